"""embedding on the CPU: a copy of rows. The gradient is a segment sum."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from holdfast.backends.cpu import compile_kernel, fence, kernel, prefetch_run
from holdfast.backends.threads import parallel
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.numerics.cpu_walk import offset_of, table_of
from holdfast.ops.embedding.plan import EmbeddingArgs, EmbeddingDescriptor
from holdfast.ops.segment_sum.cpu import load_index, raise_outside
from holdfast.ops.segment_sum.cpu_gather import (
    PREFETCHED,
    STREAMED_FROM,
    Lookup,
    compile_rows,
    copy_row,
    distance_of,
)
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops


@kernel
def embedding(first, last, indices, index_item, index_table, rows, weight, out, out_table, columns, item):
    """Copy the rows of the indices ``first`` to ``last``."""
    distance = distance_of(columns * item)
    for n in range(first, last):
        ahead = load_index(indices, index_item, min(n + distance, last - 1), index_table)
        prefetch_run(weight[0] + ahead * weight[1] * item, min(columns * item, PREFETCHED))
        index = load_index(indices, index_item, n, index_table)
        copy_row(index, out[0] + offset_of(n, out_table) * item, rows, weight, out, columns, item)
    fence()


@cache
def _compile() -> None:
    table = table_of((1,), (1,))
    compile_kernel(embedding, 0, 0, 0, 8, table, 0, (0, 0, 0), (0, 0, False), table, 0, 4)


class Embedding(IndexedKernel[EmbeddingDescriptor]):
    def compile(self) -> None:
        compile_rows(self.desc.index_dtype)

    def prepare(self, args: EmbeddingArgs) -> Launch[EmbeddingArgs]:
        desc = self.desc
        walk = loops(desc.shape, args.indices.stride(), args.out.stride())
        return (self.in_one_loop if len(walk.sizes) == 1 else self.in_any_order)(args, walk)

    def in_one_loop(self, args: EmbeddingArgs, walk: Space) -> Launch[EmbeddingArgs]:
        desc = self.desc
        (index_step,), (out_row,) = walk.strides
        row_step, step = args.weight.stride()
        table = table_of(walk.sizes, walk.strides[0])
        run = Lookup(
            desc.count, index_step, desc.rows, row_step, step, out_row, args.out.stride(-1), desc.columns,
            args.out.element_size(), desc.bad_index == "raise", desc.index_dtype,
        ).launch()  # fmt: skip

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingArgs, addresses: Sequence[int]
        ) -> None:
            if not run(0, 0, *addresses):
                raise_outside(args.indices, table, desc.rows)

        launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch

    def in_any_order(self, args: EmbeddingArgs, walk: Space) -> Launch[EmbeddingArgs]:
        desc, streamed = self.desc, args.out.nbytes >= STREAMED_FROM
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
