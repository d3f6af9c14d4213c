// Convolution in groups of 16 channels on tensor cores, NHWC, forward and both gradients.
//
// A block goes down some lines of images with a window of them in shared memory. Each line is
// copied there once, some steps before it is needed (cp.async). Each of its pixels is then loaded
// into registers once for all lines of the result that it reaches: their sums grow together.
//
// Nor is a pixel loaded once for each column of the kernel. A tile is 16 segments, each of some
// neighbouring pixels of a line; it may go on in the next image. A product for the tensor cores
// takes one pixel of each segment, [16 segments, 16 channels] x [16, 8]. What is loaded for it
// serves several columns of the kernel, each for another pixel of the segment: with k columns a
// segment of p pixels is loaded as p + k - 1 pixels, not as p k.
//
// Sums are float32. Those of the weights' gradient are stored in parts, and `add_parts` adds these
// in their order: no atomics, so results repeat to the bit.
//
// A pair of warps computes a group: one its first 8 channels of the result, one the others.
// models/kernels/cuda/group_conv.py launches these kernels; the compiler's command line has
//   KERNEL           lines, and columns, of the convolution's kernel
//   STRIDE           1 or 2
//   BFLOAT16         1, or 0 for float16
//   PACK             groups of a block
//   PIXELS           of a segment of the output: more of them load fewer pixels twice, and take
//                    more registers for sums
//   GRADIENT_PIXELS  of dy, of a segment of the input's gradient, which has STRIDE times as many
//   SUMMED_PIXELS    of dy, of a segment for the weights' gradient
//   STAGES           steps of lines for which shared memory has place

#include "instructions.h"

using Half = unsigned short;  // bits of a number in half precision

constexpr int GROUP = 16;  // channels of a group
constexpr int POINTS = KERNEL * KERNEL;
constexpr int MATRIX = GROUP * GROUP;  // weights at a point of the kernel

constexpr int SEGMENTS = 16;              // of a tile
constexpr int THREADS = 64 * PACK;        // of a block
constexpr int CHUNK = 16;                 // bytes that are copied at once: half of a group's pixel
constexpr int CHUNKS = 2 * PACK;          // of a pixel
constexpr int ELEMENTS = CHUNK / 2;       // of a chunk
constexpr int COPIED = THREADS / CHUNKS;  // pixels that a block copies at once

// Lines of y that a line of x reaches, at most; it is as many columns.
constexpr int TAPS = (KERNEL + STRIDE - 1) / STRIDE;
constexpr int LAG = TAPS - 1;  // steps from a line's first use to its last

// The images that are read and those that are written, both [images, height, width, channels].
struct Sizes {
    int images;
    int channels;
    int in_height;
    int in_width;
    int out_height;
    int out_width;
    int top;   // lines of padding before the convolution's input
    int left;  // columns of padding before it
};

// How the work is divided. A step is a line of y, or with the input's gradient STRIDE lines of dx.
struct Division {
    int segments;     // of a line
    int units;        // of a line in shared memory
    int strips;       // of an image
    int strip_steps;  // of a strip, but for the last
    int first_step;   // of an image
    int end_step;     // the one behind the last
};

struct Convolving {
    // Tensors.
    const Half* in;      // x, or dy for the input's gradient
    const Half* weight;  // [groups, KERNEL, KERNEL, out, in]
    Half* out;           // y or dx, written
    // Statistics of `output_with_statistics`: [images, channels, strips, segments], written.
    float* means;
    float* squares;  // sums of squared differences from the mean
    // Numbers.
    Sizes sizes;
    Division division;
};

struct Summing {
    // Tensors.
    const Half* x;   // what sizes call in
    const Half* dy;  // what sizes call out
    float* sums;     // [parts, groups, KERNEL, KERNEL, out, in], written
    // Numbers.
    Sizes sizes;
    Division division;
    int works;       // strips of all tiles
    int works_each;  // of a part, but for the last
};

struct Adding {
    // Tensors.
    const float* sums;  // [parts, groups, KERNEL, KERNEL, out, in]
    Half* gradient;     // [groups, out, in, KERNEL, KERNEL], or [.., KERNEL, KERNEL, in]; written
    // Numbers.
    int parts;
    int elements;  // of the gradient
    int channels_last;  // 1 for the second layout
};

