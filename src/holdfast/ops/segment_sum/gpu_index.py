"""What every sort of indices on the GPU uses: rows of indices, zeroed memory, binary search."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import VECTOR, row_offsets
from holdfast.backends.steps import StepOperand


@triton.jit
def lower_bound(sorted_values, value, count, step):
    """Number of the ``count`` sorted values less than ``value``; ``step`` is ``power_below(count)``."""
    found = tl.zeros(value.shape, tl.int32)
    while step > 0:
        probe = found + step
        exists = probe <= count
        there = tl.load(sorted_values + (probe - 1), mask=exists, other=0)
        found = tl.where(exists & (there < value), probe, found)
        step = step // 2
    return found


@triton.jit
def store_zeros(out, tile, count, TILE: tl.constexpr):
    """Zero one tile of ``count`` elements. The first tile also zeroes the last elements of all.

    The compiler stores vectors if it knows that a mask has the same value for all elements of a vector. So
    the mask of the tiles ends at a multiple of VECTOR, and fewer than VECTOR elements are left.
    """
    whole = count // VECTOR * VECTOR
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.zeros([TILE], out.dtype.element_ty), mask=at < whole)
    if tile == 0:
        last = whole + tl.arange(0, VECTOR).to(tl.int64)
        tl.store(out + last, tl.zeros([VECTOR], out.dtype.element_ty), mask=last < count)


@triton.jit
def load_row(indices, place, inside, rows, padding, sizes, strides, lines):
    """Row of each index; ``rows``, which sorts last, if the index is padding or out of range.

    The row is the index, or with ``Lines`` a row of the line that the place belongs to.
    """
    index = tl.load(indices + row_offsets(place, sizes, strides), mask=inside, other=0)
    if len(lines) == 1:
        kept = inside & (index >= 0) & (index < rows) & (index != padding)
        row = index
    else:
        kept = inside & (index >= 0) & (index < lines[0])
        row = index.to(tl.int32) * lines[1] + row_offsets(place, sizes, lines[2:]).to(tl.int32)
    return tl.where(kept, row, rows).to(tl.int32)


def power_below(count: int) -> int:
    """Largest power of two up to ``count``; 0 for 0."""
    return 1 << (count.bit_length() - 1) if count > 0 else 0


class ZeroFill(NamedTuple):
    """``elements`` elements of an operand, from ``start``, to be zeroed."""

    at: StepOperand
    start: int
    elements: int
    itemsize: int

    def split(self, size: int) -> tuple[ZeroFill, ZeroFill]:
        """The first ``size`` bytes or fewer, and the rest, which begins at a whole vector."""
        now = min(size // self.itemsize // VECTOR.value * VECTOR.value, self.elements)
        rest = self._replace(start=self.start + now, elements=self.elements - now)
        return self._replace(elements=now), rest

    def tile(self, size: int) -> int:
        """Elements of a tile of ``size`` bytes."""
        return size // self.itemsize

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of a kernel whose further programs zero memory."""
        return {"fill": self.at, "fill_start": self.start, "fill_count": self.elements}


class Lines(NamedTuple):
    """A table of several lines, each with ``extent`` rows. Indices are rows of a line.

    Row ``index`` of a line is row ``start + index * step`` of the table. ``strides`` give the start of the
    line of each place, in the loops over the indices.
    """

    extent: int
    step: int
    strides: tuple[int, ...]
