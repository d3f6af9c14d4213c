// What a group convolution reads, 16 channels of a pixel at a time: a tensor as it is, or what is
// computed from it.
//
// A reader has `move_to(image, first channel)`, then `at(place, part)`: some channels of a pixel.
// ACTIVATES: it also has the slopes of an activation.
#pragma once

#include <cstdint>

#include "convolution.h"
#include "normalization.h"
#include "normalization_gradients.h"
#include "vectors.h"

class PlainReader {
public:
    PlainReader(const float* x) : x_(x) {}
    void move_to(int64_t, int64_t) {}
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

    void move_to(int64_t image, int64_t first_channel) {
        for (int part = 0; part < PARTS; part++) {
            const int64_t channel = first_channel + part * WIDTH;
            const int64_t place = image * channels_ + channel;
            mean_[part] = load<WIDTH>(all_.mean.data() + place);
            inverse_[part] = load<WIDTH>(all_.inverse.data() + place);
            scale_[part] = load<WIDTH>(all_.scale.data() + place);
            bias_[part] = load<WIDTH>(all_.bias.data() + channel);
        }
    }

    Values at(int64_t place, int part) const {
        const Values z = before_activation(place, part);
        return z * sigmoid<WIDTH>(z);
    }

    // The same, with the slope of the activation.
    Values at(int64_t place, int part, Values& slope) const {
        const Values z = before_activation(place, part);
        const Values gate = sigmoid<WIDTH>(z);
        slope = silu_slope<WIDTH>(z, gate);
        return z * gate;
    }

    // xhat
    Values normalised(int64_t place, int part) const {
        return deviation(place, part) * inverse_[part];
    }

    static constexpr bool ACTIVATES = true;

private:
    Values deviation(int64_t place, int part) const {
        return load<WIDTH>(x_ + place + part * WIDTH) - mean_[part];
    }
    Values before_activation(int64_t place, int part) const {
        return deviation(place, part) * scale_[part] + bias_[part];
    }

    int64_t channels_;
    const float* x_;
    const Coefficients& all_;
    // Of the 16 channels.
    Values mean_[PARTS];
    Values inverse_[PARTS];
    Values scale_[PARTS];
    Values bias_[PARTS];
};

// The gradient that reaches a normalisation's input from squeeze and excitation: see
// input_gradient, GATED.
class GatedGradientReader {
public:
    GatedGradientReader(const Shape& shape,
                        const float* x,
                        const Coefficients& all,
                        const GradientCoefficients& below,
                        const Incoming& from)
        : channels_(shape.channels), x_(x), all_(all), below_(below), from_(from) {}

    void move_to(int64_t image, int64_t first_channel) {
        for (int part = 0; part < PARTS; part++) {
            const int64_t channel = first_channel + part * WIDTH;
            const int64_t place = image * channels_ + channel;
            mean_[part] = load<WIDTH>(all_.mean.data() + place);
            scale_[part] = load<WIDTH>(all_.scale.data() + place);
            bias_[part] = load<WIDTH>(all_.bias.data() + channel);
            offset_[part] = load<WIDTH>(below_.offset.data() + place);
            slope_[part] = load<WIDTH>(below_.slope.data() + place);
            gate_[part] = load<WIDTH>(from_.gate + place);
            pooled_[part] = load<WIDTH>(from_.pooled + place);
        }
    }

    Values at(int64_t place, int part) const {
        const Values deviation = load<WIDTH>(x_ + place + part * WIDTH) - mean_[part];
        const Values z = deviation * scale_[part] + bias_[part];
        const Values slope = silu_slope<WIDTH>(z, sigmoid<WIDTH>(z));
        const Values incoming =
            load<WIDTH>(from_.dy + place + part * WIDTH) * gate_[part] + pooled_[part];
        return incoming * slope * scale_[part] - offset_[part] - deviation * slope_[part];
    }

    static constexpr bool ACTIVATES = false;

private:
    int64_t channels_;
    const float* x_;
    const Coefficients& all_;
    const GradientCoefficients& below_;
    Incoming from_;
    // Of the 16 channels.
    Values mean_[PARTS];
    Values scale_[PARTS];
    Values bias_[PARTS];
    Values offset_[PARTS];
    Values slope_[PARTS];
    Values gate_[PARTS];
    Values pooled_[PARTS];
};
