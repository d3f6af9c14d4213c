"""Triton kernels of normalisation, SiLU, and squeeze and excitation: `squeeze.py` launches them.

Strips, tiles and their arithmetic are those of `tile_functions.py`. Between pooling and gates are
small kernels with a program for each image, and one that adds the parameters' gradients up over
images in a fixed order. The two small layers are `reduce` and `expand`; RANK and BLOCK are numbers
of their rows and channels at a time. For an image:

    pooled = means of the activations over pixels, [C]
    squeezed = reduce(pooled), [rank]
    gates = sigmoid(expand(silu(squeezed))), [C]
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

# ---- Forward.


@triton.jit
def sum_activations(
    # Tensors.
    x,  # [N, C, H, W]
    norm,  # weight, bias, mean, scale
    sums,  # [N, C, chunks], written
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Add up the activations of each channel of the strip: normalised x after SiLU."""
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # What all tiles of the strip have in common.
    coefficients = coefficients_of(strip, norm, shape)

    # What is outside the strip was loaded as 0, whose activation is another number.
    total = tl.zeros(TILE, tl.float32)
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - coefficients.mean
        z = centred * coefficients.factor + coefficients.shift
        activation = z * sigmoid(z)
        total += tl.where(tile.mask, activation, 0.0)
    store_numbers(sums, strip, tl.sum(total, 1))


