"""Rows read at indices, on the CPU: the kernels of embedding, and of gather and index_select of rows."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from holdfast.backends.cpu import (
    LINE,
    clear,
    copy,
    copy_lines,
    fence,
    jit,
    numbers_of,
    pointer,
    prefetch_address,
    prefetch_run,
    stream,
    take,
    team_kernel,
)
from holdfast.backends.private import TaskFunction, task_bytes, task_of
from holdfast.backends.threads import run_together, threads_together
from holdfast.numerics.cpu_walk import move, size_of, table_of
from holdfast.ops.segment_sum.cpu import first_outside

#: Prefetch distance in bytes of rows, and its range in indices.
_AHEAD, _NEAREST, _FARTHEST = 2**13, 2, 32
#: Maximum bytes of a row that are prefetched; the processor reads the rest of a longer row ahead by itself.
PREFETCHED = 512
#: Tables of up to this many bytes fit the caches: prefetches of their rows take longer than they save.
_CACHED = 2**24
#: Outputs of at least this many bytes are written with streaming stores, since they do not fit the caches.
STREAMED_FROM = 2**24
#: Ranges of indices per thread, and minimum indices of a range.
_RANGES, _LEAST = 4, 16
#: Rows of more bytes are copied by the system's function.
_SHORT = 1024
_WORD = np.uint64(0)
#: A value of the type of the indices.
_INDICES = {torch.int32: np.int32(0), torch.int64: np.int64(0)}

# A task of ``copy_rows``: 17 numbers, of which the first 6 differ between calls and the others are constants,
# then a value of the type of the indices. The first is the next index; -1 if an index is to be reported.
_NUMBERS, _VARIABLES = 17, 6
#: Position among the constants: whether an index out of range is reported.
_RAISES = 10
_Task = task_of(_NUMBERS + 1)


@jit
def distance_of(row_bytes):
    """Prefetch distance in indices."""
    return min(max(_AHEAD // row_bytes, _NEAREST), _FARTHEST)


@jit
def copy_row(index, target, rows, table, out, columns, item):
    """Copy a row of ``table`` to an address; zeros for an index out of range.

    ``table`` is (address, row stride, column stride); ``out`` is (address, column stride, whether to use
    streaming stores).
    """
    table_at, row_step, step = table
    _, out_step, streamed = out
    if index < 0 or index >= rows:
        for i in range(columns):
            for b in range(item):
                pointer(target + i * out_step * item, np.uint8)[b] = 0
    elif step == 1 and out_step == 1:
        if streamed:
            stream(target, table_at + index * row_step * item, columns * item)
        else:
            copy(target, table_at + index * row_step * item, columns * item)
    else:
        move(table_at + index * row_step * item, step, columns, target, out_step, item)


@jit
def _copy_words(first, last, places, index_step, table, out, word):
    """``_copy_whole`` of rows that have the size of ``word``."""
    (source, row_step, rows), (target, target_step) = table, out
    for n in range(first, last):
        index = np.int64(places[n * index_step])
        if np.uint64(index) < np.uint64(rows):
            copy(target + n * target_step, source + index * row_step, size_of(word))
        else:
            clear(target + n * target_step, size_of(word))


@jit
def _copy_whole(first, last, places, index_step, distance, prefetched, table, out, size, vector):
    """``_copy_range`` of contiguous rows of ``size`` bytes. ``table`` and ``out`` have their row strides.

    A row is copied as two vectors of the size of ``vector``, which overlap, and if it is longer, as cache
    lines before the second.
    """
    (source, row_step, rows), (target, target_step) = table, out
    wide, lines = size_of(vector), (size - 1) // LINE
    last_vector = size - wide
    for n in range(first, last):
        if prefetched:
            ahead = source + np.int64(places[min(n + distance, last - 1) * index_step]) * row_step
            for offset in range(0, prefetched, LINE):
                prefetch_address(ahead + offset)
        index, to = np.int64(places[n * index_step]), target + n * target_step
        of = source + index * row_step
        if np.uint64(index) >= np.uint64(rows):
            clear(to, size)
        elif size > _SHORT:
            copy(to, of, size)
        else:
            if wide == LINE:
                copy_lines(to, of, lines)
            else:
                copy(to, of, wide)
            copy(to + last_vector, of + last_vector, wide)


@jit
def _copy_range(first, last, tensors, numbers, at, index_type):
    """Copy the rows of the indices ``first`` to ``last``.

    ``tensors`` are the addresses of the output, the table and the indices. The constants of the task are
    ``numbers`` from position ``at`` on.
    """
    out, source, indices = tensors
    index_step, rows, row_step, step = numbers[at + 1], numbers[at + 2], numbers[at + 3], numbers[at + 4]
    row_bytes, out_step, streamed = numbers[at + 5], numbers[at + 6], numbers[at + 7] != 0
    columns, item = numbers[at + 8], numbers[at + 9]
    places, size = pointer(indices, index_type), columns * item
    distance, prefetched = distance_of(size), min(size, PREFETCHED)
    if step == 1 and out_step == 1 and not streamed:
        whole, rows_out = (source, row_step * item, rows), (out, row_bytes)
        prefetched = prefetched if rows * row_step * item > _CACHED else 0
        if size == 8:
            _copy_words(first, last, places, index_step, whole, rows_out, _WORD)
        elif size == 4:
            _copy_words(first, last, places, index_step, whole, rows_out, np.uint32(0))
        elif size == 2:
            _copy_words(first, last, places, index_step, whole, rows_out, np.uint16(0))
        elif size < 8:
            _copy_whole(
                first, last, places, index_step, distance, prefetched, whole, rows_out, size, np.uint32(0)
            )
        elif size < 16:
            _copy_whole(first, last, places, index_step, distance, prefetched, whole, rows_out, size, _WORD)
        elif size < 32:
            _copy_whole(
                first, last, places, index_step, distance, prefetched, whole, rows_out, size, (_WORD, _WORD)
            )
        elif size < LINE:
            _copy_whole(
                first, last, places, index_step, distance, prefetched, whole, rows_out, size,
                (_WORD, _WORD, _WORD, _WORD),
            )  # fmt: skip
        else:
            _copy_whole(
                first, last, places, index_step, distance, prefetched, whole, rows_out, size,
                (_WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD),
            )  # fmt: skip
        return
    for n in range(first, last):
        ahead = np.int64(places[min(n + distance, last - 1) * index_step])
        prefetch_run(source + ahead * row_step * item, prefetched)
        index = np.int64(places[n * index_step])
        table, target = (source, row_step, step), (out, out_step, streamed)
        copy_row(index, out + n * row_bytes, rows, table, target, columns, item)


@jit
def _all_inside(numbers, index_type):
    """Whether all indices are in range."""
    places, outside = pointer(numbers[3], index_type), np.int64(0)
    count, index_step, rows = numbers[_VARIABLES], numbers[_VARIABLES + 1], numbers[_VARIABLES + 2]
    for n in range(count):
        index = np.int64(places[n * index_step])
        outside |= index | (rows - 1 - index)  # negative if the index is out of range
    return outside >= 0


@team_kernel(_NUMBERS)
def copy_rows(task):
    """``_copy_range`` of ranges of indices: take them until none is left.

    A thread that is alone checks the indices first, if one out of range is to be reported.
    """
    numbers, index_type = numbers_of(task), task[0][-1]
    tensors, share, count = (numbers[1], numbers[2], numbers[3]), numbers[4], numbers[_VARIABLES]
    alone, raises = numbers[5] != 0, numbers[_VARIABLES + _RAISES] != 0
    if alone and raises and not _all_inside(numbers, index_type):
        numbers[0] = -1
        return
    while True:
        first = take(numbers, 0, share)
        if first >= count:
            break
        _copy_range(first, min(first + share, count), tensors, numbers, _VARIABLES, index_type)
    fence()


@cache
def compile_rows(index_dtype: torch.dtype) -> TaskFunction:
    return copy_rows.compiled(_INDICES[index_dtype])


@dataclass(frozen=True)
class Lookup:
    """Rows of a table that are read at indices with one stride, into rows with one stride.

    ``row_step`` and ``step`` are the strides of the table, ``out_row`` and ``out_step`` those of the output,
    in elements of ``item`` bytes. ``raises``: an index out of range is reported.
    """

    count: int
    index_step: int
    rows: int
    row_step: int
    step: int
    out_row: int
    out_step: int
    columns: int
    item: int
    raises: bool
    index_dtype: torch.dtype

    def launch(self) -> Callable[..., bool]:
        """``run(stream, workspace, out, table, indices)`` for tensors at these addresses.

        It writes nothing and returns False if an index is to be reported.
        """
        count, columns, item = self.count, self.columns, self.item
        kernel, raises, index_item = compile_rows(self.index_dtype), self.raises, self.index_dtype.itemsize
        elements = count * columns
        streamed = elements * item >= STREAMED_FROM
        template = task_bytes(  # of a thread that is alone
            *(0, 0, 0, 0, count, 1), count, self.index_step, self.rows, self.row_step, self.step,
            self.out_row * item, self.out_step, streamed, columns, item, raises, 0,
        )  # fmt: skip
        loop = table_of((count,), (self.index_step,))

        def run(stream: int, workspace: int, out: int, table: int, indices: int) -> bool:
            task = _Task.from_buffer_copy(template)
            if threads_together(elements) == 1:
                task[1:4] = (out, table, indices)
                kernel.call(task)
                return task[0] >= 0  # type: ignore[no-any-return]
            if raises and first_outside(indices, index_item, loop, count, self.rows) >= 0:
                return False
            share = max(_LEAST, -(-count // (_RANGES * torch.get_num_threads())))
            task[1:_VARIABLES] = (out, table, indices, share, 0)
            run_together(kernel, task, elements)
            return True

        return run
