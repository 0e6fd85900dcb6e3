"""interpolate in Triton. A program computes a block of output elements; neighbours are along x.

The tables are tensors that the kernel keeps. Loops over taps go to the largest count of an axis; elements
with fewer taps are masked.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned, constants_of
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.interpolate import plan as plans
from holdfast.ops.interpolate.tables import Table, joined


@dataclass(frozen=True)
class Tuning:
    """Elements per program, and warps per program."""

    block: int = 512
    warps: int = 4


TUNING = Tuned(gpu=Tuning(), interpreter=Tuning(block=8192))


@triton.jit
def added(total, weight, term, number, count):
    """``total`` after tap ``number``, if there are that many; the first product is the sum so far."""
    product = weight * term
    return tl.where(number < count, tl.where(number > 0, total + product, product), total)


@triton.jit
def resample(
    out, source, spans, weights, elements, columns, sizes, most, out_strides, source_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of the output.

    ``sizes`` are x, y, z, c of the output; strides are of x, y, z, c, n; ``most`` are the largest counts of
    x, y, z. ``spans`` has rows of ``columns`` numbers: the first tap, the count and the first weight.
    """
    element = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    x, rest = element % sizes[0], element // sizes[0]
    y, rest = rest % sizes[1], rest // sizes[1]
    z, rest = rest % sizes[2], rest // sizes[2]
    c, n = (rest % sizes[3]).to(tl.int64), (rest // sizes[3]).to(tl.int64)
    at_x, at_y, at_z = spans + x, spans + sizes[0] + y, spans + sizes[0] + sizes[1] + z
    count_x = tl.load(at_x + columns, mask=inside, other=0)
    count_y = tl.load(at_y + columns, mask=inside, other=0)
    count_z = tl.load(at_z + columns, mask=inside, other=0)
    weight_x = weights + tl.load(at_x + 2 * columns, mask=inside, other=0)
    weight_y = weights + tl.load(at_y + 2 * columns, mask=inside, other=0)
    weight_z = weights + tl.load(at_z + 2 * columns, mask=inside, other=0)
    first = source + n * source_strides[4] + c * source_strides[3]
    first += tl.load(at_x, mask=inside, other=0).to(tl.int64) * source_strides[0]
    first += tl.load(at_y, mask=inside, other=0).to(tl.int64) * source_strides[1]
    first += tl.load(at_z, mask=inside, other=0).to(tl.int64) * source_strides[2]
    total = tl.zeros([BLOCK], COMPUTE)
    for in_z in range(most[2]):
        plane = tl.zeros([BLOCK], COMPUTE)
        for in_y in range(most[1]):
            line = first + tl.cast(in_z, tl.int64) * source_strides[2]
            line += tl.cast(in_y, tl.int64) * source_strides[1]
            read = (in_z < count_z) & (in_y < count_y)
            row = tl.zeros([BLOCK], COMPUTE)
            for in_x in range(most[0]):
                value = tl.load(
                    line + tl.cast(in_x, tl.int64) * source_strides[0],
                    mask=read & (in_x < count_x), other=0.0,
                )  # fmt: skip
                weight = tl.load(weight_x + in_x, mask=in_x < count_x, other=0.0)
                row = added(row, weight, widen(value, COMPUTE), in_x, count_x)
            weight = tl.load(weight_y + in_y, mask=in_y < count_y, other=0.0)
            plane = added(plane, weight, row, in_y, count_y)
        weight = tl.load(weight_z + in_z, mask=in_z < count_z, other=0.0)
        total = added(total, weight, plane, in_z, count_z)
    target = out + n * out_strides[4] + c * out_strides[3]
    target += x.to(tl.int64) * out_strides[0] + y.to(tl.int64) * out_strides[1]
    target += z.to(tl.int64) * out_strides[2]
    if ACCUMULATE:
        total = widen(tl.load(target, mask=inside), COMPUTE) + total
    tl.store(target, narrow(total, out.dtype.element_ty), mask=inside)


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
        desc, tuning = self.desc, TUNING.on(self.device)
        written, read = getattr(args, out), getattr(args, source)
        elements = written.numel()
        steps = Steps(self.device, args)
        steps.add(
            resample, -(-elements // tuning.block), constants_of(tuning),
            out=out, source=source, spans=self.spans, weights=self.weights, elements=elements,
            columns=self.spans.shape[1], sizes=(*_along(written.shape[2:], 1), desc.shape[1]),
            most=self.most, out_strides=_strides(written), source_strides=_strides(read),
            ACCUMULATE=accumulate, COMPUTE=tl.float64 if desc.compute.bits == 64 else tl.float32,
            INDEX=tl.int32 if elements < 2**31 - tuning.block else tl.int64, num_warps=tuning.warps,
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
