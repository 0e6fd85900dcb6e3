"""Sums of the samples around columns of pixels, in Triton: the last kernel of ``gpu_dinput_by_slot``.

A thread sums a column of pixels along y. It processes the rows of cells between the pixels one after another,
loads each sample of a cell once, and adds its terms to the pixel above the cell and to the pixel below it.

In every row a pixel has two cells, in 3-D four. Cell i holds the samples that have the pixel as a corner with
tap ``i % 2`` along x and tap ``i // 2`` along z.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.numerics.gpu import widen
from holdfast.ops.grid_sample.gpu_cells import place_offset
from holdfast.ops.grid_sample.gpu_coordinates import (
    ZEROS,
    corner_weight,
    padded_coordinate,
    unpadded_coordinate,
)
from holdfast.ops.grid_sample.gpu_dinput_by_cell import pixels_of_tile, step_of, store_pixels
from holdfast.ops.grid_sample.gpu_integer_sums import plane_shift, power_of_two, scaled

#: Words per plane of ``largest``: atomics of many programs on one address would be slow.
SPREAD = tl.constexpr(64)


@triton.jit
def load_shift(largest, plane, fraction_bits):
    """The shift of a plane."""
    fields = tl.load(largest + plane * SPREAD + tl.arange(0, SPREAD))
    return plane_shift(tl.max(fields, 0), fraction_bits, tl.float32)


@triton.jit
def factors_of(shift):
    """Two powers of two whose product is 2**shift."""
    half = shift >> 1
    return power_of_two(half, tl.float32), power_of_two(shift - half, tl.float32)


@triton.jit
def words_around(words, cell, layer, AXES: tl.constexpr):
    """The words of cells 0 to 3, given the first of them in memory; in 2-D only those of cells 0 and 1."""
    if AXES == 3:
        before_1, before_0 = tl.load(words + cell), tl.load(words + (cell + 1))
        cell += layer
        return tl.load(words + (cell + 1)), tl.load(words + cell), before_0, before_1
    else:
        west, east = tl.load(words + cell), tl.load(words + (cell + 1))
        return east, west, east, west


@triton.jit
def fraction(
    g, first, size, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The fraction of samples whose first tap is ``first``. Such samples are near the image."""
    if PADDING == ZEROS:
        x, _scale = unpadded_coordinate(g, size, PADDING, ALIGNED)
    else:
        x, _scale = padded_coordinate(g, size, MODE, PADDING, ALIGNED)
    return x - first


