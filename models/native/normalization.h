// Group normalisation with SiLU over activations [images, pixels, channels], and its gradients.
//
// The pixels of an image are divided into strips, whose number depends on the shape alone. What is added up within a
// strip is float32, what is added up over strips, channels and images is float64, in the order of their numbers. So no
// result depends on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

constexpr int64_t STRIP_ELEMENTS = 32768;  // 128 KiB: what is read twice is in the cache the second time
constexpr int64_t TOGETHER = 8;            // pixels whose sums are made in registers

struct Shape {
    int64_t images, pixels, channels, groups;
    int threads;

    int64_t size() const { return channels / groups; }
    int64_t strip() const { return std::min(pixels, std::max<int64_t>(1, STRIP_ELEMENTS / channels)); }
    int64_t strips() const { return (pixels + strip() - 1) / strip(); }
};

// Calls work(image, first pixel, pixel behind the last, number of the strip) for all strips, side by side.
template <class Work>
inline void for_strips(const Shape& shape, Work work) {
    const int64_t strip = shape.strip(), strips = shape.strips();
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (int64_t task = 0; task < shape.images * strips; task++) {
        const int64_t image = task / strips, first = task % strips * strip;
        work(image, first, std::min(first + strip, shape.pixels), task);
    }
}

// What a channel of an image is normalised by: y = (x - mean) * inverse * weight + bias.
struct Normalization {
    const float* moments;  // [images, groups, 2]: mean, and one over the standard deviation
    const float* weight;   // [channels]
    const float* bias;     // [channels], or null
};

// The same number for each channel of a group, [images, channels], from `of(weight of the channel, group's numbers)`.
template <class Of>
inline std::vector<float> by_channel(const Shape& shape, const float* of_groups, Of of) {
    std::vector<float> made(shape.images * shape.channels);
    for (int64_t image = 0; image < shape.images; image++)
        for (int64_t group = 0; group < shape.groups; group++) {
            const float* numbers = of_groups + 2 * (image * shape.groups + group);
            const float first = numbers[0], second = numbers[1];
            float* out = made.data() + image * shape.channels + group * shape.size();
            for (int64_t each = 0; each < shape.size(); each++) out[each] = of(group * shape.size() + each, first, second);
        }
    return made;
}

// The numbers of a normalisation for all channels of all images: y = (x - mean) * scale + bias.
class Coefficients {
public:
    Coefficients(const Shape& shape, const Normalization& norm)
        : mean(by_channel(shape, norm.moments, [](int64_t, float mean, float) { return mean; })),
          inverse(by_channel(shape, norm.moments, [](int64_t, float, float inverse) { return inverse; })),
          scale(by_channel(shape, norm.moments,
                           [&](int64_t channel, float, float inverse) { return inverse * norm.weight[channel]; })),
          bias(shape.channels) {
        if (norm.bias) std::copy(norm.bias, norm.bias + shape.channels, bias.begin());
    }

    const std::vector<float> mean, inverse, scale;  // [images, channels]
    std::vector<float> bias;                        // [channels]
};

// Those of an image.
struct ImageCoefficients {
    const float *mean, *inverse, *scale, *bias;

    ImageCoefficients(const Coefficients& all, int64_t image, int64_t channels)
        : mean(all.mean.data() + image * channels),
          inverse(all.inverse.data() + image * channels),
          scale(all.scale.data() + image * channels),
          bias(all.bias.data()) {}
};

