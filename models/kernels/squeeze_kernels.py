"""Triton kernels of normalisation, SiLU, and squeeze and excitation: `squeeze.py` launches them.

Tiles, groups and their arithmetic are those of `group_norm_kernels.py`. Between pooling and gates are small kernels
with a program for each image, and one that adds the parameters' gradients up over images in a fixed order. Weights of
the two small layers are `reduce`, [rank, C], and `expand`, [C, rank]; RANK and BLOCK are numbers of them at a time.
"""

import triton
import triton.language as tl

from models.kernels.group_norm_kernels import (
    _STAGES,
    affine,
    load,
    of_gradients,
    of_groups,
    sigmoid,
    slope,
    strip,
    tile_at,
)


@triton.jit
def sum_activations(
    x, weight, bias, mean, scale, sums, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the strip."""
    image, first_channel, first, end, channel, known, place = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    _, own_mean, own_scale = of_groups(mean, scale, image, channel, known, size, channels)
    factor, shift = affine(own_scale, weight, bias, channel, known)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        z = (load(x + start + inside, mask) - own_mean[:, None]) * factor[:, None] + shift[:, None]
        total += tl.where(mask, z * sigmoid(z), 0.0)
    tl.store(sums + place, tl.sum(total, 1), mask=known)


@triton.jit
def merged(sums, channel, known, chunks, CHUNKS: tl.constexpr):
    """Sums of the channels' chunks. sums: of one image, [C, chunks]."""
    total = tl.zeros([channel.shape[0], CHUNKS], tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        total += load(sums + channel[:, None] * chunks + chunk, known[:, None] & (chunk < chunks))
    return tl.sum(total, 1)


@triton.jit
def gate(
    sums, reduce, reduce_bias, expand, expand_bias, pooled, squeezed, gates, channels, pixels, chunks, rank,
    RANK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """An image's gates, [N, C]: sigmoid(expand(silu(squeezed))), squeezed = reduce(pooled), [N, rank]; pooled, [N, C],
    are means over pixels."""
    image = tl.program_id(0)
    hidden = tl.arange(0, RANK)
    total = load(reduce_bias + hidden, hidden < rank)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        known = channel < channels
        mean = merged(sums + image.to(tl.int64) * channels * chunks, channel, known, chunks, CHUNKS) / pixels
        tl.store(pooled + image * channels + channel, mean, mask=known)
        mask = (hidden < rank)[:, None] & known[None, :]
        total += tl.sum(load(reduce + hidden[:, None] * channels + channel[None, :], mask) * mean[None, :], 1)
    tl.store(squeezed + image * rank + hidden, total, mask=hidden < rank)
    total *= sigmoid(total)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        known = channel < channels
        mask = known[:, None] & (hidden < rank)[None, :]
        z = tl.sum(load(expand + channel[:, None] * rank + hidden[None, :], mask) * total[None, :], 1)
        z += load(expand_bias + channel, known)
        tl.store(gates + image * channels + channel, sigmoid(z), mask=known)


@triton.jit
def excite(
    x, weight, bias, mean, scale, gates, y, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The layer's output, from statistics and gates."""
    image, first_channel, first, end, channel, known, _ = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    _, own_mean, own_scale = of_groups(mean, scale, image, channel, known, size, channels)
    factor, shift = affine(own_scale, weight, bias, channel, known)
    own_gate = load(gates + image * channels + channel, known)
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        z = (load(x + start + inside, mask) - own_mean[:, None]) * factor[:, None] + shift[:, None]
        z *= sigmoid(z) * own_gate[:, None]
        tl.store(y + start + inside, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def sum_gradients(
    x, weight, bias, mean, scale, dy, sums, stride, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the strip: dy times the activation; dy times its slope, and that times the normalised value;
    the slope, and that times the normalised value. Each `stride` elements after the one before."""
    image, first_channel, first, end, channel, known, place = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    _, own_mean, own_scale = of_groups(mean, scale, image, channel, known, size, channels)
    factor, shift = affine(own_scale, weight, bias, channel, known)
    totals = (tl.zeros([ROWS, COLUMNS], tl.float32),) * 5
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        centred = load(x + start + inside, mask) - own_mean[:, None]
        gradient = load(dy + start + inside, mask)
        z = centred * factor[:, None] + shift[:, None]
        share = sigmoid(z)
        activation = z * share
        own_slope = tl.where(mask, slope(share, activation), 0.0)
        totals = (
            totals[0] + gradient * activation,
            totals[1] + gradient * own_slope,
            totals[2] + gradient * own_slope * centred,
            totals[3] + own_slope,
            totals[4] + own_slope * centred,
        )
    sums += place
    tl.store(sums, tl.sum(totals[0], 1), mask=known)
    tl.store(sums + stride, tl.sum(totals[1], 1), mask=known)
    tl.store(sums + 2 * stride, tl.sum(totals[2], 1) * own_scale, mask=known)
    tl.store(sums + 3 * stride, tl.sum(totals[3], 1), mask=known)
    tl.store(sums + 4 * stride, tl.sum(totals[4], 1) * own_scale, mask=known)


@triton.jit
def gate_gradients(
    sums, stride, weight, reduce, expand, squeezed, gates, dexpanded, dsqueezed, dpooled, by_channel, by_group,
    images, size, channels, pixels, chunks, rank, RANK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of an image, from what `sum_gradients` stored: gradients of both small layers' results and of a pixel's share in
    what is pooled; by_channel, [2, N, C], what it adds to the gradients of the normalisation's bias and weight; and
    by_group, [2, N, groups], their sums over a group times its weights."""
    image = tl.program_id(0)
    hidden = tl.arange(0, RANK)
    known_hidden = hidden < rank
    sums += image.to(tl.int64) * channels * chunks
    total = tl.zeros([RANK], tl.float32)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        known = channel < channels
        own = load(gates + image * channels + channel, known)
        gradient = merged(sums, channel, known, chunks, CHUNKS) * own * (1 - own)
        tl.store(dexpanded + image * channels + channel, gradient, mask=known)
        mask = known[:, None] & known_hidden[None, :]
        total += tl.sum(load(expand + channel[:, None] * rank + hidden[None, :], mask) * gradient[:, None], 0)
    z = load(squeezed + image * rank + hidden, known_hidden)
    share = sigmoid(z)
    total *= slope(share, z * share)
    tl.store(dsqueezed + image * rank + hidden, total, mask=known_hidden)
    groups = channels // size
    for group in range(0, groups):
        group_shift, group_along = 0.0, 0.0
        for first in range(group * size, (group + 1) * size, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            known = channel < (group + 1) * size
            mask = known_hidden[:, None] & known[None, :]
            gradient = load(reduce + hidden[:, None] * channels + channel[None, :], mask) * total[:, None]
            gradient = tl.sum(gradient, 0) / pixels
            place = image * channels + channel
            tl.store(dpooled + place, gradient, mask=known)
            own = load(gates + place, known)
            shift = own * merged(sums + stride, channel, known, chunks, CHUNKS)
            shift += gradient * merged(sums + 3 * stride, channel, known, chunks, CHUNKS)
            along = own * merged(sums + 2 * stride, channel, known, chunks, CHUNKS)
            along += gradient * merged(sums + 4 * stride, channel, known, chunks, CHUNKS)
            tl.store(by_channel + place, shift, mask=known)
            tl.store(by_channel + images * channels + place, along, mask=known)
            own_weight = load(weight + channel, known)
            group_shift += tl.sum(shift * own_weight, 0)
            group_along += tl.sum(along * own_weight, 0)
        tl.store(by_group + image * groups + group, group_shift)
        tl.store(by_group + (images + image) * groups + group, group_along)


@triton.jit
def parameter_gradients(
    by_channel, dexpanded, dsqueezed, pooled, squeezed,
    dweight, dbias, dreduce, dreduce_bias, dexpand, dexpand_bias, images, channels, rank,
    RANK: tl.constexpr, BLOCK: tl.constexpr, IMAGES: tl.constexpr,
):  # fmt: skip
    """Sums over images, of BLOCK channels; the first program's, of the biases of `reduce`, too."""
    channel, hidden = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, RANK)
    known, known_hidden = channel < channels, hidden < rank
    shifts, scales = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    expand_biases, reduce_biases = tl.zeros([BLOCK], tl.float32), tl.zeros([RANK], tl.float32)
    expands, reduces = tl.zeros([BLOCK, RANK], tl.float32), tl.zeros([RANK, BLOCK], tl.float32)
    for first in range(0, images, IMAGES):
        image = first + tl.arange(0, IMAGES)
        mask = (image < images)[:, None] & known[None, :]
        place = image[:, None] * channels + channel[None, :]
        shifts += tl.sum(load(by_channel + place, mask), 0)
        scales += tl.sum(load(by_channel + images * channels + place, mask), 0)
        expanded, means = load(dexpanded + place, mask), load(pooled + place, mask)
        mask = (image < images)[:, None] & known_hidden[None, :]
        place = image[:, None] * rank + hidden[None, :]
        z, gradient = load(squeezed + place, mask), load(dsqueezed + place, mask)
        expand_biases += tl.sum(expanded, 0)
        reduce_biases += tl.sum(gradient, 0)
        expands = tl.dot(tl.trans(expanded), z * sigmoid(z), expands, input_precision="ieee")
        reduces = tl.dot(tl.trans(gradient), means, reduces, input_precision="ieee")
    kind = dweight.dtype.element_ty
    tl.store(dweight + channel, scales.to(kind), mask=known)
    if dbias is not None:
        tl.store(dbias + channel, shifts.to(kind), mask=known)
    tl.store(dexpand_bias + channel, expand_biases.to(kind), mask=known)
    mask = known[:, None] & known_hidden[None, :]
    tl.store(dexpand + channel[:, None] * rank + hidden[None, :], expands.to(kind), mask=mask)
    mask = known_hidden[:, None] & known[None, :]
    tl.store(dreduce + hidden[:, None] * channels + channel[None, :], reduces.to(kind), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(dreduce_bias + hidden, reduce_biases.to(kind), mask=known_hidden)


@triton.jit
def input_gradient(
    x, weight, bias, mean, scale, dy, gates, pooled, shifts, scales, dx, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """As group_norm's, for the gradient that reaches the activations: dy by the gates, and that of the means."""
    image, first_channel, first, end, channel, known, _ = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    group, own_mean, own_scale = of_groups(mean, scale, image, channel, known, size, channels)
    factor, shift = affine(own_scale, weight, bias, channel, known)
    group_shift, group_along = of_gradients(shifts, scales, group, known, own_scale, 1.0 * size * pixels)
    own_gate = load(gates + image * channels + channel, known)
    own_pooled = load(pooled + image * channels + channel, known)
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        centred = load(x + start + inside, mask) - own_mean[:, None]
        z = centred * factor[:, None] + shift[:, None]
        share = sigmoid(z)
        gradient = load(dy + start + inside, mask) * own_gate[:, None] + own_pooled[:, None]
        gradient *= slope(share, z * share) * factor[:, None]
        gradient -= group_shift[:, None] + centred * group_along[:, None]
        tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)
