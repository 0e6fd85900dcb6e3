"""Scatter on the CPU: the row of each term, then the sort and the ordered sum of ``segment_sum``. Gather."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, copy, jit, kernel, pointer
from holdfast.backends.threads import parallel
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import BOUND_BYTES, WorkspaceLayout, first_address
from holdfast.numerics.cpu import kind
from holdfast.numerics.cpu_walk import move, offset_of, size_of, table_of
from holdfast.ops.scatter.cpu_elements import ElementSums
from holdfast.ops.scatter.cpu_index import (
    INDICES,
    RANDOM,
    compile_check,
    cycle_of,
    first_outside,
    rows_of_lines,
)
from holdfast.ops.scatter.plan import (
    BadScatterIndex,
    GatherArgs,
    GatherDescriptor,
    LinesDescriptor,
    ScatterArgs,
    ScatterDescriptor,
)
from holdfast.ops.segment_sum.cpu import (
    ADDED,
    JOINED,
    KEPT,
    Ordering,
    Rows,
    RowSort,
    RowSums,
    compile_for,
)
from holdfast.ops.segment_sum.cpu_few_terms import FewTerms, Filling, is_tall
from holdfast.ops.segment_sum.cpu_gather import Lookup, compile_rows
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops

Table = np.ndarray[Any, Any]

#: What input is for. In all other cases it is kept where there are no terms.
_ROLES = {("sum", "added"): ADDED, ("mean", "added"): JOINED}
#: An unsigned zero of an element's size.
_BITS = {2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}


@kernel
def find_rows(first, last, index, table, extent, step, found_at, like):
    """Store the rows of the terms ``first`` to ``last``. Returns the first bad index, or -1.

    ``table`` has the sizes of the loops over the index, its strides, and the strides of the rows. ``like`` is
    a value of the type of the index.
    """
    rows = found_at + first * 4
    return rows_of_lines(pointer(index, like), first, last - first, table, step, extent, 0, rows)


@kernel
def starts_if_sorted(found_at, count, rows, starts_at):
    """The starts of ``counting_sort`` for rows that ascend. Returns the longest row's length, or -1."""
    found, starts = pointer(found_at, np.int32), pointer(starts_at, np.int32)
    for n in range(1, count):
        if found[n] < found[n - 1]:
            return -1
    row, most = 0, 0
    for n in range(count):
        while row <= found[n]:
            starts[row] = n
            row += 1
        most = max(most, n + 1 - starts[row - 1])
    for empty in range(row, rows + 2):
        starts[empty] = count
    return most


@jit
def _gather_run(indices, place, outputs, targets, inputs, lines, strides, extent, count, bits):
    """Copy ``count`` elements. ``strides`` are of the index, the output, input, and its indexed axis."""
    index_step, target_step, line_step, row_step = strides
    for i in range(count):
        row = np.int64(indices[place + i * index_step])
        if np.uint64(row) < np.uint64(extent):
            outputs[targets + i * target_step] = inputs[lines + i * line_step + row * row_step]
        else:
            outputs[targets + i * target_step] = bits


@jit
def _gather_cycle(indices, place, outputs, inputs, line, cycle, line_step, row_step, extent, count, bits):
    """``_gather_run`` of consecutive indices, for lines that begin again after each ``cycle`` of them."""
    for i in range(place, place + count):
        row = np.int64(indices[i])
        if np.uint64(row) < np.uint64(extent):
            outputs[i] = inputs[line * line_step + row * row_step]
        else:
            outputs[i] = bits
        line += 1
        line = line if line < cycle else 0


