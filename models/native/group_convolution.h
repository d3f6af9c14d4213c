// Convolutions in groups of 16 channels over activations [images, height, width, channels], and their gradients.
//
// A task takes a group's part of some lines of an image, or of some small images. It packs what it reads into memory
// of its own and computes from there: an output pixel's 16 channels are a register (or two, or four), to which every
// input channel at every point of the kernel adds its multiple of 16 weights. As it packs, it can normalise and
// activate, so that an activation between a normalisation and a convolution is never stored.
//
// Lines of large images are packed with the padding's zeros around them; neighbouring pixels of a line are computed
// side by side. Of small images, where much of a kernel meets nothing but padding, the same pixels of several images
// are: then all points of the kernel that meet no pixel are left out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#include "normalization.h"
#include "readers.h"
#include "vectors.h"

constexpr int MATRIX = GROUP * GROUP;  // weights at a point of the kernel
constexpr int MAX_KERNEL = 7;
constexpr int64_t LINES_ELEMENTS = 16384;   // 64 KiB, about, of packed lines
constexpr int64_t IMAGES_ELEMENTS = 32768;  // 128 KiB, about, of packed images
constexpr int64_t SMALL_PIXELS = 256;       // of images that are computed side by side,
constexpr int64_t LEAST_IMAGES = 4;         // if there are so many
constexpr int64_t WANTED_PARTS = 32;        // in which the weights' gradient is added up, where there are as many

// Pixels whose sums are in registers at a time: of 32 registers with AVX-512, else of 16, less those of the weights.
#if defined(__AVX512F__)
constexpr int PIXELS = 16;
#elif defined(__AVX__)
constexpr int PIXELS = 6;
#else
constexpr int PIXELS = 3;
#endif

struct Convolution {
    int64_t images, height, width, channels;
    int64_t out_height, out_width;
    int64_t kernel, stride, top, left;  // top, left: lines and columns of padding before the image
    int threads;

    int64_t groups() const { return channels / GROUP; }
    int64_t points() const { return kernel * kernel; }
    int64_t pixels() const { return height * width; }
    int64_t out_pixels() const { return out_height * out_width; }

    // Of small images: how many are computed side by side; 1 where images are large.
    int64_t images_at_once() const {
        if (pixels() > SMALL_PIXELS || images < LEAST_IMAGES) return 1;
        const int64_t most = std::max(IMAGES_ELEMENTS / (pixels() * GROUP), LEAST_IMAGES);
        const int64_t sets = (images + most - 1) / most;
        return (images + sets - 1) / sets;
    }
    bool small() const { return images_at_once() > 1; }
    int64_t sets() const { return (images + images_at_once() - 1) / images_at_once(); }

    // Of large images: packed columns, of each remainder by the stride; and lines of the output that a task takes.
    int64_t packed_width() const { return (out_width - 1) * stride + kernel; }
    int64_t packed_columns() const { return (packed_width() + stride - 1) / stride; }
    int64_t line_elements() const { return stride * packed_columns() * GROUP; }
    int64_t lines() const {
        if (small()) return out_height;
        const int64_t fitting = (LINES_ELEMENTS / line_elements() - kernel) / stride + 1;
        return std::min(out_height, std::max<int64_t>(fitting, 4));
    }
    int64_t blocks() const { return (out_height + lines() - 1) / lines(); }
};

// Memory of this thread, for one use at a time of each number.
template <int NUMBER>
inline float* scratch(int64_t elements) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < elements) memory.resize(elements);
    return memory.data();
}

inline int64_t divided_down(int64_t value, int64_t by) { return (value - (by - 1) * (value < 0)) / by; }

// ---- Weights, [channels, 16, kernel, kernel], as kernels read them: [groups, points, 16 that are read, 16 written].

// Each row of a block of 4 x 4 numbers becomes a column.
struct Rows {
    const float* row[4];
};
struct Columns {
    float* column[4];
};

