"""dinput of bilinear samples with many channels, in Triton: a pixel sums the samples of the cells around it.

``gpu_cells`` lists the samples of each cell. The sums are exact sums of integers, in arbitrary order.

``sum_planes`` reads dout plane by plane, one thread per pixel; neighbouring pixels must have neighbouring
samples. ``sum_rows`` reads rows of channels: of the copy of dout in the order of the cells, or of dout itself
if its channels are last. Both are launched, and the one that does not suit the grid returns at once.

A crowd is a pixel with many terms. Its terms are divided into segments, and one program of ``sum_segments``
sums one segment. A crowd of several segments has a holder, an accumulator in memory: the segments are added
to it with integer atomics, and the last segment to arrive stores the result.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import Part, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_cells import LONG, SEGMENTS, Cells, cells_of, place_offset
from holdfast.ops.grid_sample.gpu_coordinates import offset_of, strides_of
from holdfast.ops.grid_sample.gpu_integer_sums import (
    BIAS,
    converted,
    finite_or_zero,
    plane_shift,
    scaled,
    special_bits,
)
from holdfast.ops.grid_sample.gpu_locality import is_scattered
from holdfast.ops.grid_sample.plan import (
    LIMIT,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    Mode,
)

#: Bits of the float 2**0, doubled: the sum of the bits of 2**shift and of 2**-shift.
TWO_ONES = tl.constexpr(2 * 127 << 23)


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``CellSums``."""

    #: Pixels of a tile of ``sum_planes``, its width in pixels, warps, and channels of a program.
    plane_pixels: int
    plane_wide: int
    plane_warps: int
    plane_channels: int
    #: Pixels of a tile of ``sum_rows``, its width, warps, threads per pixel, and terms loaded together.
    row_pixels: int
    row_wide: int
    row_warps: int
    row_lanes: int
    row_unroll: int
    #: Maximum number of terms of a pixel that is not a crowd, and of a segment of a crowd.
    crowd: int
    segment: int
    #: Terms and channels of a tile of ``sum_segments``, its warps, and its maximum number of programs.
    segment_terms: int
    segment_channels: int
    segment_warps: int
    segment_programs: int
    #: Maximum registers of ``sum_planes`` in 2-D and 3-D, and of ``sum_rows``. With an explicit limit the
    #: compiler groups the loads. It does not do so if it chooses the same limit itself.
    plane_registers: int | None = 88
    volume_registers: int | None = 96
    row_registers: int | None = 128
    #: Maximum blocks of channels of a thread of ``sum_rows``: 1, 2 or 4. Maximum number of its programs if
    #: they may have to return at once, because starting a program takes time.
    row_blocks: int = 4
    row_programs: int = 2112
    #: Minimum number of channels; minimum number of elements of dout or dinput, unless the channels are
    #: ``many``.
    least_channels: int = 8
    least_elements: int = 2**20
    many: int = 32


TUNING = Tuned(
    gpu=Tuning(
        plane_pixels=128, plane_wide=32, plane_warps=4, plane_channels=32,
        row_pixels=32, row_wide=16, row_warps=4, row_lanes=4, row_unroll=2,
        crowd=64, segment=2048, segment_terms=64, segment_channels=16, segment_warps=4, segment_programs=1056,
    ),
    interpreter=Tuning(
        plane_pixels=4096, plane_wide=32, plane_warps=4, plane_channels=64,
        row_pixels=4096, row_wide=32, row_warps=4, row_lanes=4, row_unroll=1,
        crowd=14, segment=32, segment_terms=32, segment_channels=16, segment_warps=4, segment_programs=4,
        row_programs=2, least_channels=5, least_elements=800,
    ),
)  # fmt: skip


@triton.jit
def lists_of(starts, counts, cell, exists, row):
    """The lists of four cells around pixels; ``cell`` is the one whose first corner is the pixel.

    Returns the number of terms; the numbers of the first terms of the second to fourth list; and for each
    list the difference between the position of a sample and the number of its term.
    """
    first_1 = tl.load(counts + cell, mask=exists, other=0)
    first_2 = first_1 + tl.load(counts + cell - 1, mask=exists, other=0)
    first_3 = first_2 + tl.load(counts + cell - row, mask=exists, other=0)
    amount = first_3 + tl.load(counts + cell - row - 1, mask=exists, other=0)
    base_0 = tl.load(starts + cell, mask=exists, other=0)
    base_1 = tl.load(starts + cell - 1, mask=exists, other=0) - first_1
    base_2 = tl.load(starts + cell - row, mask=exists, other=0) - first_2
    base_3 = tl.load(starts + cell - row - 1, mask=exists, other=0) - first_3
    return amount, first_1, first_2, first_3, base_0, base_1, base_2, base_3


