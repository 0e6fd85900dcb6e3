"""grid_sample in Triton.

A forward program computes the corners of its samples once, then loops over channels. dinput is summed by
pixel: ``gpu_dinput_by_cell`` for 2-D bilinear, ``gpu_dinput_by_corner`` otherwise. dgrid is summed by sample,
one thread each, channel after channel.

By cell, dout is copied with channels last and samples in the order of the cells, so that samples that share
pixels are neighbours. If the samples are scattered (``gpu_locality``), dgrid is computed in that order too,
from the copy. Otherwise it is computed in the order of the samples, concurrently with dinput.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import Part, StepOperand, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.plan import Launch
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_coordinates import (
    NEAREST,
    corner_pixel,
    corner_slope,
    corner_weight,
    grid_strides_of,
    locate,
    offset_of,
    offset_type,
    sampling_constants,
    sizes_of,
    strides_of,
    unravel,
)
from holdfast.ops.grid_sample.gpu_dinput_by_cell import MANY_CHANNELS, CellSums
from holdfast.ops.grid_sample.gpu_dinput_by_corner import CornerSums
from holdfast.ops.grid_sample.gpu_locality import is_scattered
from holdfast.ops.grid_sample.plan import (
    LIMIT,
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    GridSampleDescriptor,
    Mode,
    SampleKernel,
)

#: Maximum workspace in bytes. If a batch needs more, fewer images are processed at a time.
MOST_WORKSPACE = 2**31


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``grid_sample`` and ``grid_gradient``. A program has one sample per thread."""

    #: Samples and warps of ``grid_sample`` with few channels, and with many, where samples share the cache.
    few_samples: int
    few_warps: int
    many_samples: int
    many_warps: int
    #: Samples and warps of ``grid_gradient``.
    grid_samples: int
    grid_warps: int
    #: Registers of ``grid_gradient`` in the order of the samples: enough to load four channels together. By
    #: default the compiler uses fewer, and half of the loads wait for the other half.
    grid_registers: int = 80
    #: Preferred shared-memory carve-out of ``grid_gradient``, percent: room for three tiles of ``copy_rows``.
    grid_shared_percent: int = 28
    #: Desired number of forward programs, and the minimum channels per program when channels are split.
    min_programs: int = 4096
    min_share: int = 16


TUNING = Tuned(
    gpu=Tuning(few_samples=128, few_warps=4, many_samples=512, many_warps=16, grid_samples=256, grid_warps=8),
    interpreter=Tuning(
        few_samples=16384, few_warps=4, many_samples=16384, many_warps=4, grid_samples=16384, grid_warps=4
    ),
)
CHUNK, BLOCK = tl.constexpr(32), tl.constexpr(1024)


@triton.jit
def pixel_offset(n, x, y, z, strides):
    """Offset of a corner's pixel; outside the image, of a pixel inside, which is safe to load."""
    return offset_of(n, tl.maximum(x, 0), tl.maximum(y, 0), tl.maximum(z, 0), strides)


@triton.jit
def valid(channel, channels):
    """channel < channels as a mask. The interpreter of Triton 3.9 does not accept a scalar mask."""
    return tl.full([1], channel, tl.int32) < channels


