"""Triton kernels of group normalisation: `group_norm.py` launches them.

Programs of most kernels take a strip each, tile after tile (`tile_functions.py`). Those of
`merge_statistics` take an image's group each, those of `merge_gradients` a channel, or a group of
an image. All arithmetic is float32. Sums are added in an order that depends on shapes alone,
without atomics, so results repeat bit for bit.
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
    store_numbers,
    store_tile,
    strip_of,
    subtrahends_of,
    tile_at,
)

# ---- Statistics.


@triton.jit
def strip_statistics(
    # Tensors.
    x,  # [N, C, H, W]
    means,  # [N, C, chunks], written
    squares,  # like means, written
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Compute mean, and sum of squared differences from it, of each channel of the strip.

    From sums of differences from the first tile's mean, and of their squares: what a large mean
    would take is gone.
    """
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # The origin: each channel's mean in the first tile, [ROWS].
    count = strip.end - strip.first_pixel
    tile = tile_at(strip, strip.first_pixel, LAYOUT, TILE)
    tile_pixels = tl.minimum(TILE[1], count)
    origin = tl.sum(load_tile(x, tile), 1) / tile_pixels

    # All tiles, the first again. What is masked was loaded as 0, which is not the origin.
    sums = tl.zeros(TILE, tl.float32)
    products = tl.zeros(TILE, tl.float32)
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - origin[:, None]
        centred = tl.where(tile.mask, centred, 0.0)
        sums += centred
        products += centred * centred

    # From the origin to the mean. Rounding may leave less than 0 where all values are alike.
    shift = tl.sum(sums, 1) / count
    squared = tl.sum(products, 1) - shift * shift * count
    store_numbers(means, strip, origin + shift)
    store_numbers(squares, strip, tl.maximum(squared, 0.0))


@triton.jit
def values_of(part, plane, PART: tl.constexpr):
    """Return how many pixels a `part` of an image has: lines by columns, less at the edges."""
    height, width = plane
    LINES: tl.constexpr = PART[0]
    COLUMNS: tl.constexpr = PART[1]
    # Parts are numbered channel after channel, and within a channel line after line.
    tiles = tl.cdiv(width, COLUMNS)
    chunks = tl.cdiv(height, LINES) * tiles
    chunk = part % chunks
    first_line = chunk // tiles * LINES
    first_column = chunk % tiles * COLUMNS
    lines = tl.minimum(LINES, height - first_line)
    return lines * tl.minimum(COLUMNS, width - first_column)


@triton.jit
def merge_statistics(
    # Tensors.
    partial,  # means of the parts of images, and sums of squared differences: [N, C, parts] each
    mean,  # [N, groups], written
    scale,  # [N, groups], written: one over the standard deviation
    # Sizes, and a number.
    size,  # channels of a group
    plane,  # lines and columns of an image
    eps,  # added to the variance
    # Constants.
    PART: tl.constexpr,  # lines and columns of a part of an image
    BLOCK: tl.constexpr,  # parts at a time
):
    """Merge the statistics of one image and group.

    Those of its parts, `size` channels of each, are neighbours in memory.
    """
    group = tl.program_id(0).to(tl.int64)
    height, width = plane
    parts = size * tl.cdiv(height, PART[0]) * tl.cdiv(width, PART[1])
    means = partial[0] + group * parts
    squares = partial[1] + group * parts
    elements = 1.0 * size * height * width

    # Differences from any of the means keep the digits that a large mean would take.
    origin = tl.load(means)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        known = part < parts
        count = values_of(part, plane, PART)
        centred = load(means + part, known) - origin
        sums += tl.where(known, count * centred, 0.0)
    from_origin = tl.sum(sums, 0) / elements

    # Now that the mean is known: squared differences from it.
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        known = part < parts
        count = values_of(part, plane, PART)
        centred = load(means + part, known) - origin - from_origin
        squared = load(squares + part, known)
        squared += count * centred * centred
        sums += tl.where(known, squared, 0.0)

    # The biased variance, as normalisations use it.
    variance = tl.sum(sums, 0) / elements
    tl.store(mean + group, origin + from_origin)
    tl.store(scale + group, tl.rsqrt(variance + eps))


# ---- The layer.


