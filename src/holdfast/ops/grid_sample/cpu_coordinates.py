"""Coordinates and taps of samples on the CPU: a block of samples at a time, axis by axis.

Each axis has scratch rows with one element per sample: the coordinate, its scale (the derivative by the grid
coordinate), and for each tap the index, the weight and the slope. A tap outside the image has the index of
the nearest pixel, and its weight and slope are NaN. So is the weight of a corner with such a tap. Every loop
runs over samples and vectorises.

A place is a position in the image with all corners that are read from it together. With one column, each
corner has its own place. With two, a place is two pixels side by side: the two linear taps along x. At the
left and right border, where one of the taps is outside, the place is moved into the image, and the weights of
its columns follow.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from holdfast.backends.cpu import emit, jit, on_demand, outlined, pointer
from holdfast.backends.on_demand import Real
from holdfast.core.workspace_layout import step_of
from holdfast.numerics.cpu import ITEM_SIZE, rint, zero
from holdfast.numerics.cpu_walk import RUN, load_span, offset_at, size_of, store_span
from holdfast.ops.grid_sample.plan import LONGEST_AXIS, MARGIN, Mode, Padding

#: Samples of a block, bytes of a scratch row, and the distance between rows.
BLOCK = RUN
ROW_BYTES = BLOCK * 8
ROW = step_of(ROW_BYTES)
#: Samples of the vectors of an unrolled loop. A block has whole ones.
_WHOLE = 32

MODES = {Mode.NEAREST: 0, Mode.BILINEAR: 1, Mode.BICUBIC: 2}
PADDINGS = {Padding.ZEROS: 0, Padding.BORDER: 1, Padding.REFLECTION: 2}
_NEAREST, _BILINEAR, _BICUBIC = MODES.values()
_ZEROS, _BORDER, _REFLECTION = PADDINGS.values()

# Rows of an axis: the coordinate, its scale, and the weight, slope and pixel of each of four taps. Loops over
# many rows use one pointer: LLVM does not vectorise a loop with many pointers that might overlap.
_X, _SCALE, WEIGHT, SLOPE, INDEX = 0, 1, 2, 6, 10
AXIS_ROWS = 14

# Exact in float32; the other operand determines the compute type.
_HALF, _ONE, _MARGIN, _COUNTABLE = (np.float32(value) for value in (0.5, 1, MARGIN, LONGEST_AXIS))
_NEAR_A, _NEAR_B = np.float32(1.25), np.float32(2.25)
_FAR_A, _FAR_B, _FAR_C, _FAR_D = (np.float32(value) for value in (0.75, 3.75, 6, 3))
_NEAR_SLOPE_A, _NEAR_SLOPE_B = np.float32(3.75), np.float32(4.5)
_FAR_SLOPE_A, _FAR_SLOPE_B, _FAR_SLOPE_C = np.float32(2.25), np.float32(7.5), np.float32(6)


@emit
def floor(typingctx, value):
    """Floor, as a single instruction."""

    def build(context, builder, signature, args):
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [args[0].type]), args)

    return value(value), build


@jit
def whole(count):
    """``count`` rounded up to whole vectors: loops without a remainder are faster.

    Samples after the last have any coordinates, and taps in the image as all others.
    """
    return (count + _WHOLE - 1) // _WHOLE * _WHOLE


@jit
def row_size(like):
    """Elements from one scratch row to the next."""
    return ROW // size_of(like)


@jit
def interleaved(grid, axes, like):
    """Whether a grid is contiguous and of the compute type."""
    _, kind, walk, step = grid
    return kind == size_of(like) and walk[1] == 1 and offset_at(1, walk) == axes and step == 1


@jit
def _load_grid(grid, axes, begin, count, rows_at, raw, like):
    """Load grid coordinates to the rows of the coordinates."""
    address, kind, walk, step = grid
    if interleaved(grid, axes, like):
        source, rows = pointer(address + begin * axes * kind, like), pointer(rows_at, like)
        axis = AXIS_ROWS * row_size(like)
        if axes == 2:
            for i in range(count):
                rows[i], rows[axis + i] = source[2 * i], source[2 * i + 1]
        else:
            for i in range(count):
                x, y, z = source[3 * i], source[3 * i + 1], source[3 * i + 2]
                rows[i], rows[axis + i], rows[2 * axis + i] = x, y, z
        return
    for a in range(axes):
        target = rows_at + a * AXIS_ROWS * ROW
        load_span(
            address + a * step * (kind & ITEM_SIZE), kind, walk, begin, begin + count, raw, target, like
        )


@jit
def _coordinates(rows, count, aligned, numbers, like):
    """Convert grid coordinates to pixels."""
    x = pointer(rows + _X * ROW, like)
    size, last = numbers[0], numbers[1]
    if aligned:
        for i in range(count):
            x[i] = ((x[i] + _ONE) * _HALF) * last
    else:
        for i in range(count):
            x[i] = ((x[i] + _ONE) * size - _ONE) * _HALF


@jit
def _limit_zeros(rows, count, numbers, like):
    """Padding zeros: move coordinates without taps in the image to the margin, with scale 0."""
    x, s = pointer(rows + _X * ROW, like), pointer(rows + _SCALE * ROW, like)
    beyond, scale = numbers[2], numbers[3]
    before, zero_value = -(_MARGIN + zero(like)), zero(like)
    for i in range(count):
        here = x[i]
        near = here >= before and here <= beyond
        x[i] = here if near else beyond if here > beyond else before
        s[i] = scale if near else zero_value


@on_demand
def _limit_border(rows, count, beyond: Real, scale: Real, like):
    """Bicubic border: move coordinates without taps in the image to where all taps hit the border."""
    x, s = pointer(rows + _X * ROW, like), pointer(rows + _SCALE * ROW, like)
    before, zero_value = -(_MARGIN + zero(like)), zero(like)
    for i in range(count):
        here = x[i]
        far = beyond if here > zero_value else before if here < zero_value else zero_value
        near = here >= before and here <= beyond
        x[i] = here if near else far
        s[i] = scale if near else zero_value


@on_demand
def _limit_reflection(rows, count, scale: Real, like):
    """Bicubic reflection: move coordinates that are too large for an index to 0, with scale 0."""
    x, s = pointer(rows + _X * ROW, like), pointer(rows + _SCALE * ROW, like)
    zero_value = zero(like)
    for i in range(count):
        here = x[i]
        countable = abs(here) <= _COUNTABLE
        x[i] = here if countable else zero_value
        s[i] = scale if countable else zero_value


@on_demand
def _reflected(rows, count, scale: Real, low: Real, period: Real, like):
    """Reflect coordinates, before ``_clipped``; the sign of the scale is the direction."""
    x, s = pointer(rows + _X * ROW, like), pointer(rows + _SCALE * ROW, like)
    zero_value = zero(like)
    if period == zero_value:
        for i in range(count):
            x[i] = zero_value
            s[i] = zero_value
    else:
        for i in range(count):
            from_low = x[i] - low
            away = abs(from_low)
            within = away - floor(away / period) * period
            back = period - within
            turned = within > back
            x[i] = (back if turned else within) + low
            s[i] = -scale if turned != (from_low < zero_value) else scale


@on_demand
def _clipped(rows, count, fresh, last: Real, scale: Real, like):
    """Clip coordinates to the image, with scale 0 there; ``fresh``: set the scale first."""
    x, s = pointer(rows + _X * ROW, like), pointer(rows + _SCALE * ROW, like)
    zero_value = zero(like)
    if fresh:
        for i in range(count):
            s[i] = scale
    for i in range(count):
        here = x[i]
        moves = here > zero_value and here < last
        x[i] = here if moves else last if here > zero_value else zero_value
        s[i] = s[i] if moves else zero_value


@jit
def _near(u):
    return ((_NEAR_A * u - _NEAR_B) * u) * u + _ONE


@jit
def _far(u):
    return ((_FAR_B - _FAR_A * u) * u - _FAR_C) * u + _FAR_D


@jit
def _near_slope(u):
    return (_NEAR_SLOPE_A * u - _NEAR_SLOPE_B) * u


@jit
def _far_slope(u):
    return (_FAR_SLOPE_B - _FAR_SLOPE_A * u) * u - _FAR_SLOPE_C


@on_demand
def _mark_taps(rows_at, count, size, like):
    """Set the indices of the taps of bicubic from that of the first, and mark taps outside the image."""
    row, step = row_size(like), row_size(np.int32(0))
    rows, index = pointer(rows_at, like), pointer(rows_at + INDEX * ROW, np.int32)
    last, outside = np.int32(size - 1), zero(like) / zero(like)
    for i in range(count):
        first = index[i]
        for tap in range(4):
            here = np.int32(first + np.int32(tap))
            nearest = min(max(here, np.int32(0)), last)
            weight, slope = rows[(WEIGHT + tap) * row + i], rows[(SLOPE + tap) * row + i]
            index[tap * step + i] = nearest
            rows[(WEIGHT + tap) * row + i] = weight if here == nearest else outside
            rows[(SLOPE + tap) * row + i] = slope if here == nearest else outside


@on_demand
def _pad_taps(rows, count, size, padding, aligned):
    """Set the indices of the four taps of bicubic, which are padded separately."""
    index, step, last = pointer(rows + INDEX * ROW, np.int32), row_size(np.int32(0)), np.int32(size - 1)
    if padding == _BORDER:
        for i in range(count):
            first = index[i]
            for tap in range(4):
                index[tap * step + i] = min(max(np.int32(first + np.int32(tap)), np.int32(0)), last)
        return
    period = np.int32(max(2 * (size - 1) if aligned else 2 * size, 1))
    turn = period if aligned else np.int32(period - 1)
    for i in range(count):
        within = np.int32(index[i] % period)
        for tap in range(4):
            index[tap * step + i] = within if within <= last else np.int32(turn - within)
            within = np.int32(within + np.int32(1))
            within = within if within < period else np.int32(0)


@jit
def _linear_taps(rows_at, count, size, like):
    """The two taps of bilinear, each marked if it is outside the image."""
    row, step = row_size(like), row_size(np.int32(0))
    rows, index = pointer(rows_at, like), pointer(rows_at + INDEX * ROW, np.int32)
    end, last, outside, one = np.int32(size), np.int32(size - 1), zero(like) / zero(like), _ONE + zero(like)
    for i in range(count):
        first = floor(rows[i])
        here, t = np.int32(first), rows[i] - first
        after = np.int32(here + 1)
        left, right = here >= 0 and here < end, after >= 0 and after < end
        index[i] = min(max(here, np.int32(0)), last)
        index[step + i] = min(max(after, np.int32(0)), last)
        rows[WEIGHT * row + i] = one - t if left else outside
        rows[(WEIGHT + 1) * row + i] = t if right else outside
        rows[SLOPE * row + i] = -one if left else outside
        rows[(SLOPE + 1) * row + i] = one if right else outside


@jit
def _linear_columns(rows_at, count, size, like):
    """``_linear_taps`` for two columns: the taps are those of the columns, in the order of memory."""
    row = row_size(like)
    rows, index = pointer(rows_at, like), pointer(rows_at + INDEX * ROW, np.int32)
    last, outside, one = np.int32(size - 2), zero(like) / zero(like), _ONE + zero(like)
    for i in range(count):
        first = floor(rows[i])
        here, t = np.int32(first), rows[i] - first
        place = min(max(here, np.int32(0)), last)
        moved, rest = np.int32(here - place), one - t
        index[i] = place
        rows[WEIGHT * row + i] = rest if moved == 0 else t if moved == -1 else outside
        rows[(WEIGHT + 1) * row + i] = t if moved == 0 else rest if moved == 1 else outside
        rows[SLOPE * row + i] = -one if moved == 0 else one if moved == -1 else outside
        rows[(SLOPE + 1) * row + i] = one if moved == 0 else -one if moved == 1 else outside


@on_demand
def _nearest_taps(rows_at, count, size, like):
    """The tap of nearest, marked if it is outside the image. The scale is 0: there is no gradient."""
    row = row_size(like)
    rows, index = pointer(rows_at, like), pointer(rows_at + INDEX * ROW, np.int32)
    last, outside, one = np.int32(size - 1), zero(like) / zero(like), _ONE + zero(like)
    for i in range(count):
        here = np.int32(rint(rows[i]))
        nearest = min(max(here, np.int32(0)), last)
        index[i] = nearest
        rows[WEIGHT * row + i] = one if here == nearest else outside
        rows[_SCALE * row + i] = zero(like)


@on_demand
def _bicubic_weights(rows, count, like):
    x, index = pointer(rows + _X * ROW, like), pointer(rows + INDEX * ROW, np.int32)
    w0, w1 = pointer(rows + WEIGHT * ROW, like), pointer(rows + (WEIGHT + 1) * ROW, like)
    s0, s1 = pointer(rows + SLOPE * ROW, like), pointer(rows + (SLOPE + 1) * ROW, like)
    w2, w3 = pointer(rows + (WEIGHT + 2) * ROW, like), pointer(rows + (WEIGHT + 3) * ROW, like)
    s2, s3 = pointer(rows + (SLOPE + 2) * ROW, like), pointer(rows + (SLOPE + 3) * ROW, like)
    for i in range(count):
        first = floor(x[i])
        t = x[i] - first
        rest = _ONE - t
        index[i] = np.int32(first) - np.int32(1)
        w0[i], w1[i], w2[i], w3[i] = _far(t + _ONE), _near(t), _near(rest), _far(rest + _ONE)
        s0[i], s1[i] = _far_slope(t + _ONE), _near_slope(t)
        s2[i], s3[i] = -_near_slope(rest), -_far_slope(rest + _ONE)


@jit
def find_taps(grid, form, sizes, numbers, first_axis, begin, count, rows_at, raw, like, columns):
    """Compute the rows of the axes from ``first_axis`` on, for ``count`` samples from ``begin`` of one image.

    ``grid`` is (address, kind, walk over the samples, axis stride). ``form`` is (axes, taps, mode,
    padding, align_corners). ``sizes`` are the pixels along x, y and z; ``numbers`` are ``_axis_numbers`` of
    each axis. ``columns`` is a tuple whose length is the number of columns of a place.
    """
    outlined()
    axes, _, mode, padding, aligned = form
    _load_grid(grid, axes, begin, count, rows_at, raw, like)
    count = whole(count)
    for a in range(first_axis, axes):
        rows, own = rows_at + a * AXIS_ROWS * ROW, numbers[a]
        _coordinates(rows, count, aligned, own, like)
        if padding == _ZEROS:
            _limit_zeros(rows, count, own, like)
        elif mode == _BICUBIC:
            if padding == _BORDER:
                _limit_border(rows, count, own[2], own[3], like)
            else:
                _limit_reflection(rows, count, own[3], like)
        else:
            if padding == _REFLECTION:
                _reflected(rows, count, own[3], own[4], own[5], like)
            _clipped(rows, count, padding == _BORDER, own[1], own[3], like)
        if mode == _BILINEAR:
            if len(columns) == 2 and a == 0:
                _linear_columns(rows, count, sizes[a], like)
            else:
                _linear_taps(rows, count, sizes[a], like)
        elif mode == _NEAREST:
            _nearest_taps(rows, count, sizes[a], like)
        else:
            _bicubic_weights(rows, count, like)
            if padding == _ZEROS:
                _mark_taps(rows, count, sizes[a], like)
            else:
                _pad_taps(rows, count, sizes[a], padding, aligned)


@jit
def taps_of_corner(corner, axes, taps):
    """Taps of a corner along x, y and z; x is fastest."""
    x, rest = corner % taps, corner // taps
    return x, rest % taps, rest // taps if axes == 3 else 0


@jit
def row_of(rows_at, axis, row):
    """Address of a row of an axis."""
    return rows_at + (axis * AXIS_ROWS + row) * ROW


@jit
def find_weights(rows_at, corner, axes, taps, count, target, like):
    """Weights of a corner: the product of its taps' weights, x times y times z."""
    chosen, result = taps_of_corner(corner, axes, taps), pointer(target, like)
    x = pointer(row_of(rows_at, 0, WEIGHT + chosen[0]), like)
    y = pointer(row_of(rows_at, 1, WEIGHT + chosen[1]), like)
    if axes == 2:
        for i in range(count):
            result[i] = x[i] * y[i]
    else:
        z = pointer(row_of(rows_at, 2, WEIGHT + chosen[2]), like)
        for i in range(count):
            result[i] = (x[i] * y[i]) * z[i]


