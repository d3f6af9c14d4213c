// Gradients of convolutions in groups of 16 channels: see group_convolution.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "convolution.h"
#include "convolution_weights.h"
#include "group_convolution.h"
#include "normalization.h"
#include "packing.h"
#include "products.h"
#include "readers.h"
#include "vectors.h"

// Where a unit's gradients go.
struct Gradients {
    float* dx;       // [images, height, width, channels]; all images'
    float* weights;  // [points, 16 in, 16 out], of the unit's group, to be added to
    float* sums;  // [images or blocks of the unit, 2, channels], from the group's first channel on
};

// Outputs for which a point of the kernel meets the image, of `outputs` outputs.
inline Range outputs_that_meet(int64_t outputs, int64_t stride, int64_t place, int64_t extent) {
    Range found{0, outputs};
    while (found.first < outputs && found.first * stride + place < 0) found.first++;
    while (found.end > found.first && (found.end - 1) * stride + place >= extent) found.end--;
    return found;
}

// Calls work(row, tap, down, across) for all points of the kernel that meet a pixel at one of some
// lines of the output. row, tap: the point's line and column. lines: of the output; down, across:
// those of its lines, and of its columns, where the point meets a pixel.
template <class Work>
inline void for_points(const Convolution& conv, Range lines, Work work) {
    for (int64_t row = 0; row < conv.kernel; row++)
        for (int64_t tap = 0; tap < conv.kernel; tap++) {
            Range down =
                outputs_that_meet(conv.out_height, conv.stride, row - conv.top, conv.height);
            down = {std::max(down.first, lines.first), std::min(down.end, lines.end)};
            const Range across =
                outputs_that_meet(conv.out_width, conv.stride, tap - conv.left, conv.width);
            if (down.count() > 0 && across.count() > 0) work(row, tap, down, across);
        }
}

// Points of the kernel for the input's gradient, at lines (or columns) whose remainder by the
// stride is given: that is a convolution of dy. distance: between packed lines (or columns) of dy.
inline Taps backward_taps(const Convolution& conv,
                          int64_t remainder,
                          int64_t padding,
                          int64_t out_extent,
                          int64_t distance) {
    Taps taps(1, out_extent);
    for (int64_t tap = 0; tap < conv.kernel; tap++) {
        const int64_t place = divided_down(remainder + padding - tap, conv.stride);
        if (remainder + padding - tap == place * conv.stride)
            taps.add(tap, place, place * distance);
    }
    return taps;
}

// Some pixels' 16 channels.
struct GroupPixels {
    int64_t origin;  // place of the first
    int64_t pixels;
    int64_t channels;  // from a pixel to the next
};

// Multiplies dx by the slopes of the activation, and adds up dx and dx * xhat over pixels.
template <class Reader>
inline void through_activation(const Reader& reader,
                               const float* slopes,  // [pixels, 16]
                               const GroupPixels& at,
                               float* dx,   // all images', in place
                               float* sums  // [2, channels], from the group's first on, written
) {
    Values plain[PARTS] = {};
    Values normalised[PARTS] = {};
    for (int64_t pixel = 0; pixel < at.pixels; pixel++)
        for (int part = 0; part < PARTS; part++) {
            const int64_t place = at.origin + pixel * at.channels;
            const Values slope = load<WIDTH>(slopes + pixel * GROUP + part * WIDTH);
            const Values gradient = load<WIDTH>(dx + place + part * WIDTH) * slope;
            store<WIDTH>(dx + place + part * WIDTH, gradient);
            plain[part] += gradient;
            normalised[part] += gradient * reader.normalised(place, part);
        }
    for (int part = 0; part < PARTS; part++) {
        store<WIDTH>(sums + part * WIDTH, plain[part]);
        store<WIDTH>(sums + at.channels + part * WIDTH, normalised[part]);
    }
}

// Lines of the input's gradient that a block computes, and of dy that they need. All columns are
// needed, with columns of zeros before them that the kernel reaches.
struct BackwardLines {
    int64_t dx_first;
    int64_t dx_end;
    int64_t dy_first;
    int64_t dy_end;
    int64_t dy_left;  // columns of zeros
    int64_t dy_columns;

