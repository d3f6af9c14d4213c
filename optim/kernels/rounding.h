// Stochastic rounding to float16, and its random bits: the functions of optim/rounding.py.
#pragma once

#include <cstdint>

#include "lanes.h"

constexpr int UPPER = 19;           // shift to the 13 bits of a word that round weights
constexpr int LOWER = 0;            // and to those that round momentum
constexpr uint32_t CUT = 0x1FFF;    // the 13 bits of a float32 that float16 has not
constexpr uint32_t NOT_A_NUMBER = 0x7FC00000;

inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// The random word of an element of a row. row_start: `mixed(row's bits + draw)`.
inline uint32_t random_word(uint32_t row_start, int element) {
    return mixed(row_start + uint32_t(element) * 0x9E3779B1u);
}

inline uint32_t noise_of(uint32_t word, int shift) { return word >> shift & CUT; }

// One of the two float16 numbers next to `value`, as a float32. noise: below 2^13.
inline float rounded(float value, uint32_t noise) {
    const uint32_t bits = as<uint32_t>(value);
    const uint32_t sign = bits & 0x80000000u;
    float magnitude = as<float>(bits ^ sign);
    magnitude = choose(magnitude > 65504.0f, 65504.0f, magnitude);
    // Moved up by 2^-14, subnormal numbers are normal ones of the right spacing.
    const float moved = choose(magnitude < 0x1p-14f, 0x1p-14f, 0.0f);
    uint32_t cut = as<uint32_t>(magnitude + moved);
    // A NaN with all bits set must not carry into the sign.
    cut = cut > NOT_A_NUMBER ? NOT_A_NUMBER : cut;
    magnitude = as<float>((cut + noise) & ~CUT) - moved;
    return as<float>(as<uint32_t>(magnitude) | sign);
}

// A value as a state of this type will hold it.
template <class State>
inline float stored(float value, uint32_t noise) {
    return sizeof(State) == sizeof(Half) ? rounded(value, noise) : value;
}
