"""The ordered sum of few terms to a table of many rows, on the CPU.

Work for every row of a tall table takes longer than the sums. So the whole output is set to zeros or copied
from the base first, in blocks. Then the terms are sorted by row, and only rows that have terms are summed.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import (
    clear,
    compile_kernel,
    copy,
    fence,
    jit,
    kernel,
    numbers_of,
    pointer,
    stream_zeros,
    take,
    team_kernel,
)
from holdfast.backends.private import task_bytes, task_of
from holdfast.backends.threads import run_together
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.cpu_walk import move, offset_at, offset_of, table_of, walk_of

#: Bits of a digit of the sort.
_DIGIT = 11
_DIGITS = 2**_DIGIT
#: Elements of a block of an output that is filled as a whole.
_BLOCK = 2**14
#: Minimum bytes of an output that is cleared by non-temporal stores.
_STREAMED_OUTPUT = 2**25
#: Minimum number of rows. Work for every row of a smaller table is done sooner than terms are sorted apart.
_TALL = 3 * 2**8

# A task of ``fill_rows``: 14 numbers, of which the first 4 differ between calls. The threads share the first,
# the next row.
_NUMBERS, _VARIABLES = 14, 4
_Task = task_of(_NUMBERS)
#: Ranges of rows per thread.
_RANGES = 4

Table = np.ndarray[Any, Any]


def is_tall(rows: int, columns: int, count: int, itemsize: int) -> bool:
    """Whether the terms are few. A row with terms is written twice; single elements are summed slowly."""
    least = 32 if columns == 1 else 8 + columns * itemsize // 16
    return rows >= _TALL and count * least <= rows


@jit
def _collect(indices, table, count, rows, padding, keys, places):
    """Store the rows and places of the terms that are kept. Returns their number."""
    kept, contiguous = np.int64(0), table.shape[1] == 1 and table[1, 0] == 1
    for n in range(count):
        index = np.int64(indices[n if contiguous else offset_of(n, table)])
        keys[kept], places[kept] = index, n
        kept += index >= 0 and index < rows and index != padding
    return kept


@jit
def _sort_by_digit(keys, places, count, shift, sorted_keys, sorted_places, ends):
    """One pass of a stable radix sort."""
    for digit in range(_DIGITS):
        ends[digit] = 0
    for n in range(count):
        ends[(keys[n] >> shift) & (_DIGITS - 1)] += 1
    begin = np.int32(0)
    for digit in range(_DIGITS):
        begin, ends[digit] = begin + ends[digit], begin
    for n in range(count):
        digit = (keys[n] >> shift) & (_DIGITS - 1)
        sorted_keys[ends[digit]], sorted_places[ends[digit]] = keys[n], places[n]
        ends[digit] += 1


@jit
def _starts_of(keys, count, starts, names):
    """Store the first term and the number of each distinct row; the last start is ``count``.

    Returns the number of distinct rows, and the maximum number of terms of a row times 2**32.
    """
    found, longest = 0, 0
    for n in range(count):
        if n == 0 or keys[n] != keys[n - 1]:
            starts[found], names[found] = n, keys[n]
            found += 1
        longest = max(longest, n + 1 - starts[found - 1])
    starts[found] = count
    return found + (longest << 32)


@kernel
def sort_few(address, item, table, count, rows, padding, memory):
    """Sort the places of terms by row, and find the distinct rows; see ``_starts_of``.

    ``memory`` has the addresses of keys and places, of as much memory for a copy of them, of a number for
    each digit, of the starts and of the numbers of the rows.
    """
    keys_at, places_at, other_keys_at, other_places_at, ends_at, starts_at, names_at = memory
    keys, places = pointer(keys_at, np.int32), pointer(places_at, np.int32)
    other_keys, other_places = pointer(other_keys_at, np.int32), pointer(other_places_at, np.int32)
    ends = pointer(ends_at, np.int32)
    if item == 4:
        kept = _collect(pointer(address, np.int32), table, count, rows, padding, keys, places)
    else:
        kept = _collect(pointer(address, np.int64), table, count, rows, padding, keys, places)
    if rows <= 0:  # there is no memory when the kernel is compiled
        return 0
    ascending = True
    for n in range(1, kept):
        ascending &= keys[n] >= keys[n - 1]
    shift = 0
    while not ascending and (rows - 1) >> shift > 0:
        _sort_by_digit(keys, places, kept, shift, other_keys, other_places, ends)
        shift += _DIGIT
        if (rows - 1) >> shift > 0:
            _sort_by_digit(other_keys, other_places, kept, shift, keys, places, ends)
        else:
            copy(keys_at, other_keys_at, kept * 4)
            copy(places_at, other_places_at, kept * 4)
        shift += _DIGIT
    return _starts_of(keys, kept, pointer(starts_at, np.int32), pointer(names_at, np.int32))


@jit
def _fill(first, last, elements, columns, item, out, out_walk, out_step, base, base_walk, base_step):
    """``fill_rows`` of the rows ``first`` to ``last``."""
    streamed = elements * item >= _STREAMED_OUTPUT
    for row in range(first, last):
        count = min(columns, elements - row * columns)
        target = out + offset_at(row, out_walk) * item
        source = base + offset_at(row, base_walk) * item
        if base == 0 and out_step == 1:
            if streamed and count == _BLOCK:
                stream_zeros(target, count * item)
            else:
                clear(target, count * item)
        elif base == 0:
            for i in range(count):
                clear(target + i * out_step * item, item)
        elif out_step == 1 and base_step == 1:
            copy(target, source, count * item)
        else:
            move(source, base_step, count, target, out_step, item)


@team_kernel(_NUMBERS)
def fill_rows(task):
    """Copy the rows of the base; zeros if its address is 0. Take ``share`` rows, until none is left.

    A row has ``columns`` elements, except that there are no more than ``elements`` in all.
    """
    (
        _, share, out, base, rows, elements, columns, item, out_table, out_loops, out_step, base_table,
        base_loops, base_step,
    ) = task[0]  # fmt: skip
    while True:
        first = take(numbers_of(task), 0, share)
        if first >= rows:
            break
        _fill(
            first, min(first + share, rows), elements, columns, item, out, (out_table, out_loops), out_step,
            base, (base_table, base_loops), base_step,
        )  # fmt: skip
    fence()


@cache
def compile_few() -> None:
    table = table_of((1,), (1,))
    compile_kernel(sort_few, 0, 8, table, 0, 0, -1, (0,) * 7)
    fill_rows.compiled()


class FewTerms:
    """Workspace regions of ``sort_few`` for ``count`` terms to ``rows`` rows, and its runs."""

    def __init__(self, layout: WorkspaceLayout, count: int, rows: int) -> None:
        self._sizes = count, rows
        regions = [layout.take(size, torch.int32) for size in (*[count] * 4, _DIGITS, count + 1, count)]
        self._offsets = tuple(region.offset for region in regions)

    def sort(
        self, item: int, table: Table, padding: int
    ) -> Callable[[int, int], tuple[int, int, int, int, int]]:
        """``sort_few`` of indices of ``item`` bytes with this table of loops.

        The function takes the addresses of the workspace and of the indices. It returns the addresses of the
        starts and places, the maximum number of terms of a row, the address of the numbers of the rows that
        have terms, and the number of these rows.
        """
        compile_few()
        count, rows = self._sizes

        def run(workspace: int, indices: int) -> tuple[int, int, int, int, int]:
            memory = tuple([workspace + offset for offset in self._offsets])
            found = sort_few(indices, item, table, count, rows, padding, memory)
            return memory[5], memory[1], found >> 32, memory[6], found & 0xFFFFFFFF

        return run


class Filling:
    """``fill_rows`` of a whole output, at the addresses of the output and of the base; 0 for zeros.

    ``rows`` returns the table of the loops over the rows of a tensor. ``columns`` are the number of columns,
    and their strides in the output and in the base.
    """

    def __init__(
        self,
        out: torch.Tensor,
        base: torch.Tensor | None,
        rows: Callable[[Any], Table],
        columns: tuple[int, int, int],
    ) -> None:
        width, out_step, base_step = columns
        elements, shared = out.numel(), _step_along(out, base)
        number = -(-elements // max(width, 1))
        out_table, base_table = rows(out), rows(base)
        if shared is not None:
            width, out_step, base_step = _BLOCK, 1, shared
            number = -(-elements // width)
            out_table, base_table = table_of((number,), (width,)), table_of((number,), (width * shared,))
        self._tables = out_table, base_table  # in use
        self._number, self._elements = number, elements
        self._kernel = fill_rows.compiled()
        self._constants = task_bytes(
            *[0] * _VARIABLES, number, elements, width, out.element_size(), *walk_of(out_table), out_step,
            *walk_of(base_table), base_step,
        )  # fmt: skip

    def run(self, out: int, base: int) -> None:
        """Fill the output at this address, on torch's number of threads."""
        task = _Task.from_buffer_copy(self._constants)
        share = -(-self._number // (_RANGES * torch.get_num_threads()))
        task[:_VARIABLES] = (0, max(share, 1), out, base)
        run_together(self._kernel, task, self._elements)


def _step_along(out: torch.Tensor, base: torch.Tensor | None) -> int | None:
    """The stride of the base when the memory of ``out``, which has no gaps, is read in its order.

    None if there is no such stride, or if the memory of ``out`` has gaps.
    """
    axes = [axis for axis, size in enumerate(out.shape) if size != 1]
    strides = [out.stride(axis) for axis in axes]
    extent = 1 + sum((out.shape[axis] - 1) * out.stride(axis) for axis in axes)
    if extent != out.numel() or any(stride <= 0 for stride in strides):
        return None
    others = strides if base is None else [base.stride(axis) for axis in axes]
    if others == strides:
        return 1
    return None if any(others) else 0