inline void transpose(const Rows& from, const Columns& to) {
#if defined(__SSE__)
    __m128 a = _mm_loadu_ps(from.row[0]), b = _mm_loadu_ps(from.row[1]);
    __m128 c = _mm_loadu_ps(from.row[2]), d = _mm_loadu_ps(from.row[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to.column[0], a);
    _mm_storeu_ps(to.column[1], b);
    _mm_storeu_ps(to.column[2], c);
    _mm_storeu_ps(to.column[3], d);
#else
    for (int row = 0; row < 4; row++)
        for (int column = 0; column < 4; column++) to.column[column][row] = from.row[row][column];
#endif
}

// Calls work(first) for blocks of four of `count` numbers, 4 or more; the last may overlap the one before.
template <class Work>
inline void for_fours(int64_t count, Work work) {
    for (int64_t begin = 0; begin < count; begin += 4) work(std::min(begin, count - 4));
}

// Those of the input's gradient, where `backward`, have the two sixteens exchanged.
inline void pack_weights(const Convolution& by, const float* weights, bool backward, float* packed) {
    const int64_t points = by.points();
#pragma omp parallel for num_threads(by.threads) schedule(static)
    for (int64_t group = 0; group < by.groups(); group++)
        for (int64_t line = 0; line < GROUP; line++) {
            // [16 lanes, points] becomes [points, 16 lanes].
            const int64_t pitch = backward ? points : GROUP * points;
            const float* from = weights + group * GROUP * GROUP * points + line * (backward ? GROUP * points : points);
            float* to = packed + group * points * MATRIX + line * GROUP;
            for_fours(points, [&](int64_t point) {
                for (int64_t lane = 0; lane < GROUP; lane += 4) {
                    Rows rows;
                    Columns columns;
                    for (int each = 0; each < 4; each++) {
                        rows.row[each] = from + (lane + each) * pitch + point;
                        columns.column[each] = to + (point + each) * MATRIX + lane;
                    }
                    transpose(rows, columns);
                }
            });
        }
}

// The sums of `parts`, [parts, groups, points, 16 in, 16 out], as [channels, 16 in, kernel, kernel].
inline void unpack_weights(const Convolution& by, const float* packed, int64_t parts, float* weights) {
    const int64_t points = by.points(), whole = by.groups() * points * MATRIX;
#pragma omp parallel for num_threads(by.threads) schedule(static)
    for (int64_t group = 0; group < by.groups(); group++)
        for (int64_t in = 0; in < GROUP; in++) {
            float sums[MAX_KERNEL * MAX_KERNEL][GROUP];
            for (int64_t point = 0; point < points; point++)
                for (int part = 0; part < PARTS; part++) {
                    const float* first = packed + (group * points + point) * MATRIX + in * GROUP + part * WIDTH;
                    Values sum = load<WIDTH>(first);
                    for (int64_t other = 1; other < parts; other++) sum += load<WIDTH>(first + other * whole);
                    store<WIDTH>(sums[point] + part * WIDTH, sum);
                }
            float* to = weights + (group * GROUP * GROUP + in) * points;
            for (int64_t out = 0; out < GROUP; out += 4)
                for_fours(points, [&](int64_t point) {
                    Rows rows;
                    Columns columns;
                    for (int each = 0; each < 4; each++) {
                        rows.row[each] = sums[point + each] + out;
                        columns.column[each] = to + (out + each) * GROUP * points + point;
                    }
                    transpose(rows, columns);
                });
        }
}

// ---- Points of the kernel.

// Lines (or columns) of the kernel, and for each: where it meets the image, and how far that is in packed memory.
struct Taps {
    int count = 0;
    int64_t step, extent;  // of the image's lines for a line of the output; lines of the image
    int64_t number[MAX_KERNEL], place[MAX_KERNEL], distance[MAX_KERNEL];

    Taps(int64_t step_, int64_t extent_) : step(step_), extent(extent_) {}
    void add(int64_t number_, int64_t place_, int64_t distance_) {
        number[count] = number_;
        place[count] = place_;
        distance[count++] = distance_;
    }
};

struct Range {
    int64_t first, last;
};

// Those that meet the image at one of some neighbouring lines of the output at least.
inline Range meeting(const Taps& taps, int64_t begin, int64_t end) {
    Range found{taps.count, 0};
    for (int64_t tap = 0; tap < taps.count; tap++) {
        const int64_t least = begin * taps.step + taps.place[tap], most = (end - 1) * taps.step + taps.place[tap];
        if (most < 0 || least >= taps.extent) continue;
        found.first = std::min(found.first, tap);
        found.last = tap + 1;
    }
    return found;
}

// Outputs for which a point of the kernel meets the image, of `outputs` outputs.
inline Range met(int64_t outputs, int64_t stride, int64_t place, int64_t extent) {
    Range found{0, outputs};
    while (found.first < outputs && found.first * stride + place < 0) found.first++;
    while (found.last > found.first && (found.last - 1) * stride + place >= extent) found.last--;
    return found;
}

// ---- Sums of products over the points of the kernel, from packed pixels.

// Where pixels that are neighbours in packed memory begin, where their results go, and the lines of the kernel.
struct Line {
    const float* in;
    float* out;
    Range rows;
};

struct Kernel {
    const Taps &rows, &columns;
    const float* weights;  // packed, of the group
    int64_t size;          // lines and columns
    int64_t out_pitch;     // between the results of neighbours
};

template <int LINES, int COLUMNS>
inline void products(const Line* lines, int64_t column, Range across, const Kernel& kernel) {
    Values sums[LINES][COLUMNS][PARTS] = {};
    Range down = lines[0].rows;
    const float* in[LINES];
#pragma GCC unroll 16
    for (int line = 0; line < LINES; line++) {
        down.first = std::min(down.first, lines[line].rows.first);
        down.last = std::max(down.last, lines[line].rows.last);
        in[line] = lines[line].in + column * GROUP;
    }
    for (int64_t row = down.first; row < down.last; row++)
        for (int64_t tap = across.first; tap < across.last; tap++) {
            const int64_t distance = kernel.rows.distance[row] + kernel.columns.distance[tap];
            const int64_t point = kernel.rows.number[row] * kernel.size + kernel.columns.number[tap];
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
                    for (int each = 0; each < COLUMNS; each++) {
                        const float value = in[line][distance + channel + each * GROUP];
#pragma GCC unroll 4
                        for (int part = 0; part < PARTS; part++) sums[line][each][part] += weight[part] * value;
                    }
                }
            }
        }
