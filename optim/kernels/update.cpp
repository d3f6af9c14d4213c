// The passes of an update on a CPU, one loop over the memory each: `sum_rows` and `step_rows` of
// optim/lars_update.py, and `round_rows` of optim/rounding.py.
//
// The same bits as plain torch, but for the order of sums over a row: that is fixed here, so it
// does not depend on the processor. And but for 1 - mu, which is taken in float32 here, in float64
// there.
// Compile with -ffp-contract=off: a fused multiplication and addition would round once instead of
// twice.

#include <cstdint>

#include "lanes.h"
#include "rounding.h"

extern "C" {

// Arguments of the passes; optim/compilation.py has the same fields in the same order.
// Tensors are [rows, ROW], or [rows] where it says so. `half`: whether the state is float16.

struct SumPass {
    int64_t rows;
    int32_t threads;
    int32_t half;
    int32_t form;  // GRADIENT or MOMENTUM
    const float* gradients;
    const void* weights;
    const void* momenta;  // or null with GRADIENT
    const float* decays;  // [rows], or null with GRADIENT
    float scale;          // of the gradients
    float mu;             // momentum
    float* sums;          // written, [3, rows], with MOMENTUM [4, rows]: see lars_sums
};

struct StepPass {
    int64_t rows;
    int32_t threads;
    int32_t half;
    int32_t form;     // a Form
    int32_t working;  // dtype of the module's own weights: a Working
    const float* gradients;
    void* weights;              // changed
    void* momenta;              // changed
    void* copies;               // the module's own weights, written; null with NONE
    const float* rates;         // [rows]
    const float* decays;        // [rows]
    const int32_t* bit_rows;    // [rows], of the random bits; null where nothing is rounded
    uint32_t draw;              // of the random bits
    float scale;                // of the gradients
    float mu;                   // momentum
    float* sums;                // written, [rows], of squares of what was subtracted
};

struct RoundPass {
    int64_t rows;
    int32_t threads;
    const float* source;
    Half* out;                // written
    const int32_t* bit_rows;  // [rows]
    uint32_t draw;
    int32_t shift;  // UPPER or LOWER
};
}

