"""The ordered sum of few terms, in Triton: one launch without a workspace.

Sorting few terms takes longer than reading all their indices again for every tile of the output. A program
has a tile of rows. It reads all indices, adds the terms of its rows in order, and sets rows without terms to
zeros.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import Steps, operand_names
from holdfast.backends.tuning import Tuned, warps_for
from holdfast.core.plan import Launch
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.segment_sum import gpu, indexed
from holdfast.ops.segment_sum.gpu_index import power_below
from holdfast.ops.segment_sum.indexed import (
    DescribedSum,
    IndexedDescriptor,
    IndexedKernel,
    SummingArgs,
    loops,
)

CHUNK = tl.constexpr(indexed.CHUNK)


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``sum_few_terms``."""

    #: Maximum number of terms; at most CHUNK * CHUNK.
    most_terms: int
    #: Bytes of a tile in the compute dtype; it is smaller if there would be fewer programs than ``programs``.
    tile_bytes: int
    programs: int
    #: Maximum bytes of a table whose rows are no whole number of vectors. More are filled as one row.
    most_ragged: int = 2**23
    #: Terms loaded together.
    unroll: int = 8
    most_warps: int = 4

    def tile_of(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
        """Rows and columns of a tile of a table with this many rows and columns."""
        elements = self.tile_bytes // (8 if dtype == torch.float64 else 4)
        width = min(triton.next_power_of_2(columns), elements)
        programs = rows * -(-columns // width) // self.programs
        return min(elements // width, power_below(programs) or 1), width

    def serves(self, desc: IndexedDescriptor) -> bool:
        """Whether this is a problem of few terms."""
        row_bytes = desc.columns * desc.dtype.itemsize
        ragged = row_bytes % 16 > 0 and desc.rows * row_bytes > self.most_ragged
        return desc.count <= self.most_terms and not ragged

    def terms_of(self, count: int) -> int:
        """``count`` or more terms, a power of two."""
        return max(int(triton.next_power_of_2(count)), self.unroll)


TUNING = Tuned(
    gpu=Tuning(most_terms=64, tile_bytes=8192, programs=528),
    interpreter=Tuning(most_terms=100, tile_bytes=65536, programs=2),
)


@triton.jit
def any_of_rows(indices, place, count, first, end, sizes, strides):
    """Whether any of these places has an index from ``first`` to ``end``."""
    index = tl.load(indices + row_offsets(place, sizes, strides), mask=place < count, other=-1)
    return tl.max(((index >= first) & (index < end)).to(tl.int32), 0) > 0


@triton.jit
def sums_of_tile(
    terms, indices, block, row, count, rows, padding, column, inside, sizes, strides, index_strides,
    COMPUTE: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Sums of ROWS rows from ``block * ROWS``, and their numbers of terms.

    There are at most TERMS terms, a power of two. A chunk sum is added to the sum of the chunks before it
    when it is full.
    """
    end = tl.minimum(block * ROWS + ROWS, rows)
    total, chunk = tl.zeros([ROWS, COLUMNS], COMPUTE), tl.zeros([ROWS, COLUMNS], COMPUTE)
    amount = tl.zeros([ROWS], tl.int32)
    if any_of_rows(indices, tl.arange(0, TERMS), count, block * ROWS, end, sizes, index_strides):
        for begin in range(0, count, UNROLL):
            if any_of_rows(
                indices, begin + tl.arange(0, UNROLL), count, block * ROWS, end, sizes, index_strides
            ):
                for u in tl.static_range(UNROLL):
                    place = begin + tl.full([1], u, tl.int32)
                    own = tl.load(
                        indices + row_offsets(place, sizes, index_strides), mask=place < count, other=-1
                    )
                    there = (own >= block * ROWS) & (own < end) & (own != padding)
                    at = terms + row_offsets(place, sizes, strides)[:, None]
                    at += column * strides[len(sizes) - 1]
                    value = widen(tl.load(at, mask=there[:, None] & inside, other=0.0), COMPUTE)
                    mine = there & (row == own)
                    chunk = tl.where(mine[:, None], chunk + value, chunk)
                    amount += mine.to(tl.int32)
                    full = mine & (amount % CHUNK == 0)
                    total = tl.where(full[:, None], total + chunk, total)
                    chunk = tl.where(full[:, None], 0.0, chunk)
    total = tl.where((amount % CHUNK > 0)[:, None], total + chunk, total)
    return total, amount


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def sum_few_terms(
    out, terms, indices, count, rows, padding, columns, tiles, out_strides, sizes, strides, index_strides,
    ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    TERMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum a tile of ROWS rows."""
    follow()
    block = tl.program_id(0) // tiles
    column = ((tl.program_id(0) - block * tiles) * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns
    row = block * ROWS + tl.arange(0, ROWS)
    total, amount = sums_of_tile(
        terms, indices, block, row, count, rows, padding, column, inside, sizes, strides, index_strides,
        COMPUTE, TERMS, ROWS, COLUMNS, UNROLL,
    )  # fmt: skip
    if BY_COUNT:
        total = quotient(total, tl.maximum(amount, 1).to(COMPUTE)[:, None])
    at = out + row.to(tl.int64)[:, None] * out_strides[0] + column * out_strides[1]
    wanted = row < rows
    if ACCUMULATE:
        wanted = wanted & (amount > 0)
        total = widen(tl.load(at, mask=wanted[:, None] & inside, other=0.0), COMPUTE) + total
    tl.store(at, narrow(total, out.dtype.element_ty), mask=wanted[:, None] & inside)


class FewTerms(IndexedKernel[IndexedDescriptor]):
    """``sum_few_terms``, for every plan that sums terms by row."""

    variant = "few terms"

    def compile(self) -> None:
        self.prepare(DescribedSum.of_sums(self.desc))

    def prepare(self, args: SummingArgs) -> Launch[SummingArgs]:
        desc, tuning = self.desc, TUNING.on(self.device)
        out, terms, indices = args.operands()
        out_name, terms_name, indices_name = operand_names(type(args))
        space = loops(desc.shape, indices.stride(), terms.stride())
        walk = gpu.term_walk(space, terms, desc.columns)
        rows, columns = tuning.tile_of(desc.rows, desc.columns, desc.dtype)
        tiles = -(-desc.columns // columns)
        steps = Steps(self.device, args)
        steps.add(
            sum_few_terms, -(-desc.rows // rows) * tiles, desc,
            out=out_name, terms=terms_name, indices=indices_name, tiles=tiles,
            out_strides=tuple(out.stride()), sizes=walk.sizes, strides=walk.strides,
            index_strides=(*space.strides[0], 0), ACCUMULATE=args.accumulate, BY_COUNT=desc.by_count,
            COMPUTE=tl.float64 if desc.dtype == torch.float64 else tl.float32,
            TERMS=tuning.terms_of(desc.count), ROWS=rows, COLUMNS=columns,
            UNROLL=tuning.unroll, num_warps=warps_for(rows * columns, tuning.most_warps),
        )  # fmt: skip
        return steps.launch


def segment_sum(desc: IndexedDescriptor, device: torch.device) -> IndexedKernel[IndexedDescriptor]:
    """The kernel for this problem: ``FewTerms``, or ``SegmentSum`` if there are more terms."""
    return FewTerms(desc, device) if TUNING.on(device).serves(desc) else gpu.SegmentSum(desc, device)
