// Gradients of a group normalisation with SiLU, and what reaches it from above: see
// normalization.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "normalization.h"
#include "vectors.h"

// What reaches an activation from above: dy * kept, or dy * gate + pooled. All but one may be null.
struct Incoming {
    const float* dy;      // like x
    const float* kept;    // [images]
    const float* gate;    // [images, channels]
    const float* pooled;  // [images, channels]: gradient of each pixel by the mean over pixels
};

// Which of these it is, and so which sums over pixels the gradients need. Here dz is the gradient
// before the activation, and xhat the normalised x.
enum Form {
    PLAIN,   // dy * kept. Sums of dz, and of dz * xhat
    LINEAR,  // the same of a normalisation without SiLU
    POOLED,  // pooled, without a dy. Sums of the activation's slope, and of slope * xhat
    GATED,   // all. Sums of dy * activation, dy * slope, dy * slope * xhat, slope, slope * xhat
};
constexpr int sums_of(Form form) { return form == GATED ? 5 : 2; }

// Adds up over pixels.
template <Form FORM>
void gradient_sums(const Shape& shape,
                   const float* x,  // [images, pixels, channels]
                   const Normalization& norm,
                   const Incoming& from,
                   float* dz_out,  // like x, written: the dz of PLAIN; or null
                   float* out      // [sums, images, channels], written
) {
    constexpr bool SILU = FORM != LINEAR;
    constexpr bool SLOPES = FORM == POOLED || FORM == GATED;  // whether they are added up
    constexpr int SUMS = sums_of(FORM);
    const int64_t channels = shape.channels;
    const Coefficients all(shape, norm);
    std::vector<float> parts(shape.images * shape.strips() * SUMS * channels);
    for_strips(shape, [&](const Strip& strip) {
        const ImageCoefficients by(all, strip.image, channels);
        const float factor = from.kept ? from.kept[strip.image] : 1.0f;
        float* sums = parts.data() + strip.number * SUMS * channels;
        // Few pixels at a time, which stay in the nearest cache, so that sums over them are in
        // registers. Memory is not read in the order of its addresses then, which processors would
        // foresee: the next pixels are asked for. Not in the loop that adds up, where it would change
        // which products the compiler adds unrounded, and with that the bits.
        const int64_t ahead = TOGETHER * channels;
        for (int64_t begin = strip.first; begin < strip.end; begin += TOGETHER) {
            const int64_t end = std::min(begin + TOGETHER, strip.end);
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                using Values = Floats<COUNT>;
                for (int64_t pixel = begin; pixel < end; pixel++) {
                    const int64_t place = (strip.image * shape.pixels + pixel) * channels + channel;
                    read_soon(x + place, ahead);
                    if (FORM != POOLED) read_soon(from.dy + place, ahead);
                    if (FORM == PLAIN && dz_out) write_soon(dz_out + place, ahead);
                }
                const Values mean = load<COUNT>(by.mean + channel);
                const Values inverse = load<COUNT>(by.inverse + channel);
                const Values scale = load<COUNT>(by.scale + channel);
                const Values bias = load<COUNT>(by.bias + channel);
                Values added[SUMS] = {};
                for (int64_t pixel = begin; pixel < end; pixel++) {
                    const int64_t place = (strip.image * shape.pixels + pixel) * channels + channel;
                    const Values deviation = load<COUNT>(x + place) - mean;
                    const Values normalised = deviation * inverse;
                    const Values z = deviation * scale + bias;
                    const Values gated = SILU ? sigmoid<COUNT>(z) : filled<COUNT>(1.0f);
                    const Values slope = SILU ? silu_slope<COUNT>(z, gated) : filled<COUNT>(1.0f);
                    if (SLOPES) {
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
                for (int number = 0; number < SUMS; number++) {
                    float* sum = sums + number * channels + channel;
                    store<COUNT>(sum, load<COUNT>(sum) + added[number]);
                }
            });
        }
    });
    const StripSums sums{shape.images, shape.strips(), SUMS, channels, shape.threads};
    add_strips(sums, parts.data(), 1.0, out);
}

// Two sums over pixels: of the gradient before the activation, and of that times the normalised x.
struct GradientSums {
    double plain;
    double normalised;
};

// Those of a channel of an image.
template <Form FORM>
inline GradientSums merged_sums(const float* sums,  // [sums, images, channels]
                                const Incoming& from,
                                int64_t place,    // in [images, channels]
                                int64_t elements  // images * channels
) {
    if (FORM == POOLED) {
        const double pooled = from.pooled[place];
        return {sums[place] * pooled, sums[elements + place] * pooled};
    }
    if (FORM == GATED) {
        const double gate = from.gate[place];
        const double pooled = from.pooled[place];
        return {sums[elements + place] * gate + sums[3 * elements + place] * pooled,
                sums[2 * elements + place] * gate + sums[4 * elements + place] * pooled};
    }
    return {sums[place], sums[elements + place]};
}