    BackwardLines(const Convolution& conv, const Unit& unit) {
        const int64_t first = unit.first_line;
        const int64_t end = unit.end_line;
        dx_first = first * conv.stride;
        dx_end = end == conv.out_height ? conv.height : end * conv.stride;
        dy_left = (conv.kernel - 1 + conv.stride - 1) / conv.stride;
        dy_first = std::min(first, divided_down(dx_first + conv.top, conv.stride) - dy_left);
        dy_end = std::max(end, (dx_end - 1 + conv.top) / conv.stride + 1);
        dy_columns =
            dy_left + std::max(conv.out_width, (conv.width - 1 + conv.left) / conv.stride + 1);
    }
};

// Gradients of a group of some lines of an image.
template <class XReader, class DReader>
void block_gradients(const Convolution& conv,
                     XReader& x_reader,
                     DReader& dy_reader,
                     const float* weights,
                     const Unit& unit,
                     int64_t group,
                     const Gradients& to) {
    const int64_t stride = conv.stride;
    const int64_t image = unit.first_image;
    const int64_t channel = group * GROUP;
    const int64_t origin = image * conv.pixels() * conv.channels + channel;
    const int64_t dy_origin = image * conv.out_pixels() * conv.channels + channel;
    const BackwardLines lines(conv, unit);

    // Pack x, or what it is activated to with the slopes of that, and dy.
    const Packing x_packing = packing_of(conv, unit);
    const int64_t x_pitch = conv.line_elements();
    const int64_t dy_pitch = lines.dy_columns * GROUP;
    Packing dy_packing;
    dy_packing.height = conv.out_height;
    dy_packing.width = conv.out_width;
    dy_packing.channels = conv.channels;
    dy_packing.first = lines.dy_first;
    dy_packing.left = lines.dy_left;
    dy_packing.lines = lines.dy_end - lines.dy_first;
    dy_packing.columns = lines.dy_columns;
    dy_packing.stride = 1;
    dy_packing.remainder_elements = dy_pitch;
    float* packed_x = scratch<0>(x_packing.lines * x_pitch);
    float* packed_dy = scratch<1>(dy_packing.lines * dy_pitch);
    Slopes slopes{nullptr, lines.dx_first, lines.dx_end};
    if (XReader::ACTIVATES)
        slopes.to = scratch<2>((lines.dx_end - lines.dx_first) * conv.width * GROUP);
    x_reader.move_to(image, channel);
    dy_reader.move_to(image, channel);
    pack_lines(x_reader, origin, x_packing, packed_x, slopes);
    pack_lines(dy_reader, dy_origin, dy_packing, packed_dy);

    // Of the weights.
    const auto add_products = [&](int64_t row, int64_t tap, Range down, Range across) {
        const int64_t remainder = tap % stride * x_packing.remainder_elements;
        const int64_t x_line = (down.first - unit.first_line) * stride + row;
        const int64_t x_column = remainder + (tap / stride + across.first) * GROUP;
        const int64_t dy_line = down.first - lines.dy_first;
        const int64_t dy_column = (lines.dy_left + across.first) * GROUP;
        const Pixels x{packed_x + x_line * x_pitch + x_column, stride * x_pitch};
        const Pixels dy{packed_dy + dy_line * dy_pitch + dy_column, dy_pitch};
        float* sums = to.weights + (row * conv.kernel + tap) * MATRIX;
        add_outer_products(x, dy, down.count(), across.count(), sums);
    };
    for_points(conv, {unit.first_line, unit.end_line}, add_products);

    // Of the input, for lines and columns of each remainder by the stride.
    const float* group_weights = weights + group * conv.points() * MATRIX;
    for (int64_t down = 0; down < stride; down++)
        for (int64_t right = 0; right < std::min(stride, conv.width); right++) {
            const Taps rows = backward_taps(conv, down, conv.top, conv.out_height, dy_pitch);
            const Taps columns = backward_taps(conv, right, conv.left, conv.out_width, GROUP);
            static thread_local std::vector<Line> entries;
            entries.clear();
            for (int64_t y = lines.dx_first + down; y < lines.dx_end; y += stride) {
                const int64_t line = y / stride;
                const float* in =
                    packed_dy + (line - lines.dy_first) * dy_pitch + lines.dy_left * GROUP;
                float* out = to.dx + origin + (y * conv.width + right) * conv.channels;
                entries.push_back({in, out, meeting(rows, line, line + 1)});
            }
            if (entries.empty()) continue;
            const int64_t width = (conv.width - right + stride - 1) / stride;
            const Kernel backward{rows, columns, group_weights, conv.kernel,
                                  stride * conv.channels};
            convolve_lines(entries, width, backward);
        }
    if constexpr (XReader::ACTIVATES) {
        const int64_t pixels = (lines.dx_end - lines.dx_first) * conv.width;
        const GroupPixels at{origin + lines.dx_first * conv.width * conv.channels, pixels,
                             conv.channels};
        through_activation(x_reader, slopes.to, at, to.dx, to.sums);
    }
}

