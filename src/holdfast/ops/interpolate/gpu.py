"""interpolate in Triton. A program computes the same block of pixels in one plane after the other.

A plane is one channel of one image; with channels last, it is one image, and its pixels have channels. All
planes share the tables, so a program reads the taps and the weights of its pixels once for all its planes.
Small planes are computed several at a time, side by side.
The tables are tensors that the kernel keeps. Loops over taps go to the largest count of an axis; pixels with
fewer taps are masked.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.interpolate import plan as plans
from holdfast.ops.interpolate.tables import Table, joined


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``resample``.

    The loops over all axes are unrolled if a pixel has few taps, else the loop over x if it has few.
    """

    #: Pixels at a time per program, of one plane or of several planes.
    block: int = 512
    #: Maximum number of times, one after the other; fewer if there would be fewer programs than ``programs``.
    turns: int = 16
    programs: int = 1056
    warps: int = 4
    few_taps: int = 16
    few_along_x: int = 8


TUNING = Tuned(gpu=Tuning(), interpreter=Tuning(block=8192, turns=64, programs=1))

#: Pixels with many taps: a thread has one pixel, because it has enough loads of its own to wait for.
MANY_TAPS = Tuned(
    gpu=Tuning(block=256, turns=8, warps=8), interpreter=Tuning(block=8192, turns=64, programs=1)
)


@triton.jit
def added(total, weight, term, number, count):
    """``total`` after tap ``number``, if there are that many; the first product is the sum so far."""
    product = weight * term
    return tl.where(number < count, tl.where(number > 0, total + product, product), total)