// ---- Where things are.

// Lines of shared memory, [groups of the block, units, pixels of a segment, 16 channels]. A unit is
// a segment, or pixels behind the last segment of a line that a kernel reaches from there. A chunk
// after each unit keeps neighbouring segments out of each other's banks.
template <int STEP>
struct Line {
    static constexpr int UNIT = 2 * STEP + 1;  // chunks

    // Chunks of a group. Two more than a multiple of 8: so chunks of a pixel, which are written
    // together, differ in their banks.
    static DEVICE int group_chunks(int units) { return (units * UNIT + 5) / 8 * 8 + 2; }
    static DEVICE int bytes(int units) { return PACK * group_chunks(units) * CHUNK; }
    // From a unit's first pixel to the one that lies `pixel` after it, maybe in a unit behind.
    static constexpr DEVICE int chunk(int pixel) { return pixel / STEP * UNIT + pixel % STEP * 2; }
};

// A block's tile and strip.
struct Work {
    int first_segment;  // of the tile, among those of all images
    int first_step;
    int end_step;  // the one behind the last
    int strip;

    DEVICE bool owns(int step) const { return step >= first_step && step < end_step; }
};

DEVICE Work work_of(const Division& division, int number) {
    Work work;
    work.strip = number % division.strips;
    work.first_segment = number / division.strips * SEGMENTS;
    work.first_step = division.first_step + work.strip * division.strip_steps;
    work.end_step = min(work.first_step + division.strip_steps, division.end_step);
    return work;
}

// Number of a tile's segment among the units of a line. Each image's has `halo` units behind it.
DEVICE int unit_of(const Division& division, const Work& work, int segment, int halo) {
    const int number = work.first_segment + segment;
    const int first_image = work.first_segment / division.segments;
    return segment + (number / division.segments - first_image) * halo;
}

constexpr int OUTSIDE = -1;

// From a tensor's start to a pixel of its first line, in groups of channels: so 32 bits count
// 2^35 elements. Or OUTSIDE.
DEVICE int place(const Sizes& sizes, int height, int width, int image, int column) {
    if (image >= sizes.images || column < 0 || column >= width) return OUTSIDE;
    return (image * height * width + column) * (sizes.channels / GROUP);
}

DEVICE long long elements_to(int place) { return static_cast<long long>(place) * GROUP; }

// Places of the pixels of a line in shared memory. first_column: of the first segment.
template <int STEP>
DEVICE void find_read_pixels(const Sizes& sizes,
                             const Division& division,
                             const Work& work,
                             int halo,
                             int first_column,
                             int* places  // [units, STEP], written
) {
    const int first_image = work.first_segment / division.segments;
    for (int pixel = threadIdx.x; pixel < division.units * STEP; pixel += THREADS) {
        // As if the tile began with its image's first segment.
        const int unit = pixel / STEP + work.first_segment % division.segments;
        const int image = first_image + unit / (division.segments + halo);
        const int column = first_column + unit % (division.segments + halo) * STEP + pixel % STEP;
        places[pixel] = place(sizes, sizes.in_height, sizes.in_width, image, column);
    }
}

// Places of the pixels of the tile's segments in a tensor of the size that is written.
template <int STEP>
DEVICE void find_segment_pixels(const Sizes& sizes,
                                const Division& division,
                                const Work& work,
                                int first_column,
                                int* places  // [SEGMENTS, STEP], written
) {
    for (int pixel = threadIdx.x; pixel < SEGMENTS * STEP; pixel += THREADS) {
        const int segment = work.first_segment + pixel / STEP;
        const int image = segment / division.segments;
        const int column = first_column + segment % division.segments * STEP + pixel % STEP;
        places[pixel] = place(sizes, sizes.out_height, sizes.out_width, image, column);
    }
}

