// Crops of uint8 images, resized by bilinear or bicubic filters with antialiasing: see crops.py.
//
// As in Pillow and torch, columns are resized before rows, each time to uint8, by weights of 16 bits.

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int CHANNELS = 3;
constexpr int LARGEST_PRECISION = 22;
constexpr int WEIGHT_BITS = 15;  // apart from the sign

// The images of a data set, and the size of what is cut out of them.
struct Images {
    const uint8_t* pixels;
    int64_t image_stride;
    int64_t channel_stride;
    int64_t row_stride;
    int64_t column_stride;
    int64_t size;  // pixels a side of a result
};

// What one result shows: `Frame` of transforms.py.
struct Frame {
    int64_t image;
    int64_t top;
    int64_t left;
    int64_t height;  // of the box
    int64_t width;
    int64_t resized_height;
    int64_t resized_width;
    int64_t first_row;  // of the resized box
    int64_t first_column;
    int64_t flip;
    int64_t cubic;  // 1: bicubic, 0: bilinear
};

// Resizing along one axis: each result is a weighted sum of neighbouring pixels.
struct Axis {
    int64_t taps;  // weights a result, the last of them may be 0
    int precision;
    std::vector<int64_t> first;    // pixel of each result's sum
    std::vector<int64_t> count;    // of the pixels in it
    std::vector<int16_t> weights;  // [results, taps], times 2^precision
};

// Bilinear interpolation: 1 - |x|, for |x| < 1.
double triangle(double distance) { return distance < 1.0 ? 1.0 - distance : 0.0; }

// Bicubic interpolation, for |x| < 2. Source: Keys (1981), equation 4, with a = -1/2.
double keys_cubic(double distance) {
    constexpr double a = -0.5;
    const double x = distance;
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
    if (x < 2.0) return ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a;
    return 0.0;
}

// Returns the weights of `results` pixels, from `first_result` on, of `length` pixels resized to
// `resized`. The precision is that of all resized pixels.
Axis axis_of(int64_t length, int64_t resized, int64_t first_result, int64_t results, bool cubic) {
    const double scale = double(length) / double(resized);
    const double support = (cubic ? 2.0 : 1.0) * std::max(scale, 1.0);
    const double sharpness = scale >= 1.0 ? 1.0 / scale : 1.0;
    Axis axis;
    axis.taps = int64_t(support + 1.0) * 2 + 1;
    std::vector<int64_t> first(resized);
    std::vector<int64_t> count(resized);
    std::vector<double> weights(resized * axis.taps);
    double largest = 0.0;
    for (int64_t result = 0; result < resized; result++) {
        const double center = scale * (result + 0.5);
        first[result] = std::max<int64_t>(int64_t(center - support + 0.5), 0);
        count[result] = std::min<int64_t>(int64_t(center + support + 0.5), length) - first[result];
        double* own = &weights[result * axis.taps];
        double total = 0.0;
        for (int64_t tap = 0; tap < count[result]; tap++) {
            double distance = (tap + first[result] - center + 0.5) * sharpness;
            if (distance < 0.0) distance = -distance;
            own[tap] = cubic ? keys_cubic(distance) : triangle(distance);
            total += own[tap];
        }
        for (int64_t tap = 0; tap < count[result]; tap++) {
            if (total != 0.0) own[tap] /= total;
            largest = std::max(largest, own[tap]);
        }
    }
    axis.precision = 0;
    while (axis.precision < LARGEST_PRECISION &&
           int64_t(0.5 + largest * (1 << (axis.precision + 1))) < (1 << WEIGHT_BITS))
        axis.precision++;
    axis.first.assign(first.begin() + first_result, first.begin() + first_result + results);
    axis.count.assign(count.begin() + first_result, count.begin() + first_result + results);
    axis.weights.resize(results * axis.taps);
    const double* kept = &weights[first_result * axis.taps];
    for (int64_t weight = 0; weight < results * axis.taps; weight++) {
        const double scaled = kept[weight] * (1 << axis.precision);
        axis.weights[weight] = int16_t(scaled < 0.0 ? scaled - 0.5 : scaled + 0.5);
    }
    return axis;
}

