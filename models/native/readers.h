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

struct GroupCoefficients {
    Values mean[PARTS], inverse[PARTS], scale[PARTS], bias[PARTS];

    void of(const Shape& shape, const Normalization& norm, int64_t image, int64_t first) {
        for (int64_t lane = 0; lane < GROUP; lane++) {
            const int64_t channel = first + lane;
            const float* moments = norm.moments + 2 * (image * shape.groups + channel / shape.size());
            mean[lane / WIDTH][lane % WIDTH] = moments[0];
            inverse[lane / WIDTH][lane % WIDTH] = moments[1];
            scale[lane / WIDTH][lane % WIDTH] = moments[1] * norm.weight[channel];
            bias[lane / WIDTH][lane % WIDTH] = norm.bias ? norm.bias[channel] : 0.0f;
        }
    }
};

// silu of the normalised x.
class ActivatedReader {
public:
    ActivatedReader(const Shape& shape, const float* x, const Normalization& norm) : shape_(shape), x_(x), norm_(norm) {}
    void of(int64_t image, int64_t first) { by_.of(shape_, norm_, image, first); }
    Values at(int64_t place, int part) const {
        const Values z = normalised(place, part) * by_.scale[part] + by_.bias[part];
        return z * sigmoid<WIDTH>(z);
    }
    // The same, with the slope of the activation.
    Values at(int64_t place, int part, Values& slope) const {
        const Values z = normalised(place, part) * by_.scale[part] + by_.bias[part];
        const Values gate = sigmoid<WIDTH>(z);
        slope = silu_slope<WIDTH>(z, gate);
        return z * gate;
    }
    // xhat, but for the standard deviation's inverse.
    Values normalised(int64_t place, int part) const {
        return load<WIDTH>(x_ + place + part * WIDTH) - by_.mean[part];
    }
    Values inverse(int part) const { return by_.inverse[part]; }
    static constexpr bool ACTIVATES = true;

private:
    Shape shape_;
    const float* x_;
    Normalization norm_;
    GroupCoefficients by_;
};

// The gradient that reaches a normalisation's input from squeeze and excitation: see input_gradient, GATED.
class GatedGradientReader {
public:
    GatedGradientReader(const Shape& shape, const float* x, const Normalization& norm, const Incoming& from,
                        const float* by_group)
        : shape_(shape), x_(x), norm_(norm), from_(from), by_group_(by_group) {}
    void of(int64_t image, int64_t first) {
        by_.of(shape_, norm_, image, first);
        for (int64_t lane = 0; lane < GROUP; lane++) {
            const int64_t channel = first + lane;
            const float* means = by_group_ + 2 * (image * shape_.groups + channel / shape_.size());
            const float inverse = by_.inverse[lane / WIDTH][lane % WIDTH];
            offset_[lane / WIDTH][lane % WIDTH] = inverse * means[0];
            slope_[lane / WIDTH][lane % WIDTH] = inverse * inverse * means[1];
        }
        const int64_t place = image * shape_.channels + first;
        for (int part = 0; part < PARTS; part++) {
            gate_[part] = load<WIDTH>(from_.gate + place + part * WIDTH);
            pooled_[part] = load<WIDTH>(from_.pooled + place + part * WIDTH);
        }
    }
    Values at(int64_t place, int part) const {
        const Values deviation = load<WIDTH>(x_ + place + part * WIDTH) - by_.mean[part];
        const Values z = deviation * by_.scale[part] + by_.bias[part];
        const Values slope = silu_slope<WIDTH>(z, sigmoid<WIDTH>(z));
        const Values incoming = load<WIDTH>(from_.dy + place + part * WIDTH) * gate_[part] + pooled_[part];
        return incoming * slope * by_.scale[part] - offset_[part] - deviation * slope_[part];
    }
    static constexpr bool ACTIVATES = false;

private:
    Shape shape_;
    const float* x_;
    Normalization norm_;
    Incoming from_;
    const float* by_group_;
    GroupCoefficients by_;
    Values offset_[PARTS], slope_[PARTS], gate_[PARTS], pooled_[PARTS];
};