// Copies a line of images to shared memory, zeros outside.
template <int STEP>
DEVICE void fetch_line(const Half* first,  // of the line's first pixel in the first image
                       const int* places,  // [units, STEP]
                       int units,
                       char* line  // written
) {
    static_assert(COPIED % STEP == 0, "a thread's next pixel is some whole units behind");
    const int chunk = threadIdx.x % CHUNKS;
    const int first_pixel = threadIdx.x / CHUNKS;
    char* to = line + (chunk / 2 * Line<STEP>::group_chunks(units) + chunk % 2 +
                       Line<STEP>::chunk(first_pixel)) * CHUNK;
    for (int pixel = first_pixel; pixel < units * STEP; pixel += COPIED) {
        const int from = places[pixel];
        const bool inside = from != OUTSIDE;
        copy_async(to, first + elements_to(inside ? from : 0) + chunk * ELEMENTS, inside);
        to += Line<STEP>::chunk(COPIED) * CHUNK;
    }
}

// Copies a line of the tile's segments from shared memory.
template <int STEP>
DEVICE void store_line(const char* line,
                       const int* places,  // [SEGMENTS, STEP]
                       Half* first  // of the line's first pixel in the first image, written
) {
    const int chunk = threadIdx.x % CHUNKS;
    const int first_pixel = threadIdx.x / CHUNKS;
    const char* from = line + (chunk / 2 * Line<STEP>::group_chunks(SEGMENTS) + chunk % 2 +
                               Line<STEP>::chunk(first_pixel)) * CHUNK;
    for (int pixel = first_pixel; pixel < SEGMENTS * STEP; pixel += COPIED) {
        const int to = places[pixel];
        if (to != OUTSIDE)
            *reinterpret_cast<uint4*>(first + elements_to(to) + chunk * ELEMENTS) =
                *reinterpret_cast<const uint4*>(from);
        from += Line<STEP>::chunk(COPIED) * CHUNK;
    }
}

// ---- Output and input's gradient.

// What a step of the convolution, or of its TRANSPOSED, the input's gradient, reads and writes.
// Line o of y has line ky of the kernel over line o STRIDE + ky - top of x. So step t finishes
//   line t of y, by lines of x of which the last is (t + 1) STRIDE - 1 + KERNEL - STRIDE - top; or
//   lines t STRIDE - top and following of dx, by lines of dy of which the last is t.
// The same goes for columns.
template <bool TRANSPOSED>
struct Form {
    // Pixels of a segment.
    static constexpr int IN_STEP = TRANSPOSED ? GRADIENT_PIXELS : PIXELS * STRIDE;
    static constexpr int OUT_STEP = TRANSPOSED ? GRADIENT_PIXELS * STRIDE : PIXELS;
    // Pixels that a segment of the result is made of.
    static constexpr int REACHED = TRANSPOSED ? IN_STEP + LAG : (PIXELS - 1) * STRIDE + KERNEL;
    static constexpr int HALO = (REACHED - 1) / IN_STEP;  // units
    // Lines that a step reads, those that it finishes, and those whose sums are under way.
    static constexpr int READ = TRANSPOSED ? 1 : STRIDE;
    static constexpr int FINISHED = TRANSPOSED ? STRIDE : 1;
    static constexpr int LIVE = TRANSPOSED ? KERNEL : TAPS;

    static DEVICE int first_in_line(const Sizes& sizes, int step) {
        return TRANSPOSED ? step : step * STRIDE + KERNEL - STRIDE - sizes.top;
    }
    static DEVICE int first_out_line(const Sizes& sizes, int step) {
        return TRANSPOSED ? step * STRIDE - sizes.top : step;
    }
    static DEVICE int first_in_column(const Sizes& sizes) {
        return TRANSPOSED ? sizes.left / STRIDE - LAG : -sizes.left;
    }
    static DEVICE int first_out_column(const Sizes& sizes) {
        return TRANSPOSED ? sizes.left / STRIDE * STRIDE - sizes.left : 0;
    }

    // Steps from now to the one that finishes a live line.
    static constexpr DEVICE int steps_to(int live) { return live / FINISHED; }
    // The kernel's line between a line that is read and a live line, and its column between pixels
    // of a segment; maybe outside the kernel.
    static constexpr DEVICE int kernel_line(int read, int live) {
        return TRANSPOSED ? live : KERNEL - STRIDE + read - STRIDE * live;
    }
    static constexpr DEVICE int kernel_column(int in_pixel, int out_pixel) {
        return TRANSPOSED ? out_pixel - STRIDE * (in_pixel - LAG) : in_pixel - STRIDE * out_pixel;
    }
};

