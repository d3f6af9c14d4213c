// Numbers that a processor computes side by side, by the vector extension of GCC and Clang.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
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

// e^rest for |rest| <= ln 2 / 2, off by less than 2e-9: Taylor's series to the seventh power, which
// is replaced by lower ones that differ from it by a Chebyshev polynomial.
template <class Values>
inline Values exponential_series(Values rest) {
    constexpr float LIMIT = 0.34657359f;  // ln 2 / 2
    constexpr float SQUARE = LIMIT * LIMIT;
    constexpr float SHARE = 1.0f / 5040;
    constexpr float FIRST = 1.0f + SHARE * 0.109375f * SQUARE * SQUARE * SQUARE;
    constexpr float THIRD = 1.0f / 6 - SHARE * 0.875f * SQUARE * SQUARE;
    constexpr float FIFTH = 1.0f / 120 + SHARE * 1.75f * SQUARE;
    Values series = rest * (1.0f / 720) + FIFTH;
    series = series * rest + 1.0f / 24;
    series = series * rest + THIRD;
    series = series * rest + 0.5f;
    series = series * rest + FIRST;
    return series * rest + 1.0f;
}

// x = power ln 2 + rest: the logarithm in two parts, as `power` times it would lose digits.
constexpr float LOG2_E = 1.44269504f;
constexpr float LN2_MOST = 0.693359375f;
constexpr float LN2_REST = -2.12194440e-4f;

// Beyond these e^-x is no number with an exponent of its own.
constexpr float LEAST = -88.0f;
constexpr float MOST = 87.0f;

// x between LEAST and MOST; NaN of NaN. The functions take their second operand where one is not a
// number, so they are one instruction where a comparison and a choice are two.
template <int COUNT>
inline Floats<COUNT> bounded(Floats<COUNT> x) {
#if defined(__AVX__)
    if constexpr (COUNT == 8)
        return _mm256_min_ps(_mm256_set1_ps(MOST), _mm256_max_ps(_mm256_set1_ps(LEAST), x));
#endif
#if defined(__AVX512F__)
    if constexpr (COUNT == 16)
        return _mm512_min_ps(_mm512_set1_ps(MOST), _mm512_max_ps(_mm512_set1_ps(LEAST), x));
#endif
    x = x < LEAST ? filled<COUNT>(LEAST) : x;
    return x > MOST ? filled<COUNT>(MOST) : x;
}

// 1 / (1 + e^-x), off by at most 3 units in the last place; beyond LEAST and MOST that of the
// limit; NaN of NaN.
template <int COUNT>
inline Floats<COUNT> sigmoid(Floats<COUNT> x) {
#if defined(__AVX512F__)
    if constexpr (COUNT == 16) {
        x = bounded<COUNT>(x);
        const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E)), 0);
        const __m512 rest = -x - power * LN2_MOST - power * LN2_REST;
        const __m512 divisor = _mm512_scalef_ps(exponential_series(rest), power) + 1.0f;
        // A division takes several times as long as this and a step of Newton's method, which
        // squares its error, 2^-14.
        const __m512 guess = _mm512_rcp14_ps(divisor);
        return guess + guess * (1.0f - divisor * guess);
    }
#endif
    using Integers = typename Lanes<COUNT>::Integers;
    x = bounded<COUNT>(x);
    // Above 2^23 a float has no fraction, so the addition rounds to a whole number.
    constexpr float WHOLE = 12582912.0f;
    const Floats<COUNT> shifted = x * -LOG2_E + WHOLE;
    const Floats<COUNT> power = shifted - WHOLE;
    const Floats<COUNT> rest = -x - power * LN2_MOST - power * LN2_REST;
    // 2^power by its exponent's bits.
    Integers bits;
    Integers whole;
    const Floats<COUNT> origin = filled<COUNT>(WHOLE);
    std::memcpy(&bits, &shifted, sizeof bits);
    std::memcpy(&whole, &origin, sizeof whole);
    bits = (bits - whole + 127) << 23;
    Floats<COUNT> scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return 1.0f / (exponential_series(rest) * scale + 1.0f);
}

// Derivative of x sigmoid(x), from sigmoid(x).
template <int COUNT>
inline Floats<COUNT> silu_slope(Floats<COUNT> x, Floats<COUNT> sigmoid) {
    return sigmoid * (x * (1.0f - sigmoid) + 1.0f);
}

// Asks for numbers that are read soon. An address behind the end of an array asks for nothing that
// matters.
inline void read_soon(const float* from, int64_t ahead) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + 4 * ahead);
}

// The same for numbers that are written soon.
inline void write_soon(const float* to, int64_t ahead) {
    __builtin_prefetch(reinterpret_cast<const char*>(to) + 4 * ahead, 1);
}

// A number of numbers, known as code is compiled.
template <int COUNT>
struct Width {
    static constexpr int count = COUNT;
};

// Calls work(Width<n>(), first) for the numbers from 0 to count: for as many at once as possible.
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
