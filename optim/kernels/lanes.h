// Numbers of several types, LANES at a time: compilers turn loops over them into vectors.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

constexpr int ROW = 64;    // elements, as in optim/layout.py
constexpr int LANES = 16;  // elements computed, and sums made, side by side

using Half = uint16_t;  // the bits of a float16

struct BFloat16 {
    uint16_t bits;
};

// In the place of the module's own weights where these are the state.
struct Nothing {};

template <class To, class From>
inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

inline float choose(bool first, float one, float other) { return first ? one : other; }

// LANES numbers as float32. Compilers do not find x86's instruction for float16 by themselves.
inline void widen(const Half* from, float* to) {
#ifdef __F16C__
    for (int lane = 0; lane < LANES; lane += 8) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + lane));
        _mm256_storeu_ps(to + lane, _mm256_cvtph_ps(halves));
    }
#else
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t sign = uint32_t(from[lane] & 0x8000) << 16;
        const uint32_t magnitude = from[lane] & 0x7FFF;
        const bool subnormal = magnitude < 0x400;
        // The exponent moves from a bias of 15 to one of 127; infinity and NaN move twice as far.
        // Subnormal numbers are made normal ones above 2^-14, from which that is subtracted.
        const uint32_t normal = magnitude < 0x7C00 ? 112u << 23 : 224u << 23;
        const uint32_t exponent = subnormal ? 113u << 23 : normal;
        const float moved = choose(subnormal, 0x1p-14f, 0.0f);
        const float value = as<float>((magnitude << 13) + exponent) - moved;
        to[lane] = as<float>(as<uint32_t>(value) | sign);
    }
#endif
}

inline void widen(const float* from, float* to) {
    for (int lane = 0; lane < LANES; lane++) to[lane] = from[lane];
}

// LANES float32 numbers in another type: as float16 numbers that this type holds, or NaN.
inline void narrow(const float* from, Half* to) {
#ifdef __F16C__
    for (int lane = 0; lane < LANES; lane += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + lane), 0);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + lane), halves);
    }
#else
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t bits = as<uint32_t>(from[lane]);
        const uint32_t sign = bits & 0x80000000u;
        const float magnitude = as<float>(bits ^ sign);
        const bool subnormal = magnitude < 0x1p-14f;
        const uint32_t moved = as<uint32_t>(magnitude + choose(subnormal, 0x1p-14f, 0.0f)) >> 13;
        const uint32_t result = moved - (subnormal ? 113u << 10 : 112u << 10);
        to[lane] = Half((magnitude == magnitude ? result : 0x7E00u) | sign >> 16);
    }
#endif
}

inline void narrow(const float* from, float* to) {
    for (int lane = 0; lane < LANES; lane++) to[lane] = from[lane];
}

// To the nearest bfloat16, of two to the even one.
inline void narrow(const float* from, BFloat16* to) {
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t bits = as<uint32_t>(from[lane]);
        const uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        to[lane].bits = uint16_t(from[lane] == from[lane] ? nearest : 0x7FC0);
    }
}

inline void narrow(const float*, Nothing*) {}

template <class Type>
inline Type* at(Type* tensor, int64_t element) {
    return tensor + element;
}

inline Nothing* at(Nothing* tensor, int64_t) { return tensor; }

// The sum of LANES sums, in one order on every processor.
inline float total(float* sums) {
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    }
    return sums[0];
}
