// Group normalisation with SiLU over activations [images, pixels, channels].
//
// The pixels of an image are divided into strips, whose number depends on the shape alone. What is
// added up within a strip is float32, what is added up over strips, channels and images is float64,
// in the order of their numbers. So no result depends on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

// 128 KiB: what is read twice is in the cache the second time.
constexpr int64_t STRIP_ELEMENTS = 32768;
constexpr int64_t TOGETHER = 8;  // pixels whose sums are made in registers

// The activations that a normalisation reads.
struct Shape {
    int64_t images;
    int64_t pixels;  // of an image
    int64_t channels;
    int64_t groups;
    int threads;

    int64_t group_channels() const { return channels / groups; }
    int64_t strip_pixels() const {
        return std::min(pixels, std::max<int64_t>(1, STRIP_ELEMENTS / channels));
    }
    int64_t strips() const { return (pixels + strip_pixels() - 1) / strip_pixels(); }
};

// ---- Strips.

// Neighbouring pixels of an image.
struct Strip {
    int64_t image;
    int64_t first;   // pixel
    int64_t end;     // the pixel behind the last
    int64_t number;  // among the strips of all images
};

// Calls work(strip) for all strips, side by side.
template <class Work>
inline void for_strips(const Shape& shape, Work work) {
    const int64_t pixels = shape.strip_pixels();
    const int64_t strips = shape.strips();
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (int64_t number = 0; number < shape.images * strips; number++) {
        const int64_t first = number % strips * pixels;
        work(Strip{number / strips, first, std::min(first + pixels, shape.pixels), number});
    }
}

// Numbers that were added up within the strips of images.
struct StripSums {
    int64_t images;
    int64_t strips;  // of an image
    int64_t numbers;
    int64_t channels;
    int threads;
};

// Adds up over strips, and divides.
inline void add_strips(const StripSums& by,
                       const float* parts,  // [images, strips, numbers, channels]
                       double divisor,
                       float* out  // [numbers, images, channels], written
) {
#pragma omp parallel for num_threads(by.threads) schedule(static)
    for (int64_t image = 0; image < by.images; image++)
        for (int64_t number = 0; number < by.numbers; number++)
            for (int64_t channel = 0; channel < by.channels; channel++) {
                double sum = 0;
                for (int64_t strip = 0; strip < by.strips; strip++) {
                    const int64_t row = (image * by.strips + strip) * by.numbers + number;
                    sum += parts[row * by.channels + channel];
                }
                out[(number * by.images + image) * by.channels + channel] = float(sum / divisor);
            }
}

// ---- What channels are normalised by.

// y = (x - mean) * inverse * weight + bias.
struct Normalization {
    const float* moments;  // [images, groups, 2]: mean, and one over the standard deviation
    const float* weight;   // [channels]
    const float* bias;     // [channels], or null
};

// A number for each channel of each image, [images, channels]: number(channel, first, second),
// where the last two are those of its group. groups: [images, groups, 2].
template <class Number>
inline std::vector<float> by_channel(const Shape& shape, const float* groups, Number number) {
    const int64_t size = shape.group_channels();
    std::vector<float> result(shape.images * shape.channels);
    for (int64_t image = 0; image < shape.images; image++)
        for (int64_t group = 0; group < shape.groups; group++) {
            const float* numbers = groups + 2 * (image * shape.groups + group);
            const float first = numbers[0];
            const float second = numbers[1];
            float* out = result.data() + image * shape.channels;
            for (int64_t channel = group * size; channel < (group + 1) * size; channel++)
                out[channel] = number(channel, first, second);
        }
    return result;
}

// The numbers of a normalisation for all channels of all images: y = (x - mean) * scale + bias.
class Coefficients {
public:
    Coefficients(const Shape& shape, const Normalization& norm)
        : mean(by_channel(shape, norm.moments, [](int64_t, float mean, float) { return mean; })),
          inverse(by_channel(shape, norm.moments, [](int64_t, float, float inv) { return inv; })),
          scale(by_channel(
              shape,
              norm.moments,
              [&](int64_t channel, float, float inv) { return inv * norm.weight[channel]; })),
          bias(shape.channels) {
        if (norm.bias) std::copy(norm.bias, norm.bias + shape.channels, bias.begin());
    }

    const std::vector<float> mean;     // [images, channels]
    const std::vector<float> inverse;  // [images, channels]: one over the standard deviation
    const std::vector<float> scale;    // [images, channels]: `inverse` times the weight
    std::vector<float> bias;           // [channels]
};

// Those of an image, [channels] each.
struct ImageCoefficients {
    const float* mean;
    const float* inverse;
    const float* scale;
    const float* bias;

    ImageCoefficients(const Coefficients& all, int64_t image, int64_t channels)
        : mean(all.mean.data() + image * channels),
          inverse(all.inverse.data() + image * channels),
          scale(all.scale.data() + image * channels),
          bias(all.bias.data()) {}
};

// ---- Moments.

constexpr int PART_MOMENTS = 3;

