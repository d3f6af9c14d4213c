// The passes of an update on a CPU, one loop over the memory each: those of optim/lars_update.py and the stochastic
// rounding of optim/rounding.py. Loops over LANES elements, which compilers turn into vector instructions.
//
// The same bits as plain torch, but for the order of sums over a row: that is fixed here, so it does not depend on the
// processor. Compile with -ffp-contract=off: a fused multiplication and addition would round once instead of twice.

#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

constexpr int ROW = 64;    // elements, as in optim/layout.py
constexpr int LANES = 16;  // elements computed, and sums made, side by side
// The trust ratio is that of the gradient, that of the momentum, or that of the gradient with Nesterov momentum.
enum Form { GRADIENT, MOMENTUM, NESTEROV };
using Half = uint16_t;
struct BFloat16 {
    uint16_t bits;
};
struct Nothing {};  // in the place of the module's own weights where these are the state
struct Rows {
    int64_t count;
    int threads;
};

template <class To, class From>
inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

inline float choose(bool first, float one, float other) { return first ? one : other; }

// LANES float16 numbers as float32 ones, and back where they are exact. Compilers do not find x86's instruction for it.
inline void widen(const Half* from, float* to) {
#ifdef __F16C__
    for (int lane = 0; lane < LANES; lane += 8)
        _mm256_storeu_ps(to + lane, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + lane))));
#else
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t magnitude = from[lane] & 0x7FFF;
        // Subnormal numbers are made normal ones above 2^-14, from which that is subtracted.
        const uint32_t exponent = magnitude < 0x400 ? 113u << 23 : magnitude < 0x7C00 ? 112u << 23 : 224u << 23;
        const float moved = choose(magnitude < 0x400, 0x1p-14f, 0.0f);
        const float value = as<float>((magnitude << 13) + exponent) - moved;
        to[lane] = as<float>(as<uint32_t>(value) | uint32_t(from[lane] & 0x8000) << 16);
    }
#endif
}
inline void narrow(const float* from, Half* to) {
#ifdef __F16C__
    for (int lane = 0; lane < LANES; lane += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + lane), _mm256_cvtps_ph(_mm256_loadu_ps(from + lane), 0));
#else
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t bits = as<uint32_t>(from[lane]), sign = bits & 0x80000000u;
        const float magnitude = as<float>(bits ^ sign);
        const bool subnormal = magnitude < 0x1p-14f;
        const uint32_t moved = as<uint32_t>(magnitude + choose(subnormal, 0x1p-14f, 0.0f)) >> 13;
        const uint32_t result = moved - (subnormal ? 113u << 10 : 112u << 10);
        to[lane] = Half((magnitude == magnitude ? result : 0x7E00u) | sign >> 16);
    }
#endif
}
inline void widen(const float* from, float* to) { for (int lane = 0; lane < LANES; lane++) to[lane] = from[lane]; }
inline void narrow(const float* from, float* to) { for (int lane = 0; lane < LANES; lane++) to[lane] = from[lane]; }
inline void narrow(const float* from, BFloat16* to) {  // to nearest, even
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t bits = as<uint32_t>(from[lane]);
        to[lane].bits = uint16_t(from[lane] == from[lane] ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0);
    }
}
inline void narrow(const float*, Nothing*) {}

template <class Type>
inline Type* at(Type* tensor, int64_t place) {
    return tensor + place;
}
inline Nothing* at(Nothing* tensor, int64_t) { return tensor; }

// `rounded` of optim/rounding.py, still float32. noise: below 2^13.
inline float rounded(float value, uint32_t noise) {
    const uint32_t bits = as<uint32_t>(value), sign = bits & 0x80000000u;
    float magnitude = as<float>(bits ^ sign);
    magnitude = choose(magnitude > 65504.0f, 65504.0f, magnitude);
    const float moved = choose(magnitude < 0x1p-14f, 0x1p-14f, 0.0f);
    uint32_t cut = as<uint32_t>(magnitude + moved);
    cut = cut > 0x7FC00000u ? 0x7FC00000u : cut;
    magnitude = as<float>((cut + noise) & ~0x1FFFu) - moved;
    return as<float>(as<uint32_t>(magnitude) | sign);
}
template <class State>
inline float stored(float value, uint32_t noise) {
    return sizeof(State) == sizeof(Half) ? rounded(value, noise) : value;
}

inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}
inline uint32_t word(uint32_t start, int lane) { return mixed(start + uint32_t(lane) * 0x9E3779B1u); }

inline float total(float* sums) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    return sums[0];
}

template <class State, bool MOMENTUM_FORM>
void sums(Rows rows, const float* __restrict gradients, const State* __restrict weights,
          const State* __restrict momenta, const float* __restrict decays, float scale, float mu,
          float* __restrict out) {
#pragma omp parallel for num_threads(rows.threads) schedule(static)
    for (int64_t row = 0; row < rows.count; row++) {
        float gg[LANES] = {}, ww[LANES] = {}, wrong[LANES] = {}, uu[LANES] = {};
        for (int64_t first = row * ROW; first < (row + 1) * ROW; first += LANES) {
            float w[LANES], m[LANES] = {};
            widen(weights + first, w);
            if (MOMENTUM_FORM) widen(momenta + first, m);
            for (int lane = 0; lane < LANES; lane++) {
                const float g = gradients[first + lane] * scale;
                gg[lane] += g * g;
                ww[lane] += w[lane] * w[lane];
                wrong[lane] += g - g;
                if (MOMENTUM_FORM) {
                    const float u = (m[lane] * mu + g * (1.0f - mu)) + decays[row] * w[lane];
                    uu[lane] += u * u;
                }
            }
        }
        out[row] = total(gg);
        out[rows.count + row] = total(ww);
        out[2 * rows.count + row] = total(wrong);
        if (MOMENTUM_FORM) out[3 * rows.count + row] = total(uu);
    }
}