constexpr DEVICE bool in_kernel(int point) { return point >= 0 && point < KERNEL; }

// The warp's half of the matrices of its group, as multiply_add wants them.
template <bool TRANSPOSED>
DEVICE void load_weights(const Half* group, int half, unsigned (&weights)[POINTS][2]) {
    const int lane = threadIdx.x % 32;
    const int to = half * 8 + lane / 4;  // channel of the result
    const int from = lane % 4 * 2;       // first channel of what is multiplied
    for (int point = 0; point < POINTS; point++)
        for (int part = 0; part < 2; part++) {
            const Half* matrix = group + point * MATRIX;
            const int first = from + part * 8;
            if (TRANSPOSED) {
                const unsigned low = matrix[first * GROUP + to];
                const unsigned high = matrix[(first + 1) * GROUP + to];
                weights[point][part] = high << 16 | low;
            } else {
                weights[point][part] =
                    *reinterpret_cast<const unsigned*>(matrix + to * GROUP + first);
            }
        }
}

// Adds the products of a line that is read to the sums of all live lines that it reaches.
// WHOLE: all of them are of the strip; without branches the compiler loads ahead of products.
template <class Of, bool WHOLE>
DEVICE void add_products(const Work& work,
                         int step,
                         int read,
                         const char* loaded,  // the lane's row of the first pixel
                         const unsigned (&weights)[POINTS][2],
                         float (&sums)[Of::LIVE][Of::OUT_STEP][4]) {
#pragma unroll
    for (int in_pixel = 0; in_pixel < Of::REACHED; in_pixel++) {
        unsigned pixels[4];
        load_matrices(pixels, loaded + Line<Of::IN_STEP>::chunk(in_pixel) * CHUNK);
#pragma unroll
        for (int live = 0; live < Of::LIVE; live++) {
            const int ky = Of::kernel_line(read, live);
            if (!in_kernel(ky) || !(WHOLE || work.owns(step + Of::steps_to(live)))) continue;
#pragma unroll
            for (int out_pixel = 0; out_pixel < Of::OUT_STEP; out_pixel++) {
                const int kx = Of::kernel_column(in_pixel, out_pixel);
                if (in_kernel(kx))
                    multiply_add(sums[live][out_pixel], pixels, weights[ky * KERNEL + kx]);
            }
        }
    }
}

// Statistics of the strip of a segment: a thread has two segments, and of each two channels.
struct Statistics {
    // Means of the first line, in pairs: with an origin near the values a large mean takes no
    // digits, and half precision takes half the registers.
    unsigned origins[2];
    float sum[4];  // of differences from the origin
    float squares[4];

    DEVICE float origin(int value) const {
        return widened(origins[value / 2] >> value % 2 * 16 & 0xffff);
    }
};

// Adds a line that is finished, by pixels of segments. Value 2 row + i of a thread is of segment
// lane / 4 + 8 row and channel 2 (lane % 4) + i.
template <int OUT_STEP>
DEVICE void add_statistics(const float (&line)[OUT_STEP][4],
                           const int (&inside)[2],  // pixels of the segments that the image has
                           bool first,
                           Statistics& statistics) {
    if (first)
        for (int row = 0; row < 2; row++) {
            float sums[2] = {};
            for (int pixel = 0; pixel < OUT_STEP; pixel++)
                for (int i = 0; i < 2; i++)
                    if (pixel < inside[row]) sums[i] += line[pixel][2 * row + i];
            const float share = 1.0f / max(inside[row], 1);
            statistics.origins[row] = rounded(sums[0] * share, sums[1] * share);
        }
    for (int value = 0; value < 4; value++) {
        if (first) statistics.sum[value] = statistics.squares[value] = 0;
        for (int pixel = 0; pixel < OUT_STEP; pixel++)
            if (pixel < inside[value / 2]) {
                const float difference = line[pixel][value] - statistics.origin(value);
                statistics.sum[value] += difference;
                statistics.squares[value] += difference * difference;
            }
    }
}