@kernel
def gather_rows(first, last, input, index, out, table, steps, columns, cycle, extent, like, bits):
    """Copy the rows of the indices ``first`` to ``last``; zeros for an index out of range.

    ``table`` has the sizes of the loops over the index, its strides, those of the output, and those of input.
    ``steps`` are the column strides of the output and of input, and the stride of input along its indexed
    axis. ``cycle`` is 0, or the lines of ``cycle_of``, with one loop over the index. ``bits`` is an unsigned
    zero of an element's size.
    """
    out_step, step, row_step = steps
    at, inner, item = first, table.shape[1] - 1, size_of(bits)
    indices, outputs, inputs = pointer(index, like), pointer(out, bits), pointer(input, bits)
    length, index_step, target_step, line_step = (
        table[0, inner], table[1, inner], table[2, inner], table[3, inner],
    )  # fmt: skip
    if cycle:
        line, count = at % cycle, last - at
        _gather_cycle(indices, at, outputs, inputs, line, cycle, line_step, row_step, extent, count, bits)
        return
    begin, left, place, targets, lines = at % length, 0, 0, 0, 0
    while at < last:
        if left == 0:
            place, targets, lines = offset_of(at, table), offset_of(at, table, 2), offset_of(at, table, 3)
            left = table[0, inner - 1] - at // length % table[0, inner - 1] if inner > 0 else 1
        run = min(length - begin, last - at)
        if columns == 1:
            if index_step == 1 and target_step == 1 and line_step == 0 and row_step == 1:
                strides = (1, 1, 0, 1)
                _gather_run(indices, place, outputs, targets, inputs, lines, strides, extent, run, bits)
            else:
                strides = (index_step, target_step, line_step, row_step)
                _gather_run(indices, place, outputs, targets, inputs, lines, strides, extent, run, bits)
        else:
            for i in range(run):
                row = np.int64(indices[place + i * index_step])
                target = targets + i * target_step
                source = lines + i * line_step + row * row_step
                if row < 0 or row >= extent:
                    for c in range(columns):
                        outputs[target + c * out_step] = bits
                elif out_step == 1 and step == 1:
                    copy(out + target * item, input + source * item, columns * item)
                else:
                    move(input + source * item, step, columns, out + target * item, out_step, item)
        at, left = at + run, left - 1
        if left > 0:  # the next run is a step of the second loop away; runs may be short
            place += table[1, inner - 1] - begin * index_step
            targets += table[2, inner - 1] - begin * target_step
            lines += table[3, inner - 1] - begin * line_step
        begin = 0


@cache
def _compile(index_dtype: torch.dtype) -> None:
    compile_kernel(starts_if_sorted, 0, 0, -2, 0)
    compile_kernel(find_rows, 0, 0, 0, np.zeros((3, 1), np.int64), 0, 0, 0, INDICES[index_dtype])


@cache
def _compile_gather(index_dtype: torch.dtype, item: int) -> None:
    table = np.ones((4, 1), np.int64)
    compile_check(index_dtype)
    given = 0, 0, 0, 0, 0, table, (1, 1, 1), 0, 0, 0, INDICES[index_dtype], _BITS[item]
    compile_kernel(gather_rows, *given)


def _table(walk: Any, *operands: int) -> Table:
    """The sizes of the loops, then the strides of these operands."""
    return np.array([walk.sizes, *(walk.strides[operand] for operand in operands)], np.int64)


def _rows_of(tensor: torch.Tensor | None, desc: LinesDescriptor) -> Table:
    """The table of the loops over the rows of a tensor."""
    return table_of((1,), (0,)) if tensor is None else _table(loops(desc.table, tensor.stride()), 0)


class _SortUnlessSorted(RowSort):
    """A ``RowSort`` of rows that may ascend."""

    def run(self, indices: int, starts: int, places: int) -> Ordering:
        longest = starts_if_sorted(indices, self.count, self.rows, starts)
        return super().run(indices, starts, places) if longest < 0 else Ordering(starts, 0, longest)


