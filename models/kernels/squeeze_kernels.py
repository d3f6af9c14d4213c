"""Triton kernels of normalisation, SiLU, and squeeze and excitation: `squeeze.py` launches them.

Tiles, groups and their arithmetic are those of `group_norm_kernels.py`. Between pooling and gates are small kernels
with a program for each image, and one that adds the parameters' gradients up over images in a fixed order. Weights of
the two small layers are `reduce`, [rank, C], and `expand`, [C, rank]; RANK and BLOCK are numbers of them at a time.
"""

import triton
import triton.language as tl

from models.kernels.group_norm_kernels import (
    backwards,
    group_of,
    group_statistics,
    less_group_means,
    load,
    normalised,
    normalised_at,
    sigmoid,
    slope,
)


@triton.jit
def sum_activations(
    x, weight, bias, mean, scale, sums, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile."""
    _, _, _, _, mask, _, z, _, known, place, _, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    tl.store(sums + place, tl.sum(tl.where(mask, z * sigmoid(z), 0.0), 1), mask=known)


@triton.jit
def sum_activations_of_groups(
    x, weight, bias, mean, scale, sums, eps, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the group; and the statistics that they take."""
    image, group, first = group_of(size, channels, ALIGNED, CHANNELS_LAST)
    own_mean, own_scale = group_statistics(
        x, mean, scale, group, image, first, size, channels, pixels, eps, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    end = first + size
    for first_channel in range(first, end, ROWS):  # backwards, registers would be spilled
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for now_pixel in range(0, pixels, COLUMNS):
            first_pixel = backwards(now_pixel, 0, pixels, COLUMNS)
            _, _, mask, _, z, _ = normalised_at(
                x, weight, bias, own_mean, own_scale, image, first_channel, end, first_pixel, channels, pixels,
                CHANNELS_LAST, ALIGNED, ROWS, COLUMNS,
            )  # fmt: skip
            total += tl.where(mask, z * sigmoid(z), 0.0)
        channel = first_channel + tl.arange(0, ROWS)
        tl.store(sums + image * channels + channel, tl.sum(total, 1), mask=channel < end)


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
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The layer's output, from statistics and gates."""
    image, channel, start, inside, mask, _, z, _, known, _, _, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    own_gate = load(gates + image * channels + channel, known)[:, None]
    tl.store(y + start + inside, (z * sigmoid(z) * own_gate).to(y.dtype.element_ty), mask=mask)


@triton.jit
def sum_gradients(
    x, weight, bias, mean, scale, dy, sums, stride, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: dy times the activation; dy times its slope, and that times the normalised value;
    the slope, and that times the normalised value. Each `stride` elements after the one before."""
    _, _, start, inside, mask, centred, z, _, known, place, own_scale, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gradient = load(dy + start + inside, mask)
    share = sigmoid(z)
    own_slope = tl.where(mask, slope(z, share), 0.0)
    sums += place
    tl.store(sums, tl.sum(gradient * z * share, 1), mask=known)
    tl.store(sums + stride, tl.sum(gradient * own_slope, 1), mask=known)
    tl.store(sums + 2 * stride, tl.sum(gradient * own_slope * centred, 1) * own_scale, mask=known)
    tl.store(sums + 3 * stride, tl.sum(own_slope, 1), mask=known)
    tl.store(sums + 4 * stride, tl.sum(own_slope * centred, 1) * own_scale, mask=known)


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
    total *= slope(z, sigmoid(z))
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
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As group_norm's, for the gradient that reaches the activations: dy by the gates, and that of the means."""
    image, channel, start, inside, mask, centred, z, group, known, _, own_scale, own_weight = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    of_channel = image * channels + channel
    gradient = load(dy + start + inside, mask) * load(gates + of_channel, known)[:, None]
    gradient += load(pooled + of_channel, known)[:, None]
    gradient *= slope(z, sigmoid(z))
    shift, along = load(shifts + group, known), load(scales + group, known)
    elements = 1.0 * size * pixels
    gradient = less_group_means(gradient, centred, shift, along, own_scale, own_weight, elements)
    tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)
