"""Triton kernels of grouped convolution: `group_conv.py` launches them.

A tile is [groups, pixels, channels of a group]: pixels of one line of an image. Lines are scalars, so what concerns
them is computed once a tile. Weights come packed, [groups, k, k, out, in]: each group's matrix at each point of the
kernel is contiguous. In their own layout a matrix's elements are k^2 apart: each program would load them one by one, 72
to 200 loads where 9 to 25 do, and most from several lines of the cache. Sums are float32 and added in an order that
depends on shapes alone, without atomics, so results repeat bit for bit.
"""

import triton
import triton.language as tl

# The kernels are compiled once whatever these sizes are: of `channels` alone it is worth knowing that 16 divides them.
_SIZES = ["blocks", "tiles", "height", "width", "out_height", "out_width", "top", "left"]
_SIZES += ["all_blocks", "blocks_each"]


@triton.jit(do_not_specialize=_SIZES)
def output(
    x, weight, y, means, squares, blocks, tiles, channels, height, width, out_height, out_width, top, left,
    LINES: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """y for some groups, PIXELS columns and LINES lines. A line of x is read KERNEL times, not KERNEL^2.

    means, squares: unless None, [N, C, chunks], for the statistics of the tile's channels, of y as it is stored.
    REVERSED: the kernel is taken from its last point to its first and its matrices are transposed, as the gradient of
    the input of a convolution with stride 1 wants.
    """
    program, group, channel = _channels(tl.program_id(0), channels, GROUPS, GROUP)
    tile, block, image = _tile(program, tiles, blocks)
    column, row = tile * PIXELS + tl.arange(0, PIXELS), block * LINES
    first_row, first_column = row * STRIDE - top, column * STRIDE - left
    at = x + _places(image, channel, first_row, first_column, channels, height, width, CHANNELS_LAST)
    row_step, column_step = _steps(channels, width, CHANNELS_LAST)
    extents = _extents(first_row, height, width, (LINES - 1) * STRIDE + KERNEL)
    sums = (tl.zeros((GROUPS, PIXELS, GROUP), tl.float32),) * LINES
    step: tl.constexpr = -GROUP * GROUP if REVERSED else GROUP * GROUP
    # The product wants [in, out]. Loading that takes fewer instructions than transposing what was loaded if x is
    # channels-last, and more if it is not; with stride 2 it would spill registers.
    loaded: tl.constexpr = CHANNELS_LAST and STRIDE == 1
    matrix = _matrix(weight, group, KERNEL, GROUP, loaded and not REVERSED)
    if REVERSED:
        matrix += (KERNEL * KERNEL - 1) * GROUP * GROUP
    for kx in range(KERNEL):
        weights = ()
        for ky in tl.static_range(KERNEL):
            each = tl.load(matrix + step * (ky * KERNEL))
            weights += (each if loaded or REVERSED else tl.trans(each, 0, 2, 1),)
        lines = _load(at, first_column + kx, row_step, extents)
        totals = ()
        for line in tl.static_range(LINES):
            total = sums[line]
            for ky in tl.static_range(KERNEL):
                total = tl.dot(lines[line * STRIDE + ky], weights[ky], total, input_precision="ieee")
            totals += (total,)
        sums = totals
        at += column_step
        matrix += step
    at = y + _places(image, channel, row, column, channels, out_height, out_width, CHANNELS_LAST)
    row_step, _ = _steps(channels, out_width, CHANNELS_LAST)
    extents = _extents(row, out_height, out_width, LINES)
    for line in tl.static_range(LINES):
        _store(at, sums[line], column, extents[line])
        at += row_step
    if means is not None:
        # From sums of differences from the first line's mean, and of their squares.
        inside = tl.minimum(PIXELS, out_width - tile * PIXELS)
        origin = tl.sum(_stored(sums[0], 0.0, column, extents[0], y), 1) * (1.0 / inside)
        total, squared = (tl.zeros((GROUPS, PIXELS, GROUP), tl.float32),) * 2
        for line in tl.static_range(LINES):
            centred = _stored(sums[line], origin[:, None, :], column, extents[line], y)
            total += centred
            squared += centred * centred
        count = inside * tl.minimum(LINES, out_height - row)
        shift = tl.sum(total, 1) * (1.0 / count)
        place = (image.to(tl.int64) * channels + channel) * (blocks * tiles) + block * tiles + tile
        tl.store(means + place, origin + shift)
        tl.store(squares + place, tl.maximum(tl.sum(squared, 1) - shift * shift * count, 0.0))


@triton.jit(do_not_specialize=_SIZES)
def strided_input_gradient(
    dy, weight, dx, blocks, tiles, channels, height, width, out_height, out_width, top, left,
    LINES: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """dx for some groups, STRIDE PIXELS columns and STRIDE LINES lines.

    Row r of x is under row ky of the kernel for row (r + top - ky) / STRIDE of y, where that is whole: with
    r + top = STRIDE m + phase and ky = STRIDE tap + phase it is m - tap. So all phases read the same lines of dy.
    """
    TAPS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    program, group, channel = _channels(tl.program_id(0), channels, GROUPS, GROUP)
    tile, row, image = _tile(program, tiles, blocks)
    column, row = left // STRIDE + tile * PIXELS + tl.arange(0, PIXELS), top // STRIDE + row * LINES
    first_row, first_column = row - (TAPS - 1), column - (TAPS - 1)
    at = dy + _places(image, channel, first_row, first_column, channels, out_height, out_width, CHANNELS_LAST)
    row_step, column_step = _steps(channels, out_width, CHANNELS_LAST)
    extents = _extents(first_row, out_height, out_width, LINES + TAPS - 1)
    sums = (tl.zeros((GROUPS, PIXELS, GROUP), tl.float32),) * (LINES * STRIDE * STRIDE)
    matrix = _matrix(weight, group, KERNEL, GROUP, False)
    for step in tl.static_range(TAPS):
        weights = ()
        for ky in tl.static_range(KERNEL):
            for phase in tl.static_range(STRIDE):
                if (TAPS - 1 - step) * STRIDE + phase < KERNEL:
                    shift = (ky * KERNEL + (TAPS - 1 - step) * STRIDE + phase) * GROUP * GROUP
                    weights += (tl.load(matrix + shift),)
                else:  # not used: beyond the kernel
                    weights += (0,)
        lines = _load(at, first_column + step, row_step, extents)
        totals = ()
        for line in tl.static_range(LINES):
            for above in tl.static_range(STRIDE):
                for before in tl.static_range(STRIDE):
                    total = sums[(line * STRIDE + above) * STRIDE + before]
                    for tap in tl.static_range(TAPS):
                        if tap * STRIDE + above < KERNEL and (TAPS - 1 - step) * STRIDE + before < KERNEL:
                            values = lines[line - tap + TAPS - 1]
                            matrices = weights[(tap * STRIDE + above) * STRIDE + before]
                            total = tl.dot(values, matrices, total, input_precision="ieee")
                    totals += (total,)
        sums = totals
        at += column_step
    row, column = row * STRIDE - top, column * STRIDE - left
    at = dx + _places(image, channel, row, column, channels, height, width, CHANNELS_LAST)
    row_step, column_step = _steps(channels, width, CHANNELS_LAST)
    extents = _extents(row, height, width, LINES * STRIDE)
    for line in tl.static_range(LINES * STRIDE):
        for phase in tl.static_range(STRIDE):
            _store(at + phase * column_step, sums[line * STRIDE + phase], column + phase, extents[line])
        at += row_step


@triton.jit(do_not_specialize=_SIZES)
def weight_gradient(
    x, dy, sums, blocks, tiles, channels, height, width, out_height, out_width, top, left, all_blocks, blocks_each,
    LINES: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """Sums over `blocks_each` blocks of LINES lines for some groups and one column of the kernel.

    A round's tiles are loaded before those of the round before are multiplied: a warp has little else to do while it
    waits for them.
    """
    program, group, channel = _channels(tl.program_id(0), channels, GROUPS, GROUP)
    kx, part = (program % KERNEL).to(tl.int32), (program // KERNEL).to(tl.int32)
    first, end = part * blocks_each * tiles, tl.minimum(part * blocks_each + blocks_each, all_blocks) * tiles
    sizes = (blocks, tiles, channels, height, width, out_height, out_width, top, left)
    products = (tl.zeros((GROUPS, GROUP, GROUP), tl.float32),) * KERNEL
    gradients, lines = _round(x, dy, first, kx, channel, sizes, LINES, PIXELS, KERNEL, STRIDE, CHANNELS_LAST)
    for number in range(first, end):
        following = tl.minimum(number + 1, end - 1)
        next_gradients, next_lines = _round(
            x, dy, following, kx, channel, sizes, LINES, PIXELS, KERNEL, STRIDE, CHANNELS_LAST
        )
        totals = ()
        for ky in tl.static_range(KERNEL):
            total = products[ky]
            for line in tl.static_range(LINES):
                gradient = tl.trans(gradients[line], 0, 2, 1)
                total = tl.dot(gradient, lines[line * STRIDE + ky], total, input_precision="ieee")
            totals += (total,)
        products, gradients, lines = totals, next_gradients, next_lines
    at = _matrix(sums + part.to(tl.int64) * channels * GROUP * KERNEL * KERNEL, group, KERNEL, GROUP, False)
    for ky in tl.static_range(KERNEL):
        tl.store(at + (ky * KERNEL + kx) * GROUP * GROUP, products[ky])


@triton.jit(do_not_specialize=["parts"])
def add_parts(
    sums, gradient, parts, elements, PARTS: tl.constexpr, ELEMENTS: tl.constexpr, POINTS: tl.constexpr,
    GROUP: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """ELEMENTS of the weights' gradient, from sums, [parts, groups, POINTS, out, in]: read in their order, PARTS at a
    time. gradient: [groups, out, in, POINTS], or [groups, out, POINTS, in] if CHANNELS_LAST."""
    place = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    known = place < elements
    part = tl.arange(0, PARTS)
    at = sums + part[:, None] * elements + place[None, :]
    totals = tl.zeros((PARTS, ELEMENTS), tl.float32)
    for first in range(0, parts, PARTS):
        totals += tl.load(at, mask=(first + part < parts)[:, None] & known[None, :], other=0.0)
        at += PARTS * elements
    inner, outer = place % GROUP, place // GROUP % GROUP
    point, group = place // (GROUP * GROUP) % POINTS, place // (GROUP * GROUP * POINTS)
    if CHANNELS_LAST:
        target = ((group * GROUP + outer) * POINTS + point) * GROUP + inner
    else:
        target = ((group * GROUP + outer) * GROUP + inner) * POINTS + point
    tl.store(gradient + target, tl.sum(totals, 0).to(gradient.dtype.element_ty), mask=known)


@triton.jit
def _channels(program, channels, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """What remains of a program's number, and its channels, [GROUPS, GROUP]: programs that run together read what lies
    together in a channels-last tensor."""
    packs = (channels // (GROUPS * GROUP)).to(tl.uint32)
    program = program.to(tl.uint32)
    group = (program % packs).to(tl.int32) * GROUPS + tl.arange(0, GROUPS)
    return program // packs, group, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _tile(program, tiles, blocks):
    """Number of a program's tile in its line, of its block of lines, and of its image."""
    tiles, blocks = tiles.to(tl.uint32), blocks.to(tl.uint32)
    block = program // tiles
    return (program % tiles).to(tl.int32), (block % blocks).to(tl.int32), (block // blocks).to(tl.int32)


@triton.jit
def _round(
    x, dy, number, kx, channel, sizes,
    LINES: tl.constexpr, PIXELS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """Tiles of LINES lines of dy, and of the lines of x that they reach through column kx of the kernel."""
    blocks, tiles, channels, height, width, out_height, out_width, top, left = sizes
    tile, block, image = _tile(number.to(tl.uint32), tiles, blocks)
    column, row = tile * PIXELS + tl.arange(0, PIXELS), block * LINES
    y_step, _ = _steps(channels, out_width, CHANNELS_LAST)
    at = dy + _places(image, channel, row, column, channels, out_height, out_width, CHANNELS_LAST)
    gradients = _load(at, column, y_step, _extents(row, out_height, out_width, LINES))
    x_step, _ = _steps(channels, width, CHANNELS_LAST)
    row, column = row * STRIDE - top, column * STRIDE - left + kx
    at = x + _places(image, channel, row, column, channels, height, width, CHANNELS_LAST)
    return gradients, _load(at, column, x_step, _extents(row, height, width, (LINES - 1) * STRIDE + KERNEL))


@triton.jit
def _places(image, channel, row, column, channels, height, width, CHANNELS_LAST: tl.constexpr):
    """Elements from the start of [N, C, H, W] to each of a tile, 64 bits."""
    start = image.to(tl.int64) * (channels * height * width)
    channel, column = channel[:, None, :], column[None, :, None]
    if CHANNELS_LAST:
        return start + ((row * width + column) * channels + channel)
    else:
        return start + ((channel * height + row) * width + column)


@triton.jit
def _steps(channels, width, CHANNELS_LAST: tl.constexpr):
    """Elements from a line to the next, and from a pixel to the next."""
    if CHANNELS_LAST:
        return width * channels, channels
    else:
        return width, 1


@triton.jit
def _extents(row, height, width, LINES: tl.constexpr):
    """Columns that each line from `row` on has: none outside the image."""
    extents = ()
    for line in tl.static_range(LINES):
        extents += (tl.where((row + line >= 0) & (row + line < height), width, 0),)
    return extents


@triton.jit
def _inside(column, extent):
    return column.to(tl.uint32) < extent.to(tl.uint32)


@triton.jit
def _load(at, column, row_step, extents):
    """Tiles of neighbouring lines, [GROUPS, PIXELS, GROUP], 0 outside the image. All are under way before the first is
    needed."""
    lines = ()
    for line in tl.static_range(len(extents)):
        lines += (tl.load(at, mask=_inside(column, extents[line])[None, :, None], other=0.0),)
        at += row_step
    return lines


@triton.jit
def _store(at, values, column, extent):
    """A tile, [GROUPS, PIXELS, GROUP]."""
    tl.store(at, values.to(at.dtype.element_ty), mask=_inside(column, extent)[None, :, None])


@triton.jit
def _stored(values, less, column, extent, y):
    """The values as y has them, less those of `less`; 0 outside the image."""
    values = values.to(y.dtype.element_ty).to(tl.float32) - less
    return tl.where(_inside(column, extent)[None, :, None], values, 0.0)


@triton.jit
def _matrix(weight, group, KERNEL: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Pointers to the groups' matrices at the first point of the kernel: [groups, out, in], or [groups, in, out]."""
    row, column = tl.arange(0, GROUP)[None, :, None], tl.arange(0, GROUP)[None, None, :]
    if TRANSPOSED:
        row, column = column, row
    return weight + (group[:, None, None] * (KERNEL * KERNEL * GROUP) + row) * GROUP + column