DEVICE void store_statistics(const Convolving& arguments,
                             const Work& work,
                             int channel,  // the thread's first
                             const int (&inside)[2],
                             const Statistics& statistics) {
    const Sizes& sizes = arguments.sizes;
    const Division& division = arguments.division;
    const int lines = work.end_step - work.first_step;
    for (int value = 0; value < 4; value++) {
        const int segment = work.first_segment + threadIdx.x % 32 / 4 + value / 2 * 8;
        const int image = segment / division.segments;
        const int count = inside[value / 2] * lines;
        if (!count) continue;
        const long long plane =
            static_cast<long long>(image) * sizes.channels + channel + value % 2;
        const long long at = (plane * division.strips + work.strip) * division.segments +
                             segment % division.segments;
        const float shift = statistics.sum[value] / count;
        arguments.means[at] = statistics.origin(value) + shift;
        // Rounding may leave less than 0 where all values are alike.
        arguments.squares[at] = fmaxf(statistics.squares[value] - shift * shift * count, 0);
    }
}

template <bool TRANSPOSED, bool STATISTICS>
DEVICE void convolve(const Convolving& arguments) {
    using Of = Form<TRANSPOSED>;
    using InLine = Line<Of::IN_STEP>;
    using OutLine = Line<Of::OUT_STEP>;
    const Sizes& sizes = arguments.sizes;
    const Division& division = arguments.division;

    // Blocks of all channels of a pixel run together.
    const int packs = sizes.channels / (PACK * GROUP);
    const int first_group = blockIdx.x % packs * PACK;
    const Work work = work_of(division, blockIdx.x / packs);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int group = warp / 2;  // of the block
    const int half = warp % 2;   // of the group's channels

    // Shared memory: a ring of stages of lines that are read, two stages of lines that were
    // finished, and places of pixels.
    const int in_bytes = InLine::bytes(division.units);
    const int out_bytes = OutLine::bytes(SEGMENTS);
    char* const ring = shared_memory();
    char* const finished = ring + STAGES * Of::READ * in_bytes;
    int* const in_places = reinterpret_cast<int*>(finished + 2 * Of::FINISHED * out_bytes);
    int* const out_places = in_places + division.units * Of::IN_STEP;
    find_read_pixels<Of::IN_STEP>(sizes, division, work, Of::HALO, Of::first_in_column(sizes),
                                  in_places);
    find_segment_pixels<Of::OUT_STEP>(sizes, division, work, Of::first_out_column(sizes),
                                      out_places);
    __syncthreads();

    const Half* const in = arguments.in + first_group * GROUP;
    Half* const out = arguments.out + first_group * GROUP;
    const int in_pitch = sizes.in_width * sizes.channels;
    const int out_pitch = sizes.out_width * sizes.channels;

    // Lines that a step reads, on their way to a stage. 32 bits count an image's elements.
    const auto fetch = [&](int step, int stage) {
        for (int read = 0; read < Of::READ; read++) {
            const int line = Of::first_in_line(sizes, step) + read;
            if (step < work.end_step && line >= 0 && line < sizes.in_height)
                fetch_line<Of::IN_STEP>(in + line * in_pitch, in_places, division.units,
                                        ring + (stage * Of::READ + read) * in_bytes);
        }
        end_copies();
    };
    // Lines that a step has finished, from shared memory to the tensor.
    const auto store = [&](int step) {
        for (int ended = 0; ended < Of::FINISHED; ended++) {
            const int line = Of::first_out_line(sizes, step) + ended;
            if (line >= 0 && line < sizes.out_height)
                store_line<Of::OUT_STEP>(finished +
                                             (step % 2 * Of::FINISHED + ended) * out_bytes,
                                         out_places, out + line * out_pitch);
        }
    };

    // The warp's weights and sums. Of a pixel of each segment the lane loads half of one: see
    // load_matrices.
    unsigned weights[POINTS][2];
    load_weights<TRANSPOSED>(arguments.weight + (first_group + group) * POINTS * MATRIX, half,
                             weights);
    float sums[Of::LIVE][Of::OUT_STEP][4] = {};
    const int loaded_unit = unit_of(division, work, lane % 16, Of::HALO);
    const int loaded_chunk = group * InLine::group_chunks(division.units) +
                             loaded_unit * InLine::UNIT + lane / 16;
    const int stored_chunk = group * OutLine::group_chunks(SEGMENTS) + half;

    Statistics statistics;
    int inside[2];
    if (STATISTICS)
        for (int row = 0; row < 2; row++) {
            const int segment = work.first_segment + lane / 4 + row * 8;
            const int first = segment % division.segments * Of::OUT_STEP;
            const bool known = segment / division.segments < sizes.images;
            inside[row] = known ? min(sizes.out_width - first, Of::OUT_STEP) : 0;
        }

    int stage = 0;
    for (int ahead = 0; ahead < STAGES - 1; ahead++) fetch(work.first_step - LAG + ahead, ahead);
    for (int step = work.first_step - LAG; step < work.end_step; step++) {
        // The step's lines are there for all threads, which are through with the stage before.
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (step > work.first_step) store(step - 1);
        fetch(step + STAGES - 1, (stage + STAGES - 1) % STAGES);

#pragma unroll
        for (int read = 0; read < Of::READ; read++) {
            const int line = Of::first_in_line(sizes, step) + read;
            if (line < 0 || line >= sizes.in_height) continue;
            const char* loaded = ring + (stage * Of::READ + read) * in_bytes + loaded_chunk * CHUNK;
            if (step >= work.first_step && step + LAG < work.end_step)
                add_products<Of, true>(work, step, read, loaded, weights, sums);
            else
                add_products<Of, false>(work, step, read, loaded, weights, sums);
        }

        if (step >= work.first_step) {
            // Through shared memory: a thread has 4 bytes of a pixel, and is to store 16.
            char* to = finished + step % 2 * Of::FINISHED * out_bytes + stored_chunk * CHUNK +
                       lane % 4 * 4;
            for (int ended = 0; ended < Of::FINISHED; ended++)
                for (int pixel = 0; pixel < Of::OUT_STEP; pixel++)
                    for (int row = 0; row < 2; row++) {
                        float(&values)[4] = sums[ended][pixel];
                        const unsigned pair = rounded(values[2 * row], values[2 * row + 1]);
                        const int segment = lane / 4 + row * 8;
                        const int at = segment * OutLine::UNIT + pixel * 2;
                        *reinterpret_cast<unsigned*>(to + ended * out_bytes + at * CHUNK) = pair;
                        // Statistics are to be those of what the next layer reads.
                        values[2 * row] = widened(pair & 0xffff);
                        values[2 * row + 1] = widened(pair >> 16);
                    }
            if (STATISTICS)
                add_statistics(sums[0], inside, step == work.first_step, statistics);
        }
        // The next lines are at the front. Moving registers takes less than code for each position.
        for (int live = 0; live < Of::LIVE; live++)
            for (int pixel = 0; pixel < Of::OUT_STEP; pixel++)
                for (int value = 0; value < 4; value++)
                    sums[live][pixel][value] = live + Of::FINISHED < Of::LIVE
                                                   ? sums[live + Of::FINISHED][pixel][value]
                                                   : 0;
        stage = (stage + 1) % STAGES;
    }
    __syncthreads();
    store(work.end_step - 1);
    if (STATISTICS)
        store_statistics(arguments, work, (first_group + group) * GROUP + half * 8 + lane % 4 * 2,
                         inside, statistics);
}

