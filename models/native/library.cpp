// What Python calls: see library.py.

#include "group_convolution.h"
#include "group_convolution_gradients.h"
#include "normalization.h"
#include "normalization_gradients.h"

extern "C" {

void group_moments_of(const Shape* shape,
                      const float* x,
                      float eps,
                      float* moments  // [images, groups, 2], written
) {
    group_moments(*shape, x, eps, moments);
}

void activate_of(const Shape* shape,
                 int silu,
                 const float* x,
                 const Normalization* norm,
                 const float* kept,      // [images], or null
                 const float* residual,  // like x, or null
                 float* y                // like x, written
) {
    if (silu)
        activate<true>(*shape, x, *norm, kept, residual, y);
    else
        activate<false>(*shape, x, *norm, kept, residual, y);
}

void activate_and_pool_of(const Shape* shape,
                          const float* x,
                          const Normalization* norm,
                          float* y,      // like x, written; or null
                          float* pooled  // [images, channels], written
) {
    activate_and_pool(*shape, x, *norm, y, pooled);
}

void multiply_of(const Shape* shape,
                 const float* gate,  // [images, channels]
                 float* y            // [images, pixels, channels], in place
) {
    multiply(*shape, gate, y);
}

void gradient_sums_of(const Shape* shape,
                      int form,  // a Form
                      const float* x,
                      const Normalization* norm,
                      const Incoming* from,
                      float* dz,   // like x, written with PLAIN; or null
                      float* sums  // [sums, images, channels], written
) {
    if (form == PLAIN) gradient_sums<PLAIN>(*shape, x, *norm, *from, dz, sums);
    if (form == LINEAR) gradient_sums<LINEAR>(*shape, x, *norm, *from, nullptr, sums);
    if (form == POOLED) gradient_sums<POOLED>(*shape, x, *norm, *from, nullptr, sums);
    if (form == GATED) gradient_sums<GATED>(*shape, x, *norm, *from, nullptr, sums);
}

void merge_gradients_of(const Shape* shape,
                        int form,             // a Form
                        const float* sums,    // [sums, images, channels]
                        const float* weight,  // [channels]
                        const Incoming* from,
                        float* dweight,  // [channels], written
                        float* dbias,    // [channels], written; or null
                        float* by_group  // [images, groups, 2], written
) {
    if (form == PLAIN)
        merge_gradients<PLAIN>(*shape, sums, weight, *from, dweight, dbias, by_group);
    if (form == LINEAR)
        merge_gradients<LINEAR>(*shape, sums, weight, *from, dweight, dbias, by_group);
    if (form == POOLED)
        merge_gradients<POOLED>(*shape, sums, weight, *from, dweight, dbias, by_group);
    if (form == GATED)
        merge_gradients<GATED>(*shape, sums, weight, *from, dweight, dbias, by_group);
}

void input_gradient_of(const Shape* shape,
                       int form,  // a Form, not PLAIN
                       const float* x,
                       const Normalization* norm,
                       const Incoming* from,
                       const float* by_group,  // [images, groups, 2]
                       float* dx               // like x, written
) {
    if (form == LINEAR) input_gradient<LINEAR>(*shape, x, *norm, *from, by_group, dx);
    if (form == POOLED) input_gradient<POOLED>(*shape, x, *norm, *from, by_group, dx);
    if (form == GATED) input_gradient<GATED>(*shape, x, *norm, *from, by_group, dx);
}

void pack_weights_of(const Convolution* conv,
                     const float* weights,  // [channels, 16, kernel, kernel]
                     int backward,
                     float* packed  // [groups, points, 16, 16], written
) {
    pack_weights(*conv, weights, backward, packed);
}

void convolution_of(const Convolution* conv,
                    const float* x,
                    const Shape* before_shape,    // of x, or null
                    const Normalization* before,  // which x passes first, with SiLU; or null
                    const float* weights,         // packed
                    float* y,                  // [images, out_height, out_width, channels], written
                    const Shape* after_shape,  // of y
                    float eps,
                    float* moments  // [images, groups of after_shape, 2], written; or null
) {
    const int64_t part_count = conv->images * conv->blocks();
    std::vector<float> parts(moments ? part_count * PART_MOMENTS * conv->channels : 0);
    float* written = moments ? parts.data() : nullptr;
    if (before) {
        const Coefficients all(*before_shape, *before);
        group_convolution(*conv, ActivatedReader(*before_shape, x, all), weights, y, written);
    } else {
        group_convolution(*conv, PlainReader(x), weights, y, written);
    }
    if (moments)
        merge_moments(*after_shape, written, conv->lines() * conv->out_width, eps, moments);
}

void convolution_gradients_of(
    const Convolution* conv,
    const float* x,
    const Shape* before_shape,    // of x, or null
    const Normalization* before,  // which x passes first, with SiLU; or null
    const float* y,               // what `after` normalises, or null
    const Shape* after_shape,     // of y, or null
    const Normalization* after,   // which y passes, with SiLU and gates; or null
    const Incoming* from,         // behind `after`, or y's gradient
    const float* by_group,        // of `after`, or null
    const float* weights,         // packed
    float* dx,                    // like x, written
    float* dweights,              // [channels, 16, kernel, kernel], written
    float* sums                   // [2, images, channels], written; or null
) {
    if (!after) {
        const PlainReader dy(from->dy);
        group_convolution_gradients(*conv, PlainReader(x), dy, weights, dx, dweights, sums);
        return;
    }
    const Coefficients all_after(*after_shape, *after);
    const GradientCoefficients below(*after_shape, *after, by_group);
    const GatedGradientReader dy(*after_shape, y, all_after, below, *from);
    if (before) {
        const Coefficients all(*before_shape, *before);
        group_convolution_gradients(*conv, ActivatedReader(*before_shape, x, all), dy, weights, dx,
                                    dweights, sums);
    } else {
        group_convolution_gradients(*conv, PlainReader(x), dy, weights, dx, dweights, sums);
    }
}

}  // extern "C"
