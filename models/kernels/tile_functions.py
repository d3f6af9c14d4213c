"""Functions that the kernels in `group_norm_kernels.py` and `squeeze_kernels.py` are made of.

A program computes a strip: some channels by some pixels of one image. It takes the strip's tiles,
[ROWS, COLUMNS], channels by pixels, one after the other, in either layout. All arithmetic is
float32.

Channels of an image come in blocks of a tile's rows, and pixels of a plane in chunks: a strip is a
block by a chunk. Statistics of a channel are merged from those of parts of its plane, which are
chunks, or rectangles where a convolution has taken the statistics of its output.

Values that belong together are a NamedTuple, as Triton has no other records whose interface is
public. It takes tensors only: a constant that is stored in one is no constant any more.

What a kernel is launched with comes in plain tuples: an argument that is a NamedTuple loses its
names where a program is compiled ahead (`engines/ahead.py`). Those of all kernels over strips are

    shape: channels of a group, channels of x, and pixels of a plane
    norm: weight, [C]; bias, [C], or None; mean, [N, groups]; and one over the standard deviation,
        [N, groups]
    LAYOUT: whether x is channels-last, and a factor of the size that is contiguous in memory
    TILE: rows (channels) and columns (pixels) of a tile
    PIXELS: of a strip, a multiple of a tile's

Tried with Triton 3.6 and 3.8; tests/test_gpu_path.py compiles and launches the kernels.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

STAGES = tl.constexpr(4)  # tiles of a loop that are under way

# The interpreter knows no instruction of a GPU.
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_LOG2_E = tl.constexpr(math.log2(math.e))


class Strip(NamedTuple):
    """A program's part of an image: a tile's channels by at most PIXELS pixels."""

    image: tl.tensor  # its number, int64
    first_channel: tl.tensor
    first_pixel: tl.tensor
    end: tl.tensor  # the pixel behind the last
    channel: tl.tensor  # [ROWS], numbers of the channels
    known: tl.tensor  # [ROWS], whether there are such channels
    place: tl.tensor  # [ROWS], in [N, C, chunks]
    channels: tl.tensor  # of the image
    pixels: tl.tensor  # of the image


class Tile(NamedTuple):
    """Where a tile is. Offsets are two numbers, as 32 bits hold the second, but not the first."""

    start: tl.tensor  # elements before the tile, int64
    inside: tl.tensor  # [ROWS, COLUMNS], elements from there
    mask: tl.tensor  # [ROWS, COLUMNS], whether the strip has the channel and the pixel


class Coefficients(NamedTuple):
    """Numbers of a normalisation for each channel of a strip: y = (x - mean) * factor + shift."""

    group: tl.tensor  # [ROWS], the group's place in [N, groups]
    scale: tl.tensor  # [ROWS], one over the group's standard deviation
    mean: tl.tensor  # [ROWS, 1], the group's
    factor: tl.tensor  # [ROWS, 1], the channel's weight times `scale`
    shift: tl.tensor  # [ROWS, 1], the channel's bias, or 0


@triton.jit
def load(pointers, mask):
    """Load values as float32, 0 outside the mask."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_tile(x, tile):
    """Load a tile of x, [ROWS, COLUMNS], as float32, 0 outside the mask."""
    return load(x + tile.start + tile.inside, tile.mask)


@triton.jit
def store_tile(y, tile, values):
    """Store a tile of y, rounded to its dtype."""
    rounded = values.to(y.dtype.element_ty)
    tl.store(y + tile.start + tile.inside, rounded, mask=tile.mask)


@triton.jit
def store_numbers(to, strip, numbers):
    """Store a number of each channel of the strip, [ROWS]. to: [N, C, chunks]."""
    tl.store(to + strip.place, numbers, mask=strip.known)


