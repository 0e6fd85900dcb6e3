"""grid_sample in Triton.

A forward program computes the corners of its samples once, then loops over channels. The problem selects the
kernels of the gradients: ``gpu_dinput_by_slot`` for large bilinear problems with few channels,
``gpu_dinput_by_cell`` and ``gpu_dgrid`` for those with many, ``gpu_dinput_by_plane`` for small problems,
``gpu_dinput_by_image`` for many small images, and ``gpu_dinput_by_sample`` for all others. If the samples are
scattered (``gpu_locality``), the kernels for many channels use a copy of dout with channels last and samples
in the order of the cells.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.plan import Launch
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_coordinates import (
    NEAREST,
    corner_pixel,
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
from holdfast.ops.grid_sample.gpu_dgrid import GridGradient
from holdfast.ops.grid_sample.gpu_dinput_by_cell import CellSums, serves
from holdfast.ops.grid_sample.gpu_dinput_by_image import ImageSums
from holdfast.ops.grid_sample.gpu_dinput_by_plane import PlaneSums
from holdfast.ops.grid_sample.gpu_dinput_by_sample import SampleSums
from holdfast.ops.grid_sample.gpu_dinput_by_slot import SlotSums
from holdfast.ops.grid_sample.plan import (
    LIMIT,
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    GridSampleDescriptor,
    Mode,
    SampleKernel,
)

#: Minimum number of channels for the tuning for many channels.
MANY_CHANNELS = 5


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``grid_sample``. A program has one sample per thread."""

    #: Samples and warps with few channels, and with many, where samples share the cache.
    few_samples: int
    few_warps: int
    many_samples: int
    many_warps: int
    #: Desired number of forward programs, and the minimum channels per program when channels are split.
    min_programs: int = 4096
    min_share: int = 16
    #: Samples, warps and minimum channels with many channels, if there would be fewer programs than this.
    few_programs: int = 1024
    small_samples: int = 256
    small_warps: int = 8
    small_share: int = 4
    #: A tile has samples of several images if tiles of one image would leave this share of threads idle.
    most_idle: float = 0.1


TUNING = Tuned(
    gpu=Tuning(few_samples=128, few_warps=4, many_samples=512, many_warps=16),
    interpreter=Tuning(few_samples=16384, few_warps=4, many_samples=16384, many_warps=4, small_samples=16384),
)


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