@jit
def find_pair_weights(rows_at, axes, count, target, like):
    """``find_weights`` of all corners of bilinear. The results are ``RUN`` elements apart."""
    row, axis = row_size(like), AXIS_ROWS * row_size(like)
    rows, result = pointer(rows_at + WEIGHT * ROW, like), pointer(target, like)
    if axes == 2:
        for i in range(count):
            left, right, upper, lower = rows[i], rows[row + i], rows[axis + i], rows[axis + row + i]
            result[i], result[RUN + i] = left * upper, right * upper
            result[2 * RUN + i], result[3 * RUN + i] = left * lower, right * lower
    else:
        for i in range(count):
            left, right, upper, lower = rows[i], rows[row + i], rows[axis + i], rows[axis + row + i]
            front, back = rows[2 * axis + i], rows[2 * axis + row + i]
            nw, ne, sw, se = left * upper, right * upper, left * lower, right * lower
            result[i], result[RUN + i] = nw * front, ne * front
            result[2 * RUN + i], result[3 * RUN + i] = sw * front, se * front
            result[4 * RUN + i], result[5 * RUN + i] = nw * back, ne * back
            result[6 * RUN + i], result[7 * RUN + i] = sw * back, se * back


@jit
def find_pair_offsets(rows_at, axes, steps, count, target):
    """``find_offsets`` of all places of bilinear with two columns, in 32 bits."""
    row = ROW // 4
    axis, result = AXIS_ROWS * row, pointer(target, np.int64)
    index = pointer(rows_at + INDEX * ROW, np.int32)
    sx, sy, sz = np.int32(steps[0]), np.int32(steps[1]), np.int32(steps[2])
    if axes == 2:
        for i in range(count):
            x, upper, lower = np.int32(index[i] * sx), index[axis + i], index[axis + row + i]
            result[i] = np.int32(x + np.int32(upper * sy))
            result[RUN + i] = np.int32(x + np.int32(lower * sy))
    else:
        for i in range(count):
            x, front, back = np.int32(index[i] * sx), index[2 * axis + i], index[2 * axis + row + i]
            upper, lower = np.int32(index[axis + i] * sy), np.int32(index[axis + row + i] * sy)
            front, back = np.int32(x + np.int32(front * sz)), np.int32(x + np.int32(back * sz))
            result[i], result[RUN + i] = np.int32(front + upper), np.int32(front + lower)
            result[2 * RUN + i], result[3 * RUN + i] = np.int32(back + upper), np.int32(back + lower)