// The axes of several images: most boxes have the sides of others.
class Axes {
public:
    explicit Axes(int64_t results) : results_(results) {}

    // A reference that stays valid.
    const Axis& of(int64_t length, int64_t resized, int64_t first_result, bool cubic) {
        const auto key = std::make_tuple(length, resized, first_result, cubic);
        const auto found = made_.find(key);
        if (found != made_.end()) return found->second;
        Axis axis = axis_of(length, resized, first_result, results_, cubic);
        return made_.emplace(key, std::move(axis)).first->second;
    }

private:
    int64_t results_;
    std::map<std::tuple<int64_t, int64_t, int64_t, bool>, Axis> made_;
};

uint8_t rounded(int32_t sum, int precision) {
    return uint8_t(std::min(std::max(sum >> precision, 0), 255));
}

// Writes [box height, size, CHANNELS]: the rows of a box with resized columns, mirrored or not.
void resize_columns(const Images& images, const Frame& frame, const Axis& axis, uint8_t* out) {
    const uint8_t* box = images.pixels + frame.image * images.image_stride +
                         frame.top * images.row_stride + frame.left * images.column_stride;
    const int32_t half = axis.precision ? 1 << (axis.precision - 1) : 0;
    for (int64_t row = 0; row < frame.height; row++) {
        for (int64_t column = 0; column < images.size; column++) {
            const int16_t* weights = &axis.weights[column * axis.taps];
            const uint8_t* pixel =
                box + row * images.row_stride + axis.first[column] * images.column_stride;
            int32_t sums[CHANNELS] = {half, half, half};
            for (int64_t tap = 0; tap < axis.count[column]; tap++) {
                for (int channel = 0; channel < CHANNELS; channel++)
                    sums[channel] += weights[tap] * pixel[channel * images.channel_stride];
                pixel += images.column_stride;
            }
            const int64_t place = frame.flip ? images.size - 1 - column : column;
            for (int channel = 0; channel < CHANNELS; channel++)
                out[(row * images.size + place) * CHANNELS + channel] =
                    rounded(sums[channel], axis.precision);
        }
    }
}

// Writes [size, size, CHANNELS]: resized rows of what resize_columns wrote.
void resize_rows(const Axis& axis, int64_t size, const uint8_t* rows, int32_t* sums, uint8_t* out) {
    const int64_t bytes = size * CHANNELS;  // of a row
    const int32_t half = axis.precision ? 1 << (axis.precision - 1) : 0;
    for (int64_t row = 0; row < size; row++) {
        std::fill(sums, sums + bytes, half);
        for (int64_t tap = 0; tap < axis.count[row]; tap++) {
            const int32_t weight = axis.weights[row * axis.taps + tap];
            const uint8_t* from = rows + (axis.first[row] + tap) * bytes;
            for (int64_t byte = 0; byte < bytes; byte++) sums[byte] += weight * from[byte];
        }
        for (int64_t byte = 0; byte < bytes; byte++)
            out[row * bytes + byte] = rounded(sums[byte], axis.precision);
    }
}

}  // namespace

extern "C" void crop(const Images* images,
                     int64_t count,
                     const Frame* frames,  // [count]
                     uint8_t* out          // [count, size, size, CHANNELS], written
) {
    const int64_t size = images->size;
    Axes axes(size);
    std::vector<uint8_t> rows;
    std::vector<int32_t> sums(size * CHANNELS);
    for (int64_t number = 0; number < count; number++) {
        const Frame& frame = frames[number];
        const bool cubic = frame.cubic != 0;
        const Axis& columns = axes.of(frame.width, frame.resized_width, frame.first_column, cubic);
        const Axis& lines = axes.of(frame.height, frame.resized_height, frame.first_row, cubic);
        rows.resize(frame.height * size * CHANNELS);
        resize_columns(*images, frame, columns, rows.data());
        resize_rows(lines, size, rows.data(), sums.data(),
                    out + number * size * size * CHANNELS);
    }
}
