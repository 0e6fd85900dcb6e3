"""Tiles of the index space, in Triton.

A program processes one tile of ROWS x COLUMNS. Columns follow the memory of the output. A row number is split
into the indices of the other loops once per row, so a contiguous tensor needs no division.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import triton
import triton.language as tl

from holdfast.backends.gpu import loop_offsets

#: Elements of a vector. A thread loads or stores at most 16 bytes at once, so 16 serve every dtype.
VECTOR = tl.constexpr(16)


@triton.jit
def tile_rows(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr, steps=1):
    """The row numbers of this program's tile, or of the first of its ``steps`` tiles."""
    if GRID == "rows" or GRID == "last columns":
        tile = tl.program_id(0)
    elif GRID == "columns and rows":
        tile = tl.program_id(1)
    else:
        tile = tl.program_id(0).to(tl.uint32) // column_tiles(columns, COLUMNS)
    return tile.to(rows.dtype) * (ROWS * steps) + tl.arange(0, ROWS)


@triton.jit
def tile_start(columns, COLUMNS: tl.constexpr, GRID: tl.constexpr):
    """The first column of this program's tile."""
    if GRID == "rows":
        return tl.full([], 0, tl.int64)
    elif GRID == "last columns":
        return (tl.full([], 0, tl.int64) + columns) // VECTOR * VECTOR
    elif GRID == "columns and rows":
        return tl.program_id(0).to(tl.int64) * COLUMNS
    else:
        tile = tl.program_id(0).to(tl.uint32) % column_tiles(columns, COLUMNS)
        return tile.to(tl.int64) * COLUMNS


@triton.jit
def column_tiles(columns, COLUMNS: tl.constexpr):
    """Number of tiles along the columns; unsigned, because unsigned division is faster."""
    return ((columns - 1) // COLUMNS + 1).to(tl.uint32)


@triton.jit
def columns_inside(start, columns, COLUMNS: tl.constexpr):
    """Mask of the columns from ``start`` that exist; shape [1, COLUMNS]."""
    left = tl.minimum(columns - start, COLUMNS).to(tl.int32)
    return (tl.arange(0, COLUMNS) < left)[None, :]


@triton.jit
def row_offsets(row, sizes, strides):
    """The offset of each row: ``loop_offsets`` over all loops except the last one, the columns."""
    return loop_offsets(row, sizes[:-1], strides)


def common_step(itemsize: int, columns: int, *strides: Sequence[int]) -> int:
    """Elements that can be loaded and stored together: 16 bytes, or a power of two that is less.

    It divides the number of columns and all strides but the last, the columns', which must be 1. If all of
    them are multiples of 16, the compiler finds this by itself, and the step is 1.
    """
    if any(last != 1 for *_, last in strides):
        return 1
    most = gcd(columns, *(stride for some in strides for stride in some[:-1]))
    return 1 if most % 16 == 0 else gcd(most, 16 // itemsize)


@triton.jit
def stepped(strides, STEP: tl.constexpr):
    """The strides. For a STEP above 1, the compiler learns that all but the last are multiples of it.

    The last stride is 1 then. A constexpr cannot be an element of a tuple that a function returns.
    """
    if STEP == 1:
        return strides
    else:
        found = (strides[0] // STEP * STEP,)
        for d in tl.static_range(1, len(strides) - 1):
            found = found + (strides[d] // STEP * STEP,)  # type: ignore[assignment]  # noqa: RUF005
        return found + (tl.full([], 1, tl.int32),)  # noqa: RUF005


@triton.jit
def tile_row_offsets(row, loops, strides):
    """``row_offsets`` with the loops of ``TiledKernel``; 32-bit row numbers need no division.

    An operand whose rows form a single loop has one stride for all rows.
    """
    offset = tl.zeros(row.shape, tl.int64)
    for d in tl.static_range(len(strides) - 2, -1, -1):
        if d == 0:
            offset += row.to(tl.int64) * strides[d]
        else:
            size, multiplier, shift = loops[d]
            if row.dtype == tl.int32:
                high = tl.umulhi(row.to(tl.uint32), multiplier.to(tl.uint32))
                outer = (high >> (shift.to(tl.uint32) - 2)).to(tl.int32)
            else:
                outer = row // size
            offset += (row - outer * size).to(tl.int64) * strides[d]
            row = outer
    return offset


@triton.jit
def tile_offsets(row, start, sizes, strides, COLUMNS: tl.constexpr):
    """The offset of each element of the tile."""
    step = strides[len(strides) - 1]
    column = tl.arange(0, COLUMNS)
    return (start * step + tile_row_offsets(row, sizes, strides))[:, None] + (column * step)[None, :]


@triton.jit
def byte_offsets(row, start, sizes, strides, WIDTH: tl.constexpr):
    """The offset of each byte of packed codes in the tile; ``strides`` and ``start`` are in bytes."""
    return (start + tile_row_offsets(row, sizes, strides))[:, None] + tl.arange(0, WIDTH)[None, :]
