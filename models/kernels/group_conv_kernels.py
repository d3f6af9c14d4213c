"""Triton kernels of grouped convolution: `group_conv.py` launches them.

A tile is [GROUPS, PIXELS, GROUP]: groups, pixels of one line of an image, and channels of a group.
Lines are scalars, so what concerns them is computed once a tile. Weights come packed, [groups, k,
k, out, in]: each group's matrix at each point of the kernel is contiguous. In their own layout a
matrix's elements are k^2 apart: each program would load them one by one, 72 to 200 loads where 9 to
25 do, and most from several lines of the cache. Sums are float32 and added in an order that depends
on shapes alone, without atomics, so results repeat bit for bit.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# The kernels are compiled once whatever these sizes are: of `channels` alone it is worth knowing
# that 16 divides them.
_SIZES = ["blocks", "tiles", "height", "width", "out_height", "out_width", "top", "left"]
_SIZES += ["all_blocks", "blocks_each"]


class _Images(NamedTuple):
    """Sizes of a tensor [N, C, H, W]."""

    channels: tl.tensor
    height: tl.tensor
    width: tl.tensor


class _Program(NamedTuple):
    """A program's channels, and what remains of its number."""

    number: tl.tensor  # of the program among those of its groups
    group: tl.tensor  # [GROUPS], numbers of the groups
    channel: tl.tensor  # [GROUPS, GROUP], numbers of the channels


class _Tile(NamedTuple):
    """Numbers of a program's tile in its line, of its block of lines, and of its image."""

    tile: tl.tensor
    block: tl.tensor
    image: tl.tensor


@triton.jit(do_not_specialize=_SIZES)
def output(
    # Tensors.
    x,  # [N, C, height, width]
    weight,  # [groups, k, k, out, in]
    y,  # [N, C, out_height, out_width], written
    means,  # [N, C, chunks], written: mean of the tile's part of y, as it is stored; or None
    squares,  # like means, written: sum of squared differences from it; or None
    # Sizes.
    blocks,  # of lines, of an image
    tiles,  # of a line
    channels,
    height,
    width,
    out_height,
    out_width,
    top,  # lines of padding before the image
    left,  # columns of padding before the image
    # Constants of a program: it computes LINES by PIXELS of y.
    LINES: tl.constexpr,
    PIXELS: tl.constexpr,  # columns
    GROUPS: tl.constexpr,  # a warp each
    # Constants of the convolution.
    GROUP: tl.constexpr,  # channels of a group
    KERNEL: tl.constexpr,  # k
    STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,  # layout of x and y
    REVERSED: tl.constexpr,
):
    """Compute y for some groups, PIXELS columns and LINES lines.

    A line of x is read KERNEL times, not KERNEL^2.

    REVERSED: the kernel is taken from its last point to its first and its matrices are transposed,
    as the gradient of the input of a convolution with stride 1 wants.
    """
    # The program's tiles of y: LINES of them, one under the other.
    program = _program(channels, GROUPS, GROUP)
    tile = _tile(program.number, tiles, blocks)
    column = tile.tile * PIXELS + tl.arange(0, PIXELS)
    row = tile.block * LINES

    # Lines of x that the lines of y reach, and their first columns. They may begin in the padding,
    # before the tensor: such pixels are masked.
    x_sizes = _Images(channels, height, width)
    first_row = row * STRIDE - top
    first_column = column * STRIDE - left
    at = x + _places(
        x_sizes,
        tile.image,
        program.channel,
        row=first_row,
        column=first_column,
        CHANNELS_LAST=CHANNELS_LAST,
    )
    row_step, column_step = _steps(x_sizes, CHANNELS_LAST)
    extents = _extents(x_sizes, first_row, (LINES - 1) * STRIDE + KERNEL)
    sums = (tl.zeros((GROUPS, PIXELS, GROUP), tl.float32),) * LINES

    # The product wants [in, out]. Loading that takes fewer instructions than transposing what was
    # loaded if x is channels-last, and more if it is not; with stride 2 it would spill registers.
    loaded: tl.constexpr = CHANNELS_LAST and STRIDE == 1
    matrix = _matrix(weight, program.group, KERNEL, GROUP, TRANSPOSED=loaded and not REVERSED)
    step: tl.constexpr = -GROUP * GROUP if REVERSED else GROUP * GROUP
    if REVERSED:
        matrix += (KERNEL * KERNEL - 1) * GROUP * GROUP

    # Column after column of the kernel: its matrices and the lines are loaded, then all lines of y
    # are served.
    for kx in range(KERNEL):
        weights: tl.tuple = ()
        for ky in tl.static_range(KERNEL):
            point_weights = tl.load(matrix + step * (ky * KERNEL))
            weights += (point_weights if loaded or REVERSED else tl.trans(point_weights, 0, 2, 1),)
        lines = _load(at, first_column + kx, row_step, extents)
        totals: tl.tuple = ()
        for line in tl.static_range(LINES):
            total = sums[line]
            for ky in tl.static_range(KERNEL):
                values = lines[line * STRIDE + ky]
                total = tl.dot(values, weights[ky], total, input_precision="ieee")
            totals += (total,)
        sums = totals
        at += column_step
        matrix += step

    # Where the lines of y are.
    y_sizes = _Images(channels, out_height, out_width)
    at = y + _places(
        y_sizes,
        tile.image,
        program.channel,
        row=row,
        column=column,
        CHANNELS_LAST=CHANNELS_LAST,
    )
    row_step, _ = _steps(y_sizes, CHANNELS_LAST)
    extents = _extents(y_sizes, row, LINES)
    for line in tl.static_range(LINES):
        _store(at, sums[line], column, extents[line])
        at += row_step

    # Statistics of what was stored, while it is in registers: from sums of differences from the
    # first line's mean, and of their squares. A large mean then takes no digits.
    if means is not None:
        inside = tl.minimum(PIXELS, out_width - tile.tile * PIXELS)
        first_line = _stored(sums[0], 0.0, column, extents[0], y)
        origin = tl.sum(first_line, 1) * (1.0 / inside)
        total = tl.zeros((GROUPS, PIXELS, GROUP), tl.float32)
        squared = tl.zeros((GROUPS, PIXELS, GROUP), tl.float32)
        for line in tl.static_range(LINES):
            centred = _stored(sums[line], origin[:, None, :], column, extents[line], y)
            total += centred
            squared += centred * centred
        # From the origin to the mean of the tile, which at an edge has fewer pixels.
        count = inside * tl.minimum(LINES, out_height - row)
        shift = tl.sum(total, 1) * (1.0 / count)
        channel_place = tile.image.to(tl.int64) * channels + program.channel
        place = channel_place * (blocks * tiles) + tile.block * tiles + tile.tile
        # Rounding may leave less than 0 where all values are alike.
        squared_sum = tl.sum(squared, 1) - shift * shift * count
        tl.store(means + place, origin + shift)
        tl.store(squares + place, tl.maximum(squared_sum, 0.0))


