"""Triton kernels of group normalisation: `group_norm.py` and `squeeze.py` launch them.

A tile is [ROWS, COLUMNS], channels by pixels of one image, in either layout. Kernels over tiles take one each; kernels
over groups take all tiles of one image's group, one after the other, twice. All arithmetic is float32. Sums are added
in an order that depends on shapes alone, without atomics, so results repeat bit for bit.
"""

import triton
import triton.language as tl

# The interpreter knows no instruction of a GPU.
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)): compiled with a reciprocal that is off by 1 ulp at most (PTX), where a division takes more
    instructions for numbers beyond 2^126, and is off by 2."""
    if _COMPILED:
        below = 1 + tl.exp(-z)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, True, 1)
    else:
        return tl.sigmoid(z)


@triton.jit
def slope(z, share):
    """Derivative of SiLU at z. share: sigmoid(z)."""
    return share * (1 + z * (1 - share))


@triton.jit
def tile_at(
    image, first_channel, end, first_pixel, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Channels of a tile and whether they are below `end`, both [ROWS]; its first element's offset, int64; from there
    the offsets of its elements and the mask of those that exist, both [ROWS, COLUMNS]."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    channel = first_channel + rows
    known = channel < end
    # So the compiler knows of the factor.
    if CHANNELS_LAST:
        channels = channels // ALIGNED * ALIGNED
        start = (image * pixels + first_pixel) * channels + first_channel
        inside = rows[:, None] + columns[None, :] * channels
    else:
        pixels = pixels // ALIGNED * ALIGNED
        start = (image * channels + first_channel) * pixels + first_pixel
        inside = rows[:, None] * pixels + columns[None, :]
    return channel, known, start, inside, known[:, None] & (first_pixel + columns < pixels)[None, :]


@triton.jit
def tile(
    channels, pixels, CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The program's tile: its image and first pixel; what `tile_at` returns, and the channels' places in
    [N, C, chunks], [ROWS]."""
    chunks = tl.cdiv(pixels, COLUMNS)
    blocks = tl.cdiv(channels, ROWS)
    program = tl.program_id(0)
    chunk = program % chunks
    first_channel = program // chunks % blocks * ROWS
    image = (program // chunks // blocks).to(tl.int64)
    channel, known, start, inside, mask = tile_at(
        image, first_channel, channels, chunk * COLUMNS, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    return image, chunk * COLUMNS, channel, known, (image * channels + channel) * chunks + chunk, start, inside, mask


@triton.jit
def load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def affine(centred, scale, weight, bias, channel, known):
    """The normalised tile times weight plus bias: what SiLU is given; and the channels' weights, [ROWS].

    centred: x less its group's mean. scale: one over the standard deviation, of each channel's group or of the group.
    """
    own = load(weight + channel, known)
    z = centred * (scale * own)[:, None]
    if bias is not None:
        z += load(bias + channel, known)[:, None]
    return z, own


@triton.jit
def normalised(
    x, weight, bias, mean, scale, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Image, channels, start, offsets and mask of the program's tile. x less its group's mean, and what SiLU is given,
    both [ROWS, COLUMNS]. Of each channel, [ROWS]: its group's place in [N, groups], whether it exists, and its place in
    [N, C, chunks]; the scale of its group, and its weight."""
    image, _, channel, known, place, start, inside, mask = tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    group = image * (channels // size) + channel // size
    own_scale = load(scale + group, known)
    centred = load(x + start + inside, mask) - load(mean + group, known)[:, None]
    z, own_weight = affine(centred, own_scale, weight, bias, channel, known)
    return image, channel, start, inside, mask, centred, z, group, known, place, own_scale, own_weight


@triton.jit
def store_output(y, z, kept, residual, image, start, inside, mask, SILU: tl.constexpr):
    """Store SiLU(z), or z, times the image's `kept`, plus `residual`; either may be None."""
    if SILU:
        z *= sigmoid(z)
    if kept is not None:
        z *= tl.load(kept + image).to(tl.float32)
    if residual is not None:
        z += load(residual + start + inside, mask)
    tl.store(y + start + inside, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gradient_of(dy, dresidual, z, kept, image, place, mask, SILU: tl.constexpr):
    """The gradient of what SiLU is given, 0 outside the mask. place: of the tile in dy; dresidual gets a copy of dy
    there unless it is None."""
    gradient = load(dy + place, mask)
    if dresidual is not None:
        tl.store(dresidual + place, gradient.to(dresidual.dtype.element_ty), mask=mask)
    if kept is not None:
        gradient *= tl.load(kept + image).to(tl.float32)
    if SILU:
        gradient *= slope(z, sigmoid(z))
    return gradient


@triton.jit
def less_group_means(gradient, centred, shift, along, own_scale, own_weight, elements):
    """x's gradient, from that of weight times normalised values plus bias: less its mean over the group, and less its
    share along the normalised values; in standard deviations.

    shift, along: sums over each channel's group, [ROWS], of that gradient times the weight, and of that times the
    normalised values. own_scale: [ROWS], or one number.
    """
    shift = shift / elements * own_scale
    along = along / elements * own_scale * own_scale
    return gradient * (own_weight * own_scale)[:, None] - shift[:, None] - centred * along[:, None]


# Over tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def tile_statistics(
    x, means, squares, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: the mean, and the sum of squared differences from it. size: as all are given."""
    _, first_pixel, _, known, place, start, inside, mask = tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    values = load(x + start + inside, mask)
    mean = tl.sum(values, 1) / tl.minimum(COLUMNS, pixels - first_pixel)
    centred = tl.where(mask, values - mean[:, None], 0.0)
    tl.store(means + place, mean, mask=known)
    tl.store(squares + place, tl.sum(centred * centred, 1), mask=known)


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
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The layer's output, from the statistics of its groups."""
    image, _, start, inside, mask, _, z, _, _, _, _, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    store_output(y, z, kept, residual, image, start, inside, mask, SILU)


@triton.jit
def sum_gradients(
    x, dy, weight, bias, mean, scale, kept, sums, stride, size, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: what it adds to the gradient of the bias and, `stride` elements on, to that of the
    weight."""
    image, _, start, inside, mask, centred, z, _, known, place, own_scale, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gradient = gradient_of(dy, None, z, kept, image, start + inside, mask, SILU)
    tl.store(sums + place, tl.sum(gradient, 1), mask=known)
    tl.store(sums + place + stride, tl.sum(gradient * centred, 1) * own_scale, mask=known)


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
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x's gradient, and a copy of dy unless dresidual is None. shifts, scales: sums over each group, [N, groups], for
    `less_group_means`."""
    image, _, start, inside, mask, centred, z, group, known, _, own_scale, own_weight = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gradient = gradient_of(dy, dresidual, z, kept, image, start + inside, mask, SILU)
    shift, along = load(shifts + group, known), load(scales + group, known)
    elements = 1.0 * size * pixels
    gradient = less_group_means(gradient, centred, shift, along, own_scale, own_weight, elements)
    tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)


# Over groups ----------------------------------------------------------------------------------------------------------


@triton.jit
def group_statistics(
    x, mean, scale, group, image, first, size, channels, pixels, eps,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mean, and one over the standard deviation, of an image's channels from `first` on, which are stored, too.

    From sums of differences from the first tile's mean, and of their squares: what a large mean would take is gone.
    """
    end = first + size
    _, _, start, inside, mask = tile_at(image, first, end, 0, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    there = 1.0 * tl.minimum(ROWS, size) * tl.minimum(COLUMNS, pixels)
    origin = tl.sum(tl.sum(load(x + start + inside, mask), 1), 0) / there
    sums, squares = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_channel in range(first, end, ROWS):
        for first_pixel in range(0, pixels, COLUMNS):
            _, _, start, inside, mask = tile_at(
                image, first_channel, end, first_pixel, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
            )
            centred = tl.where(mask, load(x + start + inside, mask) - origin, 0.0)
            sums += centred
            squares += centred * centred
    elements = 1.0 * size * pixels
    shift = tl.sum(tl.sum(sums, 1), 0) / elements
    variance = tl.maximum(tl.sum(tl.sum(squares, 1), 0) / elements - shift * shift, 0.0)
    own_mean, own_scale = origin + shift, tl.rsqrt(variance + eps)
    tl.store(mean + group, own_mean)
    tl.store(scale + group, own_scale)
    return own_mean, own_scale


@triton.jit
def normalised_at(
    x, weight, bias, own_mean, own_scale, image, first_channel, end, first_pixel, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As `normalised`, of a tile of one group, whose mean and scale are numbers: start, offsets and mask; x less the
    mean, and what SiLU is given, both [ROWS, COLUMNS]; and the channels' weights, [ROWS]."""
    channel, known, start, inside, mask = tile_at(
        image, first_channel, end, first_pixel, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    centred = load(x + start + inside, mask) - own_mean
    z, own_weight = affine(centred, own_scale, weight, bias, channel, known)
    return start, inside, mask, centred, z, own_weight


@triton.jit
def group_of(size, channels, ALIGNED: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """The program's image, its group's place in [N, groups], and its first channel."""
    if CHANNELS_LAST:
        size = size // ALIGNED * ALIGNED
    group, groups = tl.program_id(0), channels // size
    return (group // groups).to(tl.int64), group, group % groups * size


@triton.jit
def backwards(now, first, end, STEP: tl.constexpr):
    """Where a loop from `first` to `end` is that goes backwards: what was read last is read again first, as it is most
    likely to be in the cache."""
    return first + (tl.cdiv(end - first, STEP) - 1) * STEP - (now - first)


@triton.jit
def normalise_groups(
    x, y, weight, bias, mean, scale, kept, residual, eps, size, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The layer's output, and the statistics of its groups."""
    image, group, first = group_of(size, channels, ALIGNED, CHANNELS_LAST)
    own_mean, own_scale = group_statistics(
        x, mean, scale, group, image, first, size, channels, pixels, eps, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    end = first + size
    for now in range(first, end, ROWS):
        first_channel = backwards(now, first, end, ROWS)
        for now_pixel in range(0, pixels, COLUMNS):
            first_pixel = backwards(now_pixel, 0, pixels, COLUMNS)
            start, inside, mask, _, z, _ = normalised_at(
                x, weight, bias, own_mean, own_scale, image, first_channel, end, first_pixel, channels, pixels,
                CHANNELS_LAST, ALIGNED, ROWS, COLUMNS,
            )  # fmt: skip
            store_output(y, z, kept, residual, image, start, inside, mask, SILU)


@triton.jit
def gradients_of_groups(
    x, dy, weight, bias, mean, scale, kept, sums, stride, dx, dresidual, size, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel what `sum_gradients` stores, [N, C]; x's gradient, and a copy of dy, unless these are None."""
    image, group, first = group_of(size, channels, ALIGNED, CHANNELS_LAST)
    own_mean, own_scale = tl.load(mean + group), tl.load(scale + group)
    end, shift, along = first + size, 0.0, 0.0
    for first_channel in range(first, end, ROWS):
        shifts, scales = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_pixel in range(0, pixels, COLUMNS):
            start, inside, mask, centred, z, _ = normalised_at(
                x, weight, bias, own_mean, own_scale, image, first_channel, end, first_pixel, channels, pixels,
                CHANNELS_LAST, ALIGNED, ROWS, COLUMNS,
            )  # fmt: skip
            gradient = gradient_of(dy, None, z, kept, image, start + inside, mask, SILU)
            shifts += gradient
            scales += gradient * centred
        channel = first_channel + tl.arange(0, ROWS)
        known = channel < end
        own_shifts, own_scales = tl.sum(shifts, 1), tl.sum(scales, 1) * own_scale
        tl.store(sums + image * channels + channel, own_shifts, mask=known)
        tl.store(sums + stride + image * channels + channel, own_scales, mask=known)
        own_weight = load(weight + channel, known)
        shift += tl.sum(own_shifts * own_weight, 0)
        along += tl.sum(own_scales * own_weight, 0)
    if dx is not None:
        elements = 1.0 * size * pixels
        group_shift, group_along = tl.zeros([ROWS], tl.float32) + shift, tl.zeros([ROWS], tl.float32) + along
        for now in range(first, end, ROWS):
            first_channel = backwards(now, first, end, ROWS)
            for now_pixel in range(0, pixels, COLUMNS):
                first_pixel = backwards(now_pixel, 0, pixels, COLUMNS)
                start, inside, mask, centred, z, own_weight = normalised_at(
                    x, weight, bias, own_mean, own_scale, image, first_channel, end, first_pixel, channels, pixels,
                    CHANNELS_LAST, ALIGNED, ROWS, COLUMNS,
                )  # fmt: skip
                gradient = gradient_of(dy, dresidual, z, kept, image, start + inside, mask, SILU)
                gradient = less_group_means(
                    gradient, centred, group_shift, group_along, own_scale, own_weight, elements
                )
                tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)
