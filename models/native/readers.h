// What a group convolution reads, 16 channels of a pixel at a time: a tensor as it is, or what is computed from it.
#pragma once

#include <cstdint>

#include "normalization.h"
#include "vectors.h"

constexpr int GROUP = 16;             // channels of a group
constexpr int PARTS = GROUP / WIDTH;  // registers of a pixel
using Values = Floats<WIDTH>;

// A reader has `of(image, first channel)`, then `at(place, part)`: some channels of a pixel.

class PlainReader {
public:
    PlainReader(const float* x) : x_(x) {}
    void of(int64_t, int64_t) {}
    Values at(int64_t place, int part) const { return load<WIDTH>(x_ + place + part * WIDTH); }
    static constexpr bool ACTIVATES = false;

private:
    const float* x_;
};

// silu of the normalised x.
class ActivatedReader {
public:
    ActivatedReader(const Shape& shape, const float* x, const Coefficients& all)
        : channels_(shape.channels), x_(x), all_(all) {}
    void of(int64_t image, int64_t first) {
        for (int part = 0; part < PARTS; part++) {
            const int64_t own = image * channels_ + first + part * WIDTH;
            mean_[part] = load<WIDTH>(all_.mean.data() + own);
            inverse_[part] = load<WIDTH>(all_.inverse.data() + own);
            scale_[part] = load<WIDTH>(all_.scale.data() + own);
            bias_[part] = load<WIDTH>(all_.bias.data() + first + part * WIDTH);
        }
    }
    Values at(int64_t place, int part) const {
        const Values z = activated_by(place, part);
        return z * sigmoid<WIDTH>(z);
    }
    // The same, with the slope of the activation.
    Values at(int64_t place, int part, Values& slope) const {
        const Values z = activated_by(place, part);
        const Values gate = sigmoid<WIDTH>(z);
        slope = silu_slope<WIDTH>(z, gate);
        return z * gate;
    }
    // xhat
    Values normalised(int64_t place, int part) const { return deviation(place, part) * inverse_[part]; }
    static constexpr bool ACTIVATES = true;

private:
    Values deviation(int64_t place, int part) const { return load<WIDTH>(x_ + place + part * WIDTH) - mean_[part]; }
    Values activated_by(int64_t place, int part) const { return deviation(place, part) * scale_[part] + bias_[part]; }

    int64_t channels_;
    const float* x_;
    const Coefficients& all_;
    Values mean_[PARTS], inverse_[PARTS], scale_[PARTS], bias_[PARTS];
};

// The gradient that reaches a normalisation's input from squeeze and excitation: see input_gradient, GATED.
class GatedGradientReader {
public:
    GatedGradientReader(const Shape& shape, const float* x, const Coefficients& all, const GradientCoefficients& below,
                        const Incoming& from)
        : channels_(shape.channels), x_(x), all_(all), below_(below), from_(from) {}
    void of(int64_t image, int64_t first) {
        const int64_t place = image * channels_ + first;
        for (int part = 0; part < PARTS; part++) {
            const int64_t own = place + part * WIDTH;
            mean_[part] = load<WIDTH>(all_.mean.data() + own);
            scale_[part] = load<WIDTH>(all_.scale.data() + own);
            bias_[part] = load<WIDTH>(all_.bias.data() + first + part * WIDTH);
            offset_[part] = load<WIDTH>(below_.offset.data() + own);
            slope_[part] = load<WIDTH>(below_.slope.data() + own);
            gate_[part] = load<WIDTH>(from_.gate + own);
            pooled_[part] = load<WIDTH>(from_.pooled + own);
        }
    }
    Values at(int64_t place, int part) const {
        const Values deviation = load<WIDTH>(x_ + place + part * WIDTH) - mean_[part];
        const Values z = deviation * scale_[part] + bias_[part];
        const Values slope = silu_slope<WIDTH>(z, sigmoid<WIDTH>(z));
        const Values incoming = load<WIDTH>(from_.dy + place + part * WIDTH) * gate_[part] + pooled_[part];
        return incoming * slope * scale_[part] - offset_[part] - deviation * slope_[part];
    }
    static constexpr bool ACTIVATES = false;

private:
    int64_t channels_;
    const float* x_;
    const Coefficients& all_;
    const GradientCoefficients& below_;
    Incoming from_;
    Values mean_[PARTS], scale_[PARTS], bias_[PARTS], offset_[PARTS], slope_[PARTS], gate_[PARTS], pooled_[PARTS];
};
