"""embedding on the CPU: a copy of rows. The gradient is a segment sum."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from holdfast.backends.cpu import compile_kernel, copy, fence, kernel, pointer, prefetch_run, stream
from holdfast.backends.threads import parallel
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.numerics.cpu_walk import move, offset_of, table_of
from holdfast.ops.embedding.plan import EmbeddingArgs, EmbeddingDescriptor
from holdfast.ops.segment_sum.cpu import load_index, raise_outside
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops

#: Prefetch distance in indices.
_AHEAD = 2
#: Outputs of at least this many bytes are written with streaming stores, since they do not fit the caches.
_STREAMED_FROM = 2**24


@kernel
def embedding(first, last, indices, index_item, index_table, rows, weight, out, out_table, columns, item):
    """Copy the rows of the indices ``first`` to ``last``; zeros for an index out of range.

    ``weight`` is (address, row stride, column stride); ``out`` is (address, column stride, whether to use
    streaming stores).
    """
    weight_at, row_step, step = weight
    out_at, out_step, streamed = out
    for n in range(first, last):
        index = load_index(indices, index_item, n, index_table)
        target = out_at + offset_of(n, out_table) * item
        if index < 0 or index >= rows:
            for i in range(columns):
                for b in range(item):
                    pointer(target + i * out_step * item, np.uint8)[b] = 0
        elif step == 1 and out_step == 1:
            ahead = load_index(indices, index_item, min(n + _AHEAD, last - 1), index_table)
            prefetch_run(weight_at + ahead * row_step * item, columns * item)
            if streamed:
                stream(target, weight_at + index * row_step * item, columns * item)
            else:
                copy(target, weight_at + index * row_step * item, columns * item)
        else:
            move(weight_at + index * row_step * item, step, columns, target, out_step, item)
    fence()


@cache
def _compile() -> None:
    table = table_of((1,), (1,))
    compile_kernel(embedding, 0, 0, 0, 8, table, 0, (0, 0, 0), (0, 0, False), table, 0, 4)


class Embedding(IndexedKernel[EmbeddingDescriptor]):
    def compile(self) -> None:
        _compile()

    def prepare(self, args: EmbeddingArgs) -> Launch[EmbeddingArgs]:
        desc = self.desc
        self.compile()
        walk = loops(desc.shape, args.indices.stride(), args.out.stride())
        index_table, out_table = (table_of(walk.sizes, strides) for strides in walk.strides)
        index_item, item = args.indices.element_size(), args.out.element_size()
        row_step, step = args.weight.stride()
        out_step = args.out.stride(-1)
        streamed = desc.count * desc.columns * item >= _STREAMED_FROM

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