// Moments of some pixels of each channel, [3, channels]: a mean, what it lacks by rounding, and the
// sum of squared deviations. pitch: elements from a pixel to the next.
//
// Two passes: deviations are taken from the mean. Their own sum, which would be 0 but for rounding,
// corrects both (Chan, Golub and LeVeque, 1983). Rounded to float32, the corrected mean would be
// off by more than the standard deviation allows where that is small beside it.
inline void part_moments(
    const float* x, int64_t pixels, int64_t channels, int64_t pitch, float* out) {
    float* means = out;
    float* rests = out + channels;
    float* squares = out + 2 * channels;
    const float share = 1.0f / float(pixels);

    // The mean: sums of four pixels at a time, then of those that are left.
    for_lanes(channels, [&](auto width, int64_t channel) {
        constexpr int COUNT = decltype(width)::count;
        store<COUNT>(means + channel, Floats<COUNT>{});
    });
    int64_t pixel = 0;
    for (; pixel + 4 <= pixels; pixel += 4) {
        const float* row = x + pixel * pitch;
        for_lanes(channels, [&](auto width, int64_t channel) {
            constexpr int COUNT = decltype(width)::count;
            const auto first = load<COUNT>(row + channel) + load<COUNT>(row + pitch + channel);
            const auto second =
                load<COUNT>(row + 2 * pitch + channel) + load<COUNT>(row + 3 * pitch + channel);
            store<COUNT>(means + channel, load<COUNT>(means + channel) + (first + second));
        });
    }
    for (; pixel < pixels; pixel++) {
        const float* row = x + pixel * pitch;
        for_lanes(channels, [&](auto width, int64_t channel) {
            constexpr int COUNT = decltype(width)::count;
            store<COUNT>(means + channel,
                         load<COUNT>(means + channel) + load<COUNT>(row + channel));
        });
    }
    for_lanes(channels, [&](auto width, int64_t channel) {
        constexpr int COUNT = decltype(width)::count;
        store<COUNT>(means + channel, load<COUNT>(means + channel) * share);
        store<COUNT>(squares + channel, Floats<COUNT>{});
        store<COUNT>(rests + channel, Floats<COUNT>{});
    });

    // Deviations from it, in the same order.
    for (pixel = 0; pixel + 4 <= pixels; pixel += 4) {
        const float* row = x + pixel * pitch;
        for_lanes(channels, [&](auto width, int64_t channel) {
            constexpr int COUNT = decltype(width)::count;
            const auto mean = load<COUNT>(means + channel);
            const auto a = load<COUNT>(row + channel) - mean;
            const auto b = load<COUNT>(row + pitch + channel) - mean;
            const auto c = load<COUNT>(row + 2 * pitch + channel) - mean;
            const auto d = load<COUNT>(row + 3 * pitch + channel) - mean;
            store<COUNT>(rests + channel, load<COUNT>(rests + channel) + ((a + b) + (c + d)));
            store<COUNT>(squares + channel,
                         load<COUNT>(squares + channel) + ((a * a + b * b) + (c * c + d * d)));
        });
    }
    for (; pixel < pixels; pixel++) {
        const float* row = x + pixel * pitch;
        for_lanes(channels, [&](auto width, int64_t channel) {
            constexpr int COUNT = decltype(width)::count;
            const auto deviation = load<COUNT>(row + channel) - load<COUNT>(means + channel);
            store<COUNT>(rests + channel, load<COUNT>(rests + channel) + deviation);
            store<COUNT>(squares + channel, load<COUNT>(squares + channel) + deviation * deviation);
        });
    }
    for_lanes(channels, [&](auto width, int64_t channel) {
        constexpr int COUNT = decltype(width)::count;
        const auto rest = load<COUNT>(rests + channel) * share;
        store<COUNT>(rests + channel, rest);
        store<COUNT>(squares + channel,
                     load<COUNT>(squares + channel) - rest * rest * float(pixels));
    });
}

// Moments of all groups, [images, groups, 2], from those of parts, [images, parts, 3, channels].
// part_pixels: of each part; the last has what is left.
inline void merge_moments(
    const Shape& shape, const float* parts, int64_t part_pixels, float eps, float* moments) {
    const int64_t channels = shape.channels;
    const int64_t size = shape.group_channels();
    const int64_t count = (shape.pixels + part_pixels - 1) / part_pixels;
#pragma omp parallel for num_threads(shape.threads) schedule(static) collapse(2)
    for (int64_t image = 0; image < shape.images; image++)
        for (int64_t group = 0; group < shape.groups; group++) {
            double mean = 0;
            double squares = 0;
            double seen = 0;
            for (int64_t part = 0; part < count; part++) {
                const float* means =
                    parts + (image * count + part) * PART_MOMENTS * channels + group * size;
                const float* rests = means + channels;
                const float* deviations = means + 2 * channels;
                const double pixels =
                    double(std::min(part_pixels, shape.pixels - part * part_pixels));

                // All channels of a part have as many pixels: first these are merged.
                double sum = 0;
                for (int64_t channel = 0; channel < size; channel++)
                    sum += double(means[channel]) + rests[channel];
                const double part_mean = sum / double(size);
                const double part_seen = pixels * double(size);
                double part_squares = 0;
                for (int64_t channel = 0; channel < size; channel++) {
                    const double difference = double(means[channel]) + rests[channel] - part_mean;
                    part_squares += deviations[channel] + pixels * difference * difference;
                }

                // Then the parts.
                const double difference = part_mean - mean;
                const double together = seen + part_seen;
                mean += difference * (part_seen / together);
                squares += part_squares + difference * difference * (seen * part_seen / together);
                seen = together;
            }
            float* result = moments + 2 * (image * shape.groups + group);
            result[0] = float(mean);
            result[1] = float(1 / std::sqrt(squares / seen + eps));
        }
}

