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
_SIZES += ["all_blocks", "blocks_each", "images"]


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
        tl.store(at, sums[line].to(y.dtype.element_ty), mask=_inside(column, extents[line]))
        at += row_step
    if means is not None:
        count = tl.minimum(LINES, out_height - row) * tl.minimum(PIXELS, out_width - tile * PIXELS)
        place = (image.to(tl.int64) * channels + channel) * (blocks * tiles) + block * tiles + tile
        total = tl.zeros((GROUPS, GROUP), tl.float32)
        for line in tl.static_range(LINES):
            total += tl.sum(_stored(sums[line], 0.0, column, extents[line], y), 1)
        mean = total / count
        total = tl.zeros((GROUPS, GROUP), tl.float32)
        for line in tl.static_range(LINES):
            centred = _stored(sums[line], mean[:, None, :], column, extents[line], y)
            total += tl.sum(centred * centred, 1)
        tl.store(means + place, mean)
        tl.store(squares + place, total)


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
            result = sums[line * STRIDE + phase].to(dx.dtype.element_ty)
            tl.store(at + phase * column_step, result, mask=_inside(column + phase, extents[line]))
        at += row_step


@triton.jit(do_not_specialize=_SIZES)
def weight_gradient(
    x, dy, sums, blocks, tiles, channels, height, width, out_height, out_width, top, left, all_blocks, blocks_each,
    images,
    COLUMNS: tl.constexpr, IMAGES: tl.constexpr,
    LINES: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """Sums over `blocks_each` blocks of LINES lines of IMAGES images for some groups and COLUMNS columns of the kernel.

    A tile has IMAGES times as many groups: their sums are added up before they are stored, as partial sums are many
    bytes. Images beyond the last are the last, with gradients of 0.
    """
    program, group, _ = _channels(tl.program_id(0), channels, GROUPS, GROUP)
    program = program.to(tl.int32)
    member = tl.arange(0, IMAGES * GROUPS)
    channel = (tl.min(group, 0) + member % GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    kx, part = program % (KERNEL // COLUMNS) * COLUMNS, program // (KERNEL // COLUMNS)
    first = part * blocks_each
    image, row = first // blocks * IMAGES, first % blocks * LINES
    y_step, _ = _steps(channels, out_width, CHANNELS_LAST)
    x_step, column_step = _steps(channels, width, CHANNELS_LAST)
    products = (tl.zeros((IMAGES * GROUPS, GROUP, GROUP), tl.float32),) * (COLUMNS * KERNEL)
    for _ in range(first, tl.minimum(first + blocks_each, all_blocks)):
        own_image = (image + member // GROUPS)[:, None, None]
        there = own_image < images
        own_image = tl.minimum(own_image, images - 1)
        y_extents = _extents(row, out_height, out_width, LINES)
        x_extents = _extents(row * STRIDE - top, height, width, (LINES - 1) * STRIDE + KERNEL)
        for tile in range(tiles):
            column = tile * PIXELS + tl.arange(0, PIXELS)
            at = dy + _places(own_image, channel, row, column, channels, out_height, out_width, CHANNELS_LAST)
            gradients = _load(at, column, y_step, y_extents, there)
            column = column * STRIDE - left + kx
            at = x + _places(own_image, channel, row * STRIDE - top, column, channels, height, width, CHANNELS_LAST)
            totals = ()
            for step in tl.static_range(COLUMNS):
                lines = _load(at + step * column_step, column + step, x_step, x_extents)
                for ky in tl.static_range(KERNEL):
                    total = products[step * KERNEL + ky]
                    for line in tl.static_range(LINES):
                        gradient = tl.trans(gradients[line], 0, 2, 1)
                        total = tl.dot(gradient, lines[line * STRIDE + ky], total, input_precision="ieee")
                    totals += (total,)
            products = totals
        row += LINES
        image += (row >= out_height).to(tl.int32) * IMAGES
        row = tl.where(row >= out_height, 0, row)
    at = _matrix(sums + part.to(tl.int64) * channels * GROUP * KERNEL * KERNEL, group, KERNEL, GROUP, False)
    for step in tl.static_range(COLUMNS):
        for ky in tl.static_range(KERNEL):
            total = products[step * KERNEL + ky]
            if IMAGES > 1:
                total = tl.sum(tl.reshape(total, (IMAGES, GROUPS, GROUP, GROUP)), 0)
            tl.store(at + (ky * KERNEL + kx + step) * GROUP * GROUP, total)


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
    return (column.to(tl.uint32) < extent.to(tl.uint32))[None, :, None]


@triton.jit
def _stored(values, less, column, extent, y):
    """The values as y has them, less those of `less`; 0 outside the image."""
    return tl.where(_inside(column, extent), values.to(y.dtype.element_ty).to(tl.float32) - less, 0.0)


@triton.jit
def _load(at, column, row_step, extents, there=None):
    """Tiles of neighbouring lines, 0 outside the image, and where `there` is false. All are under way before the first
    is needed."""
    lines = ()
    for line in tl.static_range(len(extents)):
        mask = _inside(column, extents[line])
        if there is not None:
            mask &= there
        lines += (tl.load(at, mask=mask, other=0.0),)
        at += row_step
    return lines


@triton.jit
def _matrix(weight, group, KERNEL: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Pointers to the groups' matrices at the first point of the kernel: [groups, out, in], or [groups, in, out]."""
    row, column = tl.arange(0, GROUP)[None, :, None], tl.arange(0, GROUP)[None, None, :]
    if TRANSPOSED:
        row, column = column, row
    return weight + (group[:, None, None] * (KERNEL * KERNEL * GROUP) + row) * GROUP + column
