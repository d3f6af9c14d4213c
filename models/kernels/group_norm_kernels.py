"""Triton kernels of group normalisation: `group_norm.py` launches them.

Kernels over strips take one each, tile after tile (`tile_functions.py`); kernels over groups take
all strips of one image's group, one after the other, twice. All arithmetic is float32. Sums are
added in an order that depends on shapes alone, without atomics, so results repeat bit for bit.
"""

import triton
import triton.language as tl

from models.kernels.tile_functions import (
    STAGES,
    coefficients_of,
    load,
    load_tile,
    sigmoid,
    silu_slope,
    store_tile,
    strip_of,
    subtrahends_of,
    tile_at,
)

# ---- Statistics.


@triton.jit
def tile_statistics(
    # Tensors.
    x,  # [N, C, H, W]
    means,  # [N, C, chunks], written
    squares,  # like means, written
    # Sizes.
    size,  # of a group, like all kernels over strips have it
    channels,
    pixels,
    # Constants: see tile_functions.py.
    CHANNELS_LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute mean, and sum of squared differences from it, of each channel of the strip.

    From sums of differences from the first tile's mean, and of their squares: what a large mean
    would take is gone.
    """
    strip = strip_of(
        channels,
        pixels,
        CHANNELS_LAST=CHANNELS_LAST,
        ALIGNED=ALIGNED,
        ROWS=ROWS,
        PIXELS=STEPS * COLUMNS,
    )
    count = strip.end - strip.first_pixel
    tile = tile_at(strip, strip.first_pixel, CHANNELS_LAST, ROWS, COLUMNS)
    origin = tl.sum(load_tile(x, tile), 1) / tl.minimum(COLUMNS, count)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_pixel in tl.range(strip.first_pixel, strip.end, COLUMNS, num_stages=STAGES):
        tile = tile_at(strip, first_pixel, CHANNELS_LAST, ROWS, COLUMNS)
        values = load_tile(x, tile)
        centred = tl.where(tile.mask, values - origin[:, None], 0.0)
        sums += centred
        products += centred * centred
    shift = tl.sum(sums, 1) / count
    tl.store(means + strip.place, origin + shift, mask=strip.known)
    squared = tl.maximum(tl.sum(products, 1) - shift * shift * count, 0.0)
    tl.store(squares + strip.place, squared, mask=strip.known)


@triton.jit
def values_of(part, height, width, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return how many pixels a `part` of an image has: LINES by COLUMNS, less at the edges."""
    tiles = tl.cdiv(width, COLUMNS)
    chunk = part % (tl.cdiv(height, LINES) * tiles)
    lines = tl.minimum(LINES, height - chunk // tiles * LINES)
    return lines * tl.minimum(COLUMNS, width - chunk % tiles * COLUMNS)


@triton.jit
def merge_statistics(
    # Tensors.
    means,  # [N, C, parts of an image]
    squares,  # like means: sums of squared differences from them
    mean,  # [N, groups], written
    scale,  # [N, groups], written: one over the standard deviation
    # Sizes.
    size,  # channels of a group
    height,
    width,
    eps,
    # Constants.
    LINES: tl.constexpr,  # of a part of an image
    COLUMNS: tl.constexpr,  # of a part of an image
    BLOCK: tl.constexpr,  # parts at a time
):
    """Merge the statistics of one image and group.

    Those of its parts, `size` channels of each, are neighbours in memory.
    """
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
        centred = load(means + part, part < parts) - origin
        sums += tl.where(part < parts, count * centred, 0.0)
    from_origin = tl.sum(sums, 0) / elements
    # Now that the mean is known: squared differences from it.
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        count = values_of(part, height, width, LINES, COLUMNS)
        centred = load(means + part, part < parts) - origin - from_origin
        squared = load(squares + part, part < parts) + count * centred * centred
        sums += tl.where(part < parts, squared, 0.0)
    tl.store(mean + group, origin + from_origin)
    tl.store(scale + group, tl.rsqrt(tl.sum(sums, 0) / elements + eps))


# ---- The layer.


@triton.jit
def normalise(
    # Tensors.
    x,  # [N, C, H, W]
    y,  # like x, written
    weight,  # [C]
    bias,  # [C], or None
    mean,  # [N, groups]
    scale,  # [N, groups]: one over the standard deviation
    kept,  # [N], or None
    residual,  # like x, or None
    # Sizes.
    size,  # channels of a group
    channels,
    pixels,
    # Constants: see tile_functions.py.
    SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute SiLU of the normalised x, or that, times the image's `kept`, plus `residual`."""
    strip = strip_of(
        channels,
        pixels,
        CHANNELS_LAST=CHANNELS_LAST,
        ALIGNED=ALIGNED,
        ROWS=ROWS,
        PIXELS=STEPS * COLUMNS,
    )
    norm = coefficients_of(strip, size, (mean, scale), weight, bias)
    image_kept = None if kept is None else tl.load(kept + strip.image).to(tl.float32)
    for first_pixel in tl.range(strip.first_pixel, strip.end, COLUMNS, num_stages=STAGES):
        tile = tile_at(strip, first_pixel, CHANNELS_LAST, ROWS, COLUMNS)
        centred = load_tile(x, tile) - norm.mean
        z = centred * norm.factor + norm.shift
        if SILU:
            z *= sigmoid(z)
        if image_kept is not None:
            z *= image_kept
        if residual is not None:
            z += load_tile(residual, tile)
        store_tile(y, tile, z)


# ---- Gradients.


@triton.jit
def gradient_of(gradient, z, image_kept, SILU: tl.constexpr):
    """Return the gradient of what SiLU is given, [ROWS, COLUMNS], 0 where `gradient` is.

    gradient: of the layer's output. z: what SiLU is given. image_kept: what the image's branch is
    multiplied by, or None.
    """
    if image_kept is not None:
        gradient *= image_kept
    if SILU:
        share = sigmoid(z)
        gradient *= silu_slope(share, z * share)
    return gradient


@triton.jit
def sum_gradients(
    # Tensors.
    x,  # [N, C, H, W]
    dy,  # like x
    weight,  # [C]
    bias,  # [C], or None
    mean,  # [N, groups]
    scale,  # [N, groups]: one over the standard deviation
    kept,  # [N], or None
    sums,  # [2, N, C, chunks], written
    # Strides and sizes.
    stride,  # of the first dimension of sums
    size,  # channels of a group
    channels,
    pixels,
    # Constants: see tile_functions.py.
    SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute what each channel of the strip adds to the gradients of the bias and of the weight.

    They are sums[0] and sums[1].
    """
    strip = strip_of(
        channels,
        pixels,
        CHANNELS_LAST=CHANNELS_LAST,
        ALIGNED=ALIGNED,
        ROWS=ROWS,
        PIXELS=STEPS * COLUMNS,
    )
    norm = coefficients_of(strip, size, (mean, scale), weight, bias)
    image_kept = None if kept is None else tl.load(kept + strip.image).to(tl.float32)
    shifts = tl.zeros([ROWS, COLUMNS], tl.float32)
    scales = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_pixel in tl.range(strip.first_pixel, strip.end, COLUMNS, num_stages=STAGES):
        tile = tile_at(strip, first_pixel, CHANNELS_LAST, ROWS, COLUMNS)
        centred = load_tile(x, tile) - norm.mean
        z = centred * norm.factor + norm.shift
        gradient = gradient_of(load_tile(dy, tile), z, image_kept, SILU)
        shifts += gradient
        scales += gradient * centred
    tl.store(sums + strip.place, tl.sum(shifts, 1), mask=strip.known)
    tl.store(sums + strip.place + stride, tl.sum(scales, 1) * norm.scale, mask=strip.known)


@triton.jit
def merge_gradients(
    # Tensors.
    sums,  # [2, N, C, chunks], as sum_gradients stores them
    weight,  # [C]
    by_group,  # [2, N, groups], written; or None
    dweight,  # [C], written
    dbias,  # [C], written; or None
    # Strides and sizes.
    stride,  # of the first dimension of sums
    images,
    size,  # channels of a group
    channels,
    chunks,
    # Constants.
    BLOCK: tl.constexpr,  # parts at a time
):
    """Add up what `sum_gradients` stored.

    A program for each channel adds over images and chunks, which gives the gradients of bias and
    weight. Unless by_group is None, one for each image and group adds over the group's channels,
    times their weights.
    """
    program = tl.program_id(0)
    shifts = tl.zeros([BLOCK], tl.float32)
    scales = tl.zeros([BLOCK], tl.float32)
    if program < channels:
        for start in range(0, images * chunks, BLOCK):
            part = start + tl.arange(0, BLOCK)
            image = (part // chunks).to(tl.int64)
            place = (image * channels + program) * chunks + part % chunks
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
            channel_weight = load(weight + part // chunks, part < size * chunks)
            shifts += channel_weight * load(sums + first + part, part < size * chunks)
            scales += channel_weight * load(sums + stride + first + part, part < size * chunks)
        tl.store(by_group + group, tl.sum(shifts, 0))
        tl.store(by_group + images * (channels // size) + group, tl.sum(scales, 0))


@triton.jit
def input_gradient(
    # Tensors.
    x,  # [N, C, H, W]
    dy,  # like x
    weight,  # [C]
    bias,  # [C], or None
    mean,  # [N, groups]
    scale,  # [N, groups]: one over the standard deviation
    kept,  # [N], or None
    shifts,  # [N, groups]: see subtrahends_of
    scales,  # [N, groups]
    dx,  # like x, written
    dresidual,  # like x, written: a copy of dy; or None
    # Sizes.
    size,  # channels of a group
    channels,
    pixels,
    # Constants: see tile_functions.py.
    SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute x's gradient, dx, and a copy of dy."""
    strip = strip_of(
        channels,
        pixels,
        CHANNELS_LAST=CHANNELS_LAST,
        ALIGNED=ALIGNED,
        ROWS=ROWS,
        PIXELS=STEPS * COLUMNS,
    )
    norm = coefficients_of(strip, size, (mean, scale), weight, bias)
    image_kept = None if kept is None else tl.load(kept + strip.image).to(tl.float32)
    less, less_along = subtrahends_of(strip, norm, shifts, scales, 1.0 * size * pixels)
    for first_pixel in tl.range(strip.first_pixel, strip.end, COLUMNS, num_stages=STAGES):
        tile = tile_at(strip, first_pixel, CHANNELS_LAST, ROWS, COLUMNS)
        centred = load_tile(x, tile) - norm.mean
        z = centred * norm.factor + norm.shift
        gradient = load_tile(dy, tile)
        if dresidual is not None:
            store_tile(dresidual, tile, gradient)
        gradient = gradient_of(gradient, z, image_kept, SILU) * norm.factor
        gradient -= less + centred * less_along
        store_tile(dx, tile, gradient)