// Gradients of a group of some small images.
template <class XReader, class DReader>
void set_gradients(const Convolution& conv,
                   XReader& x_reader,
                   DReader& dy_reader,
                   const float* weights,
                   const Unit& unit,
                   int64_t group,
                   const Gradients& to) {
    const int64_t stride = conv.stride;
    const int64_t channel = group * GROUP;
    const int64_t images = unit.images();
    const int64_t pitch = images * GROUP;

    // Pack x, or what it is activated to with the slopes of that, and dy.
    const ImagePacking x_packing{conv.pixels(), conv.channels, images};
    const ImagePacking dy_packing{conv.out_pixels(), conv.channels, images};
    float* packed_x = scratch<0>(conv.pixels() * pitch);
    float* packed_dy = scratch<1>(conv.out_pixels() * pitch);
    float* slopes = scratch<2>(conv.pixels() * pitch);
    for (int64_t number = 0; number < images; number++) {
        const int64_t image = unit.first_image + number;
        const int64_t x_origin = image * conv.pixels() * conv.channels + channel;
        const int64_t dy_origin = image * conv.out_pixels() * conv.channels + channel;
        float* image_slopes =
            XReader::ACTIVATES ? slopes + number * conv.pixels() * GROUP : nullptr;
        x_reader.move_to(image, channel);
        dy_reader.move_to(image, channel);
        pack_image(x_reader, x_origin, x_packing, packed_x + number * GROUP, image_slopes);
        pack_image(dy_reader, dy_origin, dy_packing, packed_dy + number * GROUP);
    }

    // Of the weights.
    const auto add_products = [&](int64_t row, int64_t tap, Range down, Range across) {
        const int64_t x_line = down.first * stride + row - conv.top;
        const int64_t x_column = across.first * stride + tap - conv.left;
        const float* x = packed_x + (x_line * conv.width + x_column) * pitch;
        const float* dy = packed_dy + (down.first * conv.out_width + across.first) * pitch;
        const int64_t x_pitch = conv.width * pitch;
        const int64_t dy_pitch = conv.out_width * pitch;
        float* sums = to.weights + (row * conv.kernel + tap) * MATRIX;
        if (stride == 1) {  // then a line's pixels of all images are neighbours
            add_outer_products({x, x_pitch}, {dy, dy_pitch}, down.count(), across.count() * images,
                               sums);
            return;
        }
        for (int64_t line = 0; line < down.count(); line++) {
            const Pixels x_pixels{x + line * stride * x_pitch, stride * pitch};
            const Pixels dy_pixels{dy + line * dy_pitch, pitch};
            add_outer_products(x_pixels, dy_pixels, across.count(), images, sums);
        }
    };
    for_points(conv, {0, conv.out_height}, add_products);

    // Of the input, for lines and columns of each remainder by the stride.
    const int64_t out_pitch = conv.pixels() * conv.channels;
    const float* group_weights = weights + group * conv.points() * MATRIX;
    for (int64_t down = 0; down < stride; down++)
        for (int64_t right = 0; right < stride; right++) {
            const Taps rows =
                backward_taps(conv, down, conv.top, conv.out_height, conv.out_width * pitch);
            const Taps columns = backward_taps(conv, right, conv.left, conv.out_width, pitch);
            const Kernel backward{rows, columns, group_weights, conv.kernel, out_pitch};
            for_columns(images, [&](auto together, int64_t first) {
                for (int64_t y = down; y < conv.height; y += stride)
                    for (int64_t x = right; x < conv.width; x += stride) {
                        const int64_t line = y / stride;
                        const int64_t column = x / stride;
                        const int64_t pixel = y * conv.width + x;
                        const float* in = packed_dy + (line * conv.out_width + column) * pitch;
                        float* out =
                            to.dx + unit.first_image * out_pitch + pixel * conv.channels + channel;
                        const Line pixels{in, out, meeting(rows, line, line + 1)};
                        const Range across = meeting(columns, column, column + 1);
                        products<1, decltype(together)::count>(&pixels, first, across, backward);
                    }
            });
        }
    if constexpr (XReader::ACTIVATES)
        for (int64_t number = 0; number < images; number++) {
            const int64_t image = unit.first_image + number;
            const GroupPixels at{image * out_pitch + channel, conv.pixels(), conv.channels};
            const float* image_slopes = slopes + number * conv.pixels() * GROUP;
            x_reader.move_to(image, channel);
            through_activation(x_reader, image_slopes, at, to.dx,
                               to.sums + number * 2 * conv.channels);
        }
}

