// Crops of uint8 images, resized by bilinear or bicubic filters with antialiasing: see crops.py.
//
// As in Pillow and torch, columns are resized before rows, each time to uint8, by weights of 16 bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int CHANNELS = 3;
constexpr int LARGEST_PRECISION = 22;
constexpr int64_t ROWS = 32;    // whose columns are resized together
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

// Writes [box height, size, COLOURS]: the rows of a box with resized columns, mirrored or not.
// columns: [box width, ROWS, COLOURS], for its use.
template <int COLOURS>
void resize_columns(
    const Images& images, const Frame& frame, const Axis& axis, int32_t* columns, uint8_t* out) {
    constexpr int64_t LANES = ROWS * COLOURS;
    const uint8_t* box = images.pixels + frame.image * images.image_stride +
                         frame.top * images.row_stride + frame.left * images.column_stride;
    const int32_t half = axis.precision ? 1 << (axis.precision - 1) : 0;
    for (int64_t begin = 0; begin < frame.height; begin += ROWS) {
        const int64_t count = std::min(ROWS, frame.height - begin);
        // Pixels of several rows side by side, so that a processor computes them at once.
        for (int64_t row = 0; row < count; row++)
            for (int64_t column = 0; column < frame.width; column++)
                for (int colour = 0; colour < COLOURS; colour++)
                    columns[column * LANES + row * COLOURS + colour] =
                        box[(begin + row) * images.row_stride + column * images.column_stride +
                            colour * images.channel_stride];
        for (int64_t column = 0; column < images.size; column++) {
            int32_t sums[LANES];
            std::fill_n(sums, LANES, half);
            for (int64_t tap = 0; tap < axis.count[column]; tap++) {
                const int32_t weight = axis.weights[column * axis.taps + tap];
                const int32_t* from = columns + (axis.first[column] + tap) * LANES;
                for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += weight * from[lane];
            }
            const int64_t place = frame.flip ? images.size - 1 - column : column;
            for (int64_t row = 0; row < count; row++)
                for (int colour = 0; colour < COLOURS; colour++)
                    out[((begin + row) * images.size + place) * COLOURS + colour] =
                        rounded(sums[row * COLOURS + colour], axis.precision);
        }
    }
}

// Writes [size, size, CHANNELS]: resized rows of what resize_columns wrote, [height, size, COLOURS].
// sums: [size, COLOURS], for its use.
template <int COLOURS>
void resize_rows(const Axis& axis, int64_t size, const uint8_t* rows, int32_t* sums, uint8_t* out) {
    constexpr int COPIES = CHANNELS / COLOURS;
    const int64_t bytes = size * COLOURS;  // of a row
    const int32_t half = axis.precision ? 1 << (axis.precision - 1) : 0;
    for (int64_t row = 0; row < size; row++) {
        std::fill(sums, sums + bytes, half);
        for (int64_t tap = 0; tap < axis.count[row]; tap++) {
            const int32_t weight = axis.weights[row * axis.taps + tap];
            const uint8_t* from = rows + (axis.first[row] + tap) * bytes;
            for (int64_t byte = 0; byte < bytes; byte++) sums[byte] += weight * from[byte];
        }
        uint8_t* to = out + row * size * CHANNELS;
        for (int64_t byte = 0; byte < bytes; byte++)
            for (int copy = 0; copy < COPIES; copy++)
                to[byte * COPIES + copy] = rounded(sums[byte], axis.precision);
    }
}

// COLOURS: channels that differ; 1 of a grey image.
template <int COLOURS>
void crop_all(const Images& images, int64_t count, const Frame* frames, uint8_t* out) {
    const int64_t size = images.size;
    Axes axes(size);
    std::vector<uint8_t> rows;
    std::vector<int32_t> box_columns;
    std::vector<int32_t> sums(size * COLOURS);
    for (int64_t number = 0; number < count; number++) {
        const Frame& frame = frames[number];
        const bool cubic = frame.cubic != 0;
        const Axis& columns = axes.of(frame.width, frame.resized_width, frame.first_column, cubic);
        const Axis& lines = axes.of(frame.height, frame.resized_height, frame.first_row, cubic);
        rows.resize(frame.height * size * COLOURS);
        // Rows beyond the box are computed, too, and left out.
        box_columns.resize(frame.width * ROWS * COLOURS);
        resize_columns<COLOURS>(images, frame, columns, box_columns.data(), rows.data());
        uint8_t* result = out + number * size * size * CHANNELS;
        resize_rows<COLOURS>(lines, size, rows.data(), sums.data(), result);
    }
}