@triton.jit
def load_four(base, at, first, channels, step, ROWS: tl.constexpr, FULL: tl.constexpr, COMPUTE: tl.constexpr):
    """Load four channels from ``first``; 0 past the last channel.

    ROWS: the channels are contiguous. FULL: the number of channels is a multiple of 4; no mask is needed.
    """
    if ROWS:
        channel = first + tl.arange(0, 4)[None, :]
        if FULL:
            value = tl.load(base + at[:, None] + channel)
        else:
            value = tl.load(base + at[:, None] + channel, mask=channel < channels, other=0.0)
        even, odd = tl.split(tl.reshape(widen(value, COMPUTE), (value.shape[0], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        at = at + tl.full([1], first, at.dtype) * step
        a = widen(tl.load(base + at), COMPUTE)
        if FULL:
            b = widen(tl.load(base + (at + step)), COMPUTE)
            c = widen(tl.load(base + (at + 2 * step)), COMPUTE)
            d = widen(tl.load(base + (at + 3 * step)), COMPUTE)
        else:
            b = widen(tl.load(base + (at + step), mask=valid(first + 1, channels), other=0.0), COMPUTE)
            c = widen(tl.load(base + (at + 2 * step), mask=valid(first + 2, channels), other=0.0), COMPUTE)
            d = widen(tl.load(base + (at + 3 * step), mask=valid(first + 3, channels), other=0.0), COMPUTE)
    return a, b, c, d


@triton.jit
def store_four(at, first, channels, step, mask, a, b, c, d, ROWS: tl.constexpr):
    """Store four channels from ``first``; ROWS: they are contiguous."""
    if ROWS:
        channel = first + tl.arange(0, 4)[None, :]
        value = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4))
        tl.store(
            at[:, None] + channel,
            narrow(value, at.dtype.element_ty),
            mask=mask[:, None] & (channel < channels),
        )
    else:
        wide = at + tl.full([1], first, tl.int64) * step
        tl.store(wide, narrow(a, at.dtype.element_ty), mask=mask)
        tl.store(wide + step, narrow(b, at.dtype.element_ty), mask=mask & valid(first + 1, channels))
        tl.store(wide + 2 * step, narrow(c, at.dtype.element_ty), mask=mask & valid(first + 2, channels))
        tl.store(wide + 3 * step, narrow(d, at.dtype.element_ty), mask=mask & valid(first + 3, channels))


@triton.jit(do_not_specialize=["samples", "tiles", "share", "shares"])
def grid_sample(
    out, image, grid,
    samples, tiles, share, shares,
    channels, sizes, out_sizes, image_strides, out_strides, grid_strides, grid_step, image_step, out_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, IMAGE_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr,
    FULL: tl.constexpr, OFFSET: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE samples of one image, one per thread, in ``share`` channels."""
    program = tl.program_id(0)
    begin = program // tiles % shares * share
    n = program // tiles // shares
    sample = program % tiles * TILE + tl.arange(0, TILE)
    inside = sample < samples
    x, y, z = unravel(sample, out_sizes, AXES)
    first, t, _scale = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    target = out + offset_of(n, x, y, z, out_strides)
    CORNERS: tl.constexpr = (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS)
    zeros = tl.zeros([TILE], COMPUTE)
    # A corner outside the image adds 0, which does not change a sum that starts from +0.0.
    for at in range(begin, tl.minimum(begin + share, channels), 4 if IMAGE_ROWS else 1):
        if IMAGE_ROWS:
            a, b, c, d = zeros, zeros, zeros, zeros
            for corner in tl.static_range(CORNERS):
                px, py, pz, there = corner_pixel(first, corner, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
                source = pixel_offset(n, px, py, pz, image_strides).to(OFFSET)
                e, f, g, h = load_four(image, source, at, channels, image_step, True, FULL, COMPUTE)
                if MODE == NEAREST:
                    a, b = tl.where(there, e, 0.0), tl.where(there, f, 0.0)
                    c, d = tl.where(there, g, 0.0), tl.where(there, h, 0.0)
                else:
                    weight = corner_weight(t, corner, AXES, TAPS, MODE)
                    a, b = tl.where(there, a + weight * e, a), tl.where(there, b + weight * f, b)
                    c, d = tl.where(there, c + weight * g, c), tl.where(there, d + weight * h, d)
            store_four(target, at, channels, out_step, inside, a, b, c, d, OUT_ROWS)
        else:
            # One channel at a time: with more, the cache evicts pixels that corners share.
            total = zeros
            channel = tl.full([1], at, OFFSET)
            for corner in tl.static_range(CORNERS):
                px, py, pz, there = corner_pixel(first, corner, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
                source = offset_of(n, px, py, pz, image_strides).to(OFFSET) + channel * image_step
                value = widen(tl.load(image + source, mask=there & inside, other=0.0), COMPUTE)
                if MODE == NEAREST:
                    total = value
                else:
                    total += corner_weight(t, corner, AXES, TAPS, MODE) * value
            value = narrow(total, out.dtype.element_ty)
            tl.store(target + channel.to(tl.int64) * out_step, value, mask=inside)


@triton.jit
def add_four(
    total, d, base, at, first, channels, step, ROWS: tl.constexpr, FULL: tl.constexpr, COMPUTE: tl.constexpr
):
    """Add dout times pixel for four channels in order. Missing channels add 0 * 0."""
    a, b, c, e = load_four(base, at, first, channels, step, ROWS, FULL, COMPUTE)
    return (((total + d[0] * a) + d[1] * b) + d[2] * c) + d[3] * e


@triton.jit
def sum_quad(
    dout, dout_at, image, at_0, at_1, at_2, at_3, channels, dout_step, image_step,
    DOUT_ROWS: tl.constexpr, IMAGE_ROWS: tl.constexpr, FULL: tl.constexpr, DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ordered sums over channels of dout times pixel, for four corners."""
    zeros = tl.zeros([TILE], COMPUTE)
    if DEPTH == 0:
        d = load_four(dout, dout_at, 0, channels, dout_step, DOUT_ROWS, FULL, COMPUTE)
        return (
            add_four(zeros, d, image, at_0, 0, channels, image_step, IMAGE_ROWS, FULL, COMPUTE),
            add_four(zeros, d, image, at_1, 0, channels, image_step, IMAGE_ROWS, FULL, COMPUTE),
            add_four(zeros, d, image, at_2, 0, channels, image_step, IMAGE_ROWS, FULL, COMPUTE),
            add_four(zeros, d, image, at_3, 0, channels, image_step, IMAGE_ROWS, FULL, COMPUTE),
        )
    whole_0, whole_1, whole_2, whole_3 = zeros, zeros, zeros, zeros
    total_0, total_1, total_2, total_3 = zeros, zeros, zeros, zeros
    for block in range(0, channels, BLOCK):
        block_0, block_1, block_2, block_3 = zeros, zeros, zeros, zeros
        for chunk in range(block, tl.minimum(block + BLOCK, channels), CHUNK):
            sum_0, sum_1, sum_2, sum_3 = zeros, zeros, zeros, zeros
            for c in range(chunk, tl.minimum(chunk + CHUNK, channels), 4):
                d = load_four(dout, dout_at, c, channels, dout_step, DOUT_ROWS, FULL, COMPUTE)
                sum_0 = add_four(sum_0, d, image, at_0, c, channels, image_step, IMAGE_ROWS, FULL, COMPUTE)
                sum_1 = add_four(sum_1, d, image, at_1, c, channels, image_step, IMAGE_ROWS, FULL, COMPUTE)
                sum_2 = add_four(sum_2, d, image, at_2, c, channels, image_step, IMAGE_ROWS, FULL, COMPUTE)
                sum_3 = add_four(sum_3, d, image, at_3, c, channels, image_step, IMAGE_ROWS, FULL, COMPUTE)
            block_0 += sum_0
            block_1 += sum_1
            block_2 += sum_2
            block_3 += sum_3
        if DEPTH > 1:
            total_0 += block_0
            total_1 += block_1
            total_2 += block_2
            total_3 += block_3
            if (block + BLOCK) % (BLOCK * CHUNK) == 0:
                whole_0, total_0 = whole_0 + total_0, zeros
                whole_1, total_1 = whole_1 + total_1, zeros
                whole_2, total_2 = whole_2 + total_2, zeros
                whole_3, total_3 = whole_3 + total_3, zeros
        else:
            whole_0, whole_1, whole_2, whole_3 = block_0, block_1, block_2, block_3
    return whole_0 + total_0, whole_1 + total_1, whole_2 + total_2, whole_3 + total_3


@triton.jit
def add_slopes(
    changes, totals, insides, t, CORNER: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Add slope times total of four corners to the derivatives along x, y and z."""
    x, y, z = changes
    for i in tl.static_range(4):
        x = tl.where(insides[i], x + corner_slope(t, CORNER + i, 0, AXES, TAPS, MODE) * totals[i], x)
        y = tl.where(insides[i], y + corner_slope(t, CORNER + i, 1, AXES, TAPS, MODE) * totals[i], y)
        if AXES == 3:
            z = tl.where(insides[i], z + corner_slope(t, CORNER + i, 2, AXES, TAPS, MODE) * totals[i], z)
    return x, y, z


@triton.jit
def store_dgrid(dgrid, at, change, scale, inside, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr):
    value = tl.where(scale != 0, change * scale, 0.0)
    if ACCUMULATE:
        value = widen(tl.load(dgrid + at, mask=inside, other=0.0), COMPUTE) + value
    tl.store(dgrid + at, narrow(value, dgrid.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count", "samples"])
def grid_gradient(
    dgrid, dout, image, grid, places, tallies,
    count, samples, channels, sizes, out_sizes,
    dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, CHECK_LOCALITY: tl.constexpr, BY_CELL: tl.constexpr,
    DOUT_ROWS: tl.constexpr, IMAGE_ROWS: tl.constexpr, FULL: tl.constexpr, DEPTH: tl.constexpr,
    OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dgrid of TILE samples, one per thread, in the order of the samples; or BY_CELL, as the copy of dout.

    CHECK_LOCALITY: both orders are launched, and the one that does not suit the grid returns at once.
    """
    follow()
    if CHECK_LOCALITY and is_scattered(tallies, count) != BY_CELL:
        return
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < count
    # Past the end, the last sample is computed again and not stored, so that loads need no mask.
    number = tl.minimum(number, count - 1)
    place = number
    if BY_CELL:
        place = tl.load(places + number).to(tl.int32)
    n = place // samples
    x, y, z = unravel(place - n * samples, out_sizes, AXES)
    target = offset_of(n, x, y, z, dgrid_strides)
    zeros = tl.zeros([TILE], COMPUTE)
    if MODE == NEAREST:
        for a in tl.static_range(AXES):
            store_dgrid(dgrid, target + a * dgrid_step, zeros, zeros, inside, ACCUMULATE, COMPUTE)
    else:
        first, t, scale = locate(
            grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
            AXES, MODE, PADDING, ALIGNED, COMPUTE,
        )  # fmt: skip
        dout_at = number.to(OFFSET) * channels
        if not BY_CELL:
            dout_at = offset_of(n, x, y, z, dout_strides).to(OFFSET)
        changes = (zeros, zeros, zeros)
        for corner in tl.static_range(0, (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS), 4):
            x0, y0, z0, in_0 = corner_pixel(first, corner, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
            x1, y1, z1, in_1 = corner_pixel(first, corner + 1, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
            x2, y2, z2, in_2 = corner_pixel(first, corner + 2, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
            x3, y3, z3, in_3 = corner_pixel(first, corner + 3, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
            totals = sum_quad(
                dout, dout_at, image,
                pixel_offset(n, x0, y0, z0, image_strides).to(OFFSET),
                pixel_offset(n, x1, y1, z1, image_strides).to(OFFSET),
                pixel_offset(n, x2, y2, z2, image_strides).to(OFFSET),
                pixel_offset(n, x3, y3, z3, image_strides).to(OFFSET),
                channels, dout_step, image_step, DOUT_ROWS, IMAGE_ROWS, FULL, DEPTH, COMPUTE, TILE,
            )  # fmt: skip
            changes = add_slopes(changes, totals, (in_0, in_1, in_2, in_3), t, corner, AXES, TAPS, MODE)
        store_dgrid(dgrid, target, changes[0], scale[0], inside, ACCUMULATE, COMPUTE)
        store_dgrid(dgrid, target + dgrid_step, changes[1], scale[1], inside, ACCUMULATE, COMPUTE)
        if AXES == 3:
            store_dgrid(dgrid, target + 2 * dgrid_step, changes[2], scale[2], inside, ACCUMULATE, COMPUTE)


class GridSample(SampleKernel[GridSampleDescriptor]):
    """``grid_sample``."""

    def compile(self) -> None:
        self.prepare(GridSampleArgs.described(self.desc))

    def prepare(self, args: GridSampleArgs) -> Launch[GridSampleArgs]:
        desc, tuning = self.desc, TUNING.on(self.device)
        tile, warps = tuning.few_samples, tuning.few_warps
        if desc.channels >= MANY_CHANNELS:
            tile, warps = tuning.many_samples, tuning.many_warps
        tiles = -(-desc.samples // tile)
        # Channels are split over programs only if the samples make too few programs.
        shares = min(-(-tuning.min_programs // (desc.batch * tiles)), -(-desc.channels // tuning.min_share))
        share = -(-desc.channels // (4 * shares)) * 4
        shares = -(-desc.channels // share)
        steps = Steps(self.device, args)
        steps.add(
            grid_sample,
            desc.batch * shares * tiles,
            out="out",
            image="input",
            grid="grid",
            samples=desc.samples,
            tiles=tiles,
            share=share,
            shares=shares,
            channels=desc.channels,
            sizes=sizes_of(desc.image_size),
            out_sizes=sizes_of(desc.output_size),
            image_strides=strides_of(args.input),
            out_strides=strides_of(args.out),
            grid_strides=grid_strides_of(args.grid),
            grid_step=args.grid.stride(-1),
            image_step=args.input.stride(1),
            out_step=args.out.stride(1),
            **sampling_constants(desc),
            IMAGE_ROWS=args.input.stride(1) == 1,
            OUT_ROWS=args.out.stride(1) == 1,
            FULL=desc.channels % 4 == 0,
            OFFSET=offset_type(args.input),
            TILE=tile,
            num_warps=warps,
        )
        return steps.launch


class GridSampleBackward(SampleKernel[GridSampleBackwardDescriptor]):
    """dinput and dgrid, of as many images at a time as the workspace allows."""

    most_workspace = MOST_WORKSPACE
    copies = True

    def __init__(self, desc: GridSampleBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        # Per image, the largest count that must fit an int32.
        counted = max(desc.samples * desc.corners, math.prod(size + 1 for size in desc.image_size))
        self.images = max(min(desc.batch, LIMIT // counted), 1)
        while self.images > 1 and self.layout_for(self.images).size > self.most_workspace:
            self.images = -(-self.images // 2)
        rest = desc.batch % self.images
        self.set_workspace(*(self.layout_for(images) for images in (rest, self.images) if images))

    def layout_for(self, images: int) -> WorkspaceLayout:
        """Workspace regions for ``images`` images."""
        layout = WorkspaceLayout()
        if self.desc.needs_dinput:
            sums = self.sums_for(layout, images)
            self.sorted_by = "torch.sort" if sums.order.sorts else ""
            self.variant = "dinput by cell" if isinstance(sums, CellSums) else "dinput by corner"
        return layout

    def sums_for(self, layout: WorkspaceLayout, images: int) -> CellSums | CornerSums:
        cells = math.prod(size + 1 for size in self.desc.image_size)
        if self.desc.mode == Mode.BILINEAR and self.desc.axes == 2 and cells <= LIMIT:
            return CellSums(layout, self.device, self.desc, images)
        return CornerSums(layout, self.device, self.desc, images, self.copies)

    def compile(self) -> None:
        self.prepare(GridSampleBackwardArgs.described(self.desc))

    def prepare(self, args: GridSampleBackwardArgs) -> Launch[GridSampleBackwardArgs]:
        desc, steps = self.desc, Steps(self.device, args)
        for first in range(0, desc.batch, self.images):
            images = min(self.images, desc.batch - first)
            dinput, dgrid, dout, image, grid = (
                Part(operand, first, images) for operand in ("dinput", "dgrid", "dout", "input", "grid")
            )
            sums = self.sums_for(WorkspaceLayout(), images) if desc.needs_dinput else None
            # With few channels, the order of the samples is always faster.
            ordered = sums if isinstance(sums, CellSums) and sums.copies else None
            of_grid = (dgrid, dout, image, grid) if args.dgrid is not None and desc.samples else None
            if isinstance(sums, CellSums):
                sums.add_cells(steps, args, grid)
            if of_grid and (ordered is None or ordered.depends_on_locality(args)):
                # Concurrently with dinput, unless other images follow in the same workspace.
                beside = sums is not None and images == desc.batch
                self.add_grid_gradient(steps, args, images, ordered, of_grid, by_cell=False, beside=beside)
            if sums is not None:
                sums.add_steps(steps, args, dinput, dout, grid)
            if of_grid and ordered is not None:
                self.add_grid_gradient(steps, args, images, ordered, of_grid, by_cell=True)
        return steps.launch

    def add_grid_gradient(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        images: int,
        sums: CellSums | None,
        operands: tuple[StepOperand, ...],
        *,
        by_cell: bool,
        beside: bool = False,
    ) -> None:
        """Add a launch of ``grid_gradient``, in the order of the samples or of the cells in ``sums``."""
        desc, tuning = self.desc, TUNING.on(self.device)
        dgrid, dout, image, grid = operands
        assert args.dgrid is not None and args.input is not None
        wide = tl.int64 in (offset_type(args.input), offset_type(args.dout))
        offset = tl.int64 if wide or images * desc.samples * desc.channels >= 2**31 else tl.int32
        rows, places = (sums.rows, sums.order.places) if sums and by_cell else (dout, grid)
        steps.add(
            grid_gradient,
            -(-images * desc.samples // tuning.grid_samples),
            dgrid=dgrid,
            dout=rows,
            image=image,
            grid=grid,
            places=places,
            tallies=sums.order.tallies if sums else grid,
            count=images * desc.samples,
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
            **sampling_constants(desc),
            CHECK_LOCALITY=sums is not None and sums.depends_on_locality(args),
            BY_CELL=by_cell,
            DOUT_ROWS=by_cell or args.dout.stride(1) == 1,
            IMAGE_ROWS=args.input.stride(1) == 1,
            FULL=desc.channels % 4 == 0,
            DEPTH=(not 0 < desc.channels <= 4) + (desc.channels > BLOCK.value),
            OFFSET=offset,
            ACCUMULATE=args.accumulate,
            TILE=tuning.grid_samples,
            num_warps=tuning.grid_warps,
            registers=None if by_cell else tuning.grid_registers,
            shared_percent=tuning.grid_shared_percent if beside else None,
            beside=beside,
        )


class LeanGridSampleBackward(GridSampleBackward):
    """One image at a time; without the copy of dout if dinput is summed by corner."""

    most_workspace = 0
    copies = False
