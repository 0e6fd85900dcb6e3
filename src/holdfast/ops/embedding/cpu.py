"""embedding on the CPU: a copy of rows. The gradient is a segment sum."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from holdfast.backends.cpu import (
    clear,
    compile_kernel,
    copy,
    copy_run,
    fence,
    jit,
    kernel,
    numbers_of,
    pointer,
    prefetch_run,
    stream,
    take,
    team_kernel,
)
from holdfast.backends.private import TaskFunction, task_bytes, task_of
from holdfast.backends.threads import parallel, run_together, threads_together
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.numerics.cpu_walk import move, offset_of, table_of, walk_of
from holdfast.ops.embedding.plan import EmbeddingArgs, EmbeddingDescriptor
from holdfast.ops.segment_sum.cpu import first_outside, load_index, raise_outside
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops

#: Prefetch distance in bytes of rows, and its range in indices.
_AHEAD, _NEAREST, _FARTHEST = 2**13, 2, 32
#: Maximum bytes of a row that are prefetched; the processor reads the rest of a longer row ahead by itself.
_PREFETCHED = 512
#: Outputs of at least this many bytes are written with streaming stores, since they do not fit the caches.
_STREAMED_FROM = 2**24
#: Ranges of indices per thread, and minimum indices of a range.
_RANGES, _LEAST = 4, 16
#: A value of the type of the indices.
_INDICES = {torch.int32: np.int32(0), torch.int64: np.int64(0)}

# A task of ``copy_rows``: 16 numbers, of which the first 5 differ between calls and the others are constants,
# then a value of the type of the indices.
_NUMBERS, _VARIABLES = 16, 5
#: Position among the constants: whether an index out of range is reported.
_RAISES = 10
_Task = task_of(_NUMBERS + 1)


@jit
def _distance(row_bytes):
    """Prefetch distance in indices."""
    return min(max(_AHEAD // row_bytes, _NEAREST), _FARTHEST)


@jit
def _copy_row(index, target, rows, weight, out, columns, item):
    """Copy a row of ``weight`` to an address; zeros for an index out of range.

    ``weight`` is (address, row stride, column stride); ``out`` is (address, column stride, whether to use
    streaming stores).
    """
    weight_at, row_step, step = weight
    _, out_step, streamed = out
    if index < 0 or index >= rows:
        for i in range(columns):
            for b in range(item):
                pointer(target + i * out_step * item, np.uint8)[b] = 0
    elif step == 1 and out_step == 1:
        if streamed:
            stream(target, weight_at + index * row_step * item, columns * item)
        else:
            copy(target, weight_at + index * row_step * item, columns * item)
    else:
        move(weight_at + index * row_step * item, step, columns, target, out_step, item)


@kernel
def embedding(first, last, indices, index_item, index_table, rows, weight, out, out_table, columns, item):
    """Copy the rows of the indices ``first`` to ``last``."""
    distance = _distance(columns * item)
    for n in range(first, last):
        ahead = load_index(indices, index_item, min(n + distance, last - 1), index_table)
        prefetch_run(weight[0] + ahead * weight[1] * item, min(columns * item, _PREFETCHED))
        index = load_index(indices, index_item, n, index_table)
        _copy_row(index, out[0] + offset_of(n, out_table) * item, rows, weight, out, columns, item)
    fence()


@jit
def _copy_whole(first, last, places, index_step, distance, prefetched, table, out, size):
    """``_copy_range`` of contiguous rows of ``size`` bytes. ``table`` and ``out`` have their row strides."""
    (weight, row_step, rows), (target, target_step) = table, out
    for n in range(first, last):
        ahead = np.int64(places[min(n + distance, last - 1) * index_step])
        prefetch_run(weight + ahead * row_step, prefetched)
        index = np.int64(places[n * index_step])
        if np.uint64(index) < np.uint64(rows):
            copy_run(target + n * target_step, weight + index * row_step, size)
        else:
            clear(target + n * target_step, size)


@jit
def _copy_range(first, last, tensors, numbers, at, index_type):
    """``embedding`` of indices with one stride, to rows with one stride.

    ``tensors`` are the addresses of the output, the table and the indices. The constants of the task are
    ``numbers`` from position ``at`` on.
    """
    out, weight, indices = tensors
    index_step, rows, row_step, step = numbers[at + 1], numbers[at + 2], numbers[at + 3], numbers[at + 4]
    row_bytes, out_step, streamed = numbers[at + 5], numbers[at + 6], numbers[at + 7] != 0
    columns, item = numbers[at + 8], numbers[at + 9]
    places, distance = pointer(indices, index_type), _distance(columns * item)
    table, target = (weight, row_step, step), (out, out_step, streamed)
    prefetched = min(columns * item, _PREFETCHED)
    if step == 1 and out_step == 1 and not streamed:
        _copy_whole(
            first, last, places, index_step, distance, prefetched, (weight, row_step * item, rows),
            (out, row_bytes), columns * item,
        )  # fmt: skip
        return
    for n in range(first, last):
        ahead = np.int64(places[min(n + distance, last - 1) * index_step])
        prefetch_run(weight + ahead * row_step * item, prefetched)
        index = np.int64(places[n * index_step])
        _copy_row(index, out + n * row_bytes, rows, table, target, columns, item)


@team_kernel(_NUMBERS)
def copy_rows(task):
    """``_copy_range`` of ranges of indices: take them until none is left."""
    numbers, index_type = numbers_of(task), task[0][-1]
    tensors, share, count = (numbers[1], numbers[2], numbers[3]), numbers[4], numbers[_VARIABLES]
    while True:
        first = take(numbers, 0, share)
        if first >= count:
            break
        _copy_range(first, min(first + share, count), tensors, numbers, _VARIABLES, index_type)
    fence()


@kernel
def copy_few(out, weight, indices, constants, index_type):
    """``_copy_range`` of all indices on one thread. Returns False if one of them is to be reported.

    ``constants`` is the address of the constants of a task.
    """
    numbers, places = pointer(constants, np.int64), pointer(indices, index_type)
    count, index_step, rows, outside = numbers[0], numbers[1], numbers[2], np.int64(0)
    for n in range(count if numbers[_RAISES] != 0 else 0):
        index = np.int64(places[n * index_step])
        outside |= index | (rows - 1 - index)  # negative if the index is out of range
    if outside >= 0:
        _copy_range(0, count, (out, weight, indices), numbers, 0, index_type)
        fence()
    return outside >= 0


@cache
def _compile() -> None:
    table = table_of((1,), (1,))
    compile_kernel(embedding, 0, 0, 0, 8, table, 0, (0, 0, 0), (0, 0, False), table, 0, 4)


@cache
def _compile_rows(index_dtype: torch.dtype) -> TaskFunction:
    nothing = np.zeros(_NUMBERS, np.int64)
    compile_kernel(copy_few, 0, 0, 0, walk_of(nothing[None])[0], _INDICES[index_dtype])
    return copy_rows.compiled(_INDICES[index_dtype])


class Embedding(IndexedKernel[EmbeddingDescriptor]):
    def compile(self) -> None:
        _compile_rows(self.desc.index_dtype)

    def prepare(self, args: EmbeddingArgs) -> Launch[EmbeddingArgs]:
        desc = self.desc
        walk = loops(desc.shape, args.indices.stride(), args.out.stride())
        streamed = args.out.nbytes >= _STREAMED_FROM
        one_loop = len(walk.sizes) == 1
        return (self.in_one_loop if one_loop else self.in_any_order)(args, walk, streamed)

    def in_one_loop(self, args: EmbeddingArgs, walk: Space, streamed: bool) -> Launch[EmbeddingArgs]:
        desc, index_type = self.desc, _INDICES[self.desc.index_dtype]
        kernel, elements = _compile_rows(desc.index_dtype), desc.count * desc.columns
        (index_step,), (out_row,) = walk.strides
        item, index_item = args.out.element_size(), args.indices.element_size()
        table, raises = table_of(walk.sizes, walk.strides[0]), desc.bad_index == "raise"
        constants = np.array(
            [
                desc.count, index_step, desc.rows, *args.weight.stride(), out_row * item, args.out.stride(-1),
                streamed, desc.columns, item, raises, 0,
            ],
            np.int64,
        )  # fmt: skip
        template, constants_at = task_bytes(*[0] * _VARIABLES, *constants), walk_of(constants[None])[0]

        def run(stream: int, workspace: int, out: int, weight: int, indices: int) -> bool:
            """Copy rows of tensors at these addresses. Returns False if an index is to be reported."""
            if threads_together(elements) == 1:
                return copy_few(out, weight, indices, constants_at, index_type)  # type: ignore[no-any-return]
            if raises and first_outside(indices, index_item, table, desc.count, desc.rows) >= 0:
                return False
            share = max(_LEAST, -(-desc.count // (_RANGES * torch.get_num_threads())))
            task = _Task.from_buffer_copy(template)
            task[1:_VARIABLES] = (out, weight, indices, share)
            run_together(kernel, task, elements)
            return True

        run.constants = constants  # type: ignore[attr-defined]  # kept: their address is in use

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingArgs, addresses: Sequence[int]
        ) -> None:
            out, weight, indices = addresses
            if not run(0, 0, out, weight, indices):
                raise_outside(args.indices, table, desc.rows)

        launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch

    def in_any_order(self, args: EmbeddingArgs, walk: Space, streamed: bool) -> Launch[EmbeddingArgs]:
        desc = self.desc
        _compile()
        index_table, out_table = (table_of(walk.sizes, strides) for strides in walk.strides)
        index_item, item = args.indices.element_size(), args.out.element_size()
        row_step, step = args.weight.stride()
        out_step = args.out.stride(-1)

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingArgs, addresses: Sequence[int]
        ) -> None:
            out, weight, indices = addresses
            if desc.bad_index == "raise":
                raise_outside(args.indices, index_table, desc.rows)

            def part(first: int, last: int) -> None:
                embedding(
                    first, last, indices, index_item, index_table, desc.rows, (weight, row_step, step),
                    (out, out_step, streamed), out_table, desc.columns, item,
                )  # fmt: skip

            parallel(part, desc.count, desc.count * desc.columns)

        return launch
