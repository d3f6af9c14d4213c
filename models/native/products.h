// Sums of products over the points of a kernel, from packed pixels, in registers.
//
// An output pixel's 16 channels are a register (or two, or four), to which every input channel at
// every point of the kernel adds its multiple of 16 weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "convolution.h"
#include "vectors.h"

// Pixels whose sums are in registers at a time: of 32 registers with AVX-512, else of 16, less
// those of the weights.
#if defined(__AVX512F__)
constexpr int PIXELS = 16;
#elif defined(__AVX__)
constexpr int PIXELS = 6;
#else
constexpr int PIXELS = 3;
#endif

// ---- Points of the kernel.

struct Range {
    int64_t first;
    int64_t end;  // behind the last

    int64_t count() const { return end - first; }
};

// Lines (or columns) of the kernel, and for each: where it meets the image, and how far that is in
// packed memory.
struct Taps {
    int count = 0;
    int64_t step;    // lines of the image for a line of the output
    int64_t extent;  // lines of the image
    int64_t number[MAX_KERNEL];
    int64_t place[MAX_KERNEL];
    int64_t distance[MAX_KERNEL];

    Taps(int64_t step_, int64_t extent_) : step(step_), extent(extent_) {}
    void add(int64_t number_, int64_t place_, int64_t distance_) {
        number[count] = number_;
        place[count] = place_;
        distance[count] = distance_;
        count++;
    }
};

// Those that meet the image at one of some neighbouring lines of the output at least.
inline Range meeting(const Taps& taps, int64_t begin, int64_t end) {
    Range found{taps.count, 0};
    for (int64_t tap = 0; tap < taps.count; tap++) {
        const int64_t least = begin * taps.step + taps.place[tap];
        const int64_t most = (end - 1) * taps.step + taps.place[tap];
        if (most < 0 || least >= taps.extent) continue;
        found.first = std::min(found.first, tap);
        found.end = tap + 1;
    }
    return found;
}

// ---- Outputs.

// Where pixels that are neighbours in packed memory begin, where their results go, and the lines of
// the kernel.
struct Line {
    const float* in;
    float* out;
    Range rows;
};

struct Kernel {
    const Taps& rows;
    const Taps& columns;
    const float* weights;  // packed, of the group
    int64_t size;          // lines and columns
    int64_t out_pitch;     // elements between the results of neighbours
};

// LINES by COLUMNS output pixels, from `column` on. across: the columns of the kernel.
template <int LINES, int COLUMNS>
inline void products(const Line* lines, int64_t column, Range across, const Kernel& kernel) {
    Values sums[LINES][COLUMNS][PARTS] = {};
    // Lines of the kernel that any of them needs: where another meets padding, that is zeros.
    Range down = lines[0].rows;
    const float* in[LINES];
#pragma GCC unroll 16
    for (int line = 0; line < LINES; line++) {
        down.first = std::min(down.first, lines[line].rows.first);
        down.end = std::max(down.end, lines[line].rows.end);
        in[line] = lines[line].in + column * GROUP;
    }
    for (int64_t row = down.first; row < down.end; row++)
        for (int64_t tap = across.first; tap < across.end; tap++) {
            const int64_t distance = kernel.rows.distance[row] + kernel.columns.distance[tap];
            const int64_t point =
                kernel.rows.number[row] * kernel.size + kernel.columns.number[tap];
            const float* matrix = kernel.weights + point * MATRIX;
#pragma GCC unroll 2
            for (int channel = 0; channel < GROUP; channel++) {
                Values weight[PARTS];
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++)
                    weight[part] = load<WIDTH>(matrix + channel * GROUP + part * WIDTH);
#pragma GCC unroll 16
                for (int line = 0; line < LINES; line++) {
#pragma GCC unroll 16
                    for (int pixel = 0; pixel < COLUMNS; pixel++) {
                        const float value = in[line][distance + channel + pixel * GROUP];
#pragma GCC unroll 4
                        for (int part = 0; part < PARTS; part++)
                            sums[line][pixel][part] += weight[part] * value;
                    }
                }
            }
        }