@triton.jit
def lists_around(starts, counts, n, x, y, exists, cells, sizes, AXES: tl.constexpr):
    """The number of terms of pixels, and ``lists_of`` the cells around them: in 3-D after and before them."""
    row = sizes[0] + 1
    if AXES == 3:
        z = y // sizes[1]
        layer = (sizes[1] + 1) * row
        cell = n * cells + (z + 1) * layer + (y - z * sizes[1] + 1) * row + x + 1
        after = lists_of(starts, counts, cell, exists, row)
        before = lists_of(starts, counts, cell - layer, exists, row)
        return after[0] + before[0], after, before
    else:
        after = lists_of(starts, counts, n * cells + (y + 1) * row + x + 1, exists, row)
        return after[0], after, after


@triton.jit
def find_term(lists, term):
    """The position of a term, and whether the pixel is the east or south corner of its sample."""
    south = term >= lists[2]
    north_base = tl.where(term >= lists[1], lists[5], lists[4])
    south_base = tl.where(term >= lists[3], lists[7], lists[6])
    east = tl.where(south, (term >= lists[3]).to(tl.int32), (term >= lists[1]).to(tl.int32)) > 0
    return term + tl.where(south, south_base, north_base), east, south


@triton.jit
def load_term(fractions, around, term, here, AXES: tl.constexpr):
    """The position and the weight of a term of each pixel; the weight is 0 where it does not exist."""
    after = around[1]
    if AXES == 3:
        before = around[2]
        position, east, south = find_term(after, term)
        position_b, east_b, south_b = find_term(before, term - after[0])
        back = term >= after[0]
        position = tl.where(back, position_b, position)
        east = (back & east_b) | ((back == 0) & east)
        south = (back & south_b) | ((back == 0) & south)
    else:
        position, east, south = find_term(after, term)
    at = fractions + position.to(tl.int64) * AXES
    tx = tl.load(at, mask=here, other=0.0)
    ty = tl.load(at + 1, mask=here, other=0.0)
    weight = tl.where(east, tx, 1.0 - tx) * tl.where(south, ty, 1.0 - ty)
    if AXES == 3:
        tz = tl.load(at + 2, mask=here, other=0.0)
        weight = weight * tl.where(back, tz, 1.0 - tz)
    return position, tl.where(here, weight, 0.0)