// From gradient_sums: gradients of weight and bias; and by_group, means over a group of dz *
// weight, and of that times xhat.
template <Form FORM>
void merge_gradients(const Shape& shape,
                     const float* sums,    // [sums, images, channels]
                     const float* weight,  // [channels]
                     const Incoming& from,
                     float* dweight,  // [channels], written
                     float* dbias,    // [channels], written; or null
                     float* by_group  // [images, groups, 2], written
) {
    const int64_t channels = shape.channels;
    const int64_t elements = shape.images * channels;

    // Over images.
    constexpr int64_t CHANNELS = 64;  // at a time
#pragma omp parallel for num_threads(shape.threads) schedule(static)
    for (int64_t begin = 0; begin < channels; begin += CHANNELS) {
        const int64_t count = std::min(CHANNELS, channels - begin);
        double plain[CHANNELS] = {};
        double normalised[CHANNELS] = {};
        for (int64_t image = 0; image < shape.images; image++)
            for (int64_t channel = 0; channel < count; channel++) {
                const int64_t place = image * channels + begin + channel;
                const GradientSums added = merged_sums<FORM>(sums, from, place, elements);
                plain[channel] += added.plain;
                normalised[channel] += added.normalised;
            }
        for (int64_t channel = 0; channel < count; channel++) {
            if (dbias) dbias[begin + channel] = float(plain[channel]);
            dweight[begin + channel] = float(normalised[channel]);
        }
    }

    // Over the channels of a group.
    const int64_t size = shape.group_channels();
    const double count = double(shape.pixels * size);
#pragma omp parallel for num_threads(shape.threads) schedule(static) collapse(2)
    for (int64_t image = 0; image < shape.images; image++)
        for (int64_t group = 0; group < shape.groups; group++) {
            double plain = 0;
            double normalised = 0;
            for (int64_t channel = group * size; channel < (group + 1) * size; channel++) {
                const GradientSums added =
                    merged_sums<FORM>(sums, from, image * channels + channel, elements);
                plain += added.plain * weight[channel];
                normalised += added.normalised * weight[channel];
            }
            float* result = by_group + 2 * (image * shape.groups + group);
            result[0] = float(plain / count);
            result[1] = float(normalised / count);
        }
}

// What is subtracted from an input's gradient: offset + slope * (x - mean).
class GradientCoefficients {
public:
    // by_group: as merge_gradients writes it.
    GradientCoefficients(const Shape& shape, const Normalization& norm, const float* by_group)
        : offset(shape.images * shape.channels), slope(shape.images * shape.channels) {
        const int64_t size = shape.group_channels();
        for (int64_t group = 0; group < shape.images * shape.groups; group++) {
            const float inverse = norm.moments[2 * group + 1];
            const float group_offset = inverse * by_group[2 * group];
            const float group_slope = inverse * inverse * by_group[2 * group + 1];
            std::fill_n(offset.begin() + group * size, size, group_offset);
            std::fill_n(slope.begin() + group * size, size, group_slope);
        }
    }

    std::vector<float> offset;  // [images, channels]
    std::vector<float> slope;   // [images, channels]
};

// Writes inverse * (dz * weight - by_group[0] - xhat * by_group[1]).
template <Form FORM>
void input_gradient(const Shape& shape,
                    const float* x,  // [images, pixels, channels]
                    const Normalization& norm,
                    const Incoming& from,
                    const float* by_group,  // [images, groups, 2], as merge_gradients writes it
                    float* dx               // like x, written
) {
    static_assert(FORM != PLAIN, "it is LINEAR, by the dz that gradient_sums writes");
    const int64_t channels = shape.channels;
    const Coefficients all(shape, norm);
    const GradientCoefficients below(shape, norm, by_group);
    for_strips(shape, [&](const Strip& strip) {
        const int64_t first_channel = strip.image * channels;
        const ImageCoefficients by(all, strip.image, channels);
        const float factor = from.kept ? from.kept[strip.image] : 1.0f;
        const float* offsets = below.offset.data() + first_channel;
        const float* slopes = below.slope.data() + first_channel;
        for (int64_t pixel = strip.first; pixel < strip.end; pixel++) {
            const int64_t place = (strip.image * shape.pixels + pixel) * channels;
            for_lanes(channels, [&](auto width, int64_t channel) {
                constexpr int COUNT = decltype(width)::count;
                using Values = Floats<COUNT>;
                const Values deviation =
                    load<COUNT>(x + place + channel) - load<COUNT>(by.mean + channel);
                const Values scale = load<COUNT>(by.scale + channel);
                Values dz;
                if (FORM == LINEAR) dz = load<COUNT>(from.dy + place + channel) * factor;
                if (FORM == POOLED) dz = load<COUNT>(from.pooled + first_channel + channel);
                if (FORM == GATED) {
                    const Values dy = load<COUNT>(from.dy + place + channel);
                    const Values gate = load<COUNT>(from.gate + first_channel + channel);
                    dz = dy * gate + load<COUNT>(from.pooled + first_channel + channel);
                }
                if (FORM != LINEAR) {
                    const Values z = deviation * scale + load<COUNT>(by.bias + channel);
                    dz *= silu_slope<COUNT>(z, sigmoid<COUNT>(z));
                }
                const Values less = deviation * load<COUNT>(slopes + channel);
                store<COUNT>(dx + place + channel,
                             dz * scale - load<COUNT>(offsets + channel) - less);
            });
        }
    });
}