#pragma GCC unroll 16
    for (int line = 0; line < LINES; line++) {
        float* out = lines[line].out + column * kernel.out_pitch;
#pragma GCC unroll 16
        for (int pixel = 0; pixel < COLUMNS; pixel++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                store<WIDTH>(out + pixel * kernel.out_pitch + part * WIDTH,
                             sums[line][pixel][part]);
    }
}

// Lines of as many columns that are computed together.
constexpr int lines_of(int columns) { return PIXELS / columns > 6 ? 6 : PIXELS / columns; }

// Columns that are computed together: equal parts of the width, as few as possible.
inline int64_t columns_of(int64_t width) {
    const int64_t count = (width + PIXELS - 1) / PIXELS;
    return (width + count - 1) / count;
}

// Calls work(Width<columns>(), first).
template <int COLUMNS = PIXELS, class Work>
inline void with_columns(int64_t columns, int64_t first, Work work) {
    if constexpr (COLUMNS > 0) {
        if (columns == COLUMNS)
            work(Width<COLUMNS>(), first);
        else
            with_columns<COLUMNS - 1>(columns, first, work);
    }
}

// Calls work(Width<columns>(), first) for blocks of columns, which are equal but for the last.
template <class Work>
inline void for_columns(int64_t width, Work work) {
    const int64_t columns = columns_of(width);
    for (int64_t first = 0; first < width; first += columns)
        with_columns(std::min(columns, width - first), first, work);
}

// All columns of some lines. The last lines are computed twice where their number does not divide.
inline void convolve_lines(const std::vector<Line>& lines, int64_t width, const Kernel& kernel) {
    for_columns(width, [&](auto columns, int64_t column) {
        constexpr int COLUMNS = decltype(columns)::count;
        constexpr int LINES = lines_of(COLUMNS);
        const Range across = meeting(kernel.columns, column, column + COLUMNS);
        Line block[LINES];
        for (size_t first = 0; first < lines.size(); first += LINES) {
            for (size_t line = 0; line < LINES; line++)
                block[line] = lines[std::min(first + line, lines.size() - 1)];
            products<LINES, COLUMNS>(block, column, across, kernel);
        }
    });
}

// ---- Gradients of weights.

// Pixels of some lines.
struct Pixels {
    const float* first;
    int64_t pitch;  // elements between lines; the pixels of a line are neighbours
};

// Adds products of CHANNELS of x and dy's 16 channels over pixels to [CHANNELS in, 16 out].
template <int CHANNELS>
inline void outer_products(Pixels x, Pixels dy, int64_t lines, int64_t columns, float* sums) {
    Values added[CHANNELS][PARTS];
#pragma GCC unroll 16
    for (int channel = 0; channel < CHANNELS; channel++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            added[channel][part] = load<WIDTH>(sums + channel * GROUP + part * WIDTH);
    for (int64_t line = 0; line < lines; line++) {
        const float* x_line = x.first + line * x.pitch;
        const float* dy_line = dy.first + line * dy.pitch;
        for (int64_t column = 0; column < columns; column++) {
            Values from[PARTS];
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                from[part] = load<WIDTH>(dy_line + column * GROUP + part * WIDTH);
#pragma GCC unroll 16
            for (int channel = 0; channel < CHANNELS; channel++) {
                const float value = x_line[column * GROUP + channel];
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) added[channel][part] += from[part] * value;
            }
        }
    }
#pragma GCC unroll 16
    for (int channel = 0; channel < CHANNELS; channel++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            store<WIDTH>(sums + channel * GROUP + part * WIDTH, added[channel][part]);
}

// Adds products of x's 16 channels and dy's 16 over pixels to [16 in, 16 out].
inline void add_outer_products(Pixels x, Pixels dy, int64_t lines, int64_t columns, float* sums) {
    constexpr int CHANNELS = WIDTH == 16 ? 16 : WIDTH == 8 ? 4 : 2;  // whose sums are in registers
    for (int channel = 0; channel < GROUP; channel += CHANNELS) {
        outer_products<CHANNELS>(x, dy, lines, columns, sums + channel * GROUP);
        x.first += CHANNELS;
    }
}