// Gradients of the convolution of what x_reader reads. If that is activated, dx is the gradient
// before the activation, and sums are those over pixels of dx and of dx * xhat.
template <class XReader, class DReader>
void group_convolution_gradients(const Convolution& conv,
                                 const XReader& x_shared,
                                 const DReader& dy_shared,
                                 const float* weights,  // [groups, points, 16 out, 16 in]
                                 float* dx,        // [images, height, width, channels], written
                                 float* dweights,  // [channels, 16, kernel, kernel], written
                                 float* sums       // [2, images, channels], written; or null
) {
    const int64_t groups = conv.groups();
    const int64_t units = conv.units();
    const int64_t blocks = conv.blocks();
    const int64_t weight_elements = conv.points() * MATRIX;
    // The weights' gradient is added up in parts, whose number depends on the shape alone. A task
    // takes one group of small images, as their weights are many. Of large images it takes all
    // groups, which share pages of memory.
    const int64_t together = conv.small() ? 1 : groups;
    // Without images there is one, of zeros.
    const int64_t wanted = std::max<int64_t>(1, std::min(units, WANTED_PARTS * together / groups));
    const int64_t units_of_a_part = std::max<int64_t>(1, (units + wanted - 1) / wanted);
    const int64_t parts = std::max<int64_t>(1, (units + units_of_a_part - 1) / units_of_a_part);
    std::vector<float> partial(parts * groups * weight_elements);
    const int64_t sum_elements = conv.images * blocks * 2 * conv.channels;
    std::vector<float> block_sums(XReader::ACTIVATES ? sum_elements : 0);
#pragma omp parallel for num_threads(conv.threads) schedule(static)
    for (int64_t task = 0; task < parts * (groups / together); task++) {
        const int64_t part = task / (groups / together);
        const int64_t first_group = task % (groups / together) * together;
        const int64_t first_unit = part * units_of_a_part;
        const int64_t end_unit = std::min(first_unit + units_of_a_part, units);
        XReader x_reader = x_shared;
        DReader dy_reader = dy_shared;
        for (int64_t number = first_unit; number < end_unit; number++) {
            const Unit unit = conv.unit(number);
            for (int64_t group = first_group; group < first_group + together; group++) {
                Gradients to;
                to.dx = dx;
                to.weights = partial.data() + (part * groups + group) * weight_elements;
                to.sums = block_sums.data() +
                          (unit.first_image * blocks + unit.block) * 2 * conv.channels;
                to.sums += group * GROUP;
                if (conv.small())
                    set_gradients(conv, x_reader, dy_reader, weights, unit, group, to);
                else
                    block_gradients(conv, x_reader, dy_reader, weights, unit, group, to);
            }
        }
    }
    unpack_weights(conv, partial.data(), parts, dweights);
    if (XReader::ACTIVATES) {
        const StripSums strips{conv.images, blocks, 2, conv.channels, conv.threads};
        add_strips(strips, block_sums.data(), 1.0, sums);
    }
}
