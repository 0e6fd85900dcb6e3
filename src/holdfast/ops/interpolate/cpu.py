"""interpolate on the CPU. A unit of work is up to RUN elements of one output row.

Each input row that the unit reads is converted to the compute type in pieces, and summed over x for all
elements of the unit. These sums are then added over y, and those over z. The sums over x of the last rows are
kept, since the output rows below use them again.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, jit, kernel, outlined, pointer
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.numerics.cpu import ITEM_SIZE, kind, zero
from holdfast.numerics.cpu_walk import RUN, load_run, number, store_run
from holdfast.ops.interpolate import plan as plans
from holdfast.ops.interpolate.tables import Table, joined

_RUN_BYTES = 8 * RUN
#: Sums over x that are kept: of this many rows of a plane, and of this many planes.
_ROWS, _PLANES = 8, 4
_SCRATCH = Scratch("interpolate", Runs(6 + _ROWS * _PLANES, _RUN_BYTES))
_STEP = step_of(_RUN_BYTES)
#: Rows of the table: first tap, number of taps, first weight.
_FIRST, _COUNT, _START = 0, 1, 2


@jit
def _taps(spans, begin, end):
    """The number of taps of elements ``begin`` to ``end`` if all have as many, otherwise 0."""
    taps = spans[_COUNT, begin]
    different = 0
    for i in range(begin, end):
        different |= spans[_COUNT, i] ^ taps
    return taps if different == 0 else 0


@jit
def _sum_pairs(begin, count, spans, weights, row, values):
    """Sums of two taps each; the first element of ``values`` is the first tap of element ``begin``."""
    start, origin = spans[_START, begin], spans[_FIRST, begin]
    for i in range(count):
        at = spans[_FIRST, begin + i] - origin
        row[i] = weights[start + 2 * i] * values[at] + weights[start + 2 * i + 1] * values[at + 1]


@jit
def _sum_singles(begin, count, spans, weights, row, values):
    """As ``_sum_pairs``, of one tap each."""
    start, origin = spans[_START, begin], spans[_FIRST, begin]
    for i in range(count):
        row[i] = weights[start + i] * values[spans[_FIRST, begin + i] - origin]


@jit
def _sum_row(line, source, begin, count, spans, weights, row, raw, wide, like):
    """Sums over x of elements ``begin`` to ``begin + count``, from the input row at ``line``."""
    outlined()
    source_kind, step = source[1], source[6]
    end = begin + count
    last = spans[_FIRST, end - 1] + spans[_COUNT, end - 1]
    taps = _taps(spans, begin, end) if last - spans[_FIRST, begin] <= RUN else 0
    if taps != 1 and taps != 2:
        for i in range(count):
            row[i] = zero(like)
    for piece in range(spans[_FIRST, begin], last, RUN):
        columns = min(RUN, last - piece)
        at = line + piece * step * (source_kind & ITEM_SIZE)
        values = pointer(load_run(at, source_kind, step, columns, raw, wide, like), like)
        if taps == 1:
            _sum_singles(begin, count, spans, weights, row, values)
        elif taps == 2:
            _sum_pairs(begin, count, spans, weights, row, values)
        else:
            for i in range(count):
                first = spans[_FIRST, begin + i]
                start = spans[_START, begin + i] - first
                total = row[i]
                for column in range(
                    max(first, piece), min(first + spans[_COUNT, begin + i], piece + columns)
                ):
                    product = weights[start + column] * values[column - piece]
                    total = product if column == first else total + product
                row[i] = total


@jit
def _add(total, weight, terms, count, is_first):
    """total += weight * terms, or without the sum if ``is_first``."""
    if is_first:
        for i in range(count):
            total[i] = weight * terms[i]
    else:
        for i in range(count):
            total[i] = total[i] + weight * terms[i]


@kernel
def _resample(first, last, sizes, spans, weights, out, source, accumulate, scratch, like):
    """Units ``first`` to ``last``. ``sizes`` are C, D, H, W of the output.

    A tensor is (address, kind, strides of n, c, z, y, x). The table has the columns of x, then of y, then z.
    """
    channels, depth, height, width = sizes
    source_item, out_kind, out_step = source[1] & ITEM_SIZE, out[1], out[6]
    raw, wide, old_at = scratch, scratch + _STEP, scratch + 2 * _STEP
    kept, plane = pointer(scratch + 3 * _STEP, np.int64(0)), pointer(scratch + 4 * _STEP, like)
    total_at = scratch + 5 * _STEP
    total = pointer(total_at, like)
    chunks = (width + RUN - 1) // RUN
    # The input row and the first element of each kept sum.
    for slot in range(_ROWS * _PLANES if first < last else 0):
        kept[2 * slot] = 0
    for unit in range(first, last):
        y, chunk = unit % height, unit // height % chunks
        begin, line = chunk * RUN, unit // height // chunks
        z, image = line % depth, line // depth
        n, c = image // channels, image % channels
        count = min(RUN, width - begin)
        of_y, of_z = width + y, width + height + z
        for i in range(count):
            plane[i] = zero(like)
            total[i] = zero(like)
        for in_z in range(spans[_COUNT, of_z]):
            for in_y in range(spans[_COUNT, of_y]):
                from_z, from_y = spans[_FIRST, of_z] + in_z, spans[_FIRST, of_y] + in_y
                offset = n * source[2] + c * source[3] + from_z * source[4] + from_y * source[5]
                at = source[0] + offset * source_item
                slot = from_z % _PLANES * _ROWS + from_y % _ROWS
                row = pointer(scratch + (6 + slot) * _STEP, like)
                if kept[2 * slot] != at or kept[2 * slot + 1] != begin:
                    _sum_row(at, source, begin, count, spans, weights, row, raw, wide, like)
                    kept[2 * slot], kept[2 * slot + 1] = at, begin
                _add(plane, weights[spans[_START, of_y] + in_y], row, count, in_y == 0)
            _add(total, weights[spans[_START, of_z] + in_z], plane, count, in_z == 0)
        offset = n * out[2] + c * out[3] + z * out[4] + y * out[5] + begin * out_step
        target = out[0] + offset * (out_kind & ITEM_SIZE)
        if accumulate:
            old = pointer(load_run(target, out_kind, out_step, count, raw, old_at, like), like)
            for i in range(count):
                total[i] = old[i] + total[i]
        store_run(total_at, count, target, out_kind, out_step, raw, like)


@cache
def _compile(compute: Float) -> None:
    like = number(compute)
    spans, weights = np.zeros((3, 3), np.int32), np.zeros(3, type(like))
    tensor = (0, 4, 0, 0, 0, 0, 0)
    compile_kernel(_resample, 0, 0, (1, 1, 1, 1), spans, weights, tensor, tensor, False, 0, like)


class _Resample(DescribedKernel[plans.D]):
    """Both directions: the tables and the operands differ."""

    def __init__(self, desc: plans.D, device: torch.device) -> None:
        super().__init__(desc, device)
        spans, weights = joined(self.tables())
        self.spans, self.weights = spans, weights.astype(type(number(desc.compute)))

    def tables(self) -> tuple[Table, ...]:
        raise NotImplementedError

    def compile(self) -> None:
        _compile(self.desc.compute)

    def _prepared(self, out: torch.Tensor, source: torch.Tensor, accumulate: bool) -> Launch[Any]:
        self.compile()
        compute, spans, weights = self.desc.compute, self.spans, self.weights
        like, code = number(compute), kind(self.desc.dtype, compute.torch)
        channels, depth, height, width = _sizes(out.shape)
        units = self.desc.shape[0] * channels * depth * height * -(-width // RUN)
        work = out.numel() * spans[_COUNT].max()
        out_strides, source_strides = _strides(out), _strides(source)

        def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
            to = (addresses[0], code, *out_strides)
            of = (addresses[1], code, *source_strides)

            def part(first: int, last: int) -> None:
                scratch = _SCRATCH.of_thread()
                sizes = (channels, depth, height, width)
                _resample(first, last, sizes, spans, weights, to, of, accumulate, scratch, like)

            parallel(part, units, int(work))

        return launch


def _sizes(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """C, D, H, W of a shape; 1 for axes that it does not have."""
    channels, *size = shape[1:]
    depth, height, width = (1, 1, *size)[-3:]
    return channels, depth, height, width


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of n, c, z, y and x; 0 for axes that the tensor does not have."""
    n, c, *steps = tensor.stride()
    return (n, c, *(0, 0, *steps)[-3:])


class Interpolate(_Resample[plans.InterpolateDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.tables()

    def prepare(self, args: plans.InterpolateArgs) -> Launch[plans.InterpolateArgs]:
        return self._prepared(args.out, args.input, False)


class InterpolateBackward(_Resample[plans.InterpolateBackwardDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.transposed_tables()

    def prepare(self, args: plans.InterpolateBackwardArgs) -> Launch[plans.InterpolateBackwardArgs]:
        return self._prepared(args.dinput, args.dout, args.accumulate)
