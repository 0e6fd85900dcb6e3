"""dinput for every mode, in Triton: the corners of the samples are terms of a segment sum by pixel."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import StepOperand, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.gpu import widen
from holdfast.ops.grid_sample.gpu_channels_last import add_copy, worth_copying
from holdfast.ops.grid_sample.gpu_coordinates import (
    corner_pixel,
    corner_weight,
    grid_strides_of,
    locate,
    offset_of,
    sampling_constants,
    sizes_of,
    unravel,
)
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor
from holdfast.ops.segment_sum.gpu import Bounds, SegmentSumSteps, Target, Terms, Walk
from holdfast.ops.segment_sum.gpu_counting_sort import CountingSort
from holdfast.ops.segment_sum.indexed import loops


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``list_corners``: samples per program, and warps."""

    tile: int
    warps: int = 4


TUNING = Tuned(gpu=Tuning(tile=256), interpreter=Tuning(tile=16384))


@triton.jit(do_not_specialize=["count", "samples", "pixels", "rows"])
def list_corners(
    keys, weights, grid, count, samples, pixels, rows, sizes, out_sizes, grid_strides, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the pixel and the weight of every corner, indexed [image, corner, sample]."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < count
    n = number // samples
    sample = number - n * samples
    x, y, z = unravel(sample, out_sizes, AXES)
    first, t, _ = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    CORNERS: tl.constexpr = (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS)
    for corner in tl.static_range(CORNERS):
        px, py, pz, there = corner_pixel(first, corner, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
        pixel = n * pixels + (pz * sizes[1] + py) * sizes[0] + px
        at = (n * CORNERS + corner) * samples + sample
        tl.store(keys + at, tl.where(there, pixel, rows), mask=inside)
        tl.store(weights + at, corner_weight(t, corner, AXES, TAPS, MODE), mask=inside)


@triton.jit
def corner_term(
    dout, places, rows_of, weights, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Term ``number`` in sorted order is dout at its sample, times the corner's weight."""
    place = tl.load(places + number, mask=here, other=0).to(tl.int32)
    weight = tl.load(weights + place, mask=here, other=0.0)
    row = place // numbers[0] * numbers[1] + place % numbers[1]
    at = dout + row_offsets(row, sizes, strides)[:, None] + column * strides[len(sizes) - 1]
    value = widen(tl.load(at, mask=here[:, None] & inside, other=0.0), COMPUTE)
    return weight[:, None] * value, here.to(tl.int32)


class CornerSums:
    """Workspace regions and launches that compute dinput of ``images`` images by corner."""

    def __init__(
        self,
        layout: WorkspaceLayout,
        device: torch.device,
        desc: GridSampleBackwardDescriptor,
        images: int,
        copies: bool,
    ) -> None:
        self.desc, self.device, self.images, self.tuning = desc, device, images, TUNING.on(device)
        count, rows = images * desc.samples * desc.corners, images * desc.pixels
        self.keys = layout.take(count, torch.int32)
        self.weights = layout.take(count, desc.compute.torch)
        self.order = CountingSort(layout, device, count, rows)
        self.summing = SegmentSumSteps(
            layout, device, count, rows, desc.channels, desc.input_dtype, desc.samples * desc.corners, False
        )
        copied = images * desc.samples * desc.channels if copies and worth_copying(desc) else 0
        self.rows = layout.take(copied, desc.input_dtype)

    def copied(self, args: GridSampleBackwardArgs) -> Region | None:
        """The region that takes the copy of dout; None if dout is not copied."""
        return self.rows if self.rows.count and args.dout.stride(1) != 1 else None

    def add_steps(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        dinput: StepOperand,
        dout: StepOperand,
        grid: StepOperand,
    ) -> None:
        desc, images = self.desc, self.images
        samples, tile = desc.samples, self.tuning.tile
        if samples:
            steps.add(
                list_corners,
                -(-images * samples // tile),
                keys=self.keys,
                weights=self.weights,
                grid=grid,
                count=images * samples,
                samples=samples,
                pixels=desc.pixels,
                rows=self.order.rows,
                sizes=sizes_of(desc.image_size),
                out_sizes=sizes_of(desc.output_size),
                grid_strides=grid_strides_of(args.grid),
                grid_step=args.grid.stride(-1),
                **sampling_constants(desc),
                TILE=tile,
                num_warps=self.tuning.warps,
            )
        self.order.add_steps(steps, self.keys, Space((self.order.count,), ((1,),)))
        rows, channels = self.copied(args), desc.channels
        sizes: tuple[int, ...] = (images * samples, channels)
        strides: tuple[int, ...] = (channels, 1)
        if rows is not None and samples:
            add_copy(steps, self.device, desc, args, images, rows, dout)
        else:
            walk = loops((images, *desc.output_size), args.dout.stride()[:1] + args.dout.stride()[2:])
            sizes, strides = (*walk.sizes, channels), (*walk.strides[0], args.dout.stride(1))
        assert args.dinput is not None
        out = loops((images, *desc.image_size), args.dinput.stride()[:1] + args.dinput.stride()[2:])
        self.summing.add_steps(
            steps,
            Target(dinput, (*out.sizes, channels), (*out.strides[0], args.dinput.stride(1))),
            Terms(dout if rows is None else rows, self.order.places, self.keys, self.weights),
            Bounds.of(self.order),
            Walk(sizes, strides, numbers=(samples * desc.corners, max(samples, 1))),
            term=corner_term,
            accumulate=args.accumulate,
            every_row=True,
        )