// Moments of some pixels of each channel, [3, channels]: a mean, what it lacks by rounding, and the sum of squared
// deviations.
//
// Two passes: deviations are taken from the mean. Their own sum, which would be 0 but for rounding, corrects both
// (Chan, Golub and LeVeque, 1983). Rounded to float32, the corrected mean would be off by more than the standard
// deviation allows where that is small beside it.
constexpr int PART_MOMENTS = 3;
inline void part_moments(const float* x, int64_t pixels, int64_t channels, int64_t pitch, float* out) {
    float *means = out, *rests = out + channels, *squares = out + 2 * channels;
    const float share = 1.0f / float(pixels);
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
            const auto second = load<COUNT>(row + 2 * pitch + channel) + load<COUNT>(row + 3 * pitch + channel);
            store<COUNT>(means + channel, load<COUNT>(means + channel) + (first + second));
        });
    }
    for (; pixel < pixels; pixel++) {
        const float* row = x + pixel * pitch;
        for_lanes(channels, [&](auto width, int64_t channel) {
            constexpr int COUNT = decltype(width)::count;
            store<COUNT>(means + channel, load<COUNT>(means + channel) + load<COUNT>(row + channel));
        });
    }
    for_lanes(channels, [&](auto width, int64_t channel) {
        constexpr int COUNT = decltype(width)::count;
        store<COUNT>(means + channel, load<COUNT>(means + channel) * share);
        store<COUNT>(squares + channel, Floats<COUNT>{});
        store<COUNT>(rests + channel, Floats<COUNT>{});
    });
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
            store<COUNT>(squares + channel, load<COUNT>(squares + channel) + ((a * a + b * b) + (c * c + d * d)));
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
        store<COUNT>(squares + channel, load<COUNT>(squares + channel) - rest * rest * float(pixels));
    });
}

// Moments of all groups, [images, groups, 2], from those of parts, [images, parts, 3, channels].
// part: pixels of each; the last has what is left.
inline void merge_moments(const Shape& shape, const float* parts, int64_t part, float eps, float* moments) {
    const int64_t channels = shape.channels, count = (shape.pixels + part - 1) / part;
#pragma omp parallel for num_threads(shape.threads) schedule(static) collapse(2)
    for (int64_t image = 0; image < shape.images; image++)
        for (int64_t group = 0; group < shape.groups; group++) {
            const float* own = parts + image * count * PART_MOMENTS * channels + group * shape.size();
            double mean = 0, squares = 0, seen = 0;
            for (int64_t number = 0; number < count; number++) {
                const float* means = own + number * PART_MOMENTS * channels;
                const float *rests = means + channels, *deviations = means + 2 * channels;
                const double pixels = double(std::min(part, shape.pixels - number * part));
                // All channels of a part have as many pixels: first these are merged, then the parts.
                double sum = 0, own_squares = 0;
                for (int64_t channel = 0; channel < shape.size(); channel++)
                    sum += double(means[channel]) + rests[channel];
                const double own_mean = sum / double(shape.size()), own_seen = pixels * double(shape.size());
                for (int64_t channel = 0; channel < shape.size(); channel++) {
                    const double difference = double(means[channel]) + rests[channel] - own_mean;
                    own_squares += deviations[channel] + pixels * difference * difference;
                }
                const double difference = own_mean - mean, together = seen + own_seen;
                mean += difference * (own_seen / together);
                squares += own_squares + difference * difference * (seen * own_seen / together);
                seen = together;
            }
            float* result = moments + 2 * (image * shape.groups + group);
            result[0] = float(mean);
            result[1] = float(1 / std::sqrt(squares / seen + eps));
        }
}

inline void group_moments(const Shape& shape, const float* x, float eps, float* moments) {
    const int64_t channels = shape.channels, strip = shape.strip(), strips = shape.strips();
    std::vector<float> parts(shape.images * strips * PART_MOMENTS * channels);
    for_strips(shape, [&](int64_t image, int64_t first, int64_t last, int64_t task) {
        const float* own = x + (image * shape.pixels + first) * channels;
        part_moments(own, last - first, channels, channels, parts.data() + task * PART_MOMENTS * channels);
    });
    merge_moments(shape, parts.data(), strip, eps, moments);
}

template <bool SILU, int COUNT>
inline Floats<COUNT> activated(const ImageCoefficients& by, int64_t channel, Floats<COUNT> x) {
    const auto z = (x - load<COUNT>(by.mean + channel)) * load<COUNT>(by.scale + channel) + load<COUNT>(by.bias + channel);
    return SILU ? z * sigmoid<COUNT>(z) : z;
}