// What random boxes are drawn by: see crop_box in transforms.py.
struct Drawing {
    int64_t height;  // of the images
    int64_t width;
    int64_t size;   // pixels a side of a result
    int64_t cubic;  // see Frame
    double flip;    // probability
    double smallest_area;
    double largest_area;
    double narrowest;  // width over height
    double widest;
    double log_narrowest;
    double log_widest;
};

// Random numbers of one key: `Stream` of recipe/randomness.py.
class Stream {
public:
    explicit Stream(uint64_t key) : state_(key) {}

    double uniform(double low, double high) {
        const double unit = double(bits() >> 11) * 0x1p-53;
        return low + (high - low) * unit;
    }

    int64_t integer(int64_t stop) {
        return int64_t((static_cast<unsigned __int128>(bits()) * uint64_t(stop)) >> 64);
    }

private:
    uint64_t bits() {
        state_ += 0x9E3779B97F4A7C15;
        uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }

    uint64_t state_;
};

constexpr int TRIES = 10;

// Sets the box of a frame: crop_box of transforms.py, with its bits.
void draw_box(const Drawing& by, Stream& stream, Frame* frame) {
    for (int attempt = 0; attempt < TRIES; attempt++) {
        const double area =
            double(by.height * by.width) * stream.uniform(by.smallest_area, by.largest_area);
        const double aspect = std::exp(stream.uniform(by.log_narrowest, by.log_widest));
        // To even where a half is left over, as Python rounds.
        const int64_t width = int64_t(std::nearbyint(std::sqrt(area * aspect)));
        const int64_t height = int64_t(std::nearbyint(std::sqrt(area / aspect)));
        if (0 < width && width <= by.width && 0 < height && height <= by.height) {
            frame->height = height;
            frame->width = width;
            frame->top = stream.integer(by.height - height + 1);
            frame->left = stream.integer(by.width - width + 1);
            return;
        }
    }
    // Only an image that is narrower or wider than the aspect allows is cut.
    frame->height = by.height;
    frame->width = by.width;
    const double aspect = double(by.width) / double(by.height);
    if (aspect < by.narrowest)
        frame->height =
            std::max<int64_t>(1, int64_t(std::nearbyint(double(by.width) / by.narrowest)));
    if (aspect > by.widest)
        frame->width =
            std::max<int64_t>(1, int64_t(std::nearbyint(double(by.height) * by.widest)));
    frame->top = (by.height - frame->height) / 2;
    frame->left = (by.width - frame->width) / 2;
}

}  // namespace

// Draws the box and the flip of each image: `Training.frame` of transforms.py.
extern "C" void draw(const Drawing* by,
                     int64_t count,
                     const int64_t* indices,  // [count], of the images
                     const uint64_t* keys,    // [count], of their draws
                     Frame* frames            // [count], written
) {
    for (int64_t number = 0; number < count; number++) {
        Stream stream(keys[number]);
        Frame frame{};
        frame.image = indices[number];
        // First, since a box takes a number of draws that varies.
        frame.flip = stream.uniform(0.0, 1.0) < by->flip;
        draw_box(*by, stream, &frame);
        // The box as a whole becomes the result.
        frame.resized_height = by->size;
        frame.resized_width = by->size;
        frame.cubic = by->cubic;
        frames[number] = frame;
    }
}

// Cuts a frame out of each image, and resizes it.
extern "C" void crop(const Images* images,
                     int64_t count,
                     const Frame* frames,  // [count]
                     uint8_t* out          // [count, size, size, CHANNELS], written
) {
    // The channels of a grey image are the same bytes of memory.
    if (images->channel_stride == 0)
        crop_all<1>(*images, count, frames, out);
    else
        crop_all<CHANNELS>(*images, count, frames, out);
}
