// Convolutions in groups of 16 channels over activations [images, height, width, channels].
//
// A task takes a group's part of some lines of an image, or of some small images. It packs what it
// reads into memory of its own (packing.h) and computes from there (products.h). As it packs, it
// can normalise and activate, so that an activation between a normalisation and a convolution is
// never stored.
//
// Lines of large images are packed with the padding's zeros around them; neighbouring pixels of a
// line are computed side by side. Of small images, where much of a kernel meets nothing but
// padding, the same pixels of several images are: then all points of the kernel that meet no pixel
// are left out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "convolution.h"
#include "convolution_weights.h"
#include "normalization.h"
#include "packing.h"
#include "products.h"
#include "readers.h"
#include "vectors.h"

// Lines of an image as a unit needs them for its output.
inline Packing packing_of(const Convolution& conv, const Unit& unit) {
    Packing by;
    by.height = conv.height;
    by.width = conv.width;
    by.channels = conv.channels;
    by.first = unit.first_line * conv.stride - conv.top;
    by.left = conv.left;
    by.lines = (unit.lines() - 1) * conv.stride + conv.kernel;
    by.columns = conv.packed_width();
    by.stride = conv.stride;
    by.remainder_elements = conv.packed_columns() * GROUP;
    return by;
}

// A group of some lines of an image. y: [images, out_height, out_width, channels], written.
template <class Reader>
void convolve_block(const Convolution& conv,
                    Reader& reader,
                    const float* weights,
                    const Unit& unit,
                    int64_t group,
                    float* y) {
    const int64_t image = unit.first_image;
    const int64_t channel = group * GROUP;

    const Packing packing = packing_of(conv, unit);
    const int64_t pitch = conv.line_elements();
    float* packed = scratch<0>(packing.lines * pitch);
    reader.move_to(image, channel);
    pack_lines(reader, image * conv.pixels() * conv.channels + channel, packing, packed);

    Taps rows(conv.stride, conv.height);
    Taps columns(conv.stride, conv.width);
    for (int64_t tap = 0; tap < conv.kernel; tap++) {
        const int64_t remainder = tap % conv.stride * packing.remainder_elements;
        rows.add(tap, tap - conv.top, tap * pitch);
        columns.add(tap, tap - conv.left, remainder + tap / conv.stride * GROUP);
    }
    static thread_local std::vector<Line> lines;
    lines.clear();
    for (int64_t line = unit.first_line; line < unit.end_line; line++) {
        const float* in = packed + (line - unit.first_line) * conv.stride * pitch;
        float* out =
            y + (image * conv.out_height + line) * conv.out_width * conv.channels + channel;
        lines.push_back({in, out, meeting(rows, line, line + 1)});
    }
    const float* group_weights = weights + group * conv.points() * MATRIX;
    const Kernel kernel{rows, columns, group_weights, conv.kernel, conv.channels};
    convolve_lines(lines, conv.out_width, kernel);
}

// A group of some small images. y: [images, out_height, out_width, channels], written.
template <class Reader>
void convolve_set(const Convolution& conv,
                  Reader& reader,
                  const float* weights,
                  const Unit& unit,
                  int64_t group,
                  float* y) {
    const int64_t channel = group * GROUP;

    const int64_t pitch = unit.images() * GROUP;
    const ImagePacking packing{conv.pixels(), conv.channels, unit.images()};
    float* packed = scratch<0>(conv.pixels() * pitch);
    for (int64_t image = unit.first_image; image < unit.end_image; image++) {
        const int64_t origin = image * conv.pixels() * conv.channels + channel;
        reader.move_to(image, channel);
        pack_image(reader, origin, packing, packed + (image - unit.first_image) * GROUP);
    }

    Taps rows(conv.stride, conv.height);
    Taps columns(conv.stride, conv.width);
    for (int64_t tap = 0; tap < conv.kernel; tap++) {
        rows.add(tap, tap - conv.top, (tap - conv.top) * conv.width * pitch);
        columns.add(tap, tap - conv.left, (tap - conv.left) * pitch);
    }
    const int64_t out_pitch = conv.out_pixels() * conv.channels;
    const float* group_weights = weights + group * conv.points() * MATRIX;
    const Kernel kernel{rows, columns, group_weights, conv.kernel, out_pitch};
    for_columns(unit.images(), [&](auto together, int64_t first) {
        for (int64_t line = 0; line < conv.out_height; line++)
            for (int64_t column = 0; column < conv.out_width; column++) {
                const int64_t pixel = line * conv.out_width + column;
                const float* in = packed + (line * conv.width + column) * conv.stride * pitch;
                float* out = y + unit.first_image * out_pitch + pixel * conv.channels + channel;
                const Line images{in, out, meeting(rows, line, line + 1)};
                const Range across = meeting(columns, column, column + 1);
                products<1, decltype(together)::count>(&images, first, across, kernel);
            }
    });
}

// Moments of a unit's part of a group of y, as part_moments makes them.
inline void unit_moments(const Convolution& conv,
                         const Unit& unit,
                         int64_t group,
                         const float* y,  // [images, out_height, out_width, channels]
                         float* parts     // [images, blocks, 3, channels], written
) {
    const int64_t pixels = unit.lines() * conv.out_width;
    for (int64_t image = unit.first_image; image < unit.end_image; image++) {
        float moments[PART_MOMENTS * GROUP] = {};
        const int64_t pixel = (image * conv.out_height + unit.first_line) * conv.out_width;
        part_moments(y + pixel * conv.channels + group * GROUP, pixels, GROUP, conv.channels,
                     moments);
        const int64_t part = image * conv.blocks() + unit.block;
        float* out = parts + part * PART_MOMENTS * conv.channels + group * GROUP;
        for (int row = 0; row < PART_MOMENTS; row++)
            std::memcpy(out + row * conv.channels, moments + row * GROUP, GROUP * sizeof(float));
    }
}

// The convolution of what the reader reads.
template <class Reader>
void group_convolution(const Convolution& conv,
                       const Reader& shared,
                       const float* weights,  // [groups, points, 16 in, 16 out]
                       float* y,              // [images, out_height, out_width, channels], written
                       float* parts  // [images, blocks, 3, channels], written: moments; or null
) {
    const int64_t groups = conv.groups();
#pragma omp parallel for num_threads(conv.threads) schedule(static)
    for (int64_t task = 0; task < conv.units() * groups; task++) {
        const int64_t group = task % groups;
        const Unit unit = conv.unit(task / groups);
        Reader reader = shared;
        if (conv.small())
            convolve_set(conv, reader, weights, unit, group, y);
        else
            convolve_block(conv, reader, weights, unit, group, y);
        if (parts) unit_moments(conv, unit, group, y, parts);
    }
}