// moments: [images, groups, 2], written.
inline void group_moments(const Shape& shape, const float* x, float eps, float* moments) {
    const int64_t channels = shape.channels;
    std::vector<float> parts(shape.images * shape.strips() * PART_MOMENTS * channels);
    for_strips(shape, [&](const Strip& strip) {
        const float* first = x + (strip.image * shape.pixels + strip.first) * channels;
        float* out = parts.data() + strip.number * PART_MOMENTS * channels;
        part_moments(first, strip.end - strip.first, channels, channels, out);
    });
    merge_moments(shape, parts.data(), shape.strip_pixels(), eps, moments);
}

// ---- Forward.

template <bool SILU, int COUNT>
inline Floats<COUNT> activated(const ImageCoefficients& by, int64_t channel, Floats<COUNT> x) {
    const auto deviation = x - load<COUNT>(by.mean + channel);
    const auto z = deviation * load<COUNT>(by.scale + channel) + load<COUNT>(by.bias + channel);
    return SILU ? z * sigmoid<COUNT>(z) : z;
}

// Writes the normalised and activated x, times `kept` of its image, plus residual.
template <bool SILU>
void activate(const Shape& shape,
              const float* x,  // [images, pixels, channels]
              const Normalization& norm,
              const float* kept,      // [images], or null
              const float* residual,  // like x, or null
              float* y                // like x, written
) {
    const int64_t channels = shape.channels;
    const Coefficients all(shape, norm);
    for_strips(shape, [&](const Strip& strip) {
        const ImageCoefficients by(all, strip.image, channels);
        const float factor = kept ? kept[strip.image] : 1.0f;
        for (int64_t pixel = strip.first; pixel < strip.end; pixel++) {
            const int64_t place = (strip.image * shape.pixels + pixel) * channels;
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                auto value =
                    activated<SILU, COUNT>(by, channel, load<COUNT>(x + place + channel)) * factor;
                if (residual) value += load<COUNT>(residual + place + channel);
                store<COUNT>(y + place + channel, value);
            });
        }
    });
}

// Writes means over pixels of the activated x, and this unless y is null.
inline void activate_and_pool(const Shape& shape,
                              const float* x,  // [images, pixels, channels]
                              const Normalization& norm,
                              float* y,      // like x, written; or null
                              float* pooled  // [images, channels], written
) {
    const int64_t channels = shape.channels;
    const Coefficients all(shape, norm);
    std::vector<float> parts(shape.images * shape.strips() * channels);
    for_strips(shape, [&](const Strip& strip) {
        const ImageCoefficients by(all, strip.image, channels);
        float* sums = parts.data() + strip.number * channels;
        const int64_t ahead = TOGETHER * channels;  // as in gradient_sums
        for (int64_t begin = strip.first; begin < strip.end; begin += TOGETHER) {
            const int64_t end = std::min(begin + TOGETHER, strip.end);
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                for (int64_t pixel = begin; pixel < end; pixel++) {
                    const int64_t place = (strip.image * shape.pixels + pixel) * channels + channel;
                    read_soon(x + place, ahead);
                    if (y) write_soon(y + place, ahead);
                }
                Floats<COUNT> added = {};
                for (int64_t pixel = begin; pixel < end; pixel++) {
                    const int64_t place = (strip.image * shape.pixels + pixel) * channels + channel;
                    const auto value = activated<true, COUNT>(by, channel, load<COUNT>(x + place));
                    added += value;
                    if (y) store<COUNT>(y + place, value);
                }
                store<COUNT>(sums + channel, load<COUNT>(sums + channel) + added);
            });
        }
    });
    const StripSums sums{shape.images, shape.strips(), 1, channels, shape.threads};
    add_strips(sums, parts.data(), double(shape.pixels), pooled);
}

// Multiplies y by the gate of its image and channel.
inline void multiply(const Shape& shape,
                     const float* gate,  // [images, channels]
                     float* y            // [images, pixels, channels], in place
) {
    const int64_t channels = shape.channels;
    for_strips(shape, [&](const Strip& strip) {
        const float* gates = gate + strip.image * channels;
        for (int64_t pixel = strip.first; pixel < strip.end; pixel++) {
            float* row = y + (strip.image * shape.pixels + pixel) * channels;
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                store<COUNT>(row + channel,
                             load<COUNT>(row + channel) * load<COUNT>(gates + channel));
            });
        }
    });
}
