"""interpolate in Triton. A program computes the same block of pixels in several planes.

A plane is one channel of one image. All planes share the tables, so a program reads the taps and the weights
of its pixels once for all of them. The tables are tensors that the kernel keeps. Loops over taps go to the
largest count of an axis; pixels with fewer taps are masked.
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
    """Values per program, planes and warps per program, and the most taps of x that are unrolled."""

    values: int = 1024
    planes: int = 8
    warps: int = 4
    unrolled: int = 8


TUNING = Tuned(gpu=Tuning(), interpreter=Tuning(values=16384))


@triton.jit
def added(total, weight, term, number, count):
    """``total`` after tap ``number``, if there are that many; the first product is the sum so far."""
    product = weight * term
    return tl.where(number < count, tl.where(number > 0, total + product, product), total)


@triton.jit
def row_sum(
    line, weights, stride, taps, count, read,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over the taps of x. TAPS is their largest count, or 0 if it is only known as ``taps``."""
    row = tl.zeros([PLANES, BLOCK], COMPUTE)
    if TAPS > 0:
        for number in tl.static_range(TAPS):
            value = tl.load(line + number * stride, mask=read & (number < count), other=0.0)
            weight = tl.load(weights + number, mask=number < count, other=0.0)
            row = added(row, weight, widen(value, COMPUTE), number, count)
    else:
        for number in range(taps):
            at = line + tl.cast(number, tl.int64) * stride
            value = tl.load(at, mask=read & (number < count), other=0.0)
            weight = tl.load(weights + number, mask=number < count, other=0.0)
            row = added(row, weight, widen(value, COMPUTE), number, count)
    return row


@triton.jit
def resample(
    out, source, spans, weights, pixels, pixel_blocks, channels, channel_blocks, columns, sizes, most,
    out_strides, source_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr, TAPS: tl.constexpr,
    PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK pixels of PLANES channels of one image.

    ``sizes`` are x, y of the output; strides are of x, y, z, c, n; ``most`` are the largest counts of
    x, y, z. ``spans`` has rows of ``columns`` numbers: the first tap, the count and the first weight.
    """
    block = tl.program_id(0).to(tl.int64)
    pixel = (block % pixel_blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = pixel < pixels
    block = block // pixel_blocks
    channel = block % channel_blocks * PLANES + tl.arange(0, PLANES)[:, None]
    image = block // channel_blocks
    known = channel < channels
    x, rest = (pixel % sizes[0]).to(tl.int32), (pixel // sizes[0]).to(tl.int32)
    y, z = rest % sizes[1], rest // sizes[1]
    at_x, at_y, at_z = spans + x, spans + sizes[0] + y, spans + sizes[0] + sizes[1] + z
    count_x = tl.load(at_x + columns, mask=inside, other=0)
    count_y = tl.load(at_y + columns, mask=inside, other=0)
    count_z = tl.load(at_z + columns, mask=inside, other=0)
    weight_x = weights + tl.load(at_x + 2 * columns, mask=inside, other=0)
    weight_y = weights + tl.load(at_y + 2 * columns, mask=inside, other=0)
    weight_z = weights + tl.load(at_z + 2 * columns, mask=inside, other=0)
    first = tl.load(at_x, mask=inside, other=0).to(tl.int64) * source_strides[0]
    first += tl.load(at_y, mask=inside, other=0).to(tl.int64) * source_strides[1]
    first += tl.load(at_z, mask=inside, other=0).to(tl.int64) * source_strides[2]
    # Channels that do not exist read the last one. Only what they store is masked.
    plane = source + image * source_strides[4] + tl.minimum(channel, channels - 1) * source_strides[3]
    corner = plane + first
    total = tl.zeros([PLANES, BLOCK], COMPUTE)
    for in_z in range(most[2]):
        slab = tl.zeros([PLANES, BLOCK], COMPUTE)
        for in_y in range(most[1]):
            line = corner + (
                tl.cast(in_z, tl.int64) * source_strides[2] + tl.cast(in_y, tl.int64) * source_strides[1]
            )
            read = (in_z < count_z) & (in_y < count_y)
            row = row_sum(
                line, weight_x, source_strides[0], most[0], count_x, read, COMPUTE, TAPS, PLANES, BLOCK
            )
            weight = tl.load(weight_y + in_y, mask=in_y < count_y, other=0.0)
            slab = added(slab, weight, row, in_y, count_y)
        weight = tl.load(weight_z + in_z, mask=in_z < count_z, other=0.0)
        total = added(total, weight, slab, in_z, count_z)
    target = out + image * out_strides[4] + channel * out_strides[3]
    target = target + (
        x.to(tl.int64) * out_strides[0] + y.to(tl.int64) * out_strides[1] + z.to(tl.int64) * out_strides[2]
    )
    written = inside & known
    if ACCUMULATE:
        total = widen(tl.load(target, mask=written), COMPUTE) + total
    tl.store(target, narrow(total, out.dtype.element_ty), mask=written)


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
        tuning = TUNING.on(self.device)
        written, read = getattr(args, out), getattr(args, source)
        images, channels, out_strides, source_strides = _planes(written, read)
        sizes = _along(written.shape[2:], 1)
        by_channel = channels > 1 and written.stride(1) == 1  # channels last: neighbours are channels
        most = tuning.values // 8 if by_channel else tuning.planes
        planes = min(triton.next_power_of_2(channels), most)
        block = tuning.values // planes
        pixel_blocks, channel_blocks = -(-math.prod(sizes) // block), -(-channels // planes)
        steps = Steps(self.device, args)
        steps.add(
            resample, images * channel_blocks * pixel_blocks, {"PLANES": planes, "BLOCK": block},
            out=out, source=source, spans=self.spans, weights=self.weights, pixels=math.prod(sizes),
            pixel_blocks=pixel_blocks, channels=channels, channel_blocks=channel_blocks,
            columns=self.spans.shape[1], sizes=sizes[:2], most=self.most, out_strides=out_strides,
            source_strides=source_strides, ACCUMULATE=accumulate,
            COMPUTE=tl.float64 if self.desc.compute.bits == 64 else tl.float32,
            INDEX=tl.int32 if pixel_blocks * block < 2**31 else tl.int64,
            TAPS=self.most[0] if self.most[0] <= tuning.unrolled else 0, num_warps=tuning.warps,
        )  # fmt: skip
        return steps.launch


def _planes(*tensors: torch.Tensor) -> tuple[Any, ...]:
    """Images, channels, and the strides of x, y, z, c, n of each tensor.

    If every tensor steps evenly from the last channel to the next image, all images count as one.
    """
    images, channels = tensors[0].shape[:2]
    if all(tensor.stride(0) == channels * tensor.stride(1) for tensor in tensors):
        images, channels = 1, images * channels
    return images, channels, *map(_strides, tensors)


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
