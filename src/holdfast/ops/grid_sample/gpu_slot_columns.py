"""Sums of the slots around columns of pixels, in Triton: the last kernel of ``gpu_dinput_by_slot``.

A thread sums a column of pixels along y. It passes the rows of cells between them one after another, loads
each sample of a cell once, and adds its terms to the pixel above the cell and to the pixel below it.

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

#: Positions in ``tallies``: the number of extras and of holders; then the number of tallies.
EXTRAS, HOLDERS, TALLIES = (tl.constexpr(number) for number in (0, 1, 8))


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
    a0, a1, a2, a3, b0, b1, b2, b3, k, samples, counts, x, y, z, grid, dout, scales, sizes, out_sizes,
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
        change = widen(tl.load(source), COMPUTE) * scales[0]
        a0 += (above * change).to(tl.int64)
        b0 += (below * change).to(tl.int64)
        if CHANNELS > 1:
            change = widen(tl.load(source + dout_step), COMPUTE) * scales[1]
            a1 += (above * change).to(tl.int64)
            b1 += (below * change).to(tl.int64)
        if CHANNELS > 2:
            change = widen(tl.load(source + 2 * dout_step), COMPUTE) * scales[2]
            a2 += (above * change).to(tl.int64)
            b2 += (below * change).to(tl.int64)
        if CHANNELS > 3:
            change = widen(tl.load(source + 3 * dout_step), COMPUTE) * scales[3]
            a3 += (above * change).to(tl.int64)
            b3 += (below * change).to(tl.int64)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def held_words(
    holders, ids, counts, channel, SOUTH: tl.constexpr, AXES: tl.constexpr, CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """The sums that crowded cells hold for a channel of the pixels above, or below if SOUTH."""
    total = tl.zeros(counts[0].shape, tl.int64)
    for i in tl.static_range(2 * (AXES - 1)):
        at = holders + ids[i] * (4 * (AXES - 1) * CHANNELS)
        at += (i % 2 + 2 * SOUTH + i // 2 * 4) * CHANNELS + channel
        total += tl.load(at, mask=counts[i] > SLOTS, other=0)
    return total


@triton.jit
def store_sum(target, total, scale, exists, ACCUMULATE: tl.constexpr):
    """Convert and store the sums of a plane with this scale."""
    bits = (scale + tl.zeros([1], tl.float32)).to(tl.int32, bitcast=True)
    inverse = (tl.full([1], 2 * 127 << 23, tl.int32) - bits).to(tl.float32, bitcast=True)
    store_pixels(target, total.to(tl.float32) * inverse, exists, ACCUMULATE)


@triton.jit(do_not_specialize=["tiles", "cells", "all_cells", "most_extras", "stacked"])
def sum_slots(
    dinput, counts, slots, holders, tallies, scales, dout, grid,
    tiles, cells, all_cells, most_extras, stacked, channels, sizes, out_sizes, dinput_strides,
    dout_strides, grid_strides, dinput_step, dout_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr,
    PACKED: tl.constexpr, GRID_FLAT: tl.constexpr, FLAT: tl.constexpr, OFFSET: tl.constexpr,
    ACCUMULATE: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Sum LANES columns of ROWS pixels of an image in all channels, one column per thread.

    The columns are WIDE beside each other. ``stacked`` counts the bands of ROWS rows, in 3-D of all layers.
    AHEAD: the counters and first slots of a row of cells are loaded one row ahead.
    """
    follow()
    if tl.load(tallies + EXTRAS) > most_extras:
        return
    n = tl.program_id(0) // tiles
    x, band, exists = pixels_of_tile(tl.program_id(0) - n * tiles, sizes[0], stacked, LANES, WIDE)
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
    own_dout = dout + n.to(tl.int64) * dout_strides[0]
    dout_step, dinput_step = step_of(dout_step), step_of(dinput_step)
    scale_0 = tl.load(scales + n * channels)
    scale_1, scale_2, scale_3 = scale_0, scale_0, scale_0
    if CHANNELS > 1:
        scale_1 = tl.load(scales + n * channels + 1)
    if CHANNELS > 2:
        scale_2 = tl.load(scales + n * channels + 2)
    if CHANNELS > 3:
        scale_3 = tl.load(scales + n * channels + 3)
    factors = (scale_0, scale_1, scale_2, scale_3)
    # Sums of the pixels above the row of cells (a) and below it (b).
    zero = tl.zeros([LANES], tl.int64)
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    cell = corner + tl.minimum(top, sizes[1]) * row
    c0, c1, c2, c3 = words_around(counts, cell, layer, AXES)
    s0, s1, s2, s3 = words_around(slots, cell, layer, AXES)
    for j in range(ROWS + 1):
        y = tl.minimum(top + j, sizes[1])
        cell = corner + y * row
        if AHEAD:
            amounts, samples = (c0, c1, c2, c3), (s0, s1, s2, s3)
            following = corner + tl.minimum(top + j + 1, sizes[1]) * row
            c0, c1, c2, c3 = words_around(counts, following, layer, AXES)
            s0, s1, s2, s3 = words_around(slots, following, layer, AXES)
        else:
            amounts = words_around(counts, cell, layer, AXES)
            samples = words_around(slots, cell, layer, AXES)
        pixel_y = (y - 1).to(tl.float32)
        a0, a1, a2, a3, b0, b1, b2, b3 = add_round(
            a0, a1, a2, a3, b0, b1, b2, b3, 0, samples, amounts, pixel_x, pixel_y, pixel_z, own_grid,
            own_dout, factors, sizes, out_sizes, grid_strides, dout_strides, grid_step, dout_step, CHANNELS,
            AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, PACKED, GRID_FLAT, FLAT, OFFSET,
        )  # fmt: skip
        most = tl.maximum(amounts[0], amounts[1])
        if AXES == 3:
            most = tl.maximum(most, tl.maximum(amounts[2], amounts[3]))
        most = tl.max(most, 0)
        for k in range(1, tl.minimum(most, SLOTS)):
            samples = words_around(slots + k * all_cells, cell, layer, AXES)
            a0, a1, a2, a3, b0, b1, b2, b3 = add_round(
                a0, a1, a2, a3, b0, b1, b2, b3, k, samples, amounts, pixel_x, pixel_y, pixel_z, own_grid,
                own_dout, factors, sizes, out_sizes, grid_strides, dout_strides, grid_step, dout_step,
                CHANNELS, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, PACKED, GRID_FLAT, FLAT, OFFSET,
            )  # fmt: skip
        if most > SLOTS:
            ids = words_around(slots + SLOTS * all_cells, cell, layer, AXES)
            a0 += held_words(holders, ids, amounts, 0, 0, AXES, CHANNELS, SLOTS)
            b0 += held_words(holders, ids, amounts, 0, 1, AXES, CHANNELS, SLOTS)
            if CHANNELS > 1:
                a1 += held_words(holders, ids, amounts, 1, 0, AXES, CHANNELS, SLOTS)
                b1 += held_words(holders, ids, amounts, 1, 1, AXES, CHANNELS, SLOTS)
            if CHANNELS > 2:
                a2 += held_words(holders, ids, amounts, 2, 0, AXES, CHANNELS, SLOTS)
                b2 += held_words(holders, ids, amounts, 2, 1, AXES, CHANNELS, SLOTS)
            if CHANNELS > 3:
                a3 += held_words(holders, ids, amounts, 3, 0, AXES, CHANNELS, SLOTS)
                b3 += held_words(holders, ids, amounts, 3, 1, AXES, CHANNELS, SLOTS)
        # The pixels above are complete, unless they belong to the column above.
        done = exists & (j > 0) & (top + j <= sizes[1])
        at = target + (offset + (top + j - 1).to(OFFSET) * dinput_strides[2])
        store_sum(at, a0, scale_0, done, ACCUMULATE)
        if CHANNELS > 1:
            store_sum(at + dinput_step, a1, scale_1, done, ACCUMULATE)
        if CHANNELS > 2:
            store_sum(at + 2 * dinput_step, a2, scale_2, done, ACCUMULATE)
        if CHANNELS > 3:
            store_sum(at + 3 * dinput_step, a3, scale_3, done, ACCUMULATE)
        a0, a1, a2, a3 = b0, b1, b2, b3
        b0, b1, b2, b3 = zero, zero, zero, zero
