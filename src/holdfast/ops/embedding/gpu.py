"""embedding, in Triton: a copy of rows. The gradient is a segment sum."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.backends.gpu import report
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import Steps
from holdfast.core import device_errors
from holdfast.core.plan import Launch
from holdfast.ops.embedding.plan import EmbeddingArgs, EmbeddingDescriptor
from holdfast.ops.segment_sum.gpu import TUNING
from holdfast.ops.segment_sum.indexed import BadIndex, IndexedKernel, loops

WARPS = 4


@triton.jit(do_not_specialize=["count", "rows", "place"])
def embedding(
    out, weight, indices, reports,
    count, rows, place, columns, tiles, sizes, out_strides, weight_strides, index_strides,
    RAISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy COLUMNS columns of the rows of ROWS indices; zeros for an index out of range."""
    tile = tl.program_id(0) % tiles
    number = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns
    exists = number < count
    index = tl.load(indices + row_offsets(number, sizes, index_strides), mask=exists, other=0)
    known = exists & (index >= 0) & (index < rows)
    at = weight + (index.to(tl.int64) * weight_strides[0])[:, None] + column * weight_strides[1]
    row = tl.load(at, mask=known[:, None] & inside, other=0.0)
    to = out + row_offsets(number, sizes, out_strides)[:, None] + column * out_strides[len(sizes) - 1]
    tl.store(to, row, mask=exists[:, None] & inside)
    if RAISE:
        report(reports, place, number, index, exists & ~known & (tile == 0))


class Embedding(IndexedKernel[EmbeddingDescriptor]):
    """``embedding``."""

    def compile(self) -> None:
        self.prepare(EmbeddingArgs.described(self.desc))

    def prepare(self, args: EmbeddingArgs) -> Launch[EmbeddingArgs]:
        desc = self.desc
        raises = desc.bad_index == "raise"
        reports = device_errors.reports_on(self.device) if raises else None
        rows, columns = TUNING.on(self.device).tile_of(desc.columns, desc.dtype.itemsize)
        tiles = -(-desc.columns // columns)
        walk = loops(desc.shape, args.indices.stride(), args.out.stride())
        steps = Steps(self.device, args)
        steps.add(
            embedding, -(-desc.count // rows) * tiles, desc,
            reports=reports.words if reports else "indices",
            place=reports.word(BadIndex(desc.rows)) if reports else 0, tiles=tiles,
            sizes=(*walk.sizes, desc.columns), out_strides=(*walk.strides[1], args.out.stride(-1)),
            weight_strides=tuple(args.weight.stride()), index_strides=(*walk.strides[0], 0),
            RAISE=raises, ROWS=rows, COLUMNS=columns, num_warps=WARPS,
        )  # fmt: skip
        return steps.launch