template <class State, class Work, Form FORM>
void step(Rows rows, const float* __restrict gradients, State* __restrict weights, State* __restrict momenta,
          Work* __restrict working, const float* __restrict rates, const float* __restrict decays,
          const int32_t* __restrict bit_rows, uint32_t draw, float scale, float mu, float* __restrict out) {
#pragma omp parallel for num_threads(rows.threads) schedule(static)
    for (int64_t row = 0; row < rows.count; row++) {
        const float rate = rates[row], decay = decays[row];
        const uint32_t start = bit_rows ? mixed(uint32_t(bit_rows[row]) + draw) : 0;
        float subtracted[LANES] = {};
        for (int begin = 0; begin < ROW; begin += LANES) {
            const int64_t first = row * ROW + begin;
            float w[LANES], m[LANES];
            widen(weights + first, w);
            widen(momenta + first, m);
            for (int lane = 0; lane < LANES; lane++) {
                const float g = gradients[first + lane] * scale;
                const float added = FORM == MOMENTUM ? g * (1.0f - mu) : (g + decay * w[lane]) * rate;
                const float momentum = m[lane] * mu + added;
                const float u = FORM == MOMENTUM   ? (momentum + decay * w[lane]) * rate
                                : FORM == NESTEROV ? momentum * mu + added
                                                   : momentum;
                subtracted[lane] += u * u;
                const uint32_t bits = word(start, begin + lane);
                w[lane] = stored<State>(w[lane] - u, bits >> 19);
                m[lane] = stored<State>(momentum, bits & 0x1FFF);
            }
            narrow(w, weights + first);
            narrow(m, momenta + first);
            narrow(w, at(working, first));
        }
        out[row] = total(subtracted);
    }
}

// work: dtype of the module's own weights, 0 none, 1 float32, 2 bfloat16.
template <class State, Form FORM, class... Others>
void step_with(int work, void* working, Rows rows, const float* gradients, void* weights, void* momenta,
               Others... others) {
    State *w = static_cast<State*>(weights), *m = static_cast<State*>(momenta);
    if (work == 0) step<State, Nothing, FORM>(rows, gradients, w, m, nullptr, others...);
    if (work == 1) step<State, float, FORM>(rows, gradients, w, m, static_cast<float*>(working), others...);
    if (work == 2) step<State, BFloat16, FORM>(rows, gradients, w, m, static_cast<BFloat16*>(working), others...);
}

}  // namespace

extern "C" {

// half: whether the state is float16. form: a Form; of sums, GRADIENT or MOMENTUM.
// out: sums over rows, [3 or 4, rows]: of g^2, of w^2, 0 or NaN where a g is not finite, and of u^2 with MOMENTUM.
void lars_sums(int64_t count, int threads, int half, int form, const float* gradients, const void* weights,
               const void* momenta, const float* decays, float scale, float mu, float* out) {
    const Rows rows{count, threads};
    const auto *hw = static_cast<const Half*>(weights), *hm = static_cast<const Half*>(momenta);
    const auto *fw = static_cast<const float*>(weights), *fm = static_cast<const float*>(momenta);
    if (half && form) sums<Half, true>(rows, gradients, hw, hm, decays, scale, mu, out);
    if (half && !form) sums<Half, false>(rows, gradients, hw, hm, decays, scale, mu, out);
    if (!half && form) sums<float, true>(rows, gradients, fw, fm, decays, scale, mu, out);
    if (!half && !form) sums<float, false>(rows, gradients, fw, fm, decays, scale, mu, out);
}

void lars_step(int64_t count, int threads, int half, int form, int work, const float* gradients, void* weights,
               void* momenta, void* working, const float* rates, const float* decays, const int32_t* bit_rows,
               uint32_t draw, float scale, float mu, float* out) {
    const Rows rows{count, threads};
    const auto with = [&](auto step) {
        step(work, working, rows, gradients, weights, momenta, rates, decays, bit_rows, draw, scale, mu, out);
    };
    if (half && form == GRADIENT) with([](auto... all) { step_with<Half, GRADIENT>(all...); });
    if (half && form == MOMENTUM) with([](auto... all) { step_with<Half, MOMENTUM>(all...); });
    if (half && form == NESTEROV) with([](auto... all) { step_with<Half, NESTEROV>(all...); });
    if (!half && form == GRADIENT) with([](auto... all) { step_with<float, GRADIENT>(all...); });
    if (!half && form == MOMENTUM) with([](auto... all) { step_with<float, MOMENTUM>(all...); });
    if (!half && form == NESTEROV) with([](auto... all) { step_with<float, NESTEROV>(all...); });
}

// shift: 19 for the upper 13 bits of a word, 0 for the lower ones.
void round_rows(int64_t count, int threads, const float* __restrict source, Half* __restrict out,
                const int32_t* __restrict bit_rows, uint32_t draw, int shift) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < count; row++) {
        const uint32_t start = mixed(uint32_t(bit_rows[row]) + draw);
        for (int begin = 0; begin < ROW; begin += LANES) {
            float values[LANES];
            for (int lane = 0; lane < LANES; lane++)
                values[lane] = rounded(source[row * ROW + begin + lane], word(start, begin + lane) >> shift & 0x1FFF);
            narrow(values, out + row * ROW + begin);
        }
    }
}

}  // extern "C"
