"""Scatter, in Triton: the sort and the ordered sum of ``segment_sum``, with an own last step. Gather."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.backends.gpu import double_bits
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import Steps
from holdfast.core.plan import Launch
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.scatter.plan import (
    BadScatterIndex,
    GatherArgs,
    GatherDescriptor,
    ScatterArgs,
    ScatterDescriptor,
)
from holdfast.ops.segment_sum.gpu import (
    Bounds,
    SortedSums,
    Target,
    Terms,
    Walk,
    fill_rows,
    finish,
    places_of,
)
from holdfast.ops.segment_sum.gpu_gather import Lookup, add_gather
from holdfast.ops.segment_sum.gpu_index import Lines
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops

#: Set in both halves of alpha's bits. Triton compiles an integer that is 1, or fits 32 bits, separately.
_HIGH_BIT = 2**40


@triton.jit
def rows_at(tensor, row, column, sizes, strides):
    """Addresses of the elements of rows."""
    return tensor + row_offsets(row, sizes, strides)[:, None] + column * strides[len(sizes) - 1]


@triton.jit
def finish_added(
    out, input, row, wanted, total, amount, count, column, inside, sizes, strides, input_strides, alpha,
    ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store input plus alpha times the sum, or the mean of input and the terms. Without terms, copy input.

    ``alpha`` has the two halves of its bits, or one element for alpha = 1.
    """
    mask = wanted[:, None] & inside
    old = tl.load(rows_at(input, row, column, sizes, input_strides), mask=mask, other=0.0)
    if len(alpha) == 2:
        bits = ((alpha[0] & 0xFFFFFFFF) << 32) | (alpha[1] & 0xFFFFFFFF)
        total = bits.to(tl.int64).to(tl.float64, bitcast=True).to(COMPUTE) * total
    total = widen(old, COMPUTE) + total
    if BY_COUNT:
        total = quotient(total, (count + 1).to(COMPUTE)[:, None])
    made = tl.where((amount > 0)[:, None], narrow(total, out.dtype.element_ty), old)
    tl.store(rows_at(out, row, column, sizes, strides), made, mask=mask)


@triton.jit
def finish_kept(
    out, input, row, wanted, total, amount, count, column, inside, sizes, strides, input_strides, alpha,
    ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the sum or the mean of the terms. Without terms, copy input."""
    mask = wanted[:, None] & inside
    lacks = mask & (amount == 0)[:, None]
    old = tl.load(rows_at(input, row, column, sizes, input_strides), mask=lacks, other=0.0)
    if BY_COUNT:
        total = quotient(total, tl.maximum(count, 1).to(COMPUTE)[:, None])
    made = tl.where((amount > 0)[:, None], narrow(total, out.dtype.element_ty), old)
    tl.store(rows_at(out, row, column, sizes, strides), made, mask=mask)


@triton.jit
def copy_rows(
    out, input, bounds, first_row, rows, length, column, inside, sizes, strides, input_strides,
    BOUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy those of ROWS rows of input that have no terms."""
    row = first_row + tl.arange(0, ROWS)
    _, amount = places_of(bounds, row, row < rows, length, BOUNDS)
    mask = ((row < rows) & (amount == 0))[:, None] & inside
    old = tl.load(rows_at(input, row, column, sizes, input_strides), mask=mask, other=0.0)
    tl.store(rows_at(out, row, column, sizes, strides), old, mask=mask)


#: The last step, and the step for rows without terms, by what input is for.
LAST = {"added": (finish_added, copy_rows), "kept": (finish_kept, copy_rows), "zeros": (finish, fill_rows)}


class Scatter(SortedSums[ScatterDescriptor]):
    """Merge sort, then segment sum."""

    def compile(self) -> None:
        self.prepare(ScatterArgs.described(self.desc))

    def prepare(self, args: ScatterArgs) -> Launch[ScatterArgs]:
        desc, order = self.desc, self.order
        index, src, out = args.index, args.src, args.out
        source = out if args.input is None else args.input
        walk = loops(desc.shape, index.stride(), src.stride(), desc.line_strides)
        table = loops(desc.table, out.stride(), source.stride())
        steps = Steps(self.device, args)
        fill, filled = self.zero_fill("out", out) if desc.base == "zeros" else (None, 0)
        lines = Lines(desc.extent, desc.step, walk.strides[2])
        order.add_steps(
            steps, "index", walk, -1, self.summing.arrivals, fill,
            lines if len(desc.shape) > 1 else None, BadScatterIndex(desc.extent),
        )  # fmt: skip
        finish_rows, fill_others = LAST[desc.base]
        self.summing.add_steps(
            steps,
            Target("out", (*table.sizes, desc.columns), (*table.strides[0], desc.column_step(out))),
            Terms("src", order.places, None, None if args.input is None else "input"),
            Bounds.of(order),
            Walk(
                (*walk.sizes, desc.columns),
                (*walk.strides[1], desc.column_step(src)),
                factor_strides=(*table.strides[1], desc.column_step(source)),
                numbers=halves(desc.alpha),
            ),
            finish=finish_rows,
            fill=fill_others,
            cleared=desc.count > 0,
            filled=filled,
        )
        return steps.launch


def halves(alpha: float) -> tuple[int, ...]:
    """The upper and the lower half of alpha's bits; one zero for alpha = 1."""
    bits = double_bits(alpha)
    return (0,) if alpha == 1.0 else tuple(half & 0xFFFFFFFF | _HIGH_BIT for half in (bits >> 32, bits))


class Gather(IndexedKernel[GatherDescriptor]):
    """``gather`` from the lines of a table."""

    def compile(self) -> None:
        self.prepare(GatherArgs.described(self.desc))

    def prepare(self, args: GatherArgs) -> Launch[GatherArgs]:
        desc = self.desc
        walk = loops(
            desc.shape, args.index.stride(), args.out.stride(), desc.without_dim(args.input.stride())
        )
        of_lines = (*walk.strides[2], desc.column_step(args.input)) if any(walk.strides[2]) else (0,)
        lookup = Lookup(
            "input", "index", desc.count, desc.extent, desc.columns, desc.dtype.itemsize,
            row_stride=args.input.stride(desc.dim), column_stride=desc.column_step(args.input),
            sizes=(*walk.sizes, desc.columns), index_strides=(*walk.strides[0], 0), line_strides=of_lines,
            out_strides=(*walk.strides[1], desc.column_step(args.out)),
        )  # fmt: skip
        steps = Steps(self.device, args)
        add_gather(steps, lookup, BadScatterIndex(desc.extent) if desc.bad_index == "raise" else None)
        return steps.launch