@triton.jit
def load_placed_term(
    fractions, places, around, term, here, first_place, out_sizes, strides,
    AXES: tl.constexpr, FLAT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """The offset in a plane of dout, and the weight, of a term of each pixel.

    A term that does not exist has the offset of an existing sample, so that loads need no mask.
    """
    position, weight = load_term(fractions, around, term, here, AXES)
    sample = tl.load(places + position, mask=here, other=first_place) - first_place
    return place_offset(sample, out_sizes, strides, AXES, FLAT).to(OFFSET), weight


@triton.jit
def load_two(
    source, amount, FIRST: tl.constexpr, out_sizes, strides,
    AXES: tl.constexpr, FLAT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """``load_placed_term`` of FIRST and FIRST + 1. ``source``: fractions, places, lists, first place."""
    fractions, places, around, first_place = source
    at_0, weight_0 = load_placed_term(
        fractions, places, around, FIRST, amount > FIRST, first_place, out_sizes, strides, AXES, FLAT, OFFSET
    )
    at_1, weight_1 = load_placed_term(
        fractions, places, around, FIRST + 1, amount > FIRST + 1, first_place, out_sizes, strides,
        AXES, FLAT, OFFSET,
    )  # fmt: skip
    return at_0, weight_0, at_1, weight_1


@triton.jit
def pixels_of_tile(tile, width, stacked, PIXELS: tl.constexpr, WIDE: tl.constexpr):
    """x and y of the pixels of a tile of width WIDE, or 0 for consecutive pixels, and whether they exist.

    The layers of a volume are stacked along y.
    """
    lane = tl.arange(0, PIXELS)
    if WIDE == 0:
        y = (tile * PIXELS + lane) // width
        x = tile * PIXELS + lane - y * width
    else:
        across = tl.cdiv(width, WIDE)
        x = tile % across * WIDE + lane % WIDE
        y = tile // across * (PIXELS // WIDE) + lane // WIDE
    return x, y, (x < width) & (y < stacked)


@triton.jit
def pixel_offset(n, x, y, sizes, strides, AXES: tl.constexpr):
    """Offset of pixels in dinput."""
    if AXES == 3:
        z = y // sizes[1]
        return offset_of(n, x, y - z * sizes[1], z, strides)
    else:
        return offset_of(n, x, y, tl.zeros_like(y), strides)


@triton.jit
def store_pixels(at, value, mask, ACCUMULATE: tl.constexpr):
    """Store pixels, or add to them if ACCUMULATE."""
    if ACCUMULATE:
        value = widen(tl.load(at, mask=mask, other=0.0), value.dtype) + value
    tl.store(at, narrow(value, at.dtype.element_ty), mask=mask)


@triton.jit
def step_of(stride):
    """A stride as 64 bits."""
    return tl.full([], 1, tl.int64) * stride


@triton.jit
def list_crowds(
    tallies, owners, parts, holders, sums, arrived, pixel, amount, channels, tiles,
    CROWD: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """List the segments of crowds: pixel, number of the segment, and index of the holder (-1: one segment).

    Set the sums of holders to the bias, and their counters of arrived segments to 0.
    """
    wanted = tl.where(amount > CROWD, (amount + SEGMENT - 1) // SEGMENT, 0)
    slot = tl.atomic_add(tallies + SEGMENTS, tl.sum(wanted, 0), sem="relaxed")
    slot += tl.cumsum(wanted, 0) - wanted
    is_long = (wanted > 1).to(tl.int32)
    holder = tl.atomic_add(tallies + LONG, tl.sum(is_long, 0), sem="relaxed")
    holder += tl.cumsum(is_long, 0) - is_long
    for part in range(0, tl.max(wanted, 0)):
        tl.store(owners + slot + part, pixel, mask=wanted > part)
        tl.store(parts + slot + part, part + tl.zeros_like(slot), mask=wanted > part)
        tl.store(holders + slot + part, tl.where(is_long > 0, holder, -1), mask=wanted > part)
    if tl.max(is_long, 0) > 0:
        start = tl.full(holder.shape, BIAS, tl.int64)
        for channel in range(0, channels):
            tl.store(sums + holder.to(tl.int64) * channels + channel, start, mask=is_long > 0)
        for tile in range(0, tiles):
            tl.store(arrived + holder * tiles + tile, tl.zeros_like(holder), mask=is_long > 0)


@triton.jit
def careful_sum(
    base, largest, fractions, places, around, amount, most, first_place, row_step, fraction_bits,
    out_sizes, strides, AXES: tl.constexpr, PLACED: tl.constexpr, FLAT: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The sums of the plane at ``base`` for any values of dout, also those that are not finite."""
    shift = plane_shift(tl.load(largest), fraction_bits, tl.float32)
    total, odd = tl.zeros([PIXELS], tl.int64), tl.zeros([PIXELS], tl.float32)
    for term in range(0, most):
        here = amount > term
        at, weight = load_source(
            fractions, places, around, term, here, first_place, row_step, out_sizes, strides,
            AXES, PLACED, FLAT,
        )  # fmt: skip
        d = widen(tl.load(base + at, mask=here, other=0.0), tl.float32)
        finite = finite_or_zero(d)
        total += (weight * scaled(finite, shift, tl.float32)).to(tl.int64)
        odd += tl.where(finite == d, 0.0, weight * d)
    value = scaled(total.to(tl.float32), -shift, tl.float32)
    return tl.where(odd == 0.0, value, odd)


@triton.jit
def load_source(
    fractions, places, around, term, here, first_place, row_step, out_sizes, strides,
    AXES: tl.constexpr, PLACED: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """The offset of a term: in dout if PLACED, otherwise in the rows in the order of the cells."""
    if PLACED:
        return load_placed_term(
            fractions, places, around, term, here, first_place, out_sizes, strides,
            AXES, FLAT, tl.int64,
        )  # fmt: skip
    else:
        position, weight = load_term(fractions, around, term, here, AXES)
        return position.to(tl.int64) * row_step, weight


@triton.jit
def load_at(base, at):
    """Load from a plane of dout."""
    return widen(tl.load(base + at), tl.float32)


@triton.jit
def word(d, weight, scale):
    """The integer of a term."""
    return (weight * (d * scale)).to(tl.int64)


@triton.jit
def add_two(q0, q1, q2, q3, bases, scales, at_0, weight_0, at_1, weight_1):
    """Add two terms in four channels. All loads come first, so that they are in flight together."""
    a0, b0 = load_at(bases[0], at_0), load_at(bases[0], at_1)
    a1, b1 = load_at(bases[1], at_0), load_at(bases[1], at_1)
    a2, b2 = load_at(bases[2], at_0), load_at(bases[2], at_1)
    a3, b3 = load_at(bases[3], at_0), load_at(bases[3], at_1)
    q0 += word(a0, weight_0, scales[0]) + word(b0, weight_1, scales[0])
    q1 += word(a1, weight_0, scales[1]) + word(b1, weight_1, scales[1])
    q2 += word(a2, weight_0, scales[2]) + word(b2, weight_1, scales[2])
    q3 += word(a3, weight_0, scales[3]) + word(b3, weight_1, scales[3])
    return q0, q1, q2, q3


@triton.jit
def inverse_power(scale):
    """1 / scale for a power of two."""
    bits = scale.to(tl.int32, bitcast=True)
    return (tl.full(bits.shape, TWO_ONES, tl.int32) - bits).to(tl.float32, bitcast=True)


@triton.jit
def store_four(
    target, totals, scales, mine, first, channels, step, ACCUMULATE: tl.constexpr, FULL: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """Convert and store four channels from ``first``."""
    for k in tl.static_range(4):
        mask = mine
        if not FULL:
            mask = mine & (tl.full([PIXELS], first + k, tl.int32) < channels)
        value = totals[k].to(tl.float32) * inverse_power(scales[k])
        store_pixels(target + (first + k) * step_of(step), value, mask, ACCUMULATE)


@triton.jit(
    do_not_specialize=["count", "samples", "cells", "pixels", "tiles", "shares", "stacked", "crowd_tiles"]
)
def sum_planes(
    dinput, tallies, owners, parts, holders, sums, arrived, dout, scales, largest, places, fractions, starts,
    counts,
    count, samples, cells, pixels, tiles, shares, stacked, crowd_tiles, channels, fraction_bits, sizes,
    out_sizes, dout_strides, dinput_strides, dout_step, dinput_step,
    LOCALITY: tl.constexpr, CROWDS: tl.constexpr, CROWD: tl.constexpr, SEGMENT: tl.constexpr,
    AXES: tl.constexpr, FLAT: tl.constexpr, FULL: tl.constexpr,
    OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, PIXELS: tl.constexpr, WIDE: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Sum a tile of pixels in SHARE channels, four at a time, one thread per pixel.

    The offsets and weights of the first terms are kept in registers. FULL: channels are a multiple of 4.
    """
    follow()
    if LOCALITY and is_scattered(tallies, count):
        return
    program = tl.program_id(0)
    tile, share, n = program % tiles, program // tiles % shares, program // tiles // shares
    x, y, exists = pixels_of_tile(tile, sizes[0], stacked, PIXELS, WIDE)
    around = lists_around(starts, counts, n, x, y, exists, cells, sizes, AXES)
    amount = around[0]
    if CROWDS and (share == 0) & (tl.max(amount, 0) > CROWD):
        list_crowds(
            tallies, owners, parts, holders, sums, arrived, n * pixels + y * sizes[0] + x, amount, channels,
            crowd_tiles, CROWD, SEGMENT,
        )  # fmt: skip
    mine = exists & (amount <= CROWD)
    amount = tl.where(mine, amount, 0)
    most = tl.max(amount, 0)
    first_place = n * samples
    source = fractions, places, around, first_place
    at_0, w_0, at_1, w_1 = load_two(source, amount, 0, out_sizes, dout_strides, AXES, FLAT, OFFSET)
    at_2, w_2, at_3, w_3 = load_two(source, amount, 2, out_sizes, dout_strides, AXES, FLAT, OFFSET)
    at_4, w_4, at_5, w_5, at_6, w_6, at_7, w_7 = at_0, w_0, at_0, w_0, at_0, w_0, at_0, w_0
    at_8, w_8, at_9, w_9, at_10, w_10, at_11, w_11 = at_0, w_0, at_0, w_0, at_0, w_0, at_0, w_0
    if most > 4:
        at_4, w_4, at_5, w_5 = load_two(source, amount, 4, out_sizes, dout_strides, AXES, FLAT, OFFSET)
    if most > 6:
        at_6, w_6, at_7, w_7 = load_two(source, amount, 6, out_sizes, dout_strides, AXES, FLAT, OFFSET)
    if most > 8:
        at_8, w_8, at_9, w_9 = load_two(source, amount, 8, out_sizes, dout_strides, AXES, FLAT, OFFSET)
    if most > 10:
        at_10, w_10, at_11, w_11 = load_two(source, amount, 10, out_sizes, dout_strides, AXES, FLAT, OFFSET)
    plane = dout + n.to(tl.int64) * dout_strides[0]
    target = dinput + pixel_offset(n, x, y, sizes, dinput_strides, AXES)
    own, step = n * channels, step_of(dout_step)
    for c in range(share * SHARE, tl.minimum(share * SHARE + SHARE, channels), 4):
        c1, c2, c3 = c + 1, c + 2, c + 3
        if not FULL:
            last = channels - 1
            c1, c2, c3 = tl.minimum(c1, last), tl.minimum(c2, last), tl.minimum(c3, last)
        scale_0, scale_1 = tl.load(scales + own + c), tl.load(scales + own + c1)
        scale_2, scale_3 = tl.load(scales + own + c2), tl.load(scales + own + c3)
        base_0, base_1, base_2, base_3 = (
            plane + c * step,
            plane + c1 * step,
            plane + c2 * step,
            plane + c3 * step,
        )
        if tl.minimum(tl.minimum(scale_0, scale_1), tl.minimum(scale_2, scale_3)) > 0.0:
            bases, factors = (base_0, base_1, base_2, base_3), (scale_0, scale_1, scale_2, scale_3)
            q0 = tl.zeros([PIXELS], tl.int64)
            q1, q2, q3 = q0, q0, q0
            q0, q1, q2, q3 = add_two(q0, q1, q2, q3, bases, factors, at_0, w_0, at_1, w_1)
            q0, q1, q2, q3 = add_two(q0, q1, q2, q3, bases, factors, at_2, w_2, at_3, w_3)
            if most > 4:
                q0, q1, q2, q3 = add_two(q0, q1, q2, q3, bases, factors, at_4, w_4, at_5, w_5)
            if most > 6:
                q0, q1, q2, q3 = add_two(q0, q1, q2, q3, bases, factors, at_6, w_6, at_7, w_7)
            if most > 8:
                q0, q1, q2, q3 = add_two(q0, q1, q2, q3, bases, factors, at_8, w_8, at_9, w_9)
            if most > 10:
                q0, q1, q2, q3 = add_two(q0, q1, q2, q3, bases, factors, at_10, w_10, at_11, w_11)
            for term in range(12, most):
                at, weight = load_placed_term(
                    fractions, places, around, term, amount > term, first_place, out_sizes, dout_strides,
                    AXES, FLAT, OFFSET,
                )  # fmt: skip
                q0 += word(load_at(base_0, at), weight, scale_0)
                q1 += word(load_at(base_1, at), weight, scale_1)
                q2 += word(load_at(base_2, at), weight, scale_2)
                q3 += word(load_at(base_3, at), weight, scale_3)
            store_four(
                target, (q0, q1, q2, q3), factors, mine, c, channels, dinput_step, ACCUMULATE, FULL,
                PIXELS,
            )  # fmt: skip
        else:
            for channel in range(c, tl.minimum(c + 4, channels)):
                value = careful_sum(
                    plane + channel * step, largest + own + channel, fractions, places, around, amount, most,
                    first_place, 0, fraction_bits, out_sizes, dout_strides, AXES, True, FLAT, PIXELS,
                )  # fmt: skip
                store_pixels(target + channel * step_of(dinput_step), value, mine, ACCUMULATE)


@triton.jit
def load_block(rows, at, here, first, channels, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):
    """Load one block of channels of rows; 0 for missing terms and channels."""
    channel = first + BLOCK * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    value = tl.load(rows + at[:, None] + channel, mask=here[:, None] & (channel < channels), other=0.0)
    return widen(value, tl.float32)


@triton.jit
def load_scales(scales, first, channels, BLOCK: tl.constexpr, CHANNELS: tl.constexpr):
    """The scales of one block of channels; 1 for missing channels."""
    channel = first + BLOCK * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return tl.load(scales + channel, mask=channel < channels, other=1.0)


@triton.jit
def store_block(
    target, total, scale, mine, first, channels, step, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convert and store one block of channels."""
    channel = first + BLOCK * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    value = total.to(tl.float32) * inverse_power(scale)
    mask = mine[:, None] & (channel < channels)
    store_pixels(target[:, None] + channel.to(tl.int64) * step, value, mask, ACCUMULATE)


@triton.jit(
    do_not_specialize=[
        "tasks", "programs", "count", "samples", "cells", "pixels", "tiles", "shares", "stacked",
        "crowd_tiles",
    ]
)  # fmt: skip
def sum_rows(
    dinput, tallies, owners, parts, holders, sums, arrived, dout, scales, largest, places, fractions, starts,
    counts,
    tasks, programs, count, samples, cells, pixels, tiles, shares, stacked, crowd_tiles, channels, row_step,
    fraction_bits, sizes, out_sizes, dout_strides, dinput_strides, dinput_step,
    LOCALITY: tl.constexpr, PLACED: tl.constexpr, CROWDS: tl.constexpr, CROWD: tl.constexpr,
    SEGMENT: tl.constexpr, AXES: tl.constexpr, FLAT: tl.constexpr, ACCUMULATE: tl.constexpr,
    PIXELS: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum tiles of pixels. LOCALITY: a program has several tiles, if the samples are scattered."""
    follow()
    if LOCALITY:
        if is_scattered(tallies, count):
            for task in range(tl.program_id(0), tasks, programs):
                sum_row_tile(
                    dinput, tallies, owners, parts, holders, sums, arrived, dout, scales, largest, places,
                    fractions, starts, counts, task, samples, cells, pixels, tiles, shares, stacked,
                    crowd_tiles, channels, row_step, fraction_bits, sizes, out_sizes, dout_strides,
                    dinput_strides, dinput_step, PLACED, CROWDS, CROWD, SEGMENT, AXES, FLAT, ACCUMULATE,
                    PIXELS, WIDE, CHANNELS, BLOCKS, UNROLL,
                )  # fmt: skip
    else:
        sum_row_tile(
            dinput, tallies, owners, parts, holders, sums, arrived, dout, scales, largest, places, fractions,
            starts, counts, tl.program_id(0), samples, cells, pixels, tiles, shares, stacked, crowd_tiles,
            channels, row_step, fraction_bits, sizes, out_sizes, dout_strides, dinput_strides, dinput_step,
            PLACED, CROWDS, CROWD, SEGMENT, AXES, FLAT, ACCUMULATE, PIXELS, WIDE, CHANNELS, BLOCKS, UNROLL,
        )  # fmt: skip


@triton.jit
def sum_row_tile(
    dinput, tallies, owners, parts, holders, sums, arrived, dout, scales, largest, places, fractions, starts,
    counts, task, samples, cells, pixels, tiles, shares, stacked, crowd_tiles, channels, row_step,
    fraction_bits, sizes, out_sizes, dout_strides, dinput_strides, dinput_step,
    PLACED: tl.constexpr, CROWDS: tl.constexpr, CROWD: tl.constexpr, SEGMENT: tl.constexpr,
    AXES: tl.constexpr, FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, PIXELS: tl.constexpr,
    WIDE: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum a tile of pixels in BLOCKS * CHANNELS channels.

    ``dout`` has contiguous channels. PLACED: its samples are in their own order, otherwise in that of the
    cells, ``row_step`` elements apart.
    """
    tile, share, n = task // shares % tiles, task % shares, task // tiles // shares
    first = share * (BLOCKS * CHANNELS)
    x, y, exists = pixels_of_tile(tile, sizes[0], stacked, PIXELS, WIDE)
    around = lists_around(starts, counts, n, x, y, exists, cells, sizes, AXES)
    amount = around[0]
    if CROWDS and (share == 0) & (tl.max(amount, 0) > CROWD):
        list_crowds(
            tallies, owners, parts, holders, sums, arrived, n * pixels + y * sizes[0] + x, amount, channels,
            crowd_tiles, CROWD, SEGMENT,
        )  # fmt: skip
    mine = exists & (amount <= CROWD)
    amount = tl.where(mine, amount, 0)
    most = tl.max(amount, 0)
    first_place = n * samples
    base = dout
    if PLACED:
        base += n.to(tl.int64) * dout_strides[0]
    target = dinput + pixel_offset(n, x, y, sizes, dinput_strides, AXES)
    own = n * channels
    scale_0 = load_scales(scales + own, first, channels, 0, CHANNELS)
    scale_1, scale_2, scale_3 = scale_0, scale_0, scale_0
    if BLOCKS > 1:
        scale_1 = load_scales(scales + own, first, channels, 1, CHANNELS)
    if BLOCKS > 2:
        scale_2 = load_scales(scales + own, first, channels, 2, CHANNELS)
        scale_3 = load_scales(scales + own, first, channels, 3, CHANNELS)
    least = tl.minimum(tl.minimum(scale_0, scale_1), tl.minimum(scale_2, scale_3))
    if tl.min(tl.min(least, 1), 0) > 0.0:
        zeros = tl.zeros([PIXELS, CHANNELS], tl.int64)
        sum_0, sum_1, sum_2, sum_3 = zeros, zeros, zeros, zeros
        for begin in range(0, most, UNROLL):
            for u in tl.static_range(UNROLL):
                here = amount > begin + u
                at, weight = load_source(
                    fractions, places, around, begin + u, here, first_place, row_step, out_sizes,
                    dout_strides, AXES, PLACED, FLAT,
                )  # fmt: skip
                weight = weight[:, None]
                d = load_block(base, at, here, first, channels, 0, CHANNELS)
                sum_0 += (weight * (d * scale_0)).to(tl.int64)
                if BLOCKS > 1:
                    d = load_block(base, at, here, first, channels, 1, CHANNELS)
                    sum_1 += (weight * (d * scale_1)).to(tl.int64)
                if BLOCKS > 2:
                    d = load_block(base, at, here, first, channels, 2, CHANNELS)
                    sum_2 += (weight * (d * scale_2)).to(tl.int64)
                    d = load_block(base, at, here, first, channels, 3, CHANNELS)
                    sum_3 += (weight * (d * scale_3)).to(tl.int64)
        store_block(target, sum_0, scale_0, mine, first, channels, dinput_step, ACCUMULATE, 0, CHANNELS)
        if BLOCKS > 1:
            store_block(target, sum_1, scale_1, mine, first, channels, dinput_step, ACCUMULATE, 1, CHANNELS)
        if BLOCKS > 2:
            store_block(target, sum_2, scale_2, mine, first, channels, dinput_step, ACCUMULATE, 2, CHANNELS)
            store_block(target, sum_3, scale_3, mine, first, channels, dinput_step, ACCUMULATE, 3, CHANNELS)
    else:
        for channel in range(first, tl.minimum(first + BLOCKS * CHANNELS, channels)):
            value = careful_sum(
                base + channel, largest + own + channel, fractions, places, around, amount, most,
                first_place, row_step, fraction_bits, out_sizes, dout_strides, AXES, PLACED, FLAT,
                PIXELS,
            )  # fmt: skip
            store_pixels(target + channel * step_of(dinput_step), value, mine, ACCUMULATE)


@triton.jit
def sum_segment(
    dout, largest, fractions, places, around, begin, end, first_place, first, channels, row_step, step,
    fraction_bits, out_sizes, strides,
    AXES: tl.constexpr, PLACED: tl.constexpr, FLAT: tl.constexpr, TERMS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The accumulators of the terms from ``begin`` to ``end`` of a pixel, in CHANNELS channels."""
    channel = first + tl.arange(0, CHANNELS)[None, :]
    field = tl.load(largest + channel, mask=channel < channels, other=0)
    shift = plane_shift(field, fraction_bits, tl.float32)
    total, odd = tl.zeros([TERMS, CHANNELS], tl.int64), tl.zeros([TERMS, CHANNELS], tl.float32)
    for start in range(begin, end, TERMS):
        term = start + tl.arange(0, TERMS)
        here = term < end
        at, weight = load_source(
            fractions, places, around, term, here, first_place, row_step, out_sizes, strides,
            AXES, PLACED, FLAT,
        )  # fmt: skip
        source = dout + at[:, None] + channel.to(tl.int64) * step
        d = widen(tl.load(source, mask=here[:, None] & (channel < channels), other=0.0), tl.float32)
        finite = finite_or_zero(d)
        total += (weight[:, None] * scaled(finite, shift, tl.float32)).to(tl.int64)
        odd += tl.where(finite == d, 0.0, weight[:, None] * d)
    odd = tl.sum(odd, 0)
    return tl.sum(total, 0), tl.where(odd == 0.0, 0, special_bits(odd))


@triton.jit(do_not_specialize=["count", "samples", "cells", "pixels", "crowd_tiles", "programs"])
def sum_segments(
    dinput, tallies, owners, parts, holders, sums, arrived, dout, rows, largest, places, fractions, starts,
    counts,
    count, samples, cells, pixels, crowd_tiles, programs, channels, fraction_bits,
    sizes, out_sizes, dout_strides, dinput_strides, dout_step, dinput_step,
    LOCALITY: tl.constexpr, AXES: tl.constexpr, FLAT: tl.constexpr, ACCUMULATE: tl.constexpr,
    SEGMENT: tl.constexpr, TERMS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum the segments of crowds, one by one, in CHANNELS channels; add and store them."""
    follow()
    tasks = tl.load(tallies + SEGMENTS) * crowd_tiles
    for task in range(tl.program_id(0), tasks, programs):
        slot, tile = task // crowd_tiles, task % crowd_tiles
        owner = tl.load(owners + slot)
        part = tl.load(parts + slot)
        holder = tl.load(holders + slot)
        n = owner // pixels
        y = (owner - n * pixels) // sizes[0]
        x = owner - n * pixels - y * sizes[0] + tl.zeros([1], tl.int32)
        y = y + tl.zeros([1], tl.int32)
        around = lists_around(starts, counts, n, x, y, x >= 0, cells, sizes, AXES)
        begin, amount = part * SEGMENT, tl.max(around[0], 0)
        end = tl.minimum(begin + SEGMENT, amount)
        first = tile * CHANNELS
        own = largest + n * channels
        if LOCALITY and is_scattered(tallies, count):
            total, marks = sum_segment(
                rows, own, fractions, places, around, begin, end, n * samples, first, channels, channels, 1,
                fraction_bits, out_sizes, dout_strides, AXES, False, FLAT, TERMS, CHANNELS,
            )  # fmt: skip
        else:
            image = dout + n.to(tl.int64) * dout_strides[0]
            total, marks = sum_segment(
                image, own, fractions, places, around, begin, end, n * samples, first, channels, channels,
                dout_step, fraction_bits, out_sizes, dout_strides, AXES, True, FLAT, TERMS, CHANNELS,
            )  # fmt: skip
        channel = first + tl.arange(0, CHANNELS)
        mask = channel < channels
        last = holder < 0
        if holder >= 0:
            held = sums + holder.to(tl.int64) * channels + channel
            tl.atomic_add(held, total, mask=mask, sem="relaxed")
            tl.atomic_or(held, marks, mask=mask & (marks != 0), sem="relaxed")
            tl.debug_barrier()
            before = tl.atomic_add(arrived + holder * crowd_tiles + tile, 1, sem="acq_rel")
            last = before == (amount - 1) // SEGMENT
            total = tl.load(held, mask=mask, other=BIAS, cache_modifier=".cg")
        else:
            total = (total + BIAS) | marks
        if last:
            shift = plane_shift(tl.load(own + channel, mask=mask, other=0), fraction_bits, tl.float32)
            value = converted(total, total, shift, fraction_bits, tl.float32)
            at = pixel_offset(n, x, y, sizes, dinput_strides, AXES)
            store_pixels(dinput + at + channel.to(tl.int64) * dinput_step, value, mask, ACCUMULATE)


def serves(desc: GridSampleBackwardDescriptor, device: torch.device) -> bool:
    """Whether dinput is summed by cell: bilinear, in float32, with many channels, and large enough."""
    tuning = TUNING.on(device)
    elements = desc.batch * desc.channels * max(desc.samples, desc.pixels)
    return (
        desc.needs_dinput
        and desc.mode == Mode.BILINEAR
        and desc.compute.bits == 32
        and desc.channels >= tuning.least_channels
        and max(cells_of(desc), desc.samples * desc.corners) <= LIMIT
        and (elements >= tuning.least_elements or desc.channels >= tuning.many)
    )


class CellSums:
    """Workspace regions and launches that compute dinput by cell, for ``budget`` bytes of workspace.

    ``images`` images are processed at a time. dout is copied only if it fits.
    """

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor, budget: int
    ) -> None:
        self.desc, self.device, self.tuning = desc, device, TUNING.on(device)
        most = max(min(desc.batch, LIMIT // max(cells_of(desc), desc.samples * desc.corners)), 1)
        self.images, self.copies = most, True
        size = self._size(1, True)
        if size > budget:
            self.copies, size = False, self._size(1, False)
        groups = -(-desc.batch // max(min(most, budget // size), 1))
        self.images = -(-desc.batch // groups)
        self.fits = self._size(self.images, self.copies) <= budget
        self._take(layout, self.images, self.copies)

    def _size(self, images: int, copies: bool) -> int:
        layout = WorkspaceLayout()
        self._take(layout, images, copies)
        return layout.size

    def _take(self, layout: WorkspaceLayout, images: int, copies: bool) -> None:
        """Take the regions for ``images`` images."""
        desc, tuning = self.desc, self.tuning
        self.listed = Cells(layout, self.device, desc, images, copies)
        terms = images * desc.samples * desc.corners
        crowded = desc.samples > tuning.crowd
        # A crowd has more terms than ``crowd``, and a crowd of several segments has more than ``segment``.
        slots = terms // min(tuning.crowd + 1, tuning.segment // 2) if crowded else 0
        held = terms // (tuning.segment + 1)
        self.crowd_tiles = -(-desc.channels // tuning.segment_channels)
        self.owners, self.parts, self.holders = (layout.take(slots, torch.int32) for _ in range(3))
        self.sums = layout.take(held * desc.channels, torch.int64)
        self.arrived = layout.take(held * self.crowd_tiles, torch.int32)

    def add_steps(self, steps: Steps, args: GridSampleBackwardArgs, first: int) -> Cells:
        """Add the launches for the images from ``first``; return the lists of their samples."""
        desc, tuning = self.desc, self.tuning
        assert args.dinput is not None
        images = min(self.images, desc.batch - first)
        listed = self.listed.of_images(images)
        listed.add_steps(steps, args, first)
        dinput, stacked = args.dinput, desc.pixels // desc.image_size[-1]
        locality = listed.depends_on_locality(args)
        common: dict[str, Any] = listed.parameters(args, first) | {
            "dinput": Part("dinput", first, images),
            "pixels": desc.pixels,
            "stacked": stacked,
            "crowd_tiles": self.crowd_tiles,
            "dinput_strides": strides_of(dinput),
            "dinput_step": dinput.stride(1),
            "CROWDS": self.owners.count > 0,
            "CROWD": tuning.crowd,
            "SEGMENT": tuning.segment,
            "ACCUMULATE": args.accumulate,
        }
        crowds = {name: getattr(self, name) for name in ("owners", "parts", "holders", "sums", "arrived")}
        width = desc.image_size[-1]
        placed = args.dout.stride(1) == 1
        if not placed:
            wide = min(tuning.plane_wide, tuning.plane_pixels) if width >= tuning.plane_wide else 0
            tiles, shares = (
                tiles_of(width, stacked, tuning.plane_pixels, wide),
                -(-desc.channels // tuning.plane_channels),
            )
            span = sum(
                (size - 1) * step for size, step in zip(desc.output_size, args.dout.stride()[2:], strict=True)
            )
            steps.add(
                sum_planes,
                images * tiles * shares,
                common,
                crowds,
                listed,
                tiles=tiles,
                shares=shares,
                FULL=desc.channels % 4 == 0,
                OFFSET=tl.int32 if span < 2**31 else tl.int64,
                PIXELS=tuning.plane_pixels,
                WIDE=wide,
                SHARE=tuning.plane_channels,
                num_warps=tuning.plane_warps,
                registers=tuning.volume_registers if desc.axes == 3 else tuning.plane_registers,
            )
        if placed or locality:
            wide = tuning.row_wide if width >= tuning.row_wide else 0
            # ``row_lanes`` threads share a row of channels, each with up to 16 bytes.
            together = tuning.row_lanes * 16 // desc.input_dtype.itemsize
            together = min(triton.next_power_of_2(desc.channels), together)
            blocks = min(triton.next_power_of_2(-(-desc.channels // together)), tuning.row_blocks)
            tiles = tiles_of(width, stacked, tuning.row_pixels, wide)
            shares = -(-desc.channels // (together * blocks))
            tasks = images * tiles * shares
            programs = min(tasks, tuning.row_programs) if locality else tasks
            steps.add(
                sum_rows,
                programs,
                common if placed else common | {"dout": listed.rows},
                crowds,
                listed,
                tasks=tasks,
                programs=programs,
                tiles=tiles,
                shares=shares,
                row_step=desc.channels,
                PLACED=placed,
                PIXELS=tuning.row_pixels,
                WIDE=wide,
                CHANNELS=together,
                BLOCKS=blocks,
                UNROLL=tuning.row_unroll,
                num_warps=tuning.row_warps,
                registers=tuning.row_registers,
            )
        if self.owners.count:
            programs = min(self.owners.count * self.crowd_tiles, tuning.segment_programs)
            steps.add(
                sum_segments,
                programs,
                common,
                crowds,
                listed,
                programs=programs,
                TERMS=tuning.segment_terms,
                CHANNELS=tuning.segment_channels,
                num_warps=tuning.segment_warps,
            )
        return listed


def tiles_of(width: int, stacked: int, pixels: int, wide: int) -> int:
    """Number of tiles of an image: ``wide`` pixels wide, or of consecutive pixels if ``wide`` is 0."""
    if wide:
        return -(-width // wide) * -(-stacked // (pixels // wide))
    return -(-width * stacked // pixels)