@triton.jit
def strip_of(shape, LAYOUT: tl.constexpr, TILE: tl.constexpr, PIXELS: tl.constexpr):
    """Return the program's Strip."""
    _, channels, pixels = shape
    CHANNELS_LAST: tl.constexpr = LAYOUT[0]
    ALIGNED: tl.constexpr = LAYOUT[1]
    ROWS: tl.constexpr = TILE[0]

    # The compiler is to know the contiguous size's factor: else it would load, and store, each
    # element by itself.
    if CHANNELS_LAST:
        channels = channels // ALIGNED * ALIGNED
    else:
        pixels = pixels // ALIGNED * ALIGNED

    # Which block of channels, which chunk of pixels, and of which image. Neighbours in memory run
    # together, so that a line of the cache is read once.
    chunks = tl.cdiv(pixels, PIXELS)
    blocks = tl.cdiv(channels, ROWS)
    program = tl.program_id(0)
    if CHANNELS_LAST:
        block = program % blocks
        chunk = program // blocks % chunks
    else:
        block = program // chunks % blocks
        chunk = program % chunks
    # The image in 64 bits, since all of its products are: a tensor may have 2^31 elements.
    image = (program // chunks // blocks).to(tl.int64)

    first_pixel = chunk * PIXELS
    channel = block * ROWS + tl.arange(0, ROWS)
    return Strip(
        image=image,
        first_channel=block * ROWS,
        first_pixel=first_pixel,
        end=tl.minimum(first_pixel + PIXELS, pixels),
        channel=channel,
        known=channel < channels,
        place=(image * channels + channel) * chunks + chunk,
        channels=channels,
        pixels=pixels,
    )


@triton.jit
def tile_at(strip, first_pixel, LAYOUT: tl.constexpr, TILE: tl.constexpr):
    """Return the strip's Tile that begins at `first_pixel`."""
    # Only the start needs 64 bits: a tile's elements are within one image.
    rows = tl.arange(0, TILE[0])
    columns = tl.arange(0, TILE[1])
    if LAYOUT[0]:  # channels-last
        start = (strip.image * strip.pixels + first_pixel) * strip.channels + strip.first_channel
        inside = rows[:, None] + columns[None, :] * strip.channels
    else:
        start = (strip.image * strip.channels + strip.first_channel) * strip.pixels + first_pixel
        inside = rows[:, None] * strip.pixels + columns[None, :]
    before_end = first_pixel + columns < strip.end
    mask = strip.known[:, None] & before_end[None, :]
    return Tile(start, inside, mask)


@triton.jit
def coefficients_of(strip, norm, shape):
    """Return the Coefficients of a strip's channels."""
    weight, bias, means, scales = norm
    size, _, _ = shape
    # Loaded by channel, though channels of a group have the same: a strip's channels may belong to
    # several groups.
    group = strip.image * (strip.channels // size) + strip.channel // size
    mean = load(means + group, strip.known)
    scale = load(scales + group, strip.known)
    factor = scale * load(weight + strip.channel, strip.known)
    if bias is None:
        shift = tl.zeros_like(factor)
    else:
        shift = load(bias + strip.channel, strip.known)
    return Coefficients(
        group=group,
        scale=scale,
        mean=mean[:, None],
        factor=factor[:, None],
        shift=shift[:, None],
    )


@triton.jit
def subtrahends_of(strip, coefficients, group_sums, shape):
    """Return what is subtracted from x's gradient: a number, and one for each unit of x - mean.

    Both are of each channel, [ROWS, 1]. They are subtracted from the gradient of what SiLU is given
    times the factor of the `coefficients`.

    group_sums: two sums over each group, [N, groups] each: of that gradient times the weight, and
    of that times the normalised values.
    """
    size, _, pixels = shape
    elements = 1.0 * size * pixels
    # With c = x - mean, s = 1 / deviation, and g the gradient before the activation times the
    # weight: dx = s (g - mean(g) - c s mean(g c s)), with means over the elements of a group.
    shift = load(group_sums[0] + coefficients.group, strip.known) / elements
    along = load(group_sums[1] + coefficients.group, strip.known) / elements
    shift = shift * coefficients.scale
    along = along * coefficients.scale * coefficients.scale
    return shift[:, None], along[:, None]


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + exp(-z)).

    Compiled with a power and a reciprocal that are off by 2 ulp and 1 ulp at most (PTX) and take
    what is below 2^-126 for 0; a division, and a power that does not, take more instructions.
    """
    if _COMPILED:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            constraints="=f,f",
            args=[z * -_LOG2_E],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            constraints="=f,f",
            args=[1 + power],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.sigmoid(z)


@triton.jit
def silu_slope(share, activation):
    """Return the derivative of SiLU at z. share: sigmoid(z). activation: z times that."""
    # s + z s (1 - s), from two products that the activation has made already.
    return share + (activation - activation * share)