@triton.jit
def normalise(
    # Tensors.
    x,  # [N, C, H, W]
    y,  # like x, written
    norm,  # weight, bias, mean, scale
    kept,  # [N], or None
    residual,  # like x, or None
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    SILU: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Compute SiLU of the normalised x, or that, times the image's `kept`, plus `residual`."""
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # What all tiles of the strip have in common.
    coefficients = coefficients_of(strip, norm, shape)
    if kept is not None:
        image_kept = tl.load(kept + strip.image).to(tl.float32)

    # All that follows the statistics at once, rounded once, as it is stored.
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - coefficients.mean
        z = centred * coefficients.factor + coefficients.shift
        if SILU:
            z *= sigmoid(z)
        if kept is not None:
            z *= image_kept
        if residual is not None:
            z += load_tile(residual, tile)
        store_tile(y, tile, z)


# ---- Gradients.


@triton.jit
def gradient_of(gradient, z, SILU: tl.constexpr):
    """Return the gradient of what SiLU is given, [ROWS, COLUMNS], 0 where `gradient` is.

    gradient: of what SiLU makes. z: what SiLU is given.
    """
    if SILU:
        share = sigmoid(z)
        gradient *= silu_slope(share, z * share)
    return gradient


@triton.jit
def sum_gradients(
    # Tensors.
    x,  # [N, C, H, W]
    dy,  # like x
    norm,  # weight, bias, mean, scale
    kept,  # [N], or None
    sums,  # two, [N, C, chunks] each, written
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    SILU: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Compute what each channel of the strip adds to the gradients of the bias and of the weight.

    They are `sums`.
    """
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # What all tiles of the strip have in common.
    coefficients = coefficients_of(strip, norm, shape)
    if kept is not None:
        image_kept = tl.load(kept + strip.image).to(tl.float32)

    # Each place of a tile adds up for itself; places are added last.
    shifts = tl.zeros(TILE, tl.float32)
    scales = tl.zeros(TILE, tl.float32)
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - coefficients.mean
        z = centred * coefficients.factor + coefficients.shift
        gradient = load_tile(dy, tile)
        if kept is not None:
            gradient *= image_kept
        gradient = gradient_of(gradient, z, SILU)
        shifts += gradient
        scales += gradient * centred

    # The factor that all differences of a channel have in common is applied to their sum.
    store_numbers(sums[0], strip, tl.sum(shifts, 1))
    store_numbers(sums[1], strip, tl.sum(scales, 1) * coefficients.scale)


@triton.jit
def merge_gradients(
    # Tensors.
    sums,  # two, [N, C, chunks] each, as sum_gradients stores them
    weight,  # [C]
    by_group,  # [2, N, groups], written; or None
    dweight,  # [C], written
    dbias,  # [C], written; or None
    sizes,  # images, channels of a group, channels, chunks
    # Constants.
    BLOCK: tl.constexpr,  # parts at a time
):
    """Add up what `sum_gradients` stored.

    A program for each channel adds over images and chunks, which gives the gradients of bias and
    weight. Unless by_group is None, one for each image and group adds over the group's channels,
    times their weights.
    """
    shift_sums, scale_sums = sums
    images, size, channels, chunks = sizes
    program = tl.program_id(0)
    shifts = tl.zeros([BLOCK], tl.float32)
    scales = tl.zeros([BLOCK], tl.float32)
    if program < channels:
        # A channel's numbers are apart: those of an image are neighbours.
        parts = images * chunks
        for start in range(0, parts, BLOCK):
            part = start + tl.arange(0, BLOCK)
            image = (part // chunks).to(tl.int64)
            place = (image * channels + program) * chunks + part % chunks
            shifts += load(shift_sums + place, part < parts)
            scales += load(scale_sums + place, part < parts)
        # In the parameters' dtype, as gradients are.
        total = tl.sum(scales, 0)
        tl.store(dweight + program, total.to(dweight.dtype.element_ty))
        if dbias is not None:
            total = tl.sum(shifts, 0)
            tl.store(dbias + program, total.to(dbias.dtype.element_ty))
    elif by_group is not None:
        # Those of an image's group are neighbours.
        group = program - channels
        groups = channels // size
        parts = size * chunks
        shift_sums += group.to(tl.int64) * parts
        scale_sums += group.to(tl.int64) * parts
        weight += group % groups * size
        for start in range(0, parts, BLOCK):
            part = start + tl.arange(0, BLOCK)
            known = part < parts
            channel_weight = load(weight + part // chunks, known)
            shifts += channel_weight * load(shift_sums + part, known)
            scales += channel_weight * load(scale_sums + part, known)
        # Where mean and scale of the group are in their tensors, too.
        tl.store(by_group + group, tl.sum(shifts, 0))
        tl.store(by_group + images * groups + group, tl.sum(scales, 0))


@triton.jit
def input_gradient(
    # Tensors.
    x,  # [N, C, H, W]
    dy,  # like x
    norm,  # weight, bias, mean, scale
    kept,  # [N], or None
    group_sums,  # two, [N, groups] each: see subtrahends_of
    dx,  # like x, written
    dresidual,  # like x, written: a copy of dy; or None
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    SILU: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Compute x's gradient, dx, and a copy of dy."""
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # What all tiles of the strip have in common.
    coefficients = coefficients_of(strip, norm, shape)
    if kept is not None:
        image_kept = tl.load(kept + strip.image).to(tl.float32)
    less, less_along = subtrahends_of(strip, coefficients, group_sums, shape)

    # The normalisation's gradient: what SiLU's input gets, less what mean and deviation take of it.
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - coefficients.mean
        z = centred * coefficients.factor + coefficients.shift
        gradient = load_tile(dy, tile)
        if dresidual is not None:
            store_tile(dresidual, tile, gradient)
        if kept is not None:
            gradient *= image_kept
        gradient = gradient_of(gradient, z, SILU) * coefficients.factor
        gradient -= less + centred * less_along
        store_tile(dx, tile, gradient)