@jit
def add_slopes(rows_at, corner, axes, taps, slope_of, count, sums_at, target, like):
    """Add slope times sum of a corner, for axis ``slope_of``, where the corner is in the image."""
    chosen, sums, result = taps_of_corner(corner, axes, taps), pointer(sums_at, like), pointer(target, like)
    x = pointer(row_of(rows_at, 0, (SLOPE if slope_of == 0 else WEIGHT) + chosen[0]), like)
    y = pointer(row_of(rows_at, 1, (SLOPE if slope_of == 1 else WEIGHT) + chosen[1]), like)
    if axes == 2:
        for i in range(count):
            slope = x[i] * y[i]
            more = result[i] + slope * sums[i]
            result[i] = more if slope == slope else result[i]
    else:
        z = pointer(row_of(rows_at, 2, (SLOPE if slope_of == 2 else WEIGHT) + chosen[2]), like)
        for i in range(count):
            slope = (x[i] * y[i]) * z[i]
            more = result[i] + slope * sums[i]
            result[i] = more if slope == slope else result[i]


@jit
def _linear_slopes_2(rows_at, count, sums_at, like):
    row, axis = row_size(like), AXIS_ROWS * row_size(like)
    rows, sums = pointer(rows_at, like), pointer(sums_at, like)
    for i in range(count):
        along_x = along_y = zero(like)
        for corner in range(4):
            x, y = (corner & 1) * row + i, axis + (corner >> 1) * row + i
            slope_x = rows[SLOPE * row + x] * rows[WEIGHT * row + y]
            slope_y = rows[WEIGHT * row + x] * rows[SLOPE * row + y]
            total, inside = sums[corner * RUN + i], slope_x == slope_x
            along_x = along_x + slope_x * total if inside else along_x
            along_y = along_y + slope_y * total if inside else along_y
        rows[i], rows[axis + i] = along_x, along_y


