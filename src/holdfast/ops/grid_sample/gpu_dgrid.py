"""dgrid in Triton: ordered sums over channels of dout times pixel, for each corner of each sample.

A sum has chunks of 32 channels, which are independent of each other. With few samples, several threads share
a sample, one chunk each, and the sums of the chunks are then added in order.

Samples are computed in their own order, or in the order of the cells (``gpu_cells``) from the copy of dout.
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
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_cells import Cells
from holdfast.ops.grid_sample.gpu_coordinates import (
    corner_pixel,
    corner_slope,
    grid_strides_of,
    locate,
    offset_of,
    offset_type,
    sampling_constants,
    sizes_of,
    strides_of,
    unravel,
)
from holdfast.ops.grid_sample.gpu_locality import is_scattered
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor
from holdfast.ops.segment_sum import indexed

CHUNK, BLOCK = tl.constexpr(indexed.CHUNK), tl.constexpr(indexed.CHUNK**2)


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``grid_gradient``."""

    #: Threads per program, and warps.
    tile: int
    warps: int
    #: Desired number of threads, and maximum number of threads that share a sample.
    threads: int
    most_shared: int
    #: Maximum registers in the order of the samples: enough to load four channels together. By default the
    #: compiler uses fewer, and half of the loads wait for the other half.
    registers: int | None = 80
    #: Maximum number of programs in the order of the cells: they may have to return at once.
    programs: int = 4224


TUNING = Tuned(
    gpu=Tuning(tile=256, warps=8, threads=2**16, most_shared=8),
    interpreter=Tuning(tile=8192, warps=4, threads=2**19, most_shared=4, programs=2),
)