// y = the normalised and activated x, times `kept` of its image, plus residual. kept, [images], residual: or null.
template <bool SILU>
void activate(const Shape& shape, const float* x, const Normalization& norm, const float* kept, const float* residual,
              float* y) {
    const int64_t channels = shape.channels;
    const Coefficients all(shape, norm);
    for_strips(shape, [&](int64_t image, int64_t first, int64_t last, int64_t) {
        const ImageCoefficients by(all, image, channels);
        const float factor = kept ? kept[image] : 1.0f;
        for (int64_t pixel = first; pixel < last; pixel++) {
            const int64_t place = (image * shape.pixels + pixel) * channels;
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                auto value = activated<SILU, COUNT>(by, channel, load<COUNT>(x + place + channel)) * factor;
                if (residual) value += load<COUNT>(residual + place + channel);
                store<COUNT>(y + place + channel, value);
            });
        }
    });
}

// pooled, [images, channels]: means over pixels of the activated x, which is stored in y unless that is null.
inline void activate_and_pool(const Shape& shape, const float* x, const Normalization& norm, float* y, float* pooled) {
    const int64_t channels = shape.channels, strips = shape.strips();
    const Coefficients all(shape, norm);
    std::vector<float> parts(shape.images * strips * channels);
    for_strips(shape, [&](int64_t image, int64_t first, int64_t last, int64_t task) {
        const ImageCoefficients by(all, image, channels);
        float* sums = parts.data() + task * channels;
        for (int64_t begin = first; begin < last; begin += TOGETHER) {
            const int64_t end = std::min(begin + TOGETHER, last);
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                Floats<COUNT> added = {};
                for (int64_t pixel = begin; pixel < end; pixel++) {
                    const int64_t place = (image * shape.pixels + pixel) * channels + channel;
                    const auto value = activated<true, COUNT>(by, channel, load<COUNT>(x + place));
                    added += value;
                    if (y) store<COUNT>(y + place, value);
                }
                store<COUNT>(sums + channel, load<COUNT>(sums + channel) + added);
            });
        }
    });
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (int64_t image = 0; image < shape.images; image++)
        for (int64_t channel = 0; channel < channels; channel++) {
            double sum = 0;
            for (int64_t number = 0; number < strips; number++)
                sum += parts[(image * strips + number) * channels + channel];
            pooled[image * channels + channel] = float(sum / shape.pixels);
        }
}

// y *= gate of its image and channel, in place. gate: [images, channels].
inline void multiply(const Shape& shape, const float* gate, float* y) {
    const int64_t channels = shape.channels;
    for_strips(shape, [&](int64_t image, int64_t first, int64_t last, int64_t) {
        for (int64_t pixel = first; pixel < last; pixel++) {
            float* row = y + (image * shape.pixels + pixel) * channels;
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                store<COUNT>(row + channel, load<COUNT>(row + channel) * load<COUNT>(gate + image * channels + channel));
            });
        }
    });
}

// What reaches an activation from above: dy * kept, or dy * gate + pooled. All but one may be null.
struct Incoming {
    const float* dy;      // like x
    const float* kept;    // [images]
    const float* gate;    // [images, channels]
    const float* pooled;  // [images, channels]: gradient of each pixel by the mean over pixels
};

// Sums over pixels, [sums, images, channels]. Two sums of PLAIN: of dz and of dz * xhat, where dz is the gradient of
// (dy * kept) before the activation, and xhat the normalised x. Two of POOLED, which has no dy: of the activation's
// slope, and of slope * xhat. Five of GATED: of dy * activation, dy * slope, dy * slope * xhat, slope, slope * xhat.
// dz_out: for the dz of PLAIN, so that input_gradient need not compute the slope again; or null.
enum Form { PLAIN, POOLED, GATED };
constexpr int sums_of(Form form) { return form == GATED ? 5 : 2; }

