"""Scatter of few terms, in Triton: one launch without a workspace, as in ``segment_sum.gpu_few_terms``."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow, report
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import warps_for
from holdfast.core import device_errors
from holdfast.core.plan import Launch
from holdfast.ops.scatter import gpu
from holdfast.ops.scatter.plan import BadScatterIndex, ScatterArgs, ScatterDescriptor
from holdfast.ops.segment_sum.gpu_few_terms import TUNING, sums_of_tile
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops


@triton.jit(do_not_specialize=["count", "rows", "word"])
def scatter_few_terms(
    out, input, src, index, reports, count, rows, word, columns, tiles,
    out_sizes, out_strides, input_strides, sizes, strides, index_strides, alpha,
    FINISH: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum and store a tile of ROWS rows. The first program reports an index out of range."""
    follow()
    block = tl.program_id(0) // tiles
    column = ((tl.program_id(0) - block * tiles) * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns
    row = block * ROWS + tl.arange(0, ROWS)
    total, amount = sums_of_tile(
        src, index, block, row, count, rows, -1, column, inside, sizes, strides, index_strides,
        COMPUTE, TERMS, ROWS, COLUMNS, UNROLL,
    )  # fmt: skip
    FINISH(
        out, input, row, row < rows, total, amount, amount, column, inside, out_sizes, out_strides,
        input_strides, alpha, False, BY_COUNT, COMPUTE,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        place = tl.arange(0, TERMS)
        given = tl.load(index + row_offsets(place, sizes, index_strides), mask=place < count, other=0)
        report(reports, word, place, given, (place < count) & ((given < 0) | (given >= rows)))


class FewTerms(IndexedKernel[ScatterDescriptor]):
    """``scatter_few_terms``, for an index of one axis."""

    variant = "few terms"

    def compile(self) -> None:
        self.prepare(ScatterArgs.described(self.desc))

    def prepare(self, args: ScatterArgs) -> Launch[ScatterArgs]:
        desc, tuning = self.desc, TUNING.on(self.device)
        reports = device_errors.reports_on(self.device)
        source = args.out if args.input is None else args.input
        walk = loops(desc.shape, args.index.stride(), args.src.stride())
        rows, columns = tuning.tile_of(desc.rows, desc.columns, desc.dtype)
        tiles = -(-desc.columns // columns)
        finish, _ = gpu.LAST[desc.base]
        steps = Steps(self.device, args)
        steps.add(
            scatter_few_terms, -(-desc.rows // rows) * tiles, desc,
            input=None if args.input is None else "input",
            reports=reports.words, word=reports.word(BadScatterIndex(desc.extent)), tiles=tiles,
            out_sizes=(desc.rows, desc.columns),
            out_strides=(args.out.stride(0), desc.column_step(args.out)),
            input_strides=(source.stride(0), desc.column_step(source)),
            sizes=(*walk.sizes, desc.columns), strides=(*walk.strides[1], desc.column_step(args.src)),
            index_strides=(*walk.strides[0], 0), alpha=gpu.halves(desc.alpha),
            FINISH=finish, BY_COUNT=desc.by_count,
            COMPUTE=tl.float64 if desc.dtype == torch.float64 else tl.float32,
            TERMS=tuning.terms_of(desc.count), ROWS=rows, COLUMNS=columns, UNROLL=tuning.unroll,
            num_warps=warps_for(rows * columns, tuning.most_warps),
        )  # fmt: skip
        return steps.launch


def scatter(desc: ScatterDescriptor, device: torch.device) -> IndexedKernel[ScatterDescriptor]:
    """The kernel for this problem: ``FewTerms``, or ``Scatter`` if there are more terms or several lines."""
    few = len(desc.shape) == 1 and TUNING.on(device).serves(desc)
    return FewTerms(desc, device) if few else gpu.Scatter(desc, device)
