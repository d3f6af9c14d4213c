"""Triton kernels of group normalisation: `group_norm.py` and `squeeze.py` launch them.

A tile is [ROWS, COLUMNS], channels by pixels of one image, in either layout. Kernels over tiles take one each; kernels
over groups take all tiles of one image's group, one after the other, twice. All arithmetic is float32. Sums are added
in an order that depends on shapes alone, without atomics, so results repeat bit for bit.
"""

import math

import triton
import triton.language as tl

# The interpreter knows no instruction of a GPU.
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(math.log2(math.e))
_STAGES = tl.constexpr(4)  # tiles of a loop that are under way


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)): compiled with a power and a reciprocal that are off by 2 ulp and 1 ulp at most (PTX) and take
    what is below 2^-126 for 0; a division, and a power that does not, take more instructions."""
    if _COMPILED:
        below = 1 + tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * -_LOG2_E], tl.float32, True, 1)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, True, 1)
    else:
        return tl.sigmoid(z)


@triton.jit
def slope(share, activation):
    """Derivative of SiLU at z. share: sigmoid(z). activation: z times that."""
    return share + (activation - activation * share)


@triton.jit
def with_factor(channels, pixels, CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr):
    """Both, so that the compiler knows of the contiguous one's factor: else it would load, and store, each element by
    itself."""
    if CHANNELS_LAST:
        return channels // ALIGNED * ALIGNED, pixels
    else:
        return channels, pixels // ALIGNED * ALIGNED


@triton.jit
def tile_at(
    image, first_channel, known, first_pixel, end, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile's first element's offset, int64; from there the offsets of its elements, and the mask of those whose
    channel is `known`, [ROWS], and whose pixel is before `end`: both [ROWS, COLUMNS]."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    channels, pixels = with_factor(channels, pixels, CHANNELS_LAST, ALIGNED)
    if CHANNELS_LAST:
        start = (image * pixels + first_pixel) * channels + first_channel
        inside = rows[:, None] + columns[None, :] * channels
    else:
        start = (image * channels + first_channel) * pixels + first_pixel
        inside = rows[:, None] * pixels + columns[None, :]
    return start, inside, known[:, None] & (first_pixel + columns < end)[None, :]


@triton.jit
def strip(
    channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The program's strip: its image, first channel, first pixel and the pixel behind its last; its channels, whether
    they exist, and their places in [N, C, chunks], all [ROWS]."""
    channels, pixels = with_factor(channels, pixels, CHANNELS_LAST, ALIGNED)
    chunks, blocks = tl.cdiv(pixels, STEPS * COLUMNS), tl.cdiv(channels, ROWS)
    program = tl.program_id(0)
    if CHANNELS_LAST:  # neighbours in memory run together
        block, chunk = program % blocks, program // blocks % chunks
    else:
        block, chunk = program // chunks % blocks, program % chunks
    image = (program // chunks // blocks).to(tl.int64)
    first, channel = chunk * (STEPS * COLUMNS), block * ROWS + tl.arange(0, ROWS)
    place = (image * channels + channel) * chunks + chunk
    return image, block * ROWS, first, tl.minimum(first + STEPS * COLUMNS, pixels), channel, channel < channels, place


@triton.jit
def load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def affine(scale, weight, bias, channel, known):
    """Of each channel, [ROWS]: its weight times `scale`, one over the standard deviation, and its bias."""
    factor = scale * load(weight + channel, known)
    return factor, tl.zeros_like(factor) if bias is None else load(bias + channel, known)


@triton.jit
def of_groups(mean, scale, image, channel, known, size, channels):
    """Of each channel, [ROWS]: its group's place in [N, groups], mean and scale."""
    group = image * (channels // size) + channel // size
    return group, load(mean + group, known), load(scale + group, known)


@triton.jit
def gradient_of(dy, dresidual, z, own_kept, place, mask, SILU: tl.constexpr):
    """The gradient of what SiLU is given, 0 outside the mask. place: of the tile in dy; dresidual gets a copy of dy
    there unless it is None. own_kept: what the image's branch is multiplied by, or None."""
    gradient = load(dy + place, mask)
    if dresidual is not None:
        tl.store(dresidual + place, gradient.to(dresidual.dtype.element_ty), mask=mask)
    if own_kept is not None:
        gradient *= own_kept
    if SILU:
        share = sigmoid(z)
        gradient *= slope(share, z * share)
    return gradient


@triton.jit
def of_gradients(shifts, scales, group, known, own_scale, elements):
    """What x's gradient has less than the gradient of what SiLU is given times `affine`'s factor: a number, and one for
    each standard deviation from the mean; of each channel, [ROWS].

    shifts, scales: sums over each group, [N, groups], of that gradient times the weight, and of that times the
    normalised values.
    """
    shift, along = load(shifts + group, known), load(scales + group, known)
    return shift / elements * own_scale, along / elements * own_scale * own_scale


# Over strips: each loop goes over tiles of its pixels -----------------------------------------------------------------


@triton.jit
def tile_statistics(
    x, means, squares, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the strip: the mean, and the sum of squared differences from it. size: as all are given.

    From sums of differences from the first tile's mean, and of their squares: what a large mean would take is gone.
    """
    image, first_channel, first, end, _, known, place = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    start, inside, mask = tile_at(
        image, first_channel, known, first, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    origin = tl.sum(load(x + start + inside, mask), 1) / tl.minimum(COLUMNS, end - first)
    sums, products = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        centred = tl.where(mask, load(x + start + inside, mask) - origin[:, None], 0.0)
        sums += centred
        products += centred * centred
    shift = tl.sum(sums, 1) / (end - first)
    tl.store(means + place, origin + shift, mask=known)
    tl.store(squares + place, tl.maximum(tl.sum(products, 1) - shift * shift * (end - first), 0.0), mask=known)


@triton.jit
def values_of(part, height, width, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """How many values of its channel a part of an image has: LINES by COLUMNS pixels, less at the edges."""
    tiles = tl.cdiv(width, COLUMNS)
    chunk = part % (tl.cdiv(height, LINES) * tiles)
    lines = tl.minimum(LINES, height - chunk // tiles * LINES)
    return lines * tl.minimum(COLUMNS, width - chunk % tiles * COLUMNS)


@triton.jit
def merge_statistics(
    means, squares, mean, scale, size, height, width, eps,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one image and group: its partial statistics, `size` channels of each part, are neighbours in memory. An image
    of height x width pixels is divided into parts of LINES x COLUMNS."""
    group = tl.program_id(0).to(tl.int64)
    parts = size * tl.cdiv(height, LINES) * tl.cdiv(width, COLUMNS)
    means += group * parts
    squares += group * parts
    elements = 1.0 * size * height * width
    # Differences from any of the means keep the digits that a large mean would take.
    origin = tl.load(means)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        count = values_of(part, height, width, LINES, COLUMNS)
        sums += tl.where(part < parts, count * (load(means + part, part < parts) - origin), 0.0)
    from_origin = tl.sum(sums, 0) / elements
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        count = values_of(part, height, width, LINES, COLUMNS)
        centred = load(means + part, part < parts) - origin - from_origin
        sums += tl.where(part < parts, load(squares + part, part < parts) + count * centred * centred, 0.0)
    tl.store(mean + group, origin + from_origin)
    tl.store(scale + group, tl.rsqrt(tl.sum(sums, 0) / elements + eps))


@triton.jit
def normalise(
    x, y, weight, bias, mean, scale, kept, residual, size, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """SiLU of what is normalised by the statistics of its groups, or that, times the image's `kept`, plus `residual`;
    either may be None."""
    image, first_channel, first, end, channel, known, _ = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    _, own_mean, own_scale = of_groups(mean, scale, image, channel, known, size, channels)
    factor, shift = affine(own_scale, weight, bias, channel, known)
    own_kept = None if kept is None else tl.load(kept + image).to(tl.float32)
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        z = (load(x + start + inside, mask) - own_mean[:, None]) * factor[:, None] + shift[:, None]
        if SILU:
            z *= sigmoid(z)
        if own_kept is not None:
            z *= own_kept
        if residual is not None:
            z += load(residual + start + inside, mask)
        tl.store(y + start + inside, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def sum_gradients(
    x, dy, weight, bias, mean, scale, kept, sums, stride, size, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the strip: what it adds to the gradient of the bias and, `stride` elements on, to that of the
    weight."""
    image, first_channel, first, end, channel, known, place = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    _, own_mean, own_scale = of_groups(mean, scale, image, channel, known, size, channels)
    factor, shift = affine(own_scale, weight, bias, channel, known)
    own_kept = None if kept is None else tl.load(kept + image).to(tl.float32)
    shifts, scales = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        centred = load(x + start + inside, mask) - own_mean[:, None]
        z = centred * factor[:, None] + shift[:, None]
        gradient = gradient_of(dy, None, z, own_kept, start + inside, mask, SILU)
        shifts += gradient
        scales += gradient * centred
    tl.store(sums + place, tl.sum(shifts, 1), mask=known)
    tl.store(sums + place + stride, tl.sum(scales, 1) * own_scale, mask=known)


@triton.jit
def merge_gradients(
    sums, stride, weight, by_group, dweight, dbias, images, size, channels, chunks, BLOCK: tl.constexpr
):
    """Add up what `sum_gradients` stored, [2, N, C, chunks]: a program for each channel over images and chunks, which
    gives the gradients of bias and weight; and, unless by_group is None, one for each image and group over the group's
    channels, times their weights, [2, N, groups]."""
    program = tl.program_id(0)
    shifts, scales = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if program < channels:
        for start in range(0, images * chunks, BLOCK):
            part = start + tl.arange(0, BLOCK)
            place = ((part // chunks).to(tl.int64) * channels + program) * chunks + part % chunks
            shifts += load(sums + place, part < images * chunks)
            scales += load(sums + stride + place, part < images * chunks)
        tl.store(dweight + program, tl.sum(scales, 0).to(dweight.dtype.element_ty))
        if dbias is not None:
            tl.store(dbias + program, tl.sum(shifts, 0).to(dbias.dtype.element_ty))
    elif by_group is not None:
        group = program - channels
        first = group.to(tl.int64) * size * chunks
        weight += group % (channels // size) * size
        for start in range(0, size * chunks, BLOCK):
            part = start + tl.arange(0, BLOCK)
            own = load(weight + part // chunks, part < size * chunks)
            shifts += own * load(sums + first + part, part < size * chunks)
            scales += own * load(sums + stride + first + part, part < size * chunks)
        tl.store(by_group + group, tl.sum(shifts, 0))
        tl.store(by_group + images * (channels // size) + group, tl.sum(scales, 0))


@triton.jit
def input_gradient(
    x, dy, weight, bias, mean, scale, kept, shifts, scales, dx, dresidual, size, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """x's gradient, and a copy of dy unless dresidual is None. shifts, scales: as `of_gradients` takes them."""
    image, first_channel, first, end, channel, known, _ = strip(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS, STEPS
    )
    group, own_mean, own_scale = of_groups(mean, scale, image, channel, known, size, channels)
    factor, shift = affine(own_scale, weight, bias, channel, known)
    own_kept = None if kept is None else tl.load(kept + image).to(tl.float32)
    group_shift, group_along = of_gradients(shifts, scales, group, known, own_scale, 1.0 * size * pixels)
    for first_pixel in tl.range(first, end, COLUMNS, num_stages=_STAGES):
        start, inside, mask = tile_at(
            image, first_channel, known, first_pixel, end, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
        )
        centred = load(x + start + inside, mask) - own_mean[:, None]
        z = centred * factor[:, None] + shift[:, None]
        gradient = gradient_of(dy, dresidual, z, own_kept, start + inside, mask, SILU) * factor[:, None]
        gradient -= group_shift[:, None] + centred * group_along[:, None]
        tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)