@triton.jit
def merged(sums, channel, known, chunks, CHUNKS: tl.constexpr):
    """Return sums over the channels' chunks, CHUNKS at a time. sums: of one image, [C, chunks]."""
    # In an order that depends on the shape alone: the bits repeat.
    total = tl.zeros([channel.shape[0], CHUNKS], tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        mask = known[:, None] & (chunk < chunks)
        total += load(sums + channel[:, None] * chunks + chunk, mask)
    return tl.sum(total, 1)


@triton.jit
def channels_by_hidden(pointers, channel, hidden, rank):
    """Return where elements of [C, rank] lie, as [channel, hidden]."""
    return pointers + channel[:, None] * rank + hidden[None, :]


@triton.jit
def hidden_by_channels(pointers, hidden, channel, channels):
    """Return where elements of [rank, C] lie, as [hidden, channel]."""
    return pointers + hidden[:, None] * channels + channel[None, :]


@triton.jit
def gate(
    # Tensors.
    sums,  # [N, C, chunks], as sum_activations stores them
    reduce,  # [rank, C]
    reduce_bias,  # [rank]
    expand,  # [C, rank]
    expand_bias,  # [C]
    pooled,  # [N, C], written
    squeezed,  # [N, rank], written
    gates,  # [N, C], written
    # Sizes.
    channels,
    pixels,
    chunks,
    rank,
    # Constants.
    RANK: tl.constexpr,  # at least `rank`
    BLOCK: tl.constexpr,  # channels at a time
    CHUNKS: tl.constexpr,  # chunks at a time
):
    """Compute an image's gates from the sums of its activations."""
    image = tl.program_id(0)
    hidden = tl.arange(0, RANK)
    known_hidden = hidden < rank
    sums += image.to(tl.int64) * channels * chunks

    # Means over pixels, and their product with `reduce`, block after block of channels.
    total = load(reduce_bias + hidden, known_hidden)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        known = channel < channels
        mean = merged(sums, channel, known, chunks, CHUNKS) / pixels
        tl.store(pooled + image * channels + channel, mean, mask=known)
        # [RANK, BLOCK]
        mask = known_hidden[:, None] & known[None, :]
        pointers = hidden_by_channels(reduce, hidden, channel, channels)
        weights = load(pointers, mask)
        total += tl.sum(weights * mean[None, :], 1)
    tl.store(squeezed + image * rank + hidden, total, mask=known_hidden)

    # The product with `expand`, of what is still in registers.
    total *= sigmoid(total)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        known = channel < channels
        # [BLOCK, RANK]
        mask = known[:, None] & known_hidden[None, :]
        pointers = channels_by_hidden(expand, channel, hidden, rank)
        weights = load(pointers, mask)
        z = tl.sum(weights * total[None, :], 1)
        z += load(expand_bias + channel, known)
        tl.store(gates + image * channels + channel, sigmoid(z), mask=known)


@triton.jit
def excite(
    # Tensors.
    x,  # [N, C, H, W]
    norm,  # weight, bias, mean, scale
    gates,  # [N, C]
    y,  # like x, written
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Compute the layer's output, from statistics and gates."""
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # What all tiles of the strip have in common.
    coefficients = coefficients_of(strip, norm, shape)
    _, channels, _ = shape
    gates += strip.image * channels
    channel_gate = load(gates + strip.channel, strip.known)[:, None]

    # The activations are computed again, with their gates.
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - coefficients.mean
        z = centred * coefficients.factor + coefficients.shift
        z *= sigmoid(z) * channel_gate
        store_tile(y, tile, z)


# ---- Backward.


@triton.jit
def sum_gradients(
    # Tensors.
    x,  # [N, C, H, W]
    norm,  # weight, bias, mean, scale
    dy,  # like x
    sums,  # five, [N, C, chunks] each, written
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Add up five numbers of each channel of the strip.

    They are dy times the activation; dy times its slope, and that times the normalised value; the
    slope, and that times the normalised value.
    """
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # What all tiles of the strip have in common.
    coefficients = coefficients_of(strip, norm, shape)

    # Two kinds of gradient reach an activation: dy times its gate, and its share in the mean from
    # which the gates are made. Neither factor is known yet, but both are the same for all pixels of
    # a channel: so the sums of their multiples are enough.
    activations = tl.zeros(TILE, tl.float32)
    gradients = tl.zeros(TILE, tl.float32)
    gradients_along = tl.zeros(TILE, tl.float32)
    slopes = tl.zeros(TILE, tl.float32)
    slopes_along = tl.zeros(TILE, tl.float32)
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - coefficients.mean
        gradient = load_tile(dy, tile)
        z = centred * coefficients.factor + coefficients.shift
        share = sigmoid(z)
        activation = z * share
        # dy is 0 outside the strip, the slope is not.
        slope = tl.where(tile.mask, silu_slope(share, activation), 0.0)
        activations += gradient * activation
        gradients += gradient * slope
        gradients_along += gradient * slope * centred
        slopes += slope
        slopes_along += slope * centred

    # Normalised values are differences times the scale, which is applied to their sums.
    gradient_scales = tl.sum(gradients_along, 1) * coefficients.scale
    slope_scales = tl.sum(slopes_along, 1) * coefficients.scale
    store_numbers(sums[0], strip, tl.sum(activations, 1))
    store_numbers(sums[1], strip, tl.sum(gradients, 1))
    store_numbers(sums[2], strip, gradient_scales)
    store_numbers(sums[3], strip, tl.sum(slopes, 1))
    store_numbers(sums[4], strip, slope_scales)


@triton.jit
def gate_gradients(
    # Tensors.
    sums,  # [5, N, C, chunks], as sum_gradients stores them
    weight,  # [C], of the normalisation
    reduce,  # [rank, C]
    expand,  # [C, rank]
    squeezed,  # [N, rank]
    gates,  # [N, C]
    dexpanded,  # [N, C], written: gradient of what `expand` makes
    dsqueezed,  # [N, rank], written: gradient of what `reduce` makes
    dpooled,  # [N, C], written: gradient of a pixel's share in what is pooled
    by_channel,  # [2, N, C], written: what an image adds to the gradients of bias and weight
    by_group,  # [2, N, groups], written: their sums over a group times its weights
    # Strides and sizes.
    stride,  # of the first dimension of sums
    images,
    size,  # channels of a group
    channels,
    pixels,
    chunks,
    rank,
    # Constants.
    RANK: tl.constexpr,  # at least `rank`
    BLOCK: tl.constexpr,  # channels at a time
    CHUNKS: tl.constexpr,  # chunks at a time
):
    """Go back through an image's gates, to its groups."""
    image = tl.program_id(0)
    hidden = tl.arange(0, RANK)
    known_hidden = hidden < rank
    sums += image.to(tl.int64) * channels * chunks

    # From the gates to what `reduce` makes.
    total = tl.zeros([RANK], tl.float32)
    for first in range(0, channels, BLOCK):
        channel = first + tl.arange(0, BLOCK)
        known = channel < channels
        place = image * channels + channel
        channel_gate = load(gates + place, known)
        gradient = merged(sums, channel, known, chunks, CHUNKS)
        gradient = gradient * channel_gate * (1 - channel_gate)
        tl.store(dexpanded + place, gradient, mask=known)
        # [BLOCK, RANK]
        mask = known[:, None] & known_hidden[None, :]
        pointers = channels_by_hidden(expand, channel, hidden, rank)
        weights = load(pointers, mask)
        total += tl.sum(weights * gradient[:, None], 0)

    # Through SiLU, whose input was stored.
    z = load(squeezed + image * rank + hidden, known_hidden)
    share = sigmoid(z)
    total *= silu_slope(share, z * share)
    tl.store(dsqueezed + image * rank + hidden, total, mask=known_hidden)

    # From there to the means over pixels, and with these to all that reaches the normalisation.
    # Group after group, as each one's sum is over its channels alone.
    groups = channels // size
    for group in range(0, groups):
        group_shift = 0.0
        group_along = 0.0
        for first in range(group * size, (group + 1) * size, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            known = channel < (group + 1) * size
            # [RANK, BLOCK]
            mask = known_hidden[:, None] & known[None, :]
            pointers = hidden_by_channels(reduce, hidden, channel, channels)
            weights = load(pointers, mask)
            gradient = tl.sum(weights * total[:, None], 0) / pixels
            place = image * channels + channel
            tl.store(dpooled + place, gradient, mask=known)
            # The gradients before the activation, by the gates and by the means.
            channel_gate = load(gates + place, known)
            shift = channel_gate * merged(sums + stride, channel, known, chunks, CHUNKS)
            shift += gradient * merged(sums + 3 * stride, channel, known, chunks, CHUNKS)
            along = channel_gate * merged(sums + 2 * stride, channel, known, chunks, CHUNKS)
            along += gradient * merged(sums + 4 * stride, channel, known, chunks, CHUNKS)
            tl.store(by_channel + place, shift, mask=known)
            tl.store(by_channel + images * channels + place, along, mask=known)
            channel_weight = load(weight + channel, known)
            group_shift += tl.sum(shift * channel_weight, 0)
            group_along += tl.sum(along * channel_weight, 0)
        # [2, N, groups]
        tl.store(by_group + image * groups + group, group_shift)
        tl.store(by_group + (images + image) * groups + group, group_along)


@triton.jit
def parameter_gradients(
    # Tensors that are read: see gate_gradients.
    by_channel,  # [2, N, C]
    dexpanded,  # [N, C]
    dsqueezed,  # [N, rank]
    pooled,  # [N, C]
    squeezed,  # [N, rank]
    # Tensors that are written.
    dweight,  # [C]
    dbias,  # [C], or None
    dreduce,  # [rank, C]
    dreduce_bias,  # [rank]
    dexpand,  # [C, rank]
    dexpand_bias,  # [C]
    # Sizes.
    images,
    channels,
    rank,
    # Constants.
    RANK: tl.constexpr,  # at least `rank`
    BLOCK: tl.constexpr,  # channels of a program
    IMAGES: tl.constexpr,  # images at a time
):
    """Add up gradients over images, of BLOCK channels; the first program adds dreduce_bias."""
    # A program adds over all images, so nothing is left to merge, and the order is fixed.
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hidden = tl.arange(0, RANK)
    known = channel < channels
    known_hidden = hidden < rank
    shifts = tl.zeros([BLOCK], tl.float32)
    scales = tl.zeros([BLOCK], tl.float32)
    expand_biases = tl.zeros([BLOCK], tl.float32)
    reduce_biases = tl.zeros([RANK], tl.float32)
    expands = tl.zeros([BLOCK, RANK], tl.float32)
    reduces = tl.zeros([RANK, BLOCK], tl.float32)

    for first in range(0, images, IMAGES):
        image = first + tl.arange(0, IMAGES)
        # Of channels, [IMAGES, BLOCK].
        mask = (image < images)[:, None] & known[None, :]
        place = image[:, None] * channels + channel[None, :]
        shifts += tl.sum(load(by_channel + place, mask), 0)
        scales += tl.sum(load(by_channel + images * channels + place, mask), 0)
        expanded = load(dexpanded + place, mask)
        means = load(pooled + place, mask)
        # Of what `reduce` makes, [IMAGES, RANK].
        mask = (image < images)[:, None] & known_hidden[None, :]
        place = image[:, None] * rank + hidden[None, :]
        z = load(squeezed + place, mask)
        gradient = load(dsqueezed + place, mask)
        expand_biases += tl.sum(expanded, 0)
        reduce_biases += tl.sum(gradient, 0)
        # "ieee": tensor cores would round the factors to 10 bits (TF32).
        activation = z * sigmoid(z)
        expands = tl.dot(tl.trans(expanded), activation, expands, input_precision="ieee")
        reduces = tl.dot(tl.trans(gradient), means, reduces, input_precision="ieee")

    # Store, in the parameters' dtype, which is the same for all of a layer.
    kind = dweight.dtype.element_ty
    tl.store(dweight + channel, scales.to(kind), mask=known)
    if dbias is not None:
        tl.store(dbias + channel, shifts.to(kind), mask=known)
    tl.store(dexpand_bias + channel, expand_biases.to(kind), mask=known)
    mask = known[:, None] & known_hidden[None, :]
    pointers = channels_by_hidden(dexpand, channel, hidden, rank)
    tl.store(pointers, expands.to(kind), mask=mask)
    mask = known_hidden[:, None] & known[None, :]
    pointers = hidden_by_channels(dreduce, hidden, channel, channels)
    tl.store(pointers, reduces.to(kind), mask=mask)
    # All programs have added this one, because the product needs what it is added from.
    if tl.program_id(0) == 0:
        tl.store(dreduce_bias + hidden, reduce_biases.to(kind), mask=known_hidden)


@triton.jit
def input_gradient(
    # Tensors.
    x,  # [N, C, H, W]
    norm,  # weight, bias, mean, scale
    dy,  # like x
    gates,  # [N, C]
    dpooled,  # [N, C]: see gate_gradients
    group_sums,  # two, [N, groups] each: see subtrahends_of
    dx,  # like x, written
    shape,  # channels of a group, channels, pixels
    # Constants: see tile_functions.py.
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """Compute x's gradient, dx, as group_norm's kernel does.

    What reaches the activation is dy times the gates, plus the gradient of the means.
    """
    strip = strip_of(shape, LAYOUT, TILE, PIXELS)
    # What all tiles of the strip have in common.
    coefficients = coefficients_of(strip, norm, shape)
    less, less_along = subtrahends_of(strip, coefficients, group_sums, shape)
    _, channels, _ = shape
    place = strip.image * channels + strip.channel
    channel_gate = load(gates + place, strip.known)[:, None]
    channel_dpooled = load(dpooled + place, strip.known)[:, None]

    # From what reaches the activations to the input, as in group_norm's kernel.
    for first_pixel in tl.range(strip.first_pixel, strip.end, TILE[1], num_stages=STAGES):
        tile = tile_at(strip, first_pixel, LAYOUT, TILE)
        centred = load_tile(x, tile) - coefficients.mean
        z = centred * coefficients.factor + coefficients.shift
        share = sigmoid(z)
        gradient = load_tile(dy, tile) * channel_gate
        gradient += channel_dpooled
        gradient *= silu_slope(share, z * share) * coefficients.factor
        gradient -= less + centred * less_along
        store_tile(dx, tile, gradient)