#pragma GCC unroll 16
    for (int line = 0; line < LINES; line++) {
        float* out = lines[line].out + column * kernel.out_pitch;
#pragma GCC unroll 16
        for (int each = 0; each < COLUMNS; each++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                store<WIDTH>(out + each * kernel.out_pitch + part * WIDTH, sums[line][each][part]);
    }
}

// Lines of as many columns that are computed together.
constexpr int lines_of(int columns) { return PIXELS / columns > 6 ? 6 : PIXELS / columns; }

// Columns that are computed together: equal parts of the width, as few as possible.
inline int64_t columns_of(int64_t width) {
    const int64_t count = (width + PIXELS - 1) / PIXELS;
    return (width + count - 1) / count;
}

// Calls work(Width<columns>(), first) for blocks of columns, which are equal but for the last.
template <int COLUMNS = PIXELS, class Work>
inline void with_columns(int64_t columns, int64_t first, Work work) {
    if constexpr (COLUMNS > 0) {
        if (columns == COLUMNS)
            work(Width<COLUMNS>(), first);
        else
            with_columns<COLUMNS - 1>(columns, first, work);
    }
}
template <class Work>
inline void for_columns(int64_t width, Work work) {
    const int64_t columns = columns_of(width);
    for (int64_t first = 0; first < width; first += columns)
        with_columns(std::min(columns, width - first), first, work);
}

// All columns of some lines. The last lines are computed twice where their number does not divide.
inline void convolve_lines(const std::vector<Line>& lines, int64_t width, const Kernel& kernel) {
    for_columns(width, [&](auto columns, int64_t column) {
        constexpr int COLUMNS = decltype(columns)::count, LINES = lines_of(COLUMNS);
        const Range across = meeting(kernel.columns, column, column + COLUMNS);
        Line taken[LINES];
        for (size_t first = 0; first < lines.size(); first += LINES) {
            for (size_t line = 0; line < LINES; line++) taken[line] = lines[std::min(first + line, lines.size() - 1)];
            products<LINES, COLUMNS>(taken, column, across, kernel);
        }
    });
}

// Adds products of x's 16 channels and dy's 16 over pixels to [16 in, 16 out].
struct Pixels {
    const float* first;
    int64_t pitch;  // between lines; the pixels of a line are neighbours
};