@jit
def _linear_slopes_3(rows_at, count, sums_at, like):
    row, axis = row_size(like), AXIS_ROWS * row_size(like)
    rows, sums = pointer(rows_at, like), pointer(sums_at, like)
    for i in range(count):
        along_x = along_y = along_z = zero(like)
        for corner in range(8):
            x, y, z = (corner & 1) * row, axis + (corner >> 1 & 1) * row, 2 * axis + (corner >> 2) * row
            weight_x, slope_x = rows[WEIGHT * row + x + i], rows[SLOPE * row + x + i]
            weight_y, slope_y = rows[WEIGHT * row + y + i], rows[SLOPE * row + y + i]
            weight_z, slope_z = rows[WEIGHT * row + z + i], rows[SLOPE * row + z + i]
            total, first = sums[corner * RUN + i], (slope_x * weight_y) * weight_z
            inside = first == first
            along_x = along_x + first * total if inside else along_x
            along_y = along_y + ((weight_x * slope_y) * weight_z) * total if inside else along_y
            along_z = along_z + ((weight_x * weight_y) * slope_z) * total if inside else along_z
        rows[i], rows[axis + i], rows[2 * axis + i] = along_x, along_y, along_z


@jit
def find_gradients(rows_at, form, count, sums_at, like):
    """Replace the coordinates by the gradients of the grid, from sums indexed [corner, sample]."""
    axes, taps, mode = form[:3]
    if mode == _BILINEAR and axes == 2:
        _linear_slopes_2(rows_at, count, sums_at, like)
    elif mode == _BILINEAR:
        _linear_slopes_3(rows_at, count, sums_at, like)
    else:
        for a in range(axes):
            result = pointer(row_of(rows_at, a, _X), like)
            for i in range(count):
                result[i] = zero(like)
            for corner in range(taps * taps if mode == _BICUBIC else 0):
                sums = sums_at + corner * RUN * size_of(like)
                add_slopes(rows_at, corner, axes, taps, a, count, sums, row_of(rows_at, a, _X), like)
    for a in range(axes):
        rows, scale = pointer(row_of(rows_at, a, _X), like), _SCALE * row_size(like)
        for i in range(count):
            rows[i] = rows[i] * rows[scale + i] if rows[scale + i] != zero(like) else zero(like)