namespace {

// The trust ratio is that of the gradient, that of the momentum, or that of the gradient with
// Nesterov momentum.
enum Form { GRADIENT, MOMENTUM, NESTEROV };
enum Working { NONE, FLOAT32, BFLOAT16 };

// In one function with its loop over rows: apart from it, GCC makes slower code of a float16 state.
template <class State, Form FORM>
void sum_all(const SumPass& pass) {
    const float* gradients = pass.gradients;
    const State* weights = static_cast<const State*>(pass.weights);
    const State* momenta = static_cast<const State*>(pass.momenta);
    const float scale = pass.scale;
    const float mu = pass.mu;
#pragma omp parallel for num_threads(pass.threads) schedule(static)
    for (int64_t row = 0; row < pass.rows; row++) {
        float gg[LANES] = {};
        float ww[LANES] = {};
        float wrong[LANES] = {};
        float uu[LANES] = {};
        for (int64_t first = row * ROW; first < (row + 1) * ROW; first += LANES) {
            float w[LANES];
            float m[LANES] = {};
            widen(weights + first, w);
            if (FORM == MOMENTUM) widen(momenta + first, m);
            for (int lane = 0; lane < LANES; lane++) {
                const float g = gradients[first + lane] * scale;
                gg[lane] += g * g;
                ww[lane] += w[lane] * w[lane];
                wrong[lane] += g - g;
                if (FORM == MOMENTUM) {
                    const float u = (m[lane] * mu + g * (1.0f - mu)) + pass.decays[row] * w[lane];
                    uu[lane] += u * u;
                }
            }
        }
        pass.sums[row] = total(gg);
        pass.sums[pass.rows + row] = total(ww);
        pass.sums[2 * pass.rows + row] = total(wrong);
        if (FORM == MOMENTUM) pass.sums[3 * pass.rows + row] = total(uu);
    }
}

template <class State, class Copy, Form FORM>
void step_row(const StepPass& pass, int64_t row) {
    const float* __restrict gradients = pass.gradients;
    State* __restrict weights = static_cast<State*>(pass.weights);
    State* __restrict momenta = static_cast<State*>(pass.momenta);
    Copy* __restrict copies = static_cast<Copy*>(pass.copies);
    const float scale = pass.scale;
    const float mu = pass.mu;
    const float rate = pass.rates[row];
    const float decay = pass.decays[row];
    const uint32_t row_start = pass.bit_rows ? mixed(uint32_t(pass.bit_rows[row]) + pass.draw) : 0;
    float subtracted[LANES] = {};
    for (int begin = 0; begin < ROW; begin += LANES) {
        const int64_t first = row * ROW + begin;
        float w[LANES];
        float m[LANES];
        widen(weights + first, w);
        widen(momenta + first, m);
        for (int lane = 0; lane < LANES; lane++) {
            const float g = gradients[first + lane] * scale;
            const float added = FORM == MOMENTUM ? g * (1.0f - mu) : (g + decay * w[lane]) * rate;
            const float momentum = m[lane] * mu + added;
            float u = momentum;
            if (FORM == MOMENTUM) u = (momentum + decay * w[lane]) * rate;
            if (FORM == NESTEROV) u = momentum * mu + added;
            subtracted[lane] += u * u;
            // One word for both: the upper bits round the weight, the lower ones the momentum.
            const uint32_t word = random_word(row_start, begin + lane);
            w[lane] = stored<State>(w[lane] - u, noise_of(word, UPPER));
            m[lane] = stored<State>(momentum, noise_of(word, LOWER));
        }
        narrow(w, weights + first);
        narrow(m, momenta + first);
        narrow(w, at(copies, first));
    }
    pass.sums[row] = total(subtracted);
}

template <class State, class Copy, Form FORM>
void step_all(const StepPass& pass) {
#pragma omp parallel for num_threads(pass.threads) schedule(static)
    for (int64_t row = 0; row < pass.rows; row++) step_row<State, Copy, FORM>(pass, row);
}

template <class State, Form FORM>
void step_with_copies(const StepPass& pass) {
    if (pass.working == NONE) step_all<State, Nothing, FORM>(pass);
    if (pass.working == FLOAT32) step_all<State, float, FORM>(pass);
    if (pass.working == BFLOAT16) step_all<State, BFloat16, FORM>(pass);
}

template <class State>
void sum_in_form(const SumPass& pass) {
    if (pass.form == GRADIENT) sum_all<State, GRADIENT>(pass);
    if (pass.form == MOMENTUM) sum_all<State, MOMENTUM>(pass);
}

template <class State>
void step_in_form(const StepPass& pass) {
    if (pass.form == GRADIENT) step_with_copies<State, GRADIENT>(pass);
    if (pass.form == MOMENTUM) step_with_copies<State, MOMENTUM>(pass);
    if (pass.form == NESTEROV) step_with_copies<State, NESTEROV>(pass);
}

}  // namespace

extern "C" {

// Sums over each row of g^2 and of w^2; 0, or NaN where a g is not finite; with MOMENTUM also of
// squares of the direction.
void lars_sums(const SumPass* pass) {
    if (pass->half)
        sum_in_form<Half>(*pass);
    else
        sum_in_form<float>(*pass);
}

void lars_step(const StepPass* pass) {
    if (pass->half)
        step_in_form<Half>(*pass);
    else
        step_in_form<float>(*pass);
}

void round_rows(const RoundPass* pass) {
#pragma omp parallel for num_threads(pass->threads) schedule(static)
    for (int64_t row = 0; row < pass->rows; row++) {
        const uint32_t row_start = mixed(uint32_t(pass->bit_rows[row]) + pass->draw);
        for (int begin = 0; begin < ROW; begin += LANES) {
            const int64_t first = row * ROW + begin;
            float values[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                const uint32_t word = random_word(row_start, begin + lane);
                values[lane] = rounded(pass->source[first + lane], noise_of(word, pass->shift));
            }
            narrow(values, pass->out + first);
        }
    }
}

}  // extern "C"
