// Numbers that a processor computes side by side, by the vector extension of GCC and Clang.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // floats of a register
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

template <int COUNT>
struct Lanes {
    typedef float Floats __attribute__((vector_size(4 * COUNT)));
    typedef int32_t Integers __attribute__((vector_size(4 * COUNT)));
};

template <int COUNT>
using Floats = typename Lanes<COUNT>::Floats;

template <int COUNT>
inline Floats<COUNT> load(const float* from) {
    Floats<COUNT> result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

template <int COUNT>
inline void store(float* to, Floats<COUNT> value) {
    std::memcpy(to, &value, sizeof value);
}

template <int COUNT>
inline Floats<COUNT> filled(float value) {
    return value - Floats<COUNT>{};
}

// e^x. Off by at most 2 units in the last place; below -87 and above 88 that of the limit; NaN of NaN.
template <int COUNT>
inline Floats<COUNT> exponential(Floats<COUNT> x) {
    using Integers = typename Lanes<COUNT>::Integers;
    x = x < -87.0f ? filled<COUNT>(-87.0f) : x;
    x = x > 88.0f ? filled<COUNT>(88.0f) : x;
    // x = power ln 2 + rest. Above 2^23 a float has no fraction, so the addition rounds to a whole number.
    constexpr float WHOLE = 12582912.0f;
    const Floats<COUNT> shifted = x * 1.44269504f + WHOLE;
    const Floats<COUNT> power = shifted - WHOLE;
    const Floats<COUNT> rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
    // Taylor's series: the first term left out is below 6e-9, as |rest| <= ln 2 / 2.
    Floats<COUNT> series = filled<COUNT>(1.0f / 5040);
    series = series * rest + 1.0f / 720;
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    // 2^power by its exponent's bits.
    Integers bits, whole;
    const Floats<COUNT> origin = filled<COUNT>(WHOLE);
    std::memcpy(&bits, &shifted, sizeof bits);
    std::memcpy(&whole, &origin, sizeof whole);
    bits = (bits - whole + 127) << 23;
    Floats<COUNT> scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return series * scale;
}

// 1 / x, for x from 1 to 2^127: off by at most 1 unit in the last place.
template <int COUNT>
inline Floats<COUNT> reciprocal(Floats<COUNT> x) {
#if defined(__AVX512F__)
    if constexpr (COUNT == 16) {
        // A division takes several times as long as this and a step of Newton's method, which squares its error, 2^-14.
        Floats<COUNT> guess;
        const __m512 found = _mm512_rcp14_ps(_mm512_loadu_ps(&x));
        std::memcpy(&guess, &found, sizeof guess);
        return guess + guess * (1.0f - x * guess);
    }
#endif
    return 1.0f / x;
}

template <int COUNT>
inline Floats<COUNT> sigmoid(Floats<COUNT> x) {
    return reciprocal<COUNT>(exponential<COUNT>(-x) + 1.0f);
}

// Derivative of x sigmoid(x), from sigmoid(x).
template <int COUNT>
inline Floats<COUNT> silu_slope(Floats<COUNT> x, Floats<COUNT> sigmoid) {
    return sigmoid * (x * (1.0f - sigmoid) + 1.0f);
}

// Calls work(Width<n>, first) for the numbers from 0 to count: for as many at once as possible.
template <int COUNT>
struct Width {
    static constexpr int count = COUNT;
};
template <class Work>
inline void for_lanes(int64_t count, Work work) {
    int64_t first = 0;
    for (; first + WIDTH <= count; first += WIDTH) work(Width<WIDTH>(), first);
    if (WIDTH > 8 && first + 8 <= count) {
        work(Width<8>(), first);
        first += 8;
    }
    if (WIDTH > 4 && first + 4 <= count) {
        work(Width<4>(), first);
        first += 4;
    }
    for (; first < count; first++) work(Width<1>(), first);
}