// Of a multiprocessor: 512 threads that have up to 128 registers each.
constexpr int BLOCKS = 512 / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) output(const Convolving arguments) {
    convolve<false, false>(arguments);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    output_with_statistics(const Convolving arguments) {
    convolve<false, true>(arguments);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    input_gradient(const Convolving arguments) {
    convolve<true, false>(arguments);
}

// ---- Weights' gradient.

// Of a segment, for the weights' gradient.
constexpr int SUMMED_STEP = SUMMED_PIXELS * STRIDE;                    // pixels of x
constexpr int SUMMED_REACHED = (SUMMED_PIXELS - 1) * STRIDE + KERNEL;  // that dy's pixels reach
constexpr int SUMMED_HALO = (SUMMED_REACHED - 1) / SUMMED_STEP;        // units

// Adds the products of a line of x and all live lines of dy under which it lies.
// WHOLE: see add_products.
template <bool WHOLE>
DEVICE void add_outer_products(const Work& work,
                               int step,
                               int read,
                               const char* loaded,  // the lane's row of the first pixel
                               const unsigned (&gradients)[TAPS][SUMMED_PIXELS][4],
                               float (&sums)[POINTS][4]) {
    using Of = Form<false>;
#pragma unroll
    for (int x_pixel = 0; x_pixel < SUMMED_REACHED; x_pixel++) {
        unsigned pixels[2];
        load_transposed(pixels, loaded + Line<SUMMED_STEP>::chunk(x_pixel) * CHUNK);
#pragma unroll
        for (int live = 0; live < TAPS; live++) {
            const int ky = Of::kernel_line(read, live);
            if (!in_kernel(ky) || !(WHOLE || work.owns(step + live))) continue;
#pragma unroll
            for (int y_pixel = 0; y_pixel < SUMMED_PIXELS; y_pixel++) {
                const int kx = Of::kernel_column(x_pixel, y_pixel);
                if (in_kernel(kx))
                    multiply_add(sums[ky * KERNEL + kx], gradients[live][y_pixel], pixels);
            }
        }
    }
}

// A warp adds up [16 out, 8 in] at all points of the kernel. Lines of dy stay in registers while
// lines of x pass: those of a step meet TAPS lines of dy. The pixels that a product adds up are one
// of each segment.
// At least one block of a multiprocessor: unasked the compiler spills registers for one more.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    weight_gradient(const Summing arguments) {
    using Of = Form<false>;
    using XLine = Line<SUMMED_STEP>;
    using YLine = Line<SUMMED_PIXELS>;
    const Sizes& sizes = arguments.sizes;
    const Division& division = arguments.division;

    const int packs = sizes.channels / (PACK * GROUP);
    const int first_group = blockIdx.x % packs * PACK;
    const int part = blockIdx.x / packs;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int group = warp / 2;  // of the block
    const int half = warp % 2;   // of the group's channels of x

    // Shared memory: a ring of stages, each of lines of x and one of dy, and places of pixels.
    const int x_bytes = XLine::bytes(division.units);
    const int stage_bytes = STRIDE * x_bytes + YLine::bytes(SEGMENTS);
    char* const ring = shared_memory();
    int* const x_places = reinterpret_cast<int*>(ring + STAGES * stage_bytes);
    int* const y_places = x_places + division.units * SUMMED_STEP;

    const Half* const x = arguments.x + first_group * GROUP;
    const Half* const dy = arguments.dy + first_group * GROUP;
    const int x_pitch = sizes.in_width * sizes.channels;
    const int y_pitch = sizes.out_width * sizes.channels;

    float sums[POINTS][4] = {};
    const int end_work = min((part + 1) * arguments.works_each, arguments.works);
    for (int number = part * arguments.works_each; number < end_work; number++) {
        const Work work = work_of(division, number);
        __syncthreads();  // all threads are through with the work before
        find_read_pixels<SUMMED_STEP>(sizes, division, work, SUMMED_HALO, -sizes.left, x_places);
        find_segment_pixels<SUMMED_PIXELS>(sizes, division, work, 0, y_places);
        __syncthreads();

        // Lines of x that a step reads, and the line of dy that it meets first.
        const auto fetch = [&](int step, int stage) {
            char* to = ring + stage * stage_bytes;
            for (int read = 0; read < STRIDE; read++) {
                const int line = Of::first_in_line(sizes, step) + read;
                if (step < work.end_step && line >= 0 && line < sizes.in_height)
                    fetch_line<SUMMED_STEP>(x + line * x_pitch, x_places, division.units,
                                     to + read * x_bytes);
            }
            if (work.owns(step + LAG))
                fetch_line<SUMMED_PIXELS>(dy + (step + LAG) * y_pitch, y_places, SEGMENTS,
                                          to + STRIDE * x_bytes);
            end_copies();
        };

        // Of a pixel of each segment of dy the lane loads half of one, and of x that of its warp's
        // half: see load_transposed.
        const int unit = unit_of(division, work, lane % 16, SUMMED_HALO);
        const int x_chunk =
            group * XLine::group_chunks(division.units) + unit * XLine::UNIT + half;
        const int y_segment = lane % 8 + lane / 16 * 8;
        const int y_chunk =
            group * YLine::group_chunks(SEGMENTS) + y_segment * YLine::UNIT + lane / 8 % 2;

        unsigned gradients[TAPS][SUMMED_PIXELS][4] = {};  // of live lines
        int stage = 0;
        for (int ahead = 0; ahead < STAGES - 1; ahead++)
            fetch(work.first_step - LAG + ahead, ahead);
        for (int step = work.first_step - LAG; step < work.end_step; step++) {
            wait_for_copies<STAGES - 2>();
            __syncthreads();
            fetch(step + STAGES - 1, (stage + STAGES - 1) % STAGES);

            const char* loaded = ring + stage * stage_bytes;
            // The lines move on by one; the new one is the last.
#pragma unroll
            for (int live = 0; live < LAG; live++)
                for (int pixel = 0; pixel < SUMMED_PIXELS; pixel++)
                    for (int matrix = 0; matrix < 4; matrix++)
                        gradients[live][pixel][matrix] = gradients[live + 1][pixel][matrix];
            if (work.owns(step + LAG)) {
#pragma unroll
                for (int pixel = 0; pixel < SUMMED_PIXELS; pixel++)
                    load_transposed(gradients[LAG][pixel],
                                    loaded + STRIDE * x_bytes +
                                        (y_chunk + YLine::chunk(pixel)) * CHUNK);
            }
#pragma unroll
            for (int read = 0; read < STRIDE; read++) {
                const int line = Of::first_in_line(sizes, step) + read;
                if (line < 0 || line >= sizes.in_height) continue;
                const char* x_line = loaded + read * x_bytes + x_chunk * CHUNK;
                if (step >= work.first_step && step + LAG < work.end_step)
                    add_outer_products<true>(work, step, read, x_line, gradients, sums);
                else
                    add_outer_products<false>(work, step, read, x_line, gradients, sums);
            }
            stage = (stage + 1) % STAGES;
        }
    }

    // Each part has memory of its own: add_parts adds them up in their order.
    const long long groups = sizes.channels / GROUP;
    float* const matrices =
        arguments.sums + (part * groups + first_group + group) * POINTS * MATRIX;
    for (int point = 0; point < POINTS; point++)
        for (int row = 0; row < 2; row++) {
            const int out = lane / 4 + row * 8;
            const int in = half * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(matrices + point * MATRIX + out * GROUP + in) =
                make_float2(sums[point][2 * row], sums[point][2 * row + 1]);
        }
}

constexpr int ADDED = 32;  // elements of a block of add_parts
constexpr int ADDERS = 8;  // threads of an element

// Adds up parts of the weights' gradient: each thread every ADDERS-th, then the threads' sums.
extern "C" __global__ void __launch_bounds__(ADDED* ADDERS) add_parts(const Adding arguments) {
    float* const totals = reinterpret_cast<float*>(shared_memory());  // [ADDERS, ADDED]
    const int adder = threadIdx.x / ADDED;
    const int element = blockIdx.x * ADDED + threadIdx.x % ADDED;
    float total = 0;
    if (element < arguments.elements)
        for (int part = adder; part < arguments.parts; part += ADDERS)
            total += arguments.sums[static_cast<long long>(part) * arguments.elements + element];
    totals[threadIdx.x] = total;
    __syncthreads();
    if (adder || element >= arguments.elements) return;
    for (int other = 1; other < ADDERS; other++) total += totals[other * ADDED + threadIdx.x];

    // From [groups, KERNEL, KERNEL, out, in].
    const int in = element % GROUP;
    const int out = element / GROUP % GROUP;
    const int point = element / MATRIX % POINTS;
    const int row = element / (MATRIX * POINTS) * GROUP + out;
    const int at = arguments.channels_last ? (row * POINTS + point) * GROUP + in
                                           : (row * GROUP + in) * POINTS + point;
    arguments.gradient[at] = static_cast<Half>(rounded(total, 0) & 0xffff);
}
