// A task's own memory, and what it packs there of one group: lines of a large image with the
// padding's zeros around them, or the same pixels of several small images side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "convolution.h"
#include "readers.h"
#include "vectors.h"

// Memory of this thread, for one use at a time of each number.
template <int NUMBER>
inline float* scratch(int64_t elements) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < elements) memory.resize(elements);
    return memory.data();
}

// Lines of an image's group as they are packed: [lines, remainders by the stride, columns, 16].
struct Packing {
    // The image.
    int64_t height;
    int64_t width;
    int64_t channels;
    // What is packed of it.
    int64_t first;    // line, which may be one of padding
    int64_t left;     // columns of padding before the image
    int64_t lines;    // with those of padding
    int64_t columns;  // with those of padding
    // How.
    int64_t stride;
    int64_t remainder_elements;  // from a remainder to the next
};

// Where the slopes of the activation go: those at the lines from `first` to before `end`.
struct Slopes {
    float* to;  // [pixels, 16], or null
    int64_t first;
    int64_t end;
};

// A pixel's 16 channels. slopes: where those of the activation go, or null.
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

// origin: place of the group's first pixel in the image.
template <class Reader>
inline void pack_lines(
    const Reader& reader, int64_t origin, const Packing& by, float* to, Slopes slopes = {}) {
    const auto place = [&](int64_t column) {
        if (by.stride == 1) return column * GROUP;
        return column % by.stride * by.remainder_elements + column / by.stride * GROUP;
    };
    for (int64_t line = 0; line < by.lines; line++) {
        float* row = to + line * by.stride * by.remainder_elements;
        const int64_t y = by.first + line;
        // Columns that lie in the image: none of a line of padding.
        const bool inside = 0 <= y && y < by.height;
        const int64_t begin = inside ? std::min(by.left, by.columns) : by.columns;
        const int64_t end = inside ? std::min(by.left + by.width, by.columns) : by.columns;
        for (int64_t column = 0; column < begin; column++)
            std::memset(row + place(column), 0, GROUP * sizeof(float));
        for (int64_t column = begin; column < end; column++) {
            const int64_t x = column - by.left;
            float* slope = nullptr;
            if (slopes.to && slopes.first <= y && y < slopes.end)
                slope = slopes.to + ((y - slopes.first) * by.width + x) * GROUP;
            store_read(reader, origin + (y * by.width + x) * by.channels, row + place(column),
                       slope);
        }
        for (int64_t column = end; column < by.columns; column++)
            std::memset(row + place(column), 0, GROUP * sizeof(float));
    }
}

// A group of one of several images as they are packed: [pixels, images, 16].
struct ImagePacking {
    int64_t pixels;    // of the image
    int64_t channels;  // of the image
    int64_t images;
};

// origin: place of the group's first pixel. slopes: of all pixels, [pixels, 16], written; or null.
template <class Reader>
inline void pack_image(const Reader& reader,
                       int64_t origin,
                       const ImagePacking& by,
                       float* to,
                       float* slopes = nullptr) {
    for (int64_t pixel = 0; pixel < by.pixels; pixel++) {
        float* slope = slopes ? slopes + pixel * GROUP : nullptr;
        store_read(reader, origin + pixel * by.channels, to + pixel * by.images * GROUP, slope);
    }
}
