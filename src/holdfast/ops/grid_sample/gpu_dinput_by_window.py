"""dinput of smooth 2-D grids, in Triton: a pixel sums the samples of a window of the output.

Where a grid is smooth, the samples that touch a pixel are neighbours. ``fit_tiles`` inverts the grid near each
tile of pixels: a linear model of the sample indices. ``sum_windows`` looks at the window of samples that the
model gives for a column of ROWS pixels, and adds the terms of those that touch it.

The sums are complete if every sample was found wherever it has a term. ``place_samples``
(``gpu_dinput_by_slot``) adds to ``balance`` how often each sample must be found, ``sum_windows`` subtracts how
often it was, and ``settle_balance`` checks that the difference is 0. If it is not, ``gpu_dinput_by_sample``
computes dinput again. If the models do not fit the grid, ``sum_windows`` returns at once, and the samples are
summed by slot.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.numerics.gpu import widen
from holdfast.ops.grid_sample.gpu_coordinates import ZEROS, padded_coordinate, unpadded_coordinate
from holdfast.ops.grid_sample.gpu_dinput_by_cell import store_pixels

#: Positions in ``tallies``: the number of extras and of holders; then the number of tallies.
EXTRAS, HOLDERS, TALLIES = (tl.constexpr(number) for number in (0, 1, 8))
#: Words per plane of ``largest``, and words of ``balance``: atomics of many programs on one address are slow.
SPREAD = tl.constexpr(64)
#: Pixels of a column, and rows and columns of its window of samples.
ROWS, WINDOW_ROWS, WINDOW_COLUMNS = tl.constexpr(4), tl.constexpr(6), tl.constexpr(3)
#: Numbers of a model: the sample at the centre of the tile (column, row), the change of both from one pixel to
#: the next, and the change of the column from one row of samples to the next at the same x.
MODEL = tl.constexpr(8)
#: Half the distance of the samples that give the derivatives of the grid, and steps of Newton's method.
REACH, STEPS = tl.constexpr(4), tl.constexpr(2)
#: The largest error of a model that fits, and the distance that is left for it, in pixels.
TOLERANCE, SLACK = tl.constexpr(0.1), tl.constexpr(0.15)


@triton.jit
def position(grid, column, row, mask, sizes, strides, step, ALIGNED: tl.constexpr):
    """x and y of samples, before padding."""
    at = grid + column.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    x, _ = unpadded_coordinate(widen(tl.load(at, mask=mask, other=0.0), tl.float32), sizes[0], ZEROS, ALIGNED)
    y, _ = unpadded_coordinate(widen(tl.load(at + step, mask=mask, other=0.0), tl.float32), sizes[1], ZEROS, ALIGNED)
    return x, y


@triton.jit
def whole(x, last):
    """The nearest index from 0 to ``last``."""
    x = tl.where(tl.abs(x) < 1e6, x, 0.0)
    return tl.minimum(tl.maximum(tl.floor(x + 0.5).to(tl.int32), 0), last)


@triton.jit
def fits(
    grid, column, row, x, y, mask, sizes, out_sizes, strides, step, ALIGNED: tl.constexpr
):  # fmt: skip
    """Whether the samples at these indices, if they exist, are where the model says."""
    j, i = tl.floor(column + 0.5).to(tl.int32), tl.floor(row + 0.5).to(tl.int32)
    mask = mask & (j >= 0) & (j < out_sizes[0]) & (i >= 0) & (i < out_sizes[1])
    found_x, found_y = position(grid, j, i, mask, sizes, strides, step, ALIGNED)
    near = (tl.abs(found_x - x) < TOLERANCE) & (tl.abs(found_y - y) < TOLERANCE)
    return near | (mask == 0)


@triton.jit(do_not_specialize=["tiles", "across"])
def fit_tiles(
    models, rough, grid, tiles, across, images, sizes, out_sizes, grid_strides, grid_step,
    ALIGNED: tl.constexpr, LANES: tl.constexpr, FITTED: tl.constexpr,
):  # fmt: skip
    """The models of FITTED tiles of LANES by ROWS pixels; ``tiles`` of an image, ``across`` beside each other."""
    follow()
    number = tl.program_id(0) * FITTED + tl.arange(0, FITTED)
    exists = number < images * tiles
    n = number // tiles
    group = (number - n * tiles) // across
    # The centre of the tile.
    x = ((number - n * tiles - group * across) * LANES + LANES // 2).to(tl.float32)
    y = (group * ROWS).to(tl.float32) + (ROWS - 1) * 0.5
    own = grid + n.to(tl.int64) * grid_strides[0]
    right, bottom = out_sizes[0] - 1, out_sizes[1] - 1
    zeros = tl.zeros([FITTED], tl.int32)
    column = x * (out_sizes[0] + zeros).to(tl.float32) / (sizes[0] + zeros).to(tl.float32)
    row = y * (out_sizes[1] + zeros).to(tl.float32) / (sizes[1] + zeros).to(tl.float32)
    xx, xy, yx, yy = column, column, column, column
    for _ in tl.static_range(STEPS):
        j, i = whole(column, right), whole(row, bottom)
        west, east = tl.maximum(j - REACH, 0), tl.minimum(j + REACH, right)
        north, south = tl.maximum(i - REACH, 0), tl.minimum(i + REACH, bottom)
        here_x, here_y = position(own, j, i, exists, sizes, grid_strides, grid_step, ALIGNED)
        west_x, west_y = position(own, west, i, exists, sizes, grid_strides, grid_step, ALIGNED)
        east_x, east_y = position(own, east, i, exists, sizes, grid_strides, grid_step, ALIGNED)
        north_x, north_y = position(own, j, north, exists, sizes, grid_strides, grid_step, ALIGNED)
        south_x, south_y = position(own, j, south, exists, sizes, grid_strides, grid_step, ALIGNED)
        # Derivatives: xy is that of x by the row of the sample.
        wide, high = tl.maximum(east - west, 1).to(tl.float32), tl.maximum(south - north, 1).to(tl.float32)
        xx, yx = (east_x - west_x) / wide, (east_y - west_y) / wide
        xy, yy = (south_x - north_x) / high, (south_y - north_y) / high
        area = xx * yy - xy * yx
        column = j.to(tl.float32) + (yy * (x - here_x) - xy * (y - here_y)) / area
        row = i.to(tl.float32) + (xx * (y - here_y) - yx * (x - here_x)) / area
    area = xx * yy - xy * yx
    column_step, row_step, slant = yy / area, -yx / area, -xy / xx
    known = tl.abs(column) + tl.abs(row) + (tl.abs(column_step) + tl.abs(row_step) + tl.abs(slant)) < 1e5
    # A tile without a model has its samples far away.
    column, row = tl.where(known, column, 1e6), tl.where(known, row, 1e6)
    column_step, row_step = tl.where(known, column_step, 0.0), tl.where(known, row_step, 0.0)
    slant = tl.where(known, slant, 0.0)
    at = models + number * MODEL
    tl.store(at, column, mask=exists)
    tl.store(at + 1, row, mask=exists)
    tl.store(at + 2, column_step, mask=exists)
    tl.store(at + 3, row_step, mask=exists)
    tl.store(at + 4, slant, mask=exists)
    # The samples that touch a column must be in its window, and each at its row of pixels or one beside it.
    spacing = area / xx
    off = 0.5 * (ROWS + 1) * tl.abs(1.0 - 1.0 / spacing) + tl.abs(yx / xx)
    good = known & (tl.abs(xx) * (0.5 * WINDOW_COLUMNS) > 1.0 + SLACK) & (spacing > 0) & (off < 0.5 - SLACK)
    good = good | (exists == 0)
    # Samples near the centre and near both ends must be where the model says.
    for k in tl.static_range(3):
        away = (k - 1) * (LANES // 2 - 1)
        j, i = tl.floor(column + away * column_step + 0.5), tl.floor(row + away * row_step + 0.5)
        for m in tl.static_range(2):
            at_j, at_i = j + m, i + m
            dj, di = at_j - column, at_i - row
            good = good & fits(
                own, at_j, at_i, x + xx * dj + xy * di, y + yx * dj + yy * di, exists & known, sizes,
                out_sizes, grid_strides, grid_step, ALIGNED,
            )  # fmt: skip
    tl.atomic_max(rough + n, tl.full([FITTED], 1, tl.int32), mask=exists & (good == 0), sem="relaxed")


@triton.jit
def times_owed(first, sizes):
    """How often ``sum_windows`` must find samples with these first taps: once for each column of pixels."""
    columns = ((first[0] >= 0) & (first[0] < sizes[0])).to(tl.int32)
    columns += ((first[0] >= -1) & (first[0] < sizes[0] - 1)).to(tl.int32)
    high = tl.cdiv(sizes[1], ROWS) * ROWS
    groups = ((first[1] >= 0) & (first[1] < high)).to(tl.int32)
    groups += ((first[1] >= -1) & (first[1] < high - 1) & ((first[1] & (ROWS - 1)) == ROWS - 1)).to(tl.int32)
    return columns * groups


@triton.jit
def window_coordinate(g, size, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr):
    """Coordinate of a sample: equal to the padded one if the sample touches a pixel."""
    if PADDING == ZEROS:
        x, _ = unpadded_coordinate(g, size, PADDING, ALIGNED)
    else:
        x, _ = padded_coordinate(g, size, MODE, PADDING, ALIGNED)
    return x


@triton.jit
def add_to_row(q, weights, wx, change, K: tl.constexpr, ROW: tl.constexpr):
    """Add the term of a row of pixels; ``weights`` are those of the rows K - 2, K - 1 and K."""
    if ROW == K - 2:
        return q + ((wx * weights[0]) * change).to(tl.int64)
    elif ROW == K - 1:
        return q + ((wx * weights[1]) * change).to(tl.int64)
    elif ROW == K:
        return q + ((wx * weights[2]) * change).to(tl.int64)
    else:
        return q


@triton.jit
def add_to_rows(q, weights, wx, change, K: tl.constexpr):
    """Add the terms of the ROWS rows."""
    return (
        add_to_row(q[0], weights, wx, change, K, 0),
        add_to_row(q[1], weights, wx, change, K, 1),
        add_to_row(q[2], weights, wx, change, K, 2),
        add_to_row(q[3], weights, wx, change, K, 3),
    )


@triton.jit
def store_rows(target, q, scale, exists, y, sizes, strides, ACCUMULATE: tl.constexpr):
    """Convert and store the sums of a plane."""
    bits = (scale + tl.zeros([1], tl.float32)).to(tl.int32, bitcast=True)
    inverse = (tl.full([1], 2 * 127 << 23, tl.int32) - bits).to(tl.float32, bitcast=True)
    for row in tl.static_range(ROWS):
        mask = exists & (y + row < sizes[1])
        store_pixels(target + row * strides[2], q[row].to(tl.float32) * inverse, mask, ACCUMULATE)


@triton.jit(do_not_specialize=["tiles", "across", "most_extras"])
def sum_windows(
    dinput, balance, tallies, rough, models, scales, dout, grid,
    tiles, across, most_extras, channels, sizes, out_sizes, dinput_strides, dout_strides, grid_strides,
    dinput_step, dout_step, grid_step,
    MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr, COMPUTE: tl.constexpr,
    CHANNELS: tl.constexpr, PACKED: tl.constexpr, OFFSET: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sum a tile of LANES by ROWS pixels, a column per thread, in all channels."""
    follow()
    program = tl.program_id(0)
    n = program // tiles
    if (tl.load(tallies + EXTRAS) > most_extras) | (tl.load(rough + n) > 0):
        return
    group = (program - n * tiles) // across
    left, y = (program - n * tiles - group * across) * LANES, group * ROWS
    x = left + tl.arange(0, LANES)
    exists = x < sizes[0]
    model = models + program * MODEL
    slant = tl.load(model + 4)
    away = (x - (left + LANES // 2)).to(tl.float32)
    middle = tl.load(model + 1) + away * tl.load(model + 3)
    first = tl.floor(middle) - (WINDOW_ROWS // 2 - 1)
    column = tl.load(model) + away * tl.load(model + 2) + (first - middle) * slant + 0.5
    row = first.to(tl.int32)
    # NaN is no pixel.
    here = tl.where(exists, x.to(tl.float32), float("nan"))
    before = here - 1.0
    top = y.to(tl.float32)
    own_grid = grid + n.to(tl.int64) * grid_strides[0]
    own_dout = dout + n.to(tl.int64) * dout_strides[0]
    plane = n * channels
    zero = tl.zeros([LANES], tl.int64)
    q0, q1 = (zero, zero, zero, zero), (zero, zero, zero, zero)
    q2, q3 = q0, q1
    scale_0 = tl.load(scales + plane)
    scale_1, scale_2, scale_3 = scale_0, scale_0, scale_0
    if CHANNELS > 1:
        scale_1 = tl.load(scales + plane + 1)
    if CHANNELS > 2:
        scale_2 = tl.load(scales + plane + 2)
    if CHANNELS > 3:
        scale_3 = tl.load(scales + plane + 3)
    found = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(WINDOW_ROWS):
        i = row + k
        # Rows and columns that do not exist are replaced by others; such a row has no level.
        level = tl.where((i >= 0) & (i < out_sizes[1]), top + (k - 2), float("nan"))
        i = tl.minimum(tl.maximum(i, 0), out_sizes[1] - 1).to(OFFSET)
        j = tl.floor(column + k * slant).to(tl.int32) - 1
        j = tl.minimum(tl.maximum(j, 0), out_sizes[0] - WINDOW_COLUMNS).to(OFFSET)
        grid_at = own_grid + (i * grid_strides[2] + j * (2 if PACKED else grid_strides[1]))
        source_0 = own_dout + (i * dout_strides[2] + j * dout_strides[1])
        source_1, source_2, source_3 = source_0 + dout_step, source_0 + 2 * dout_step, source_0 + 3 * dout_step
        for c in tl.static_range(WINDOW_COLUMNS):
            if PACKED:
                pair = tl.load((grid_at + 2 * c)[:, None] + tl.arange(0, 2)[None, :])
                gx, gy = tl.split(widen(pair, COMPUTE))
            else:
                gx = widen(tl.load(grid_at + c * grid_strides[1]), COMPUTE)
                gy = widen(tl.load(grid_at + (c * grid_strides[1] + grid_step)), COMPUTE)
            sx = window_coordinate(gx, sizes[0], MODE, PADDING, ALIGNED)
            sy = window_coordinate(gy, sizes[1], MODE, PADDING, ALIGNED)
            floor_x, floor_y = tl.floor(sx), tl.floor(sy)
            tx, ty = sx - floor_x, sy - floor_y
            west, east = floor_x == here, floor_x == before
            wx = tl.where(west, 1.0 - tx, tl.where(east, tx, 0.0))
            # The first row of pixels of the sample is K - 2 (upper) or K - 1 (lower).
            upper, lower = floor_y == level, floor_y == level + 1.0
            wy = (
                tl.where(upper, 1.0 - ty, 0.0),
                tl.where(upper, ty, tl.where(lower, 1.0 - ty, 0.0)),
                tl.where(lower, ty, 0.0),
            )
            if k == 0:
                touches = lower
            elif k == WINDOW_ROWS - 1:
                touches = upper
            else:
                touches = upper | lower
            found += ((west | east) & touches).to(tl.int32)
            d = widen(tl.load(source_0 + c * dout_strides[1]), COMPUTE)
            q0 = add_to_rows(q0, wy, wx, d * scale_0, k)
            if CHANNELS > 1:
                d = widen(tl.load(source_1 + c * dout_strides[1]), COMPUTE)
                q1 = add_to_rows(q1, wy, wx, d * scale_1, k)
            if CHANNELS > 2:
                d = widen(tl.load(source_2 + c * dout_strides[1]), COMPUTE)
                q2 = add_to_rows(q2, wy, wx, d * scale_2, k)
            if CHANNELS > 3:
                d = widen(tl.load(source_3 + c * dout_strides[1]), COMPUTE)
                q3 = add_to_rows(q3, wy, wx, d * scale_3, k)
    target = dinput + n.to(tl.int64) * dinput_strides[0] + y.to(tl.int64) * dinput_strides[2]
    target += x.to(tl.int64) * dinput_strides[1]
    store_rows(target, q0, scale_0, exists, y, sizes, dinput_strides, False)
    if CHANNELS > 1:
        store_rows(target + dinput_step, q1, scale_1, exists, y, sizes, dinput_strides, False)
    if CHANNELS > 2:
        store_rows(target + 2 * dinput_step, q2, scale_2, exists, y, sizes, dinput_strides, False)
    if CHANNELS > 3:
        store_rows(target + 3 * dinput_step, q3, scale_3, exists, y, sizes, dinput_strides, False)
    tl.atomic_add(balance + program % SPREAD, -tl.sum(found, 0), sem="relaxed")


@triton.jit(do_not_specialize=["most_extras"])
def settle_balance(tallies, balance, most_extras):
    """If a sample was not found, there are too many extras."""
    follow()
    if tl.sum(tl.load(balance + tl.arange(0, SPREAD)), 0) != 0:
        tl.atomic_max(tallies + EXTRAS, most_extras + 1, sem="relaxed")
