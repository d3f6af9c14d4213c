// The numbers of a group convolution, and how its work is divided: by shapes alone, not by threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

constexpr int GROUP = 16;              // channels of a group
constexpr int PARTS = GROUP / WIDTH;   // registers of a pixel
constexpr int MATRIX = GROUP * GROUP;  // weights at a point of the kernel
constexpr int MAX_KERNEL = 7;
using Values = Floats<WIDTH>;

constexpr int64_t LINES_ELEMENTS = 16384;   // 64 KiB, about, of packed lines
constexpr int64_t IMAGES_ELEMENTS = 32768;  // 128 KiB, about, of packed images
constexpr int64_t SMALL_PIXELS = 256;       // of images that are computed side by side,
constexpr int64_t LEAST_IMAGES = 4;         // if there are so many
// Parts in which the weights' gradient is added up, where there are as many.
constexpr int64_t WANTED_PARTS = 32;

// What is computed of a group at a time: a block of lines of a large image, or some small images.
struct Unit {
    int64_t first_image;
    int64_t end_image;   // the one behind the last
    int64_t block;       // number of the block in its image
    int64_t first_line;  // of the output
    int64_t end_line;    // the one behind the last

    int64_t images() const { return end_image - first_image; }
    int64_t lines() const { return end_line - first_line; }
};

struct Convolution {
    int64_t images;
    int64_t height;
    int64_t width;
    int64_t channels;
    int64_t out_height;
    int64_t out_width;
    int64_t kernel;  // lines, and columns, of the kernel
    int64_t stride;
    int64_t top;   // lines of padding before the image
    int64_t left;  // columns of padding before the image
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

    // Of large images: packed columns, all and of each remainder by the stride; elements of a
    // packed line; and lines of the output that a unit has.
    int64_t packed_width() const { return (out_width - 1) * stride + kernel; }
    int64_t packed_columns() const { return (packed_width() + stride - 1) / stride; }
    int64_t line_elements() const { return stride * packed_columns() * GROUP; }
    int64_t lines() const {
        if (small()) return out_height;
        const int64_t fitting = (LINES_ELEMENTS / line_elements() - kernel) / stride + 1;
        return std::min(out_height, std::max<int64_t>(fitting, 4));
    }
    int64_t blocks() const { return (out_height + lines() - 1) / lines(); }

    int64_t units() const { return sets() * blocks(); }
    Unit unit(int64_t number) const {
        const int64_t together = images_at_once();
        const int64_t block_lines = lines();
        const int64_t image_blocks = blocks();
        Unit unit;
        unit.first_image = number / image_blocks * together;
        unit.end_image = std::min(unit.first_image + together, images);
        unit.block = number % image_blocks;
        unit.first_line = unit.block * block_lines;
        unit.end_line = std::min(unit.first_line + block_lines, out_height);
        return unit;
    }
};

// Quotient that is rounded down.
inline int64_t divided_down(int64_t value, int64_t by) {
    return (value - (by - 1) * (value < 0)) / by;
}