@triton.jit(do_not_specialize=["samples", "count", "tiles", "share", "shares"])
def grid_sample(
    out, image, grid,
    samples, count, tiles, share, shares,
    channels, sizes, out_sizes, image_strides, out_strides, grid_strides, grid_step, image_step, out_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, IMAGE_ROWS: tl.constexpr, OUT_ROWS: tl.constexpr,
    FULL: tl.constexpr, OFFSET: tl.constexpr, ACROSS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE samples of one image, one per thread, in ``share`` channels.

    ACROSS: a tile may have samples of several images. ``samples`` are those of an image, ``count`` all.
    """
    program = tl.program_id(0)
    begin = program // tiles % shares * share
    n = program // tiles // shares
    sample = program % tiles * TILE + tl.arange(0, TILE)
    inside = sample < samples
    if ACROSS:
        inside = sample < count
        sample = tl.minimum(sample, count - 1)
        n = sample // samples
        sample -= n * samples
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


class GridSample(SampleKernel[GridSampleDescriptor]):
    """``grid_sample``."""

    def compile(self) -> None:
        self.prepare(GridSampleArgs.described(self.desc))

    def prepare(self, args: GridSampleArgs) -> Launch[GridSampleArgs]:
        desc, tuning = self.desc, TUNING.on(self.device)
        count, least_share = desc.batch * desc.samples, tuning.min_share
        tile, warps = tuning.few_samples, tuning.few_warps
        if desc.channels >= MANY_CHANNELS:
            tile, warps = tuning.many_samples, tuning.many_warps
            if -(-count // tile) * -(-desc.channels // least_share) < tuning.few_programs:
                tile, warps, least_share = tuning.small_samples, tuning.small_warps, tuning.small_share
        tiles, images = -(-desc.samples // tile), desc.batch
        across = tiles * tile * (1 - tuning.most_idle) > desc.samples and images > 1 and count <= LIMIT - tile
        if across:
            tiles, images = -(-count // tile), 1
        # Channels are split over programs only if the samples make too few programs.
        shares = min(-(-tuning.min_programs // (images * tiles)), -(-desc.channels // least_share))
        share = -(-desc.channels // (4 * shares)) * 4
        shares = -(-desc.channels // share)
        steps = Steps(self.device, args)
        steps.add(
            grid_sample,
            images * shares * tiles,
            out="out",
            image="input",
            grid="grid",
            samples=desc.samples,
            count=count,
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
            ACROSS=across,
            TILE=tile,
            num_warps=warps,
        )
        return steps.launch


class GridSampleBackward(SampleKernel[GridSampleBackwardDescriptor]):
    """dinput and dgrid; the workspace is at most ``workspace_share`` of the outputs."""

    workspace_share = 1.5
    #: Problems that need less workspace than this are not limited to the share.
    least_workspace = 2**24

    def __init__(self, desc: GridSampleBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.sums: PlaneSums | ImageSums | SlotSums | CellSums | SampleSums | None = None
        layout = WorkspaceLayout()
        if PlaneSums.serves(desc, device):
            planes = PlaneSums(layout, device, desc, self.budget)
            self.sums = planes if planes.fits else None
        elif ImageSums.serves(desc, device):
            self.sums = ImageSums(layout, device, desc)
        elif SlotSums.serves(desc, device):
            slots = SlotSums(layout, device, desc, self.budget)
            self.sums = slots if slots.fits else None
        elif serves(desc, device):
            cells = CellSums(layout, device, desc, self.budget)
            self.sums = cells if cells.fits else None
        few_channels = desc.mode != Mode.BILINEAR or desc.channels < MANY_CHANNELS
        if self.sums is None and (desc.needs_dinput or few_channels):
            layout = WorkspaceLayout()
            self.sums = SampleSums(layout, device, desc, self.budget)
        ways = {
            PlaneSums: "dinput by plane", ImageSums: "dinput by image", SlotSums: "dinput by slot",
            CellSums: "dinput by cell", SampleSums: "dinput by sample",
        }  # fmt: skip
        self.variant = ways[type(self.sums)] if self.sums and desc.needs_dinput else "dgrid by sample"
        self.set_workspace(layout)

    @property
    def budget(self) -> int:
        desc = self.desc
        shapes = [desc.expected(name) for name in ("dinput", "dgrid")]
        outputs = sum(math.prod(shape) * dtype.itemsize for shape, dtype in filter(None, shapes))
        return max(int(outputs * self.workspace_share), self.least_workspace)

    def compile(self) -> None:
        self.prepare(GridSampleBackwardArgs.described(self.desc))

    def prepare(self, args: GridSampleBackwardArgs) -> Launch[GridSampleBackwardArgs]:
        steps, desc = Steps(self.device, args), self.desc
        gradient = GridGradient(self.device, desc)
        if isinstance(self.sums, CellSums):
            for first in range(0, desc.batch, self.sums.images):
                listed = self.sums.add_steps(steps, args, first)
                if desc.needs_dgrid:
                    gradient.add_steps(steps, args, first, listed.images, listed)
        elif self.sums is not None:
            self.sums.add_steps(steps, args)
            if isinstance(self.sums, PlaneSums) and desc.needs_dgrid and not self.sums.computes_dgrid:
                gradient.add_steps(steps, args, 0, desc.batch)
        elif desc.samples:
            gradient.add_steps(steps, args, 0, desc.batch)
        return steps.launch


class LeanGridSampleBackward(GridSampleBackward):
    """With the smallest workspace."""

    workspace_share = 0.0
    least_workspace = 0