@triton.jit(do_not_specialize=_SIZES)
def strided_input_gradient(
    # Tensors.
    dy,  # [N, C, out_height, out_width]
    weight,  # [groups, k, k, out, in]
    dx,  # [N, C, height, width], written
    # Sizes: see output; blocks and tiles are those of dx, of STRIDE LINES lines and STRIDE PIXELS
    # columns.
    blocks,
    tiles,
    channels,
    height,
    width,
    out_height,
    out_width,
    top,
    left,
    # Constants: see output. LINES and PIXELS are of one phase of lines and of columns.
    LINES: tl.constexpr,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """Compute dx for some groups, STRIDE PIXELS columns and STRIDE LINES lines.

    Row r of x is under row ky of the kernel for row (r + top - ky) / STRIDE of y, where that is
    whole: with r + top = STRIDE m + phase and ky = STRIDE tap + phase it is m - tap. So all phases
    read the same lines of dy.
    """
    # `column` and `row` are m of the docstring, from the first that holds a pixel of x.
    TAPS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    program = _program(channels, GROUPS, GROUP)
    tile = _tile(program.number, tiles, blocks)
    column = left // STRIDE + tile.tile * PIXELS + tl.arange(0, PIXELS)
    row = top // STRIDE + tile.block * LINES

    # Lines of dy that reach the lines of dx, and their first columns.
    y_sizes = _Images(channels, out_height, out_width)
    first_row = row - (TAPS - 1)
    first_column = column - (TAPS - 1)
    at = dy + _places(
        y_sizes,
        tile.image,
        program.channel,
        row=first_row,
        column=first_column,
        CHANNELS_LAST=CHANNELS_LAST,
    )
    row_step, column_step = _steps(y_sizes, CHANNELS_LAST)
    extents = _extents(y_sizes, first_row, LINES + TAPS - 1)

    # Lines by phases of lines by phases of columns: a tuple has one dimension.
    sums = (tl.zeros((GROUPS, PIXELS, GROUP), tl.float32),) * (LINES * STRIDE * STRIDE)
    matrix = _matrix(weight, program.group, KERNEL, GROUP, TRANSPOSED=False)
    for step in tl.static_range(TAPS):
        # Columns of the kernel whose tap is the last but `step`, one for each phase.
        weights: tl.tuple = ()
        for ky in tl.static_range(KERNEL):
            for phase in tl.static_range(STRIDE):
                if (TAPS - 1 - step) * STRIDE + phase < KERNEL:
                    shift = (ky * KERNEL + (TAPS - 1 - step) * STRIDE + phase) * GROUP * GROUP
                    weights += (tl.load(matrix + shift),)
                else:  # not used: beyond the kernel
                    weights += (0,)
        # dy through these columns; every line of it serves all lines and phases that it reaches.
        lines = _load(at, first_column + step, row_step, extents)
        totals: tl.tuple = ()
        for line in tl.static_range(LINES):
            for above in tl.static_range(STRIDE):
                for before in tl.static_range(STRIDE):
                    total = sums[(line * STRIDE + above) * STRIDE + before]
                    for tap in tl.static_range(TAPS):
                        # In the condition: a variable would be a tensor, the branch one that runs.
                        if (
                            tap * STRIDE + above < KERNEL
                            and (TAPS - 1 - step) * STRIDE + before < KERNEL
                        ):
                            values = lines[line - tap + TAPS - 1]
                            matrices = weights[(tap * STRIDE + above) * STRIDE + before]
                            total = tl.dot(values, matrices, total, input_precision="ieee")
                    totals += (total,)
        sums = totals
        at += column_step

    # Back to lines and columns of x. Neighbouring columns are sums of other phases.
    x_sizes = _Images(channels, height, width)
    row = row * STRIDE - top
    column = column * STRIDE - left
    at = dx + _places(
        x_sizes,
        tile.image,
        program.channel,
        row=row,
        column=column,
        CHANNELS_LAST=CHANNELS_LAST,
    )
    row_step, column_step = _steps(x_sizes, CHANNELS_LAST)
    extents = _extents(x_sizes, row, LINES * STRIDE)
    for line in tl.static_range(LINES * STRIDE):
        for phase in tl.static_range(STRIDE):
            values = sums[line * STRIDE + phase]
            _store(at + phase * column_step, values, column + phase, extents[line])
        at += row_step


@triton.jit(do_not_specialize=_SIZES)
def weight_gradient(
    # Tensors.
    x,  # [N, C, height, width]
    dy,  # [N, C, out_height, out_width]
    sums,  # [parts, groups, k, k, out, in], written
    # Sizes: see output.
    blocks,
    tiles,
    channels,
    height,
    width,
    out_height,
    out_width,
    top,
    left,
    all_blocks,  # of all images
    blocks_each,  # of a part
    # Constants: see output.
    LINES: tl.constexpr,
    PIXELS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """Add up over `blocks_each` blocks of LINES lines, of some groups and one column of the kernel.

    A round's tiles are loaded before those of the round before are multiplied: a warp has little
    else to do while it waits for them.
    """
    # The program's column of the kernel, and its tiles. Programs of the columns run together: they
    # read the same pixels.
    program = _program(channels, GROUPS, GROUP)
    kx = (program.number % KERNEL).to(tl.int32)
    part = (program.number // KERNEL).to(tl.int32)
    first = part * blocks_each * tiles
    end = tl.minimum(part * blocks_each + blocks_each, all_blocks) * tiles
    sizes = (blocks, tiles, channels, height, width, out_height, out_width, top, left)

    # A product for each line of the kernel, [out, in] for each group.
    products = (tl.zeros((GROUPS, GROUP, GROUP), tl.float32),) * KERNEL
    gradients, lines = _load_round(
        x,
        dy,
        first,
        kx=kx,
        channel=program.channel,
        sizes=sizes,
        LINES=LINES,
        PIXELS=PIXELS,
        KERNEL=KERNEL,
        STRIDE=STRIDE,
        CHANNELS_LAST=CHANNELS_LAST,
    )
    # The last round loads its own tile again, as there is no next one.
    for number in range(first, end):
        next_gradients, next_lines = _load_round(
            x,
            dy,
            tl.minimum(number + 1, end - 1),
            kx=kx,
            channel=program.channel,
            sizes=sizes,
            LINES=LINES,
            PIXELS=PIXELS,
            KERNEL=KERNEL,
            STRIDE=STRIDE,
            CHANNELS_LAST=CHANNELS_LAST,
        )
        totals: tl.tuple = ()
        for ky in tl.static_range(KERNEL):
            total = products[ky]
            for line in tl.static_range(LINES):
                gradient = tl.trans(gradients[line], 0, 2, 1)
                total = tl.dot(gradient, lines[line * STRIDE + ky], total, input_precision="ieee")
            totals += (total,)
        products = totals
        gradients = next_gradients
        lines = next_lines

    # Each part has memory of its own, and add_parts adds them up: atomics would add in any order.
    part_sums = sums + part.to(tl.int64) * channels * GROUP * KERNEL * KERNEL
    at = _matrix(part_sums, program.group, KERNEL, GROUP, TRANSPOSED=False)
    for ky in tl.static_range(KERNEL):
        tl.store(at + (ky * KERNEL + kx) * GROUP * GROUP, products[ky])


@triton.jit(do_not_specialize=["parts"])
def add_parts(
    # Tensors.
    sums,  # [parts, groups, POINTS, out, in]
    gradient,  # [groups, out, in, POINTS], or [groups, out, POINTS, in] if CHANNELS_LAST; written
    # Sizes.
    parts,
    elements,  # of the gradient
    # Constants.
    PARTS: tl.constexpr,  # at a time
    ELEMENTS: tl.constexpr,  # of a program
    POINTS: tl.constexpr,  # of the kernel, k^2
    GROUP: tl.constexpr,  # channels of a group
    CHANNELS_LAST: tl.constexpr,  # layout of the gradient
):
    """Add up ELEMENTS of the weights' gradient; sums are read in their order."""
    # PARTS at a time, each lane some of them in order, and the lanes last.
    place = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    known = place < elements
    part = tl.arange(0, PARTS)
    at = sums + part[:, None] * elements + place[None, :]
    totals = tl.zeros((PARTS, ELEMENTS), tl.float32)
    for first in range(0, parts, PARTS):
        mask = (first + part < parts)[:, None] & known[None, :]
        totals += tl.load(at, mask=mask, other=0.0)
        at += PARTS * elements

    # Where an element goes: its numbers in [groups, POINTS, out, in].
    inner = place % GROUP
    outer = place // GROUP % GROUP
    point = place // (GROUP * GROUP) % POINTS
    group = place // (GROUP * GROUP * POINTS)
    if CHANNELS_LAST:
        target = ((group * GROUP + outer) * POINTS + point) * GROUP + inner
    else:
        target = ((group * GROUP + outer) * GROUP + inner) * POINTS + point
    total = tl.sum(totals, 0).to(gradient.dtype.element_ty)
    tl.store(gradient + target, total, mask=known)


# ---- Where programs are.


@triton.jit
def _program(channels, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return the _Program.

    Programs that run together read what lies together in a channels-last tensor.
    """
    program = tl.program_id(0).to(tl.uint32)
    packs = (channels // (GROUPS * GROUP)).to(tl.uint32)
    group = (program % packs).to(tl.int32) * GROUPS + tl.arange(0, GROUPS)
    channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return _Program(program // packs, group, channel)


@triton.jit
def _tile(number, tiles, blocks):
    """Return the _Tile of which `number`, uint32, is the number among all images' tiles."""
    # Unsigned: a GPU divides signed numbers by more instructions.
    tiles = tiles.to(tl.uint32)
    blocks = blocks.to(tl.uint32)
    block = number // tiles
    return _Tile(
        tile=(number % tiles).to(tl.int32),
        block=(block % blocks).to(tl.int32),
        image=(block // blocks).to(tl.int32),
    )


@triton.jit
def _places(images, image, channel, row, column, CHANNELS_LAST: tl.constexpr):
    """Return elements from the start of a tensor to each of a tile, 64 bits. images: its sizes."""
    start = image.to(tl.int64) * (images.channels * images.height * images.width)
    channel = channel[:, None, :]
    column = column[None, :, None]
    if CHANNELS_LAST:
        return start + ((row * images.width + column) * images.channels + channel)
    else:
        return start + ((channel * images.height + row) * images.width + column)


@triton.jit
def _steps(images, CHANNELS_LAST: tl.constexpr):
    """Return elements from a line to the next, and from a pixel to the next. images: sizes."""
    if CHANNELS_LAST:
        return images.width * images.channels, images.channels
    else:
        return images.width, 1


@triton.jit
def _extents(images, row, LINES: tl.constexpr):
    """Return how many columns each line from `row` on has: none outside the image.

    images: sizes.
    """
    extents: tl.tuple = ()
    for line in tl.static_range(LINES):
        inside = (row + line >= 0) & (row + line < images.height)
        extents += (tl.where(inside, images.width, 0),)
    return extents


@triton.jit
def _matrix(weight, group, KERNEL: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return pointers to the groups' matrices at the first point of the kernel.

    They are [groups, out, in], or [groups, in, out] if TRANSPOSED.
    """
    row = tl.arange(0, GROUP)[None, :, None]
    column = tl.arange(0, GROUP)[None, None, :]
    first_row = group[:, None, None] * (KERNEL * KERNEL * GROUP)
    if TRANSPOSED:
        return weight + (first_row + column) * GROUP + row
    else:
        return weight + (first_row + row) * GROUP + column


# ---- Loads and stores.


@triton.jit
def _load_round(
    # Tensors.
    x,  # [N, C, height, width]
    dy,  # [N, C, out_height, out_width]
    # Which tiles.
    number,  # of the tile among all images'
    kx,  # the column of the kernel
    channel,  # [GROUPS, GROUP]
    sizes,  # those of weight_gradient, from `blocks` to `left`
    # Constants: see output.
    LINES: tl.constexpr,
    PIXELS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """Load tiles of LINES lines of dy, and of the lines of x that they reach through column kx."""
    blocks, tiles, channels, height, width, out_height, out_width, top, left = sizes
    tile = _tile(number.to(tl.uint32), tiles, blocks)
    column = tile.tile * PIXELS + tl.arange(0, PIXELS)
    row = tile.block * LINES

    # Lines of dy.
    y_sizes = _Images(channels, out_height, out_width)
    y_step, _ = _steps(y_sizes, CHANNELS_LAST)
    at = dy + _places(
        y_sizes,
        tile.image,
        channel,
        row=row,
        column=column,
        CHANNELS_LAST=CHANNELS_LAST,
    )
    gradients = _load(at, column, y_step, _extents(y_sizes, row, LINES))

    # The lines of x under them, through one column of the kernel.
    x_sizes = _Images(channels, height, width)
    x_step, _ = _steps(x_sizes, CHANNELS_LAST)
    row = row * STRIDE - top
    column = column * STRIDE - left + kx
    at = x + _places(
        x_sizes,
        tile.image,
        channel,
        row=row,
        column=column,
        CHANNELS_LAST=CHANNELS_LAST,
    )
    extents = _extents(x_sizes, row, (LINES - 1) * STRIDE + KERNEL)
    return gradients, _load(at, column, x_step, extents)


@triton.jit
def _inside(column, extent):
    """Return whether columns, [PIXELS], are in a line of so many columns."""
    # One comparison for both ends: a negative column is a large unsigned number.
    return column.to(tl.uint32) < extent.to(tl.uint32)


@triton.jit
def _load(at, column, row_step, extents):
    """Load tiles of neighbouring lines, [GROUPS, PIXELS, GROUP], 0 outside the image.

    All are under way before the first is needed.
    """
    lines: tl.tuple = ()
    for line in tl.static_range(len(extents)):
        mask = _inside(column, extents[line])[None, :, None]
        lines += (tl.load(at, mask=mask, other=0.0),)
        at += row_step
    return lines


@triton.jit
def _store(at, values, column, extent):
    """Store a tile, [GROUPS, PIXELS, GROUP]."""
    mask = _inside(column, extent)[None, :, None]
    tl.store(at, values.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _stored(values, less, column, extent, y):
    """Return the values as y has them, less those of `less`; 0 outside the image."""
    # Rounded to y's dtype first: the statistics are to be those of what the next layer reads.
    values = values.to(y.dtype.element_ty).to(tl.float32) - less
    return tl.where(_inside(column, extent)[None, :, None], values, 0.0)