class Scatter(IndexedKernel[ScatterDescriptor]):
    """``find_rows``, ``counting_sort`` unless the rows ascend, then ``sum_segments``.

    ``ElementSums`` for few columns; ``FewTerms`` for few terms.
    """

    def __init__(self, desc: ScatterDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        self.elements = self.few = None
        if is_tall(desc.rows, desc.columns, desc.count, desc.dtype.itemsize):
            self.few = FewTerms(layout, desc.count, desc.rows)
            self.rows = layout.take(desc.count, torch.int32)
        elif ElementSums.serves(desc):
            self.elements = ElementSums(layout, desc)
        layouts = [layout]
        if self.few is None and (self.elements is None or desc.columns > 1):
            layouts.append(layout := WorkspaceLayout())
            self.rows = layout.take(desc.count, torch.int32)
            self.starts = layout.take(desc.rows + 2, torch.int32)
            self.places = layout.take(desc.count, torch.int32)
        self.set_workspace(*layouts)

    def compile(self) -> None:
        if self.elements is not None:
            self.elements.compile()
        else:
            self.compile_by_row()

    def compile_by_row(self) -> None:
        _compile(self.desc.index_dtype)
        compile_for(self.desc.compute)

    def prepare(self, args: ScatterArgs) -> Launch[ScatterArgs]:
        desc = self.desc
        walk = loops(desc.shape, args.index.stride(), args.src.stride(), desc.line_strides)
        index_table, role = _table(walk, 0, 2), _ROLES.get((desc.reduce, desc.base), KEPT)
        if self.elements is None or not self.elements.reads(walk, args.src):
            self.compile_by_row()
            return self.by_row(args, walk, index_table, role)
        self.elements.compile()
        return self.launch_of(self.elements.prepare(args, walk, index_table, role))

    def launch_of(self, add: Callable[[int, Sequence[int]], int]) -> Launch[ScatterArgs]:
        """The launch of ``add``, which takes the addresses of the workspace and of the operands.

        It returns the position of an index out of range, or -1.
        """
        extent = self.desc.extent

        def launch(stream: Stream, workspace: Workspace, args: ScatterArgs, addresses: Sequence[int]) -> None:
            wrong = add(first_address(workspace), addresses)
            if wrong >= 0:
                raise _bad_index(args.index, wrong, extent)

        def run(stream: int, workspace: int, *addresses: int) -> bool:
            return add(workspace, addresses) < 0

        if self.workspace_size <= BOUND_BYTES:
            launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch

    def by_row(self, args: ScatterArgs, walk: Space, index_table: Table, role: int) -> Launch[ScatterArgs]:
        """The launch for rows of several columns."""
        desc, compute = self.desc, self.desc.compute
        src_table = _table(loops(desc.shape, args.src.stride()), 0)
        input_table, out_table = (_rows_of(tensor, desc) for tensor in (args.input, args.out))
        input_step, src_step, out_step = map(desc.column_step, (args.input, args.src, args.out))
        code, in_order = kind(desc.dtype, compute.torch), table_of((max(desc.count, 1),), (1,))
        sums = RowSums(
            compute, (desc.rows, desc.columns, desc.count), Rows(code, src_table, src_step),
            Rows(code, out_table, out_step), Rows(code, input_table, input_step), role, alpha=desc.alpha,
        )  # fmt: skip

        count, by_count = desc.count, int(desc.by_count)
        find = self.find(index_table)
        if self.few is not None:
            columns, few = (desc.columns, out_step, input_step), self.few.sort(4, in_order, -1)
            filling = Filling(args.out, args.input, lambda tensor: _rows_of(tensor, desc), columns)

            def add_few(first: int, addresses: Sequence[int]) -> int:
                out, input, index, src = addresses
                rows = first + self.rows.offset
                wrong = find(index, rows)
                if wrong < 0:
                    filling.run(out, input)
                    sums.run(Ordering(*few(first, rows)), out, src, base=input, by_count=by_count)
                return wrong

            return self.launch_of(add_few)

        sort = _SortUnlessSorted(4, in_order, count, desc.rows)
        sum_rows = sums.after(sort, self.starts.offset, self.places.offset, by_count)

        def add(first: int, addresses: Sequence[int]) -> int:
            out, input, index, src = addresses
            rows = first + self.rows.offset
            wrong = find(index, rows)
            if wrong < 0:
                sum_rows(first, rows, out, src, base=input)
            return wrong

        return self.launch_of(add)

    def find(self, table: Table) -> Callable[[int, int], int]:
        """``find_rows`` of all terms, of an index and for rows at these addresses."""
        desc, like = self.desc, INDICES[self.desc.index_dtype]
        count, extent, step = desc.count, desc.extent, desc.step

        def run(index: int, rows: int) -> int:
            bad: list[int] = []

            def part(first: int, last: int) -> None:
                bad.append(find_rows(first, last, index, table, extent, step, rows, like))

            parallel(part, count, 2 * count)
            return min((position for position in bad if position >= 0), default=-1)

        return run


class Gather(IndexedKernel[GatherDescriptor]):
    """``Lookup`` if there is one line, ``gather_rows`` if there are several."""

    def compile(self) -> None:
        desc = self.desc
        if math.prod(desc.shape) == desc.shape[desc.dim]:
            compile_rows(desc.index_dtype)
        else:
            _compile_gather(desc.index_dtype, desc.dtype.itemsize)

    def prepare(self, args: GatherArgs) -> Launch[GatherArgs]:
        desc = self.desc
        lines = desc.without_dim(args.input.stride())
        walk = loops(desc.shape, args.index.stride(), args.out.stride(), lines)
        if len(walk.sizes) == 1 and walk.strides[2] == (0,):
            (index_step,), (out_row,), _ = walk.strides
            lookup = Lookup(
                desc.count, index_step, desc.extent, args.input.stride(desc.dim),
                desc.column_step(args.input), out_row, desc.column_step(args.out), desc.columns,
                desc.dtype.itemsize, desc.bad_index == "raise", desc.index_dtype,
            )  # fmt: skip
            return self.launch_of(lookup.launch(), _table(walk, 0))
        _compile_gather(desc.index_dtype, desc.dtype.itemsize)
        table, index_table = _table(walk, 0, 1, 2), _table(loops(desc.shape, args.index.stride()), 0)
        lines_walk = loops(desc.shape[desc.dim + 1 :], args.input.stride()[desc.dim + 1 :])
        cycle = cycle_of(desc, args.index, args.out) if len(lines_walk.sizes) == 1 else 0
        if cycle:
            table = np.array([[desc.count], [1], [1], lines_walk.strides[0]], np.int64)
        steps = (desc.column_step(args.out), desc.column_step(args.input), args.input.stride(desc.dim))
        like, bits = INDICES[desc.index_dtype], _BITS[desc.dtype.itemsize]
        count, extent, columns, raises = desc.count, desc.extent, desc.columns, desc.bad_index == "raise"

        def run(stream: int, workspace: int, out: int, input: int, index: int) -> bool:
            """Gather at these addresses. Writes nothing and returns False if an index is to be reported."""
            if raises and first_outside(index, index_table, count, extent, like) >= 0:
                return False

            def part(first: int, last: int) -> None:
                operands = first, last, input, index, out, table, steps
                gather_rows(*operands, columns, cycle, extent, like, bits)

            parallel(part, count, count * max(columns, RANDOM))
            return True

        return self.launch_of(run, index_table)

    def launch_of(self, run: Callable[..., bool], index_table: Table) -> Launch[GatherArgs]:
        """The launch of ``run``, which returns False if an index is to be reported."""
        desc, like = self.desc, INDICES[self.desc.index_dtype]

        def launch(stream: Stream, workspace: Workspace, args: GatherArgs, addresses: Sequence[int]) -> None:
            if not run(0, 0, *addresses):
                compile_check(desc.index_dtype)
                wrong = first_outside(addresses[-1], index_table, desc.count, desc.extent, like)
                raise _bad_index(args.index, wrong, desc.extent)

        launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch


def _bad_index(index: torch.Tensor, position: int, extent: int) -> Exception:
    return BadScatterIndex(extent).error(position, int(index.reshape(-1)[position].item()))
