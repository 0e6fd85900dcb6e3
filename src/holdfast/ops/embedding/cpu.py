"""embedding on the CPU: a copy of rows. The gradient is a segment sum."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from holdfast.backends.cpu import (
    compile_kernel,
    copy,
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
from holdfast.backends.private import task_bytes, task_of
from holdfast.backends.threads import parallel, run_together
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.numerics.cpu_walk import move, offset_of, table_of
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

# A task of ``copy_rows``: 15 numbers, of which the first 5 differ between calls, then a value of the type of
# the indices.
_NUMBERS, _VARIABLES = 15, 5
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


@team_kernel(_NUMBERS)
def copy_rows(task):
    """``embedding`` of indices with one stride, to rows with one stride: take ranges until none is left."""
    (
        _, out, weight, indices, share, count, index_step, rows, row_step, step, row_bytes, out_step,
        streamed, columns, item, index_type,
    ) = task[0]  # fmt: skip
    places, distance = pointer(indices, index_type), _distance(columns * item)
    while True:
        first = take(numbers_of(task), 0, share)
        if first >= count:
            break
        last = min(first + share, count)
        for n in range(first, last):
            ahead = np.int64(places[min(n + distance, last - 1) * index_step])
            prefetch_run(weight + ahead * row_step * item, min(columns * item, _PREFETCHED))
            table, target = (weight, row_step, step), (out, out_step, streamed != 0)
            index = np.int64(places[n * index_step])
            _copy_row(index, out + n * row_bytes, rows, table, target, columns, item)
    fence()


@cache
def _compile() -> None:
    table = table_of((1,), (1,))
    compile_kernel(embedding, 0, 0, 0, 8, table, 0, (0, 0, 0), (0, 0, False), table, 0, 4)


class Embedding(IndexedKernel[EmbeddingDescriptor]):
    def compile(self) -> None:
        copy_rows.compiled(_INDICES[self.desc.index_dtype])

    def prepare(self, args: EmbeddingArgs) -> Launch[EmbeddingArgs]:
        desc = self.desc
        walk = loops(desc.shape, args.indices.stride(), args.out.stride())
        streamed = args.out.nbytes >= _STREAMED_FROM
        one_loop = len(walk.sizes) == 1
        return (self.in_one_loop if one_loop else self.in_any_order)(args, walk, streamed)

    def in_one_loop(self, args: EmbeddingArgs, walk: Space, streamed: bool) -> Launch[EmbeddingArgs]:
        desc, kernel = self.desc, copy_rows.compiled(_INDICES[self.desc.index_dtype])
        (index_step,), (out_row,) = walk.strides
        item, index_item = args.out.element_size(), args.indices.element_size()
        table, raises = table_of(walk.sizes, walk.strides[0]), desc.bad_index == "raise"
        constants = task_bytes(
            *[0] * _VARIABLES, desc.count, index_step, desc.rows, *args.weight.stride(), out_row * item,
            args.out.stride(-1), streamed, desc.columns, item, 0,
        )  # fmt: skip

        def run(stream: int, workspace: int, out: int, weight: int, indices: int) -> bool:
            """Copy rows of tensors at these addresses. Returns False if an index is to be reported."""
            if raises and first_outside(indices, index_item, table, desc.count, desc.rows) >= 0:
                return False
            share = max(_LEAST, -(-desc.count // (_RANGES * torch.get_num_threads())))
            task = _Task.from_buffer_copy(constants)
            task[1:_VARIABLES] = (out, weight, indices, share)
            run_together(kernel, task, desc.count * desc.columns)
            return True

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