template <Form FORM, bool SILU>
void gradient_sums(const Shape& shape, const float* x, const Normalization& norm, const Incoming& from, float* dz_out,
                   float* out) {
    constexpr int SUMS = sums_of(FORM);
    const int64_t channels = shape.channels, strips = shape.strips();
    const Coefficients all(shape, norm);
    std::vector<float> parts(shape.images * strips * SUMS * channels);
    for_strips(shape, [&](int64_t image, int64_t first, int64_t last, int64_t task) {
        const ImageCoefficients by(all, image, channels);
        const float factor = from.kept ? from.kept[image] : 1.0f;
        float* sums = parts.data() + task * SUMS * channels;
        // Few pixels at a time, which stay in the nearest cache, so that sums over them are in registers.
        for (int64_t begin = first; begin < last; begin += TOGETHER) {
            const int64_t end = std::min(begin + TOGETHER, last);
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                using Values = Floats<COUNT>;
                const Values mean = load<COUNT>(by.mean + channel), inverse = load<COUNT>(by.inverse + channel);
                const Values scale = load<COUNT>(by.scale + channel), bias = load<COUNT>(by.bias + channel);
                Values added[SUMS] = {};
                for (int64_t pixel = begin; pixel < end; pixel++) {
                    const int64_t place = (image * shape.pixels + pixel) * channels + channel;
                    const Values deviation = load<COUNT>(x + place) - mean;
                    const Values normalised = deviation * inverse;
                    const Values z = deviation * scale + bias;
                    const Values gated = SILU ? sigmoid<COUNT>(z) : filled<COUNT>(1.0f);
                    const Values slope = SILU ? silu_slope<COUNT>(z, gated) : filled<COUNT>(1.0f);
                    if (FORM != PLAIN) {
                        added[SUMS - 2] += slope;
                        added[SUMS - 1] += slope * normalised;
                    }
                    if (FORM == POOLED) continue;
                    const Values dy = load<COUNT>(from.dy + place) * factor;
                    const Values dz = dy * slope;
                    if (FORM == GATED) added[0] += dy * (z * gated);
                    if (FORM == PLAIN && dz_out) store<COUNT>(dz_out + place, dz);
                    added[FORM == GATED ? 1 : 0] += dz;
                    added[FORM == GATED ? 2 : 1] += dz * normalised;
                }
                for (int each = 0; each < SUMS; each++) {
                    float* sum = sums + each * channels + channel;
                    store<COUNT>(sum, load<COUNT>(sum) + added[each]);
                }
            });
        }
    });
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (int64_t image = 0; image < shape.images; image++)
        for (int each = 0; each < SUMS; each++)
            for (int64_t channel = 0; channel < channels; channel++) {
                double sum = 0;
                for (int64_t number = 0; number < strips; number++)
                    sum += parts[((image * strips + number) * SUMS + each) * channels + channel];
                out[(each * shape.images + image) * channels + channel] = float(sum);
            }
}