template <int CHANNELS>
inline void outer_products(Pixels x, Pixels dy, int64_t lines, int64_t columns, float* sums) {
    Values added[CHANNELS][PARTS];
#pragma GCC unroll 16
    for (int channel = 0; channel < CHANNELS; channel++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            added[channel][part] = load<WIDTH>(sums + channel * GROUP + part * WIDTH);
    for (int64_t line = 0; line < lines; line++) {
        const float *x_line = x.first + line * x.pitch, *dy_line = dy.first + line * dy.pitch;
        for (int64_t column = 0; column < columns; column++) {
            Values from[PARTS];
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) from[part] = load<WIDTH>(dy_line + column * GROUP + part * WIDTH);
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

inline void add_outer_products(Pixels x, Pixels dy, int64_t lines, int64_t columns, float* sums) {
    constexpr int CHANNELS = WIDTH == 16 ? 16 : WIDTH == 8 ? 4 : 2;  // whose sums are in registers
    for (int channel = 0; channel < GROUP; channel += CHANNELS) {
        outer_products<CHANNELS>(x, dy, lines, columns, sums + channel * GROUP);
        x.first += CHANNELS;
    }
}

// ---- Packing.

// Lines of an image's group, from line `first` of the image on, with `left` columns before it: [lines, remainders by
// the stride, columns, 16]. origin: place of the group's first pixel.
struct Packing {
    int64_t height, width, channels;
    int64_t first, left, lines, columns;
    int64_t stride, remainder_elements;
};

// slopes: those of the activation at the lines from `slopes_first` to before `slopes_last`, [pixels, 16], or null.
struct Slopes {
    float* to;
    int64_t first, last;
};

template <class Reader>
inline void store_read(const Reader& reader, int64_t from, float* to, float* slopes) {
    for (int part = 0; part < PARTS; part++) {
        if constexpr (Reader::ACTIVATES)
            if (slopes) {
                Values slope;
                store<WIDTH>(to + part * WIDTH, reader.at(from, part, slope));
                store<WIDTH>(slopes + part * WIDTH, slope);
                continue;
            }
        store<WIDTH>(to + part * WIDTH, reader.at(from, part));
    }
}

template <class Reader>
inline void pack_lines(const Reader& reader, int64_t origin, const Packing& by, float* to, Slopes slopes = {}) {
    const auto place = [&](int64_t column) {
        if (by.stride == 1) return column * GROUP;
        return column % by.stride * by.remainder_elements + column / by.stride * GROUP;
    };
    for (int64_t line = 0; line < by.lines; line++) {
        float* row = to + line * by.stride * by.remainder_elements;
        const int64_t y = by.first + line;
        const bool inside = 0 <= y && y < by.height;
        const int64_t begin = inside ? std::min(by.left, by.columns) : by.columns;
        const int64_t end = inside ? std::min(by.left + by.width, by.columns) : by.columns;
        for (int64_t column = 0; column < begin; column++) std::memset(row + place(column), 0, GROUP * 4);
        for (int64_t column = begin; column < end; column++) {
            const int64_t from = origin + (y * by.width + column - by.left) * by.channels;
            float* slope = nullptr;
            if (slopes.to && slopes.first <= y && y < slopes.last)
                slope = slopes.to + ((y - slopes.first) * by.width + column - by.left) * GROUP;
            store_read(reader, from, row + place(column), slope);
        }
        for (int64_t column = end; column < by.columns; column++) std::memset(row + place(column), 0, GROUP * 4);
    }
}

// A group of one of `images` images: [pixels, images, 16]. slopes: of all pixels, [pixels, 16], or null.
template <class Reader>
inline void pack_image(const Reader& reader, int64_t origin, int64_t pixels, int64_t channels, int64_t images,
                       float* to, float* slopes = nullptr) {
    for (int64_t pixel = 0; pixel < pixels; pixel++)
        store_read(reader, origin + pixel * channels, to + pixel * images * GROUP,
                   slopes ? slopes + pixel * GROUP : nullptr);
}

// ---- Forward.

// A group of some lines of an image.
template <class Reader>
void convolve_block(const Convolution& by, Reader& reader, const float* weights, int64_t image, int64_t block,
                    int64_t group, float* y) {
    const int64_t first = block * by.lines(), last = std::min(first + by.lines(), by.out_height);
    const int64_t remainder = by.packed_columns() * GROUP, pitch = by.line_elements();
    const int64_t lines = (last - first - 1) * by.stride + by.kernel;
    float* packed = scratch<0>(lines * pitch);
    reader.of(image, group * GROUP);
    const Packing packing{by.height, by.width,          by.channels, first * by.stride - by.top, by.left,
                          lines,     by.packed_width(), by.stride,   remainder};
    pack_lines(reader, image * by.pixels() * by.channels + group * GROUP, packing, packed);

    Taps rows(by.stride, by.height), columns(by.stride, by.width);
    for (int64_t tap = 0; tap < by.kernel; tap++) {
        rows.add(tap, tap - by.top, tap * pitch);
        columns.add(tap, tap - by.left, tap % by.stride * remainder + tap / by.stride * GROUP);
    }
    static thread_local std::vector<Line> entries;
    entries.clear();
    for (int64_t line = first; line < last; line++) {
        float* out = y + (image * by.out_height + line) * by.out_width * by.channels + group * GROUP;
        entries.push_back({packed + (line - first) * by.stride * pitch, out, meeting(rows, line, line + 1)});
    }
    const Kernel kernel{rows, columns, weights + group * by.points() * MATRIX, by.kernel, by.channels};
    convolve_lines(entries, by.out_width, kernel);
}

// A group of some small images.
template <class Reader>
void convolve_set(const Convolution& by, Reader& reader, const float* weights, int64_t begin, int64_t end,
                  int64_t group, float* y) {
    const int64_t images = end - begin, pitch = images * GROUP;
    float* packed = scratch<0>(by.pixels() * pitch);
    for (int64_t image = begin; image < end; image++) {
        reader.of(image, group * GROUP);
        pack_image(reader, image * by.pixels() * by.channels + group * GROUP, by.pixels(), by.channels, images,
                   packed + (image - begin) * GROUP);
    }
    Taps rows(by.stride, by.height), columns(by.stride, by.width);
    for (int64_t tap = 0; tap < by.kernel; tap++) {
        rows.add(tap, tap - by.top, (tap - by.top) * by.width * pitch);
        columns.add(tap, tap - by.left, (tap - by.left) * pitch);
    }
    const int64_t out_pitch = by.out_pixels() * by.channels;
    const Kernel kernel{rows, columns, weights + group * by.points() * MATRIX, by.kernel, out_pitch};
    for_columns(images, [&](auto together, int64_t first) {
        for (int64_t line = 0; line < by.out_height; line++)
            for (int64_t column = 0; column < by.out_width; column++) {
                const float* in = packed + (line * by.width + column) * by.stride * pitch;
                float* out = y + begin * out_pitch + (line * by.out_width + column) * by.channels + group * GROUP;
                const Line pixel{in, out, meeting(rows, line, line + 1)};
                products<1, decltype(together)::count>(&pixel, first, meeting(columns, column, column + 1), kernel);
            }
    });
}

// y: the convolution of what the reader reads. parts: moments of parts of y, as part_moments makes them, or null:
// [images, blocks, 3, channels].
template <class Reader>
void group_convolution(const Convolution& by, const Reader& shared, const float* weights, float* y, float* parts) {
    const int64_t groups = by.groups(), blocks = by.blocks(), sets = by.sets(), each = by.images_at_once();
#pragma omp parallel for num_threads(by.threads) schedule(static)
    for (int64_t task = 0; task < sets * blocks * groups; task++) {
        const int64_t group = task % groups, block = task / groups % blocks, set = task / groups / blocks;
        const int64_t begin = set * each, end = std::min(begin + each, by.images);
        Reader reader = shared;
        if (by.small())
            convolve_set(by, reader, weights, begin, end, group, y);
        else
            convolve_block(by, reader, weights, begin, block, group, y);
        if (!parts) continue;
        const int64_t first = block * by.lines(), lines = std::min(by.lines(), by.out_height - first);
        for (int64_t image = begin; image < end; image++) {
            float found[PART_MOMENTS * GROUP] = {};
            const float* own = y + (image * by.out_height + first) * by.out_width * by.channels + group * GROUP;
            part_moments(own, lines * by.out_width, GROUP, by.channels, found);
            float* out = parts + (image * blocks + block) * PART_MOMENTS * by.channels + group * GROUP;
            for (int row = 0; row < PART_MOMENTS; row++)
                std::memcpy(out + row * by.channels, found + row * GROUP, GROUP * 4);
        }
    }
}

// ---- Backward.

// Points of the kernel for the input's gradient, at lines (or columns) whose remainder by the stride is given: that is
// a convolution of dy.
inline Taps backward_taps(const Convolution& by, int64_t remainder, int64_t padding, int64_t out_extent,
                          int64_t distance) {
    Taps taps(1, out_extent);
    for (int64_t tap = 0; tap < by.kernel; tap++) {
        const int64_t place = divided_down(remainder + padding - tap, by.stride);
        if (remainder + padding - tap == place * by.stride) taps.add(tap, place, place * distance);
    }
    return taps;
}

// Multiplies dx, in place, by the slopes of the activation, [pixels, 16]; puts sums over pixels of dx and of dx * xhat
// into `sums`, [2, channels].
template <class Reader>
inline void through_activation(const Reader& reader, const float* slopes, int64_t origin, int64_t pixels,
                               int64_t channels, float* dx, float* sums) {
    Values first[PARTS] = {}, second[PARTS] = {};
    for (int64_t pixel = 0; pixel < pixels; pixel++)
        for (int part = 0; part < PARTS; part++) {
            const int64_t place = origin + pixel * channels;
            const Values slope = load<WIDTH>(slopes + pixel * GROUP + part * WIDTH);
            const Values gradient = load<WIDTH>(dx + place + part * WIDTH) * slope;
            store<WIDTH>(dx + place + part * WIDTH, gradient);
            first[part] += gradient;
            second[part] += gradient * reader.normalised(place, part);
        }
    for (int part = 0; part < PARTS; part++) {
        store<WIDTH>(sums + part * WIDTH, first[part]);
        store<WIDTH>(sums + channels + part * WIDTH, second[part]);
    }
}

// Gradients of a group of some lines of an image. own_weights: [points, 16, 16], to be added to.
template <class XReader, class DReader>
void block_gradients(const Convolution& by, XReader& x_reader, DReader& dy_reader, const float* weights, int64_t image,
                     int64_t block, int64_t group, float* dx, float* own_weights, float* sums) {
    const int64_t kernel = by.kernel, stride = by.stride, channel = group * GROUP;
    const int64_t first = block * by.lines(), last = std::min(first + by.lines(), by.out_height);
    const int64_t lines = (last - first - 1) * stride + kernel;
    const int64_t remainder = by.packed_columns() * GROUP, pitch = by.line_elements();
    // Lines of dx that are computed here, and of dy that they need. Before dy come columns of zeros that are reached.
    const int64_t dx_first = first * stride;
    const int64_t dx_last = last == by.out_height ? by.height : last * stride;
    const int64_t reach = (kernel - 1 + stride - 1) / stride;
    const int64_t dy_first = std::min(first, divided_down(dx_first + by.top, stride) - reach);
    const int64_t dy_last = std::max(last, (dx_last - 1 + by.top) / stride + 1);
    const int64_t dy_columns = reach + std::max(by.out_width, (by.width - 1 + by.left) / stride + 1);
    const int64_t dy_pitch = dy_columns * GROUP;

    const int64_t origin = image * by.pixels() * by.channels + channel;
    float* packed_x = scratch<0>(lines * pitch);
    float* packed_dy = scratch<1>((dy_last - dy_first) * dy_pitch);
    x_reader.of(image, channel);
    dy_reader.of(image, channel);
    const Packing x_packing{by.height, by.width,          by.channels, first * stride - by.top, by.left,
                            lines,     by.packed_width(), stride,      remainder};
    Slopes slopes{nullptr, dx_first, dx_last};
    if (XReader::ACTIVATES) slopes.to = scratch<2>((dx_last - dx_first) * by.width * GROUP);
    pack_lines(x_reader, origin, x_packing, packed_x, slopes);
    const Packing dy_packing{by.out_height,      by.out_width, by.channels, dy_first, reach,
                             dy_last - dy_first, dy_columns,   1,           dy_pitch};
    pack_lines(dy_reader, image * by.out_pixels() * by.channels + channel, dy_packing, packed_dy);

    for (int64_t row = 0; row < kernel; row++)
        for (int64_t tap = 0; tap < kernel; tap++) {
            Range down = met(by.out_height, stride, row - by.top, by.height);
            const Range across = met(by.out_width, stride, tap - by.left, by.width);
            down = {std::max(down.first, first), std::min(down.last, last)};
            if (down.first >= down.last || across.first >= across.last) continue;
            const int64_t x_line = (down.first - first) * stride + row;
            const int64_t x_column = tap % stride * remainder + (tap / stride + across.first) * GROUP;
            const Pixels x{packed_x + x_line * pitch + x_column, stride * pitch};
            const Pixels dy{packed_dy + (down.first - dy_first) * dy_pitch + (reach + across.first) * GROUP, dy_pitch};
            add_outer_products(x, dy, down.last - down.first, across.last - across.first,
                               own_weights + (row * kernel + tap) * MATRIX);
        }

    for (int64_t down = 0; down < stride; down++)
        for (int64_t right = 0; right < std::min(stride, by.width); right++) {
            const Taps rows = backward_taps(by, down, by.top, by.out_height, dy_pitch);
            const Taps columns = backward_taps(by, right, by.left, by.out_width, GROUP);
            static thread_local std::vector<Line> entries;
            entries.clear();
            for (int64_t y = dx_first + down; y < dx_last; y += stride) {
                const int64_t line = y / stride;
                float* out = dx + origin + (y * by.width + right) * by.channels;
                const float* in = packed_dy + (line - dy_first) * dy_pitch + reach * GROUP;
                entries.push_back({in, out, meeting(rows, line, line + 1)});
            }
            if (entries.empty()) continue;
            const int64_t width = (by.width - right + stride - 1) / stride;
            const float* own = weights + group * by.points() * MATRIX;
            const Kernel backward{rows, columns, own, kernel, stride * by.channels};
            convolve_lines(entries, width, backward);
        }
    if constexpr (XReader::ACTIVATES)
        through_activation(x_reader, slopes.to, origin + dx_first * by.width * by.channels,
                           (dx_last - dx_first) * by.width, by.channels, dx, sums);
}

// Gradients of a group of some small images.
template <class XReader, class DReader>
void set_gradients(const Convolution& by, XReader& x_reader, DReader& dy_reader, const float* weights, int64_t begin,
                   int64_t end, int64_t group, float* dx, float* own_weights, float* sums) {
    const int64_t kernel = by.kernel, stride = by.stride, channel = group * GROUP;
    const int64_t images = end - begin, pitch = images * GROUP;
    float* packed_x = scratch<0>(by.pixels() * pitch);
    float* packed_dy = scratch<1>(by.out_pixels() * pitch);
    float* slopes = scratch<2>(by.pixels() * pitch);
    for (int64_t image = begin; image < end; image++) {
        x_reader.of(image, channel);
        dy_reader.of(image, channel);
        float* own_slopes = XReader::ACTIVATES ? slopes + (image - begin) * by.pixels() * GROUP : nullptr;
        pack_image(x_reader, image * by.pixels() * by.channels + channel, by.pixels(), by.channels, images,
                   packed_x + (image - begin) * GROUP, own_slopes);
        pack_image(dy_reader, image * by.out_pixels() * by.channels + channel, by.out_pixels(), by.channels, images,
                   packed_dy + (image - begin) * GROUP);
    }

    for (int64_t row = 0; row < kernel; row++)
        for (int64_t tap = 0; tap < kernel; tap++) {
            const Range down = met(by.out_height, stride, row - by.top, by.height);
            const Range across = met(by.out_width, stride, tap - by.left, by.width);
            const int64_t lines = down.last - down.first, columns = across.last - across.first;
            if (lines <= 0 || columns <= 0) continue;
            float* sum = own_weights + (row * kernel + tap) * MATRIX;
            const int64_t x_line = down.first * stride + row - by.top, x_column = across.first * stride + tap - by.left;
            const float* x = packed_x + (x_line * by.width + x_column) * pitch;
            const float* dy = packed_dy + (down.first * by.out_width + across.first) * pitch;
            if (stride == 1) {  // then a line's pixels of all images are neighbours
                add_outer_products({x, by.width * pitch}, {dy, by.out_width * pitch}, lines, columns * images, sum);
                continue;
            }
            for (int64_t line = 0; line < lines; line++)
                add_outer_products({x + line * stride * by.width * pitch, stride * pitch},
                                   {dy + line * by.out_width * pitch, pitch}, columns, images, sum);
        }

    const int64_t out_pitch = by.pixels() * by.channels;
    for (int64_t down = 0; down < stride; down++)
        for (int64_t right = 0; right < stride; right++) {
            const Taps rows = backward_taps(by, down, by.top, by.out_height, by.out_width * pitch);
            const Taps columns = backward_taps(by, right, by.left, by.out_width, pitch);
            const float* own = weights + group * by.points() * MATRIX;
            const Kernel backward{rows, columns, own, kernel, out_pitch};
            for_columns(images, [&](auto together, int64_t first) {
                for (int64_t y = down; y < by.height; y += stride)
                    for (int64_t x = right; x < by.width; x += stride) {
                        const int64_t line = y / stride, column = x / stride;
                        const float* in = packed_dy + (line * by.out_width + column) * pitch;
                        float* out = dx + begin * out_pitch + (y * by.width + x) * by.channels + channel;
                        const Line pixel{in, out, meeting(rows, line, line + 1)};
                        const Range across = meeting(columns, column, column + 1);
                        products<1, decltype(together)::count>(&pixel, first, across, backward);
                    }
            });
        }
    if constexpr (XReader::ACTIVATES)
        for (int64_t image = begin; image < end; image++) {
            x_reader.of(image, channel);
            through_activation(x_reader, slopes + (image - begin) * by.pixels() * GROUP, image * out_pitch + channel,
                               by.pixels(), by.channels, dx, sums + (image - begin) * 2 * by.channels);
        }
}

// dx: gradient of what x_reader reads; or of what it activates, where it does: then sums, [2, images, channels], are
// those over pixels of dx and of dx * xhat. dweights: [channels, 16, kernel, kernel]. weights: packed for this.
template <class XReader, class DReader>
void group_convolution_gradients(const Convolution& by, const XReader& x_shared, const DReader& dy_shared,
                                 const float* weights, float* dx, float* dweights, float* sums) {
    const int64_t groups = by.groups(), blocks = by.blocks(), each = by.images_at_once(), units = by.sets() * blocks;
    const int64_t weight_elements = by.points() * MATRIX;
    // The weights' gradient is added up in parts, whose number depends on the shape alone. A task takes one group of
    // small images, as their weights are many. Of large images it takes all groups, which share pages of memory.
    const int64_t together = by.small() ? 1 : groups;
    // Without images there is one, of zeros.
    const int64_t wanted = std::max<int64_t>(1, std::min(units, WANTED_PARTS * together / groups));
    const int64_t units_of_a_part = std::max<int64_t>(1, (units + wanted - 1) / wanted);
    const int64_t parts = std::max<int64_t>(1, (units + units_of_a_part - 1) / units_of_a_part);
    std::vector<float> partial(parts * groups * weight_elements);
    std::vector<float> block_sums(XReader::ACTIVATES ? by.images * blocks * 2 * by.channels : 0);
#pragma omp parallel for num_threads(by.threads) schedule(static)
    for (int64_t task = 0; task < parts * (groups / together); task++) {
        const int64_t part = task / (groups / together), first_group = task % (groups / together) * together;
        XReader x_reader = x_shared;
        DReader dy_reader = dy_shared;
        for (int64_t unit = part * units_of_a_part; unit < std::min((part + 1) * units_of_a_part, units); unit++)
            for (int64_t group = first_group; group < first_group + together; group++) {
                float* own_weights = partial.data() + (part * groups + group) * weight_elements;
                float* own_sums = block_sums.data() + unit * each * 2 * by.channels + group * GROUP;
                if (by.small())
                    set_gradients(by, x_reader, dy_reader, weights, unit * each,
                                  std::min((unit + 1) * each, by.images), group, dx, own_weights, own_sums);
                else
                    block_gradients(by, x_reader, dy_reader, weights, unit / blocks, unit % blocks, group, dx,
                                    own_weights, own_sums);
            }
    }
    unpack_weights(by, partial.data(), parts, dweights);
    if (!XReader::ACTIVATES) return;
    for (int64_t image = 0; image < by.images; image++)
        for (int each = 0; each < 2; each++)
            for (int64_t channel = 0; channel < by.channels; channel++) {
                double sum = 0;
                for (int64_t block = 0; block < blocks; block++)
                    sum += block_sums[((image * blocks + block) * 2 + each) * by.channels + channel];
                sums[(each * by.images + image) * by.channels + channel] = float(sum);
            }
}
