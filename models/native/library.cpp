// What Python calls: see library.py.

#include "group_convolution.h"
#include "normalization.h"

extern "C" {

void group_moments_of(const Shape* shape, const float* x, float eps, float* moments) {
    group_moments(*shape, x, eps, moments);
}

void activate_of(const Shape* shape, int silu, const float* x, const Normalization* norm, const float* kept,
                 const float* residual, float* y) {
    if (silu) activate<true>(*shape, x, *norm, kept, residual, y);
    if (!silu) activate<false>(*shape, x, *norm, kept, residual, y);
}

void activate_and_pool_of(const Shape* shape, const float* x, const Normalization* norm, float* y, float* pooled) {
    activate_and_pool(*shape, x, *norm, y, pooled);
}

void multiply_of(const Shape* shape, const float* gate, float* y) { multiply(*shape, gate, y); }

// form: 0 plain, 1 plain without SiLU, 2 pooled, 3 gated.
void gradient_sums_of(const Shape* shape, int form, const float* x, const Normalization* norm, const Incoming* from,
                      float* dz, float* sums) {
    if (form == 0) gradient_sums<PLAIN, true>(*shape, x, *norm, *from, dz, sums);
    if (form == 1) gradient_sums<PLAIN, false>(*shape, x, *norm, *from, nullptr, sums);
    if (form == 2) gradient_sums<POOLED, true>(*shape, x, *norm, *from, nullptr, sums);
    if (form == 3) gradient_sums<GATED, true>(*shape, x, *norm, *from, nullptr, sums);
}

void merge_gradients_of(const Shape* shape, int form, const float* sums, const float* weight, const Incoming* from,
                        float* dweight, float* dbias, float* by_group) {
    if (form < 2) merge_gradients<PLAIN>(*shape, sums, weight, *from, dweight, dbias, by_group);
    if (form == 2) merge_gradients<POOLED>(*shape, sums, weight, *from, dweight, dbias, by_group);
    if (form == 3) merge_gradients<GATED>(*shape, sums, weight, *from, dweight, dbias, by_group);
}

void input_gradient_of(const Shape* shape, int form, const float* x, const Normalization* norm, const Incoming* from,
                       const float* by_group, float* dx) {
    if (form == 0) input_gradient<PLAIN, true>(*shape, x, *norm, *from, by_group, dx);
    if (form == 1) input_gradient<PLAIN, false>(*shape, x, *norm, *from, by_group, dx);
    if (form == 2) input_gradient<POOLED, true>(*shape, x, *norm, *from, by_group, dx);
    if (form == 3) input_gradient<GATED, true>(*shape, x, *norm, *from, by_group, dx);
}

void pack_weights_of(const Convolution* by, const float* weights, int backward, float* packed) {
    pack_weights(*by, weights, backward, packed);
}

// before: the normalisation and SiLU that x passes first, or null. moments: those of y's groups, or null.
void convolution_of(const Convolution* by, const float* x, const Shape* before_shape, const Normalization* before,
                    const float* weights, float* y, const Shape* after_shape, float eps, float* moments) {
    std::vector<float> parts(moments ? by->images * by->blocks() * PART_MOMENTS * by->channels : 0);
    float* found = moments ? parts.data() : nullptr;
    if (before) {
        const Coefficients all(*before_shape, *before);
        group_convolution(*by, ActivatedReader(*before_shape, x, all), weights, y, found);
    } else {
        group_convolution(*by, PlainReader(x), weights, y, found);
    }
    if (moments) merge_moments(*after_shape, found, by->lines() * by->out_width, eps, moments);
}

void convolution_gradients_of(const Convolution* by, const float* x, const Shape* before_shape,
                              const Normalization* before, const float* y, const Shape* after_shape,
                              const Normalization* after, const Incoming* from, const float* by_group,
                              const float* weights, float* dx, float* dweights, float* sums) {
    if (!after) {
        group_convolution_gradients(*by, PlainReader(x), PlainReader(from->dy), weights, dx, dweights, sums);
        return;
    }
    const Coefficients all_after(*after_shape, *after);
    const GradientCoefficients below(*after_shape, *after, by_group);
    const GatedGradientReader dy(*after_shape, y, all_after, below, *from);
    if (before) {
        const Coefficients all(*before_shape, *before);
        group_convolution_gradients(*by, ActivatedReader(*before_shape, x, all), dy, weights, dx, dweights, sums);
    } else {
        group_convolution_gradients(*by, PlainReader(x), dy, weights, dx, dweights, sums);
    }
}

}  // extern "C"
