"""Rows read at indices, in Triton: the kernel of embedding, gather and index_select."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from holdfast.backends.gpu import report
from holdfast.backends.gpu_tiles import common_step, row_offsets, stepped
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core import device_errors
from holdfast.core.device_errors import ErrorKind
from holdfast.ops.segment_sum.gpu import tile_of


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``gather``: bytes of a tile, maximum rows of a tile, maximum columns of a tile, warps."""

    tile_bytes: int
    most_rows: int
    most_columns: int = 1024
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(tile_bytes=8192, most_rows=256),
    interpreter=Tuning(tile_bytes=65536, most_rows=65536),
)


@triton.jit(do_not_specialize=["count", "extent", "word"])
def gather(
    out, input, index, reports,
    count, extent, word, columns, tiles, row_stride, column_stride, sizes, out_strides, line_strides,
    index_strides,
    RAISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Copy COLUMNS columns of the rows of ROWS indices; zeros for an index out of range.

    ``line_strides`` give the first row of each position's line, if there are several lines. Columns and the
    strides of rows are multiples of STEP.
    """
    tile = tl.program_id(0) % tiles
    number = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns // STEP * STEP
    exists = number < count
    row = tl.load(index + row_offsets(number, sizes, index_strides), mask=exists, other=0)
    known = exists & (row >= 0) & (row < extent)
    offset = row.to(tl.int64) * (row_stride // STEP * STEP)
    if len(line_strides) > 1:
        offset += row_offsets(number, sizes, stepped(line_strides, STEP))
    value = tl.load(input + offset[:, None] + column * column_stride, mask=known[:, None] & inside, other=0.0)
    at = out + row_offsets(number, sizes, stepped(out_strides, STEP))[:, None]
    tl.store(at + column * out_strides[len(sizes) - 1], value, mask=exists[:, None] & inside)
    if RAISE:
        report(reports, word, number, row, exists & ~known & (tile == 0))


@dataclass(frozen=True)
class Lookup:
    """What ``gather`` reads: the names of the operands, the number of rows and columns, and strides.

    ``sizes`` are those of the loops over the indices, and the columns. All strides are of these loops.
    """

    input: str
    index: str
    count: int
    extent: int
    columns: int
    itemsize: int
    row_stride: int
    column_stride: int
    sizes: tuple[int, ...]
    out_strides: tuple[int, ...]
    index_strides: tuple[int, ...]
    line_strides: tuple[int, ...] = (0,)


def add_gather(steps: Steps, lookup: Lookup, bad_index: ErrorKind | None) -> None:
    """Add the launch. Indices out of range are reported as ``bad_index``, if it is given."""
    tuning: Any = TUNING.on(steps.device)
    reports = device_errors.reports_on(steps.device) if bad_index else None
    rows, columns = tile_of(
        lookup.columns, tuning.tile_bytes // lookup.itemsize, tuning.most_rows, tuning.most_columns
    )
    tiles = -(-lookup.columns // columns)
    read = (*lookup.line_strides[:-1], lookup.row_stride, lookup.column_stride)
    steps.add(
        gather, -(-lookup.count // rows) * tiles, lookup,
        reports=reports.words if reports else None,
        word=reports.word(bad_index) if reports and bad_index else 0, tiles=tiles,
        RAISE=reports is not None, ROWS=rows, COLUMNS=columns,
        STEP=common_step(lookup.itemsize, lookup.columns, read, lookup.out_strides),
        num_warps=tuning.warps,
    )  # fmt: skip