@jit
def store_gradients(rows_at, dgrid, axes, begin, count, accumulate, raw, old, like):
    """Store ``find_gradients`` of samples from ``begin``. ``dgrid`` is as ``grid`` in ``find_taps``."""
    address, kind, walk, step = dgrid
    if interleaved(dgrid, axes, like) and not accumulate:
        target, rows = pointer(address + begin * axes * kind, like), pointer(rows_at, like)
        axis = AXIS_ROWS * row_size(like)
        if axes == 2:
            for i in range(count):
                target[2 * i], target[2 * i + 1] = rows[i], rows[axis + i]
        else:
            for i in range(count):
                x, y, z = rows[i], rows[axis + i], rows[2 * axis + i]
                target[3 * i], target[3 * i + 1], target[3 * i + 2] = x, y, z
        return
    for a in range(axes):
        to = address + a * step * (kind & ITEM_SIZE)
        store_span(row_of(rows_at, a, _X), to, kind, walk, begin, begin + count, accumulate, raw, old, like)


@jit
def find_offsets(rows_at, corner, axes, taps, steps, count, target):
    """Offsets of the place that starts with ``corner``. ``steps`` are the strides along x, y and z.

    They are computed in 32 bits if they fit, which is faster.
    """
    chosen, result = taps_of_corner(corner, axes, taps), pointer(target, np.int64)
    x = pointer(row_of(rows_at, 0, INDEX + chosen[0]), np.int32)
    y = pointer(row_of(rows_at, 1, INDEX + chosen[1]), np.int32)
    z = pointer(row_of(rows_at, axes - 1, INDEX + chosen[2]), np.int32)
    along_x, along_y, along_z, narrow = steps
    if not narrow:
        for i in range(count):
            result[i] = x[i] * along_x + y[i] * along_y + (z[i] * along_z if axes == 3 else 0)
        return
    sx, sy, sz = np.int32(along_x), np.int32(along_y), np.int32(along_z)
    if axes == 2:
        for i in range(count):
            result[i] = np.int32(np.int32(x[i] * sx) + np.int32(y[i] * sy))
    else:
        for i in range(count):
            row = np.int32(np.int32(y[i] * sy) + np.int32(z[i] * sz))
            result[i] = np.int32(np.int32(x[i] * sx) + row)