@triton.jit
def load_four(base, at, first, last, step, ROWS: tl.constexpr, FULL: tl.constexpr, COMPUTE: tl.constexpr):
    """Load four channels from ``first``; 0 past channel ``last``.

    ROWS: the channels are contiguous. FULL: all four channels exist in every chunk.
    """
    if ROWS:
        channel = first[:, None] + tl.arange(0, 4)[None, :]
        if FULL:
            value = tl.load(base + at[:, None] + channel)
        else:
            value = tl.load(base + at[:, None] + channel, mask=channel <= last, other=0.0)
        even, odd = tl.split(tl.reshape(widen(value, COMPUTE), (value.shape[0], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        at = at + first.to(at.dtype) * step
        if FULL:
            a = widen(tl.load(base + at), COMPUTE)
            b = widen(tl.load(base + (at + step)), COMPUTE)
            c = widen(tl.load(base + (at + 2 * step)), COMPUTE)
            d = widen(tl.load(base + (at + 3 * step)), COMPUTE)
        else:
            a = widen(tl.load(base + at, mask=first <= last, other=0.0), COMPUTE)
            b = widen(tl.load(base + (at + step), mask=first + 1 <= last, other=0.0), COMPUTE)
            c = widen(tl.load(base + (at + 2 * step), mask=first + 2 <= last, other=0.0), COMPUTE)
            d = widen(tl.load(base + (at + 3 * step), mask=first + 3 <= last, other=0.0), COMPUTE)
    return a, b, c, d


@triton.jit
def add_four(
    total, d, base, at, first, last, step, ROWS: tl.constexpr, FULL: tl.constexpr, COMPUTE: tl.constexpr
):
    """Add dout times pixel for four channels in order. Missing channels add 0 * 0."""
    a, b, c, e = load_four(base, at, first, last, step, ROWS, FULL, COMPUTE)
    return (((total + d[0] * a) + d[1] * b) + d[2] * c) + d[3] * e


@triton.jit
def add_chunks(total, sums, SHARED: tl.constexpr, SAMPLES: tl.constexpr):
    """Add the sums of SHARED chunks of each sample in order."""
    if SHARED == 1:
        return total + sums
    else:
        sums = tl.reshape(sums, (SHARED, SAMPLES))
        chunk = tl.arange(0, SHARED)[:, None]
        for k in tl.static_range(SHARED):
            # A sum is never -0.0, so adding zeros to it changes no bit.
            total += tl.sum(tl.where(chunk == k, sums, 0.0), 0)
        return total


@triton.jit
def sum_quad(
    dout, dout_at, image, at_0, at_1, at_2, at_3, own, channels, dout_step, image_step,
    DOUT_ROWS: tl.constexpr, IMAGE_ROWS: tl.constexpr, FULL: tl.constexpr, MANY: tl.constexpr,
    SHARED: tl.constexpr, COMPUTE: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """Ordered sums over channels of dout times pixel, for four corners.

    ``own`` is the number of the chunk of each thread, among SHARED chunks. MANY: more than BLOCK channels.
    """
    at_0, at_1, at_2, at_3 = at_0.to(OFFSET), at_1.to(OFFSET), at_2.to(OFFSET), at_3.to(OFFSET)
    zeros = tl.zeros([SAMPLES], COMPUTE)
    whole_0, whole_1, whole_2, whole_3 = zeros, zeros, zeros, zeros
    total_0, total_1, total_2, total_3 = zeros, zeros, zeros, zeros
    block_0, block_1, block_2, block_3 = zeros, zeros, zeros, zeros
    for begin in range(0, channels, SHARED * CHUNK):
        start = tl.zeros([TILE], COMPUTE)
        sum_0, sum_1, sum_2, sum_3 = start, start, start, start
        for c in range(0, tl.minimum(CHUNK, channels - begin), 4):
            first = begin + own * CHUNK + c
            d = load_four(dout, dout_at, first, channels - 1, dout_step, DOUT_ROWS, FULL, COMPUTE)
            sum_0 = add_four(
                sum_0, d, image, at_0, first, channels - 1, image_step, IMAGE_ROWS, FULL, COMPUTE
            )
            sum_1 = add_four(
                sum_1, d, image, at_1, first, channels - 1, image_step, IMAGE_ROWS, FULL, COMPUTE
            )
            sum_2 = add_four(
                sum_2, d, image, at_2, first, channels - 1, image_step, IMAGE_ROWS, FULL, COMPUTE
            )
            sum_3 = add_four(
                sum_3, d, image, at_3, first, channels - 1, image_step, IMAGE_ROWS, FULL, COMPUTE
            )
        block_0 = add_chunks(block_0, sum_0, SHARED, SAMPLES)
        block_1 = add_chunks(block_1, sum_1, SHARED, SAMPLES)
        block_2 = add_chunks(block_2, sum_2, SHARED, SAMPLES)
        block_3 = add_chunks(block_3, sum_3, SHARED, SAMPLES)
        if MANY and (begin + SHARED * CHUNK) % BLOCK == 0:
            total_0, total_1 = total_0 + block_0, total_1 + block_1
            total_2, total_3 = total_2 + block_2, total_3 + block_3
            block_0, block_1, block_2, block_3 = zeros, zeros, zeros, zeros
            if (begin + SHARED * CHUNK) % (BLOCK * CHUNK) == 0:
                whole_0, whole_1 = whole_0 + total_0, whole_1 + total_1
                whole_2, whole_3 = whole_2 + total_2, whole_3 + total_3
                total_0, total_1, total_2, total_3 = zeros, zeros, zeros, zeros
    if MANY:
        # A sum is never -0.0, so the +0.0 of an empty level changes no bit.
        block_0, block_1 = whole_0 + (total_0 + block_0), whole_1 + (total_1 + block_1)
        block_2, block_3 = whole_2 + (total_2 + block_2), whole_3 + (total_3 + block_3)
    return block_0, block_1, block_2, block_3


@triton.jit
def corner_offset(
    first, n, CORNER: tl.constexpr, sizes, strides,
    AXES: tl.constexpr, TAPS: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Offset of a corner's pixel; outside the image, of a pixel inside, which is safe to load."""
    x, y, z, _inside = corner_pixel(first, CORNER, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
    return offset_of(n, tl.maximum(x, 0), tl.maximum(y, 0), tl.maximum(z, 0), strides)


@triton.jit
def add_slopes(
    changes, totals, first, t, sizes, CORNER: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr,
    MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add slope times total of four corners to the derivatives along x, y and z."""
    x, y, z = changes
    for i in tl.static_range(4):
        _x, _y, _z, inside = corner_pixel(first, CORNER + i, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
        x = tl.where(inside, x + corner_slope(t, CORNER + i, 0, AXES, TAPS, MODE) * totals[i], x)
        y = tl.where(inside, y + corner_slope(t, CORNER + i, 1, AXES, TAPS, MODE) * totals[i], y)
        if AXES == 3:
            z = tl.where(inside, z + corner_slope(t, CORNER + i, 2, AXES, TAPS, MODE) * totals[i], z)
    return x, y, z


@triton.jit
def store_dgrid(dgrid, at, change, scale, inside, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr):
    """Store the derivative along one axis, or add to it if ACCUMULATE."""
    value = tl.where(scale != 0, change * scale, 0.0)
    if ACCUMULATE:
        value = widen(tl.load(dgrid + at, mask=inside, other=0.0), COMPUTE) + value
    tl.store(dgrid + at, narrow(value, dgrid.dtype.element_ty), mask=inside)


@triton.jit
def locate_sample(
    grid, places, number, count, samples, out_sizes, sizes, grid_strides, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, BY_CELL: tl.constexpr,
):  # fmt: skip
    """Image and indices of samples, and ``locate`` of them."""
    place = number
    if BY_CELL:
        place = tl.load(places + number)
    n = place // samples
    x, y, z = unravel(place - n * samples, out_sizes, AXES)
    inside = tl.full(number.shape, 1, tl.int1)
    first, t, scale = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    return n, x, y, z, first, t, scale


@triton.jit(do_not_specialize=["tasks", "programs", "count", "samples"])
def grid_gradient(
    dgrid, dout, image, grid, places, tallies,
    tasks, programs, count, samples, channels, sizes, out_sizes,
    dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, LOCALITY: tl.constexpr, BY_CELL: tl.constexpr,
    DOUT_ROWS: tl.constexpr, IMAGE_ROWS: tl.constexpr, FULL: tl.constexpr, MANY: tl.constexpr,
    SHARED: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dgrid of the samples, in their own order; if BY_CELL, in the order of the copy of dout.

    LOCALITY: both orders are launched, and the one that does not suit the grid returns at once. BY_CELL, a
    program has several tiles.
    """
    follow()
    if LOCALITY and is_scattered(tallies, count) != BY_CELL:
        return
    if BY_CELL:
        for task in range(tl.program_id(0), tasks, programs):
            differentiate_tile(
                dgrid, dout, image, grid, places, task, count, samples, channels, sizes, out_sizes,
                dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step,
                grid_step, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, BY_CELL, DOUT_ROWS, IMAGE_ROWS, FULL,
                MANY, SHARED, OFFSET, ACCUMULATE, TILE,
            )  # fmt: skip
    else:
        differentiate_tile(
            dgrid, dout, image, grid, places, tl.program_id(0), count, samples, channels, sizes, out_sizes,
            dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step,
            grid_step, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, BY_CELL, DOUT_ROWS, IMAGE_ROWS, FULL,
            MANY, SHARED, OFFSET, ACCUMULATE, TILE,
        )  # fmt: skip


@triton.jit
def differentiate_tile(
    dgrid, dout, image, grid, places, task,
    count, samples, channels, sizes, out_sizes,
    dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, BY_CELL: tl.constexpr, DOUT_ROWS: tl.constexpr,
    IMAGE_ROWS: tl.constexpr, FULL: tl.constexpr, MANY: tl.constexpr, SHARED: tl.constexpr,
    OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dgrid of TILE // SHARED samples."""
    SAMPLES: tl.constexpr = TILE // SHARED
    lane = tl.arange(0, TILE)
    # Past the end, the last sample is computed again and not stored, so that loads need no mask.
    number = tl.minimum(task * SAMPLES + lane % SAMPLES, count - 1)
    n, x, y, z, first, _t, _scale = locate_sample(
        grid, places, number, count, samples, out_sizes, sizes, grid_strides, grid_step,
        AXES, MODE, PADDING, ALIGNED, COMPUTE, BY_CELL,
    )  # fmt: skip
    dout_at = number.to(OFFSET) * channels
    if not BY_CELL:
        dout_at = offset_of(n, x, y, z, dout_strides).to(OFFSET)
    own = task * SAMPLES + tl.arange(0, SAMPLES)
    inside = own < count
    m, ox, oy, oz, own_first, t, scale = locate_sample(
        grid, places, tl.minimum(own, count - 1), count, samples, out_sizes, sizes, grid_strides, grid_step,
        AXES, MODE, PADDING, ALIGNED, COMPUTE, BY_CELL,
    )  # fmt: skip
    zeros = tl.zeros([SAMPLES], COMPUTE)
    changes = (zeros, zeros, zeros)
    for corner in tl.static_range(0, (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS), 4):
        totals = sum_quad(
            dout, dout_at, image,
            corner_offset(first, n, corner, sizes, image_strides, AXES, TAPS, MODE, PADDING, ALIGNED),
            corner_offset(first, n, corner + 1, sizes, image_strides, AXES, TAPS, MODE, PADDING, ALIGNED),
            corner_offset(first, n, corner + 2, sizes, image_strides, AXES, TAPS, MODE, PADDING, ALIGNED),
            corner_offset(first, n, corner + 3, sizes, image_strides, AXES, TAPS, MODE, PADDING, ALIGNED),
            lane // SAMPLES, channels, dout_step, image_step,
            DOUT_ROWS, IMAGE_ROWS, FULL, MANY, SHARED, COMPUTE, OFFSET, TILE, SAMPLES,
        )  # fmt: skip
        changes = add_slopes(changes, totals, own_first, t, sizes, corner, AXES, TAPS, MODE, PADDING, ALIGNED)
    target = offset_of(m, ox, oy, oz, dgrid_strides)
    store_dgrid(dgrid, target, changes[0], scale[0], inside, ACCUMULATE, COMPUTE)
    store_dgrid(dgrid, target + dgrid_step, changes[1], scale[1], inside, ACCUMULATE, COMPUTE)
    if AXES == 3:
        store_dgrid(dgrid, target + 2 * dgrid_step, changes[2], scale[2], inside, ACCUMULATE, COMPUTE)


class GridGradient:
    """Launches of ``grid_gradient``; it needs no workspace."""

    def __init__(self, device: torch.device, desc: GridSampleBackwardDescriptor) -> None:
        self.desc, self.tuning = desc, TUNING.on(device)

    def add_steps(
        self, steps: Steps, args: GridSampleBackwardArgs, first: int, images: int, listed: Cells | None = None
    ) -> None:
        """Add the launches for ``images`` images from ``first``, whose samples are ``listed`` by cell."""
        locality = listed is not None and listed.depends_on_locality(args)
        self._add(steps, args, first, images, listed if locality else None, by_cell=False)
        if locality:
            self._add(steps, args, first, images, listed, by_cell=True)

    def _add(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        first: int,
        images: int,
        listed: Cells | None,
        *,
        by_cell: bool,
    ) -> None:
        desc, tuning = self.desc, self.tuning
        assert args.dgrid is not None and args.input is not None
        count = images * desc.samples
        chunks, shared = -(-desc.channels // CHUNK.value), 1
        while 2 * shared <= min(chunks, tuning.most_shared) and 2 * shared * count <= tuning.threads:
            shared *= 2
        wide = tl.int64 in (offset_type(args.input), offset_type(args.dout))
        operands: dict[str, Any] = {
            "dgrid": Part("dgrid", first, images),
            "dout": Part("dout", first, images),
            "image": Part("input", first, images),
            "grid": Part("grid", first, images),
            "places": listed.places if listed else "grid",
            "tallies": listed.tallies if listed else "grid",
        }
        if listed is not None and by_cell:
            operands["dout"] = listed.rows
        tasks = -(-count // (tuning.tile // shared))
        programs = min(tasks, tuning.programs) if by_cell else tasks
        steps.add(
            grid_gradient,
            programs,
            operands,
            sampling_constants(desc),
            tasks=tasks,
            programs=programs,
            count=count,
            samples=desc.samples,
            channels=desc.channels,
            sizes=sizes_of(desc.image_size),
            out_sizes=sizes_of(desc.output_size),
            dgrid_strides=grid_strides_of(args.dgrid),
            dout_strides=strides_of(args.dout),
            image_strides=strides_of(args.input),
            grid_strides=grid_strides_of(args.grid),
            dgrid_step=args.dgrid.stride(-1),
            dout_step=args.dout.stride(1),
            image_step=args.input.stride(1),
            grid_step=args.grid.stride(-1),
            LOCALITY=listed is not None,
            BY_CELL=by_cell,
            DOUT_ROWS=by_cell or args.dout.stride(1) == 1,
            IMAGE_ROWS=args.input.stride(1) == 1,
            # All chunks of all threads must have a multiple of 4 channels.
            FULL=desc.channels % (4 if shared == 1 else shared * CHUNK.value) == 0,
            MANY=desc.channels > BLOCK.value,
            SHARED=shared,
            OFFSET=tl.int64 if wide or count * desc.channels >= 2**31 else tl.int32,
            ACCUMULATE=args.accumulate,
            TILE=tuning.tile,
            num_warps=tuning.warps,
            registers=None if by_cell else tuning.registers,
        )
