"""The index of scatter and gather on the CPU, read in runs of its innermost loop, whose strides are constant.

The loops over a run have no branches, so that they vectorise.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, jit, kernel, pointer
from holdfast.backends.threads import parallel
from holdfast.numerics.cpu_walk import offset_of
from holdfast.ops.scatter.plan import LinesDescriptor

#: A value of the type of the index.
INDICES: dict[torch.dtype, Any] = {torch.int32: np.int32(0), torch.int64: np.int64(0)}
#: Reading one index and one element at random costs as much as this many elements read in order.
RANDOM = 8
#: Maximum number of lines of ``cycle_of``.
_MOST_LINES = 64


@jit
def _all_inside(indices, place, step, extent, count):
    inside = 0
    for i in range(count):
        inside += (np.int64(indices[place + i * step]) >= 0) & (np.int64(indices[place + i * step]) < extent)
    return inside == count


@jit
def first_bad(indices, place, step, extent, count):
    """Position in a run of the first index out of range, or -1."""
    if _all_inside(indices, place, 1, extent, count) if step == 1 else False:
        return -1
    for i in range(count):
        given = np.int64(indices[place + i * step])
        if given < 0 or given >= extent:
            return i
    return -1


@jit
def _store_rows(indices, place, index_step, line, line_step, step, extent, count, rows):
    outside = np.int64(0)
    for i in range(count):
        given = np.int64(indices[place + i * index_step])
        outside |= given | (extent - 1 - given)  # negative if the index is
        rows[i] = given * step + line + i * line_step
    return outside >= 0


@jit
def rows_of_run(indices, place, index_step, line, line_step, step, extent, count, rows):
    """Store the rows of a run, ``index * step + line + i * line_step``. Returns whether all are in range."""
    if index_step == 1 and step == 1 and line_step == 0:
        return _store_rows(indices, place, 1, line, 0, 1, extent, count, rows)
    if index_step == 1:
        return _store_rows(indices, place, 1, line, line_step, step, extent, count, rows)
    return _store_rows(indices, place, index_step, line, line_step, step, extent, count, rows)


@jit
def rows_of_lines(indices, at, count, table, step, extent, first_row, rows_at):
    """Store the rows of ``count`` terms from ``at`` on. Returns the position of the first bad index, or -1.

    ``table`` has the sizes of the loops over the index, its strides, and the strides of the rows, which count
    from ``first_row``. Runs of the innermost loop may be short, so the offsets of the next run are found from
    those of the last one.
    """
    inner = table.shape[1] - 1
    length, index_step, line_step = table[0, inner], table[1, inner], table[2, inner]
    begin, done, left, place, line = at % length, 0, 0, 0, 0
    while done < count:
        if left == 0:
            place, line = offset_of(at + done, table), offset_of(at + done, table, 2) - first_row
            left = table[0, inner - 1] - (at + done) // length % table[0, inner - 1] if inner > 0 else 1
        run, rows = min(length - begin, count - done), pointer(rows_at + done * 4, np.int32)
        if not rows_of_run(indices, place, index_step, line, line_step, step, extent, run, rows):
            return at + done + first_bad(indices, place, index_step, extent, run)
        done, left = done + run, left - 1
        if left > 0:
            place += table[1, inner - 1] - begin * index_step
            line += table[2, inner - 1] - begin * line_step
        begin = 0
    return -1


@jit
def rows_of_cycle(indices, place, line, cycle, step, extent, count, rows):
    """``rows_of_run`` of consecutive indices, for lines that begin again after each ``cycle`` of them."""
    outside = np.int64(0)
    for i in range(count):
        given = np.int64(indices[place + i])
        outside |= given | (extent - 1 - given)
        rows[i] = given * step + line
        line += 1
        line = line if line < cycle else 0
    return outside >= 0


def cycle_of(desc: LinesDescriptor, *tensors: torch.Tensor) -> int:
    """Number of lines if they are few, there is one group of them, and all tensors are contiguous; else 0.

    Then the lines of consecutive indices are 0, 1, .. and begin again. Loops over the lines would be short.
    """
    dim, after = desc.dim, desc.shape[desc.dim + 1 :]
    lines = math.prod(after)
    groups = math.prod(desc.shape[:dim])
    few = desc.columns == 1 and groups == 1 and 1 < lines <= _MOST_LINES and desc.count > lines
    if not few or after != desc.table[dim + 1 :]:
        return 0
    return lines if all(tensor.is_contiguous() for tensor in tensors) else 0


@kernel
def check(first, last, index, table, extent, like):
    """Position of the first index out of range of those from ``first`` to ``last``, or -1.

    ``table`` has the sizes of the loops over the index and its strides. ``like`` is a value of its type.
    """
    indices, inner, at = pointer(index, like), table.shape[1] - 1, first
    length, step = table[0, inner], table[1, inner]
    while at < last:
        run = min(length - at % length, last - at)
        bad = first_bad(indices, offset_of(at, table), step, extent, run)
        if bad >= 0:
            return at + bad
        at += run
    return -1


@cache
def compile_check(index_dtype: torch.dtype) -> None:
    compile_kernel(check, 0, 0, 0, np.ones((2, 1), np.int64), 0, INDICES[index_dtype])


def first_outside(index: int, table: Any, count: int, extent: int, like: Any) -> int:
    """``check`` of all indices."""
    bad: list[int] = []
    parallel(lambda first, last: bad.append(check(first, last, index, table, extent, like)), count, 2 * count)
    return min((position for position in bad if position >= 0), default=-1)