@triton.jit
def loaded_weights(weights, count, TAPS: tl.constexpr):
    """The weights of TAPS taps, 0 from ``count`` on."""
    found = (tl.load(weights, mask=0 < count, other=0.0),)
    for number in tl.static_range(1, TAPS):
        found = found + (tl.load(weights + number, mask=number < count, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def row_sum(
    line, of_x, weights, stride, taps, count, read,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The sum over the taps of x. TAPS is their largest count, or 0 if only ``taps`` has it."""
    row = tl.zeros([LANES], COMPUTE)
    if TAPS > 0:
        for number in tl.static_range(TAPS):
            step = tl.full([], number, tl.int64) * stride
            value = tl.load(line + step, mask=read & (number < count), other=0.0)
            row = added(row, of_x[number], widen(value, COMPUTE), number, count)
    else:
        for number in range(taps):
            step = tl.cast(number, tl.int64) * stride
            value = tl.load(line + step, mask=read & (number < count), other=0.0)
            weight = tl.load(weights + number, mask=number < count, other=0.0)
            row = added(row, weight, widen(value, COMPUTE), number, count)
    return row


@triton.jit(do_not_specialize=["blocks", "planes", "share"])
def resample(
    out, source, spans, weights, elements, blocks, planes, share, channels, columns, sizes, most,
    out_strides, source_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    TAPS_X: tl.constexpr, TAPS_Y: tl.constexpr, TAPS_Z: tl.constexpr,
    BLOCK: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of ``share`` planes, ABREAST planes at a time.

    ``sizes`` are x, y of the output; strides are of x, y, z, c, n; ``most`` are the largest counts of
    x, y, z. ``spans`` has rows of ``columns`` numbers: the first tap, the count and the first weight. TAPS_X,
    TAPS_Y and TAPS_Z are ``most``, or 0 for an axis whose loop is not unrolled.
    """
    block = tl.program_id(0) % blocks
    first_plane = tl.program_id(0) // blocks * share
    LANES: tl.constexpr = BLOCK * ABREAST
    lane = tl.arange(0, LANES)
    element = block.to(INDEX) * BLOCK + lane % BLOCK
    exists = element < elements
    if CHANNELS_LAST:
        pixel, channel = element // channels, (element % channels).to(tl.int64)
        corner, target = channel * source_strides[3], channel * out_strides[3]
    else:
        pixel = element
        corner, target = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    x, rest = pixel % sizes[0], pixel // sizes[0]
    y, z = rest % sizes[1], rest // sizes[1]
    at_x, at_y, at_z = spans + x, spans + sizes[0] + y, spans + sizes[0] + sizes[1] + z
    count_x = tl.load(at_x + columns, mask=exists, other=0)
    count_y = tl.load(at_y + columns, mask=exists, other=0)
    count_z = tl.load(at_z + columns, mask=exists, other=0)
    weight_x = weights + tl.load(at_x + 2 * columns, mask=exists, other=0)
    weight_y = weights + tl.load(at_y + 2 * columns, mask=exists, other=0)
    weight_z = weights + tl.load(at_z + 2 * columns, mask=exists, other=0)
    of_x = loaded_weights(weight_x, count_x, TAPS_X)
    of_y = loaded_weights(weight_y, count_y, TAPS_Y)
    of_z = loaded_weights(weight_z, count_z, TAPS_Z)
    corner += tl.load(at_x, mask=exists, other=0).to(tl.int64) * source_strides[0]
    corner += tl.load(at_y, mask=exists, other=0).to(tl.int64) * source_strides[1]
    corner += tl.load(at_z, mask=exists, other=0).to(tl.int64) * source_strides[2]
    target += x.to(tl.int64) * out_strides[0] + y.to(tl.int64) * out_strides[1]
    target += z.to(tl.int64) * out_strides[2]
    taps_y, taps_z = tl.max(count_y), tl.max(count_z)

    for first in range(first_plane, tl.minimum(first_plane + share, planes), ABREAST):
        plane, inside = first, exists
        if ABREAST > 1:
            inside = exists & (first + lane // BLOCK < planes)
            plane = tl.where(inside, first + lane // BLOCK, 0)
        if CHANNELS_LAST:
            image = tl.cast(plane, tl.int64)
            at_source, at_out = source + image * source_strides[4], out + image * out_strides[4]
        else:
            image, channel = tl.cast(plane // channels, tl.int64), tl.cast(plane % channels, tl.int64)
            at_source = source + (image * source_strides[4] + channel * source_strides[3])
            at_out = out + (image * out_strides[4] + channel * out_strides[3])
        total = tl.zeros([LANES], COMPUTE)
        if TAPS_Y > 0:
            for in_z in tl.static_range(TAPS_Z):
                slab = tl.zeros([LANES], COMPUTE)
                for in_y in tl.static_range(TAPS_Y):
                    steps = tl.full([], in_z, tl.int64) * source_strides[2]
                    steps += tl.full([], in_y, tl.int64) * source_strides[1]
                    row = row_sum(
                        at_source + steps + corner, of_x, weight_x, source_strides[0], most[0], count_x,
                        (in_z < count_z) & (in_y < count_y), COMPUTE, TAPS_X, LANES,
                    )  # fmt: skip
                    slab = added(slab, of_y[in_y], row, in_y, count_y)
                total = added(total, of_z[in_z], slab, in_z, count_z)
        else:
            for in_z in range(taps_z):
                slab = tl.zeros([LANES], COMPUTE)
                for in_y in range(taps_y):
                    steps = tl.cast(in_z, tl.int64) * source_strides[2]
                    steps += tl.cast(in_y, tl.int64) * source_strides[1]
                    row = row_sum(
                        at_source + steps + corner, of_x, weight_x, source_strides[0], most[0], count_x,
                        (in_z < count_z) & (in_y < count_y), COMPUTE, TAPS_X, LANES,
                    )  # fmt: skip
                    weight = tl.load(weight_y + in_y, mask=in_y < count_y, other=0.0)
                    slab = added(slab, weight, row, in_y, count_y)
                weight = tl.load(weight_z + in_z, mask=in_z < count_z, other=0.0)
                total = added(total, weight, slab, in_z, count_z)
        written = at_out + target
        if ACCUMULATE:
            total = widen(tl.load(written, mask=inside), COMPUTE) + total
        tl.store(written, narrow(total, out.dtype.element_ty), mask=inside)


class _Resample(DescribedKernel[plans.D]):
    """Both directions: the tables and the operands differ."""

    def __init__(self, desc: plans.D, device: torch.device) -> None:
        super().__init__(desc, device)
        tables = self.tables()
        self.most = tuple(table.most for table in tables)
        spans, weights = joined(tables)
        self.spans = torch.from_numpy(spans).to(device)
        self.weights = torch.from_numpy(weights).to(desc.compute.torch).to(device)

    def tables(self) -> tuple[Table, ...]:
        raise NotImplementedError

    def _prepared(self, args: Any, out: str, source: str, accumulate: bool) -> Launch[Any]:
        few = math.prod(self.most) <= TUNING.on(self.device).few_taps
        tuning = (TUNING if few else MANY_TAPS).on(self.device)
        written, read = getattr(args, out), getattr(args, source)
        images, channels = written.shape[:2]
        sizes = _along(written.shape[2:], 1)
        channels_last = channels > 1 and written.stride(1) == 1
        elements = math.prod(sizes) * (channels if channels_last else 1)
        planes = images * (1 if channels_last else channels)
        block = min(triton.next_power_of_2(max(elements, 1)), tuning.block)
        blocks, abreast = -(-elements // block), tuning.block // block
        turns = max(min(-(-planes // abreast) * blocks // tuning.programs, tuning.turns), 1)
        unrolled = (few or self.most[0] <= tuning.few_along_x, few, few)
        taps = [most if known else 0 for most, known in zip(self.most, unrolled, strict=True)]
        steps = Steps(self.device, args)
        steps.add(
            resample, blocks * -(-planes // (abreast * turns)),
            out=out, source=source, spans=self.spans, weights=self.weights, elements=elements, blocks=blocks,
            planes=planes, share=abreast * turns, channels=channels, columns=self.spans.shape[1],
            sizes=sizes[:2], most=self.most,
            out_strides=_strides(written), source_strides=_strides(read), ACCUMULATE=accumulate,
            COMPUTE=tl.float64 if self.desc.compute.bits == 64 else tl.float32,
            INDEX=tl.int32 if blocks * block < 2**31 else tl.int64, CHANNELS_LAST=channels_last,
            TAPS_X=taps[0], TAPS_Y=taps[1], TAPS_Z=taps[2],
            BLOCK=block, ABREAST=abreast,
            num_warps=min(8, tuning.warps * (2 if math.prod(self.most) > 8 else 1)),
        )  # fmt: skip
        return steps.launch


def _along(numbers: Any, missing: int) -> tuple[int, ...]:
    """Numbers of x, y and z from those of the last axes."""
    return (*reversed(numbers), missing, missing)[:3]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    n, c, *steps = tensor.stride()
    return (*_along(steps, 0), c, n)


class Interpolate(_Resample[plans.InterpolateDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.tables()

    def compile(self) -> None:
        self.prepare(plans.InterpolateArgs.described(self.desc))

    def prepare(self, args: plans.InterpolateArgs) -> Launch[plans.InterpolateArgs]:
        return self._prepared(args, "out", "input", False)


class InterpolateBackward(_Resample[plans.InterpolateBackwardDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.transposed_tables()

    def compile(self) -> None:
        self.prepare(plans.InterpolateBackwardArgs.described(self.desc))

    def prepare(self, args: plans.InterpolateBackwardArgs) -> Launch[plans.InterpolateBackwardArgs]:
        return self._prepared(args, "dinput", "dout", args.accumulate)