@triton.jit
def coordinates(grid, sample, out_sizes, strides, step, AXES: tl.constexpr, COMPUTE: tl.constexpr,
    PACKED: tl.constexpr, FLAT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """The grid coordinates of samples. PACKED: there is nothing between those of a 2-D grid."""
    if PACKED:
        at = (sample * 2)[:, None] + tl.arange(0, 2)[None, :]
        gx, gy = tl.split(widen(tl.load(grid + at), COMPUTE))
        return gx, gy, gx
    else:
        at = place_offset(sample, out_sizes, strides, AXES, FLAT).to(OFFSET)
        gx, gy = widen(tl.load(grid + at), COMPUTE), widen(tl.load(grid + (at + step)), COMPUTE)
        return gx, gy, widen(tl.load(grid + (at + 2 * step)), COMPUTE) if AXES == 3 else gx


@triton.jit
def add_round(
    a0, a1, a2, a3, b0, b1, b2, b3, k, samples, counts, x, y, z, grid, dout, factors, sizes, out_sizes,
    grid_strides, dout_strides, grid_step, dout_step,
    CHANNELS: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr,
    ALIGNED: tl.constexpr, COMPUTE: tl.constexpr, TAPS: tl.constexpr, PACKED: tl.constexpr,
    GRID_FLAT: tl.constexpr, FLAT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Add the terms of ``samples``, those in slot ``k`` of the cells, to the pixels above and below.

    x and z are those of the pixels, y is that of the pixels above.
    """
    for i in tl.static_range(2 * (AXES - 1)):
        # Empty slots hold any number. Sample 0 replaces them, with weights of 0.
        here = counts[i] > k
        sample = tl.where(here, samples[i], 0)
        gx, gy, gz = coordinates(
            grid, sample, out_sizes, grid_strides, grid_step, AXES, COMPUTE, PACKED, GRID_FLAT, OFFSET
        )
        tx = fraction(gx, x - (i % 2), sizes[0], MODE, PADDING, ALIGNED)
        ty = fraction(gy, y, sizes[1], MODE, PADDING, ALIGNED)
        tz = ty
        if AXES == 3:
            tz = fraction(gz, z - (i // 2), sizes[2], MODE, PADDING, ALIGNED)
        above = tl.where(here, corner_weight((tx, ty, tz), i % 2 + i // 2 * 4, AXES, TAPS, MODE), 0.0)
        below = tl.where(here, corner_weight((tx, ty, tz), i % 2 + 2 + i // 2 * 4, AXES, TAPS, MODE), 0.0)
        source = dout + place_offset(sample, out_sizes, dout_strides, AXES, FLAT).to(OFFSET)
        change = (widen(tl.load(source), COMPUTE) * factors[0][0]) * factors[0][1]
        a0 += (above * change).to(tl.int64)
        b0 += (below * change).to(tl.int64)
        if CHANNELS > 1:
            change = (widen(tl.load(source + dout_step), COMPUTE) * factors[1][0]) * factors[1][1]
            a1 += (above * change).to(tl.int64)
            b1 += (below * change).to(tl.int64)
        if CHANNELS > 2:
            change = (widen(tl.load(source + 2 * dout_step), COMPUTE) * factors[2][0]) * factors[2][1]
            a2 += (above * change).to(tl.int64)
            b2 += (below * change).to(tl.int64)
        if CHANNELS > 3:
            change = (widen(tl.load(source + 3 * dout_step), COMPUTE) * factors[3][0]) * factors[3][1]
            a3 += (above * change).to(tl.int64)
            b3 += (below * change).to(tl.int64)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def store_sum(target, total, shift, exists, ACCUMULATE: tl.constexpr):
    """Convert and store the sums of a plane with this shift."""
    store_pixels(target, scaled(total.to(tl.float32), -shift, tl.float32), exists, ACCUMULATE)


@triton.jit(
    do_not_specialize=["tiles", "groups", "first_channel", "cells", "all_cells", "stacked", "fraction_bits"]
)
def sum_slots(
    dinput, counts, slots, heads, successors, gate, largest, dout, grid,
    tiles, groups, first_channel, cells, all_cells, stacked, fraction_bits, channels, samples, sizes,
    out_sizes, dinput_strides, dout_strides, grid_strides, dinput_step, dout_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr,
    PACKED: tl.constexpr, GRID_FLAT: tl.constexpr, FLAT: tl.constexpr, OFFSET: tl.constexpr,
    ACCUMULATE: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Sum LANES columns of ROWS pixels of an image in CHANNELS channels, one column per thread.

    There are ``groups`` groups of channels, from ``first_channel``. The columns are WIDE beside each other.
    ``stacked`` counts the bands of ROWS rows, in 3-D of all layers. AHEAD: the counters and first slots of a
    row of cells are loaded one row ahead.
    """
    follow()
    if tl.load(gate) > 0:
        return
    task = tl.program_id(0) // groups
    channel = first_channel + (tl.program_id(0) - task * groups) * CHANNELS
    n = task // tiles
    x, band, exists = pixels_of_tile(task - n * tiles, sizes[0], stacked, LANES, WIDE)
    z = tl.zeros_like(x)
    if AXES == 3:
        stack = band
        band = stack // sizes[2]
        z = stack - band * sizes[2]
    top = band * ROWS
    target = dinput + n.to(tl.int64) * dinput_strides[0]
    offset = x.to(OFFSET) * dinput_strides[1] + z.to(OFFSET) * dinput_strides[3]
    # Columns past the last load the cells of the last; rows past the last, those of the last row.
    x = tl.minimum(x, sizes[0] - 1)
    row = sizes[0] + 1
    layer = (sizes[1] + 1) * row
    corner = n * cells + z * layer + x
    pixel_x, pixel_z = x.to(tl.float32), z.to(tl.float32)
    own_grid = grid + n.to(tl.int64) * grid_strides[0]
    dout_step, dinput_step = step_of(dout_step), step_of(dinput_step)
    own_dout = dout + n.to(tl.int64) * dout_strides[0] + channel * dout_step
    target += channel * dinput_step
    successors += n * samples
    plane = n * channels + channel
    shift_0 = load_shift(largest, plane, fraction_bits)
    shift_1, shift_2, shift_3 = shift_0, shift_0, shift_0
    if CHANNELS > 1:
        shift_1 = load_shift(largest, plane + 1, fraction_bits)
    if CHANNELS > 2:
        shift_2 = load_shift(largest, plane + 2, fraction_bits)
    if CHANNELS > 3:
        shift_3 = load_shift(largest, plane + 3, fraction_bits)
    factors = (factors_of(shift_0), factors_of(shift_1), factors_of(shift_2), factors_of(shift_3))
    # Sums of the pixels above the row of cells (a) and below it (b).
    zero = tl.zeros([LANES], tl.int64)
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    # ``heads`` of a cell is the number of the first sample of its list, ``successors`` of a sample the next.
    cell = corner + tl.minimum(top, sizes[1]) * row
    c0, c1, c2, c3 = words_around(counts, cell, layer, AXES)
    s0, s1, s2, s3 = words_around(slots, cell, layer, AXES)
    for j in range(ROWS + 1):
        y = tl.minimum(top + j, sizes[1])
        cell = corner + y * row
        if AHEAD:
            amounts, numbers = (c0, c1, c2, c3), (s0, s1, s2, s3)
            following = corner + tl.minimum(top + j + 1, sizes[1]) * row
            c0, c1, c2, c3 = words_around(counts, following, layer, AXES)
            s0, s1, s2, s3 = words_around(slots, following, layer, AXES)
        else:
            amounts = words_around(counts, cell, layer, AXES)
            numbers = words_around(slots, cell, layer, AXES)
        pixel_y = (y - 1).to(tl.float32)
        a0, a1, a2, a3, b0, b1, b2, b3 = add_round(
            a0, a1, a2, a3, b0, b1, b2, b3, 0, numbers, amounts, pixel_x, pixel_y, pixel_z, own_grid,
            own_dout, factors, sizes, out_sizes, grid_strides, dout_strides, grid_step, dout_step, CHANNELS,
            AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, PACKED, GRID_FLAT, FLAT, OFFSET,
        )  # fmt: skip
        most = tl.maximum(amounts[0], amounts[1])
        if AXES == 3:
            most = tl.maximum(most, tl.maximum(amounts[2], amounts[3]))
        most = tl.max(most, 0)
        for k in range(1, tl.minimum(most, SLOTS)):
            numbers = words_around(slots + k * all_cells, cell, layer, AXES)
            a0, a1, a2, a3, b0, b1, b2, b3 = add_round(
                a0, a1, a2, a3, b0, b1, b2, b3, k, numbers, amounts, pixel_x, pixel_y, pixel_z, own_grid,
                own_dout, factors, sizes, out_sizes, grid_strides, dout_strides, grid_step, dout_step,
                CHANNELS, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, PACKED, GRID_FLAT, FLAT, OFFSET,
            )  # fmt: skip
        if most > SLOTS:
            next_0, next_1, next_2, next_3 = words_around(heads, cell, layer, AXES)
            for k in range(SLOTS, most):
                numbers = (
                    tl.where(amounts[0] > k, next_0, 0), tl.where(amounts[1] > k, next_1, 0),
                    tl.where(amounts[2] > k, next_2, 0), tl.where(amounts[3] > k, next_3, 0),
                )  # fmt: skip
                next_0, next_1 = tl.load(successors + numbers[0]), tl.load(successors + numbers[1])
                next_2, next_3 = next_0, next_1
                if AXES == 3:
                    next_2, next_3 = tl.load(successors + numbers[2]), tl.load(successors + numbers[3])
                a0, a1, a2, a3, b0, b1, b2, b3 = add_round(
                    a0, a1, a2, a3, b0, b1, b2, b3, k, numbers, amounts, pixel_x, pixel_y, pixel_z, own_grid,
                    own_dout, factors, sizes, out_sizes, grid_strides, dout_strides, grid_step, dout_step,
                    CHANNELS, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, PACKED, GRID_FLAT, FLAT, OFFSET,
                )  # fmt: skip
        # The pixels above are complete, unless they belong to the column above.
        done = exists & (j > 0) & (top + j <= sizes[1])
        at = target + (offset + (top + j - 1).to(OFFSET) * dinput_strides[2])
        store_sum(at, a0, shift_0, done, ACCUMULATE)
        if CHANNELS > 1:
            store_sum(at + dinput_step, a1, shift_1, done, ACCUMULATE)
        if CHANNELS > 2:
            store_sum(at + 2 * dinput_step, a2, shift_2, done, ACCUMULATE)
        if CHANNELS > 3:
            store_sum(at + 3 * dinput_step, a3, shift_3, done, ACCUMULATE)
        a0, a1, a2, a3 = b0, b1, b2, b3
        b0, b1, b2, b3 = zero, zero, zero, zero