// From gradient_sums: gradients of weight and bias (null where there is none), [channels], and by_group,
// [images, groups, 2]: means over a group of dz * weight and of dz * weight * xhat.
template <Form FORM>
void merge_gradients(const Shape& shape, const float* sums, const float* weight, const Incoming& from, float* dweight,
                     float* dbias, float* by_group) {
    const int64_t channels = shape.channels, each = shape.images * channels;
    const auto of = [&](int64_t place, double& plain, double& normalised) {
        if (FORM == PLAIN) {
            plain = sums[place];
            normalised = sums[each + place];
        } else if (FORM == POOLED) {
            plain = double(sums[place]) * from.pooled[place];
            normalised = double(sums[each + place]) * from.pooled[place];
        } else {
            const double gate = from.gate[place], pooled = from.pooled[place];
            plain = sums[each + place] * gate + sums[3 * each + place] * pooled;
            normalised = sums[2 * each + place] * gate + sums[4 * each + place] * pooled;
        }
    };
    constexpr int64_t CHANNELS = 64;  // at a time
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (int64_t begin = 0; begin < channels; begin += CHANNELS) {
        const int64_t taken = std::min(CHANNELS, channels - begin);
        double plain_sums[CHANNELS] = {}, normalised_sums[CHANNELS] = {};
        for (int64_t image = 0; image < shape.images; image++)
            for (int64_t channel = 0; channel < taken; channel++) {
                double plain, normalised;
                of(image * channels + begin + channel, plain, normalised);
                plain_sums[channel] += plain;
                normalised_sums[channel] += normalised;
            }
        for (int64_t channel = 0; channel < taken; channel++) {
            if (dbias) dbias[begin + channel] = float(plain_sums[channel]);
            dweight[begin + channel] = float(normalised_sums[channel]);
        }
    }
    const double count = double(shape.pixels * shape.size());
#pragma omp parallel for num_threads(shape.threads) schedule(static) collapse(2)
    for (int64_t image = 0; image < shape.images; image++)
        for (int64_t group = 0; group < shape.groups; group++) {
            double first = 0, second = 0;
            for (int64_t channel = group * shape.size(); channel < (group + 1) * shape.size(); channel++) {
                double plain, normalised;
                of(image * channels + channel, plain, normalised);
                first += plain * weight[channel];
                second += normalised * weight[channel];
            }
            float* result = by_group + 2 * (image * shape.groups + group);
            result[0] = float(first / count);
            result[1] = float(second / count);
        }
}

// What is subtracted from an input's gradient: offset + slope * (x - mean), [images, channels].
class GradientCoefficients {
public:
    GradientCoefficients(const Shape& shape, const Normalization& norm, const float* by_group)
        : offset(shape.images * shape.channels), slope(shape.images * shape.channels) {
        for (int64_t place = 0; place < shape.images * shape.groups; place++) {
            const float inverse = norm.moments[2 * place + 1];
            const float first = inverse * by_group[2 * place], second = inverse * inverse * by_group[2 * place + 1];
            std::fill_n(offset.begin() + place * shape.size(), shape.size(), first);
            std::fill_n(slope.begin() + place * shape.size(), shape.size(), second);
        }
    }

    std::vector<float> offset, slope;
};

// dx = inverse * (dz * weight - by_group[0] - xhat * by_group[1]).
template <Form FORM, bool SILU>
void input_gradient(const Shape& shape, const float* x, const Normalization& norm, const Incoming& from,
                    const float* by_group, float* dx) {
    const int64_t channels = shape.channels;
    const Coefficients all(shape, norm);
    const GradientCoefficients below(shape, norm, by_group);
    for_strips(shape, [&](int64_t image, int64_t first, int64_t last, int64_t) {
        const ImageCoefficients by(all, image, channels);
        const float factor = from.kept ? from.kept[image] : 1.0f;
        const float* offsets = below.offset.data() + image * channels;
        const float* slopes = below.slope.data() + image * channels;
        for (int64_t pixel = first; pixel < last; pixel++) {
            const int64_t place = (image * shape.pixels + pixel) * channels;
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                using Values = Floats<COUNT>;
                const Values deviation = load<COUNT>(x + place + channel) - load<COUNT>(by.mean + channel);
                const Values scale = load<COUNT>(by.scale + channel);
                Values incoming;
                if (FORM == PLAIN) incoming = load<COUNT>(from.dy + place + channel) * factor;
                if (FORM == POOLED) incoming = load<COUNT>(from.pooled + image * channels + channel);
                if (FORM == GATED)
                    incoming = load<COUNT>(from.dy + place + channel) * load<COUNT>(from.gate + image * channels + channel) +
                               load<COUNT>(from.pooled + image * channels + channel);
                if (SILU) {
                    const Values z = deviation * scale + load<COUNT>(by.bias + channel);
                    incoming *= silu_slope<COUNT>(z, sigmoid<COUNT>(z));
                }
                store<COUNT>(dx + place + channel, incoming * scale - load<COUNT>(offsets + channel) -
                                                       deviation * load<COUNT>(slopes + channel));
            });
        }
    });
}
