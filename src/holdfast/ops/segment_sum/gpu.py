"""The ordered sum, in Triton: without float atomics and without waiting, for any distribution of the terms.

First the terms are sorted by row (``MergeSort``): the terms of a row are ``starts[row]``
to ``starts[row + 1]`` in sorted order. A place is a position in that order. A row of up to 32 terms is summed
by one program, which is assigned the row or, if there are more rows than terms, the row's first place. In the
latter case rows without terms are filled with zeros separately. The last rows may be filled while the terms
are still being sorted; those with terms are written again.

A longer row is cut into chunks of 32. A window is 32 aligned places, and the program of a window sums the
chunks that begin in it. At most two chunks of long rows begin in a window. At most one of them is not the
first of its row: two such chunks would belong to one row, and be 32 places apart. At most one is the first of
its row, since it fills 32 places. So a window and one bit identify a slot for the chunk's sum.

Up to 32 slots are added at each level. An atomic counter finds the program that stores the last of them. That
program adds all of them in order and stores the sum in the first slot, which no other program reads; this
slot takes part in the next level. Which program is last differs from run to run; the additions and their
order do not.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.gpu_tiles import VECTOR, common_step, row_offsets, stepped
from holdfast.backends.steps import StepOperand, Steps, operand_names
from holdfast.backends.tuning import Tuned
from holdfast.core.plan import Launch
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.gpu_index import ZeroFill, lower_bound, power_below
from holdfast.ops.segment_sum.gpu_merge_sort import MergeSort
from holdfast.ops.segment_sum.indexed import (
    D,
    DescribedSum,
    IndexedDescriptor,
    IndexedKernel,
    SummingArgs,
    loops,
)

CHUNK = tl.constexpr(indexed.CHUNK)
#: Warps of ``clear``.
WARPS = 4


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``SegmentSumSteps``."""

    #: Bytes of an output tile.
    tile_bytes: int
    #: Maximum rows of a tile: fewer than threads, so that no thread loads the bounds of two rows.
    most_rows: int
    #: Maximum programs for long rows, if the kernel can read whether there are any.
    long_programs: int
    #: With at least this many tiles of places, a program processes ``parts`` tiles.
    parted: int
    #: Bytes that a program fill_programs with zeros.
    fill_bytes: int
    #: Elements per program of ``clear``.
    lanes: int
    parts: int = 4
    #: Maximum columns of a tile.
    most_columns: int = 1024
    #: Rows of up to this many bytes use tiles of half the size; so do all rows if there are more than terms.
    narrow_bytes: int = 1024
    #: Rows are filled during the sort if at least 1 / worth_filling of them can be; some are written twice.
    worth_filling: int = 4
    #: Terms loaded together.
    unroll: int = 4
    warps: int = 4
    #: Bytes that the span of a row costs: it is zeroed, read for its sum, and read to fill it.
    span_bytes: int = 24

    def is_tall(self, rows: int, count: int, row_bytes: int) -> bool:
        """Whether the spans of all rows cost more than to write rows with terms twice."""
        return rows > count > 0 and rows * self.span_bytes > count * row_bytes

    def tile_of(self, columns: int, bytes_each: int, tile_bytes: int = 0) -> tuple[int, int]:
        """Rows and columns of a tile."""
        elements = (tile_bytes or self.tile_bytes) // bytes_each
        return tile_of(columns, elements, self.most_rows, self.most_columns)


def tile_of(columns: int, elements: int, most_rows: int, most_columns: int) -> tuple[int, int]:
    """Rows and columns of a tile: all columns, or a power of two that pads them by at most 1/8."""
    width = min(triton.next_power_of_2(max(columns, 1)), most_columns, elements)
    while width > 128 and -(-columns // width) * width * 8 > columns * 9:
        width //= 2
    return min(elements // width, most_rows), width


TUNING = Tuned(
    gpu=Tuning(tile_bytes=8192, most_rows=64, long_programs=264, parted=4096, fill_bytes=16384, lanes=2048),
    interpreter=Tuning(
        tile_bytes=65536, most_rows=65536, long_programs=2, parted=2, fill_bytes=65536, lanes=65536
    ),
)

# Bounds of a row's places: ``starts[row]`` and ``starts[row + 1]``; a pair in ``spans``, zeros if the row has
# none; or ``length`` places per row. SEARCHED: they are found in the sorted rows of all places. NONE: no row
# has places.
STARTS, SPANS, EVEN, SEARCHED, NONE = (tl.constexpr(kind) for kind in range(5))


@triton.jit(do_not_specialize=["count"])
def clear(counts, count, TILE: tl.constexpr):
    """Set ``counts`` to zeros."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(counts + number, tl.zeros([TILE], tl.int32), mask=number < count)


@triton.jit
def places_of(bounds, row, exists, length, BOUNDS: tl.constexpr):
    """First place and number of places of each row; zero places if the row does not exist."""
    if BOUNDS == EVEN:
        first = row * length
        end = first + length
    elif BOUNDS == NONE:
        first = tl.zeros_like(row)
        end = first
    elif BOUNDS == SPANS:
        at = bounds + row.to(tl.int64) * 2
        first = tl.load(at, mask=exists, other=0)
        end = tl.load(at + 1, mask=exists, other=0)
    else:
        first = tl.load(bounds + row, mask=exists, other=0)
        end = tl.load(bounds + row + 1, mask=exists, other=0)
    return first, tl.where(exists, end - first, 0)


@triton.jit
def places_from(keys, place, row, exists, count):
    """Number of places of each row whose first place is given; 33 if there are more than 32."""
    amount = exists.to(tl.int32)
    same = exists
    ahead = tl.full([], 1, tl.int32)
    while (tl.max(same.to(tl.int32), 0) > 0) & (ahead <= CHUNK):
        next = tl.load(keys + place + ahead, mask=same & (place + ahead < count), other=-1)
        same = same & (next == row)
        amount += same.to(tl.int32)
        ahead += 1
    return amount


@triton.jit
def places_around(keys, place, row, exists, count, step):
    """First place and number of places of each row that has ``place`` and the place before; else zeros."""
    before = tl.load(keys + place - 1, mask=exists & (place > 0), other=-1)
    wanted = exists & (before == row)
    first, end = tl.zeros_like(row), tl.zeros_like(row)
    if tl.max(wanted.to(tl.int32), 0) > 0:
        first, end = lower_bound(keys, row, count, step), lower_bound(keys, row + 1, count, step)
    return first, tl.where(wanted, end - first, 0)


@triton.jit
def row_of(keys, mark, exists, rows, length, BOUNDS: tl.constexpr, KEY_STEP: tl.constexpr):
    """Row of the first place of window ``mark``; at least ``rows`` if it has none."""
    if BOUNDS == EVEN:
        return tl.where(exists, mark * CHUNK // length, rows)
    else:
        return tl.load(keys + mark * KEY_STEP, mask=exists, other=rows)


@triton.jit
def plain_term(
    terms, places, rows_of, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Term ``number`` in sorted order: row ``places[number]`` of ``terms``. All terms are counted."""
    place = tl.load(places + number, mask=here, other=0)
    at = terms + row_offsets(place, sizes, strides)[:, None] + column * strides[len(sizes) - 1]
    value = tl.load(at, mask=here[:, None] & inside, other=0.0)
    return widen(value, COMPUTE), here.to(tl.int32)


@triton.jit
def finish(
    out, factors, row, wanted, total, amount, count, column, inside, sizes, strides, factor_strides, numbers,
    ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the ``wanted`` rows: divided by ``count`` if BY_COUNT, added to ``out`` if ACCUMULATE."""
    if BY_COUNT:
        total = quotient(total, tl.maximum(count, 1).to(COMPUTE)[:, None])
    at = out + row_offsets(row, sizes, strides)[:, None] + column * strides[len(sizes) - 1]
    mask = wanted[:, None] & inside
    if ACCUMULATE:
        total = widen(tl.load(at, mask=mask, other=0.0), COMPUTE) + total
    tl.store(at, narrow(total, out.dtype.element_ty), mask=mask)


@triton.jit
def add_terms(
    terms, places, rows_of, factors, begin, size, column, inside,
    sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sums of ``size`` terms from ``begin``, added one after another, and the number that are counted."""
    total = tl.zeros([ROWS, COLUMNS], COMPUTE)
    counted = tl.zeros([ROWS], tl.int32)
    for at in range(0, tl.max(size, 0), UNROLL):
        for u in tl.static_range(UNROLL):
            value, is_counted = TERM(
                terms, places, rows_of, factors, begin + (at + u), at + u < size, column, inside,
                sizes, strides, place_strides, factor_strides, numbers, COMPUTE,
            )  # fmt: skip
            total += value
            if BY_COUNT:
                counted += is_counted
    return total, counted


@triton.jit
def slot_of(origin, chunk, windows):
    """Slot of a chunk of a row whose first place is in window ``origin``."""
    return origin + chunk + tl.where(chunk == 0, windows, 0)


@triton.jit
def reduce_chunks(
    out, factors, partials, counts, arrivals, row, origin, amount, chunk, mine, total, counted, column,
    inside, windows, columns, out_sizes, out_strides, factor_strides, numbers,
    FINISH: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Store chunk sums in their slots. At each level, the last program to store adds the slots of a group.

    ``slot_of`` gives the slots of a row; with ``windows == 0`` they are consecutive from ``origin``. At each
    level a slot holds the sum of ``reach`` terms, and a group of 32 slots spans ``reach`` chunks. The arrival
    counter of a group is at the slot of its first chunk plus ``level``, so that groups of different levels
    have different counters; a group of more than one slot at that level has enough chunks.
    """
    reach = tl.full([], CHUNK, tl.int32)
    level = tl.full([], 0, tl.int32)
    while tl.max(mine.to(tl.int32), 0) > 0:
        slot = slot_of(origin, chunk, windows)
        partial = partials + slot.to(tl.int64)[:, None] * columns + column
        tl.store(partial, total, mask=mine[:, None] & inside)
        if BY_COUNT:
            tl.store(counts + slot, counted, mask=mine)
        chunk -= chunk % reach
        size = tl.minimum((amount - chunk * CHUNK - 1) // reach + 1, CHUNK)
        # The stores of all threads come before the atomic of any.
        tl.debug_barrier()
        counter = arrivals + slot_of(origin, chunk + level, windows)
        before = tl.atomic_add(counter, tl.full([ROWS], 1, tl.int32), mask=mine & (size > 1), sem="acq_rel")
        mine = mine & ((size == 1) | (before == size - 1))
        size = tl.where(mine, size, 0)
        total = tl.zeros([ROWS, COLUMNS], COMPUTE)
        counted = tl.zeros([ROWS], tl.int32)
        for begin in range(0, tl.max(size, 0), UNROLL):
            for u in tl.static_range(UNROLL):
                here = begin + u < size
                slot = slot_of(origin, chunk + (begin + u) * (reach // CHUNK), windows)
                at = partials + slot.to(tl.int64)[:, None] * columns + column
                total += tl.load(at, mask=here[:, None] & inside, other=0.0)
                if BY_COUNT:
                    counted += tl.load(counts + slot, mask=here, other=0)
        done = mine & ((amount - 1) // reach < CHUNK)
        FINISH(
            out, factors, row, done, total, amount, counted, column, inside, out_sizes, out_strides,
            factor_strides, numbers, ACCUMULATE, BY_COUNT, COMPUTE,
        )  # fmt: skip
        mine = mine & ~done
        reach *= CHUNK
        level += 1


@triton.jit
def sum_long_rows(
    out, terms, places, rows_of, factors, keys, bounds, partials, counts, arrivals,
    block, rows, count, length, windows, column, inside,
    columns, out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, FINISH: tl.constexpr, BOUNDS: tl.constexpr, KEY_STEP: tl.constexpr,
    SHORT: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of ROWS slots, for rows of more than SHORT terms."""
    slot = block * ROWS + tl.arange(0, ROWS)
    is_first = slot >= windows
    window = tl.where(is_first, slot - windows, slot)
    # A long row that begins in a window also has the first place of the next window.
    mark = window + tl.where(is_first, 1, 0)
    exists = (slot < 2 * windows) & (mark < windows)
    row = row_of(keys, mark, exists, rows, length, BOUNDS, KEY_STEP)
    if BOUNDS == SEARCHED:
        first, amount = places_around(keys, mark * KEY_STEP, row, row < rows, count, length)
    else:
        first, amount = places_of(bounds, row, row < rows, length, BOUNDS)
    chunk = window - first // CHUNK
    left = amount - chunk * CHUNK
    mine = (amount > SHORT) & tl.where(is_first, chunk == 0, (chunk > 0) & (left > 0))
    total, counted = add_terms(
        terms, places, rows_of, factors, first + chunk * CHUNK,
        tl.where(mine, tl.minimum(left, CHUNK), 0), column, inside,
        sizes, strides, place_strides, factor_strides, numbers,
        TERM, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
    )  # fmt: skip
    reduce_chunks(
        out, factors, partials, counts, arrivals, row, first // CHUNK, amount, chunk, mine, total, counted,
        column, inside, windows, columns, out_sizes, out_strides, factor_strides, numbers,
        FINISH, ACCUMULATE, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
    )  # fmt: skip


@triton.jit
def rows_begun(keys, place, rows, count):
    """Row of each place, and whether the place is the row's first."""
    row = tl.load(keys + place, mask=place < count, other=rows)
    before = tl.load(keys + place - 1, mask=(place > 0) & (place < count), other=-1)
    return row, (row < rows) & (row != before)


@triton.jit
def sum_short_rows(
    out, terms, places, rows_of, factors, keys, bounds,
    block, rows, count, length, column, inside,
    out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, FINISH: tl.constexpr, BOUNDS: tl.constexpr, SPARSE: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVERY_ROW: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum ROWS rows, or if SPARSE the rows that begin at ROWS places, if they have up to 32 terms."""
    number = block * ROWS + tl.arange(0, ROWS)
    if SPARSE:
        row, exists = rows_begun(keys, number, rows, count)
    else:
        row = number
        exists = row < rows
    if BOUNDS == SEARCHED:
        first, amount = number, places_from(keys, number, row, exists, count)
    else:
        first, amount = places_of(bounds, row, exists, length, BOUNDS)
    mine = exists & (amount <= CHUNK)
    if ACCUMULATE and not EVERY_ROW:
        mine = mine & (amount > 0)
    total, counted = add_terms(
        terms, places, rows_of, factors, first, tl.where(mine, amount, 0), column, inside,
        sizes, strides, place_strides, factor_strides, numbers,
        TERM, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
    )  # fmt: skip
    FINISH(
        out, factors, row, mine, total, amount, counted, column, inside, out_sizes, out_strides,
        factor_strides, numbers, ACCUMULATE, BY_COUNT, COMPUTE,
    )  # fmt: skip


@triton.jit
def fill_rows(
    out, factors, bounds, first_row, rows, length, column, inside, sizes, strides, factor_strides,
    BOUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Zero those of ROWS rows that have no terms."""
    row = first_row + tl.arange(0, ROWS)
    _, amount = places_of(bounds, row, row < rows, length, BOUNDS)
    at = out + row_offsets(row, sizes, strides)[:, None] + column * strides[len(sizes) - 1]
    mask = ((row < rows) & (amount == 0))[:, None] & inside
    tl.store(at, tl.zeros([ROWS, COLUMNS], out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def fill_table(
    out, factors, rows, columns, tiles, out_sizes, out_strides, factor_strides,
    FILL: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``FILL`` for ROWS rows, as if they had no terms. FLAT: the table is one row, see ``store_zeros``."""
    follow()
    tile = tl.program_id(0) % tiles
    first_row = tl.program_id(0) // tiles * ROWS
    column = (tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    end = columns // VECTOR * VECTOR if FLAT else columns
    FILL(
        out, factors, out, first_row, rows, 0, column, column < end,
        out_sizes, out_strides, factor_strides, NONE, ROWS, COLUMNS,
    )  # fmt: skip
    if FLAT and tile == 0:
        last = end + tl.arange(0, VECTOR)[None, :].to(tl.int64)
        FILL(
            out, factors, out, first_row, rows, 0, last, last < columns,
            out_sizes, out_strides, factor_strides, NONE, ROWS, VECTOR,
        )  # fmt: skip


@triton.jit
def longest(maxima, blocks):
    """Maximum number of places of a row; 2**31 - 1 if it is unknown, with ``blocks == 0``."""
    most = tl.zeros([1024], tl.int32)
    for begin in range(0, blocks, 1024):
        number = begin + tl.arange(0, 1024)
        most = tl.maximum(most, tl.load(maxima + number, mask=number < blocks, other=0).to(tl.int32))
    return tl.where(blocks > 0, tl.max(most, 0), 2**31 - 1)


@triton.jit(
    do_not_specialize=[
        "rows", "count", "length", "windows", "slot_blocks",
        "long_programs", "short_programs", "fill_programs", "blocks",
    ]
)  # fmt: skip
def sum_segments(
    out, terms, places, rows_of, factors, keys, bounds, maxima, partials, counts, arrivals,
    rows, count, length, windows, slot_blocks, long_programs, short_programs, fill_programs, blocks,
    columns, tiles, out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, FINISH: tl.constexpr, FILL: tl.constexpr, BOUNDS: tl.constexpr,
    KEY_STEP: tl.constexpr, SHORT: tl.constexpr, SPARSE: tl.constexpr, ACCUMULATE: tl.constexpr,
    EVERY_ROW: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, FILL_ROWS: tl.constexpr, UNROLL: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Sum long rows, then short rows; a program takes PARTS * ROWS short rows, or as many places if SPARSE.

    Columns, and the strides of rows of terms and of ``out``, are multiples of STEP.

    Programs that zero the rows without terms alternate with the others: sums are bound by the latency of
    their loads, and leave memory bandwidth for stores.
    """
    follow()
    program = tl.program_id(0)
    sums = (long_programs + short_programs) * tiles
    both = tl.minimum(sums, fill_programs * tiles)
    paired = program < 2 * both
    number = tl.where(paired, program // 2, program - both)
    filling = tl.where(paired, program % 2 == 1, sums == both)
    tile = number % tiles
    block = number // tiles
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    columns = columns // STEP * STEP
    out_strides, strides = stepped(out_strides, STEP), stepped(strides, STEP)
    inside = column < columns
    if filling:
        if SPARSE and not ACCUMULATE:
            FILL(
                out, factors, bounds, block * FILL_ROWS, rows, length, column, inside, out_sizes, out_strides,
                factor_strides, BOUNDS, FILL_ROWS, COLUMNS,
            )  # fmt: skip
    elif block < long_programs:
        if longest(maxima, blocks) > SHORT:
            for slot_block in range(block, slot_blocks, long_programs):
                sum_long_rows(
                    out, terms, places, rows_of, factors, keys, bounds,
                    partials, counts + tile * (2 * windows), arrivals + tile * (2 * windows),
                    slot_block, rows, count, length, windows, column, inside,
                    columns, out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
                    TERM, FINISH, BOUNDS, KEY_STEP, SHORT, ACCUMULATE, BY_COUNT, COMPUTE, ROWS, COLUMNS,
                    UNROLL,
                )  # fmt: skip
    else:
        begun = tl.full([], 1, tl.int32)
        if PARTS > 1:
            # Among the places of long rows, many tiles begin no row.
            place = (block - long_programs) * (PARTS * ROWS) + tl.arange(0, PARTS * ROWS)
            begun = tl.max(rows_begun(keys, place, rows, count)[1].to(tl.int32), 0)
        if begun > 0:
            for part in range(PARTS):
                sum_short_rows(
                    out, terms, places, rows_of, factors, keys, bounds,
                    (block - long_programs) * PARTS + part, rows, count, length, column, inside,
                    out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
                    TERM, FINISH, BOUNDS, SPARSE, ACCUMULATE, EVERY_ROW, BY_COUNT, COMPUTE, ROWS, COLUMNS,
                    UNROLL,
                )  # fmt: skip


class Bounds(NamedTuple):
    """Bounds of the places of each row: STARTS or SPANS in ``bounds``, EVEN with ``length``, or SEARCHED.

    For SEARCHED, ``length`` is ``power_below`` of the number of places, and ``bounds`` is not read.

    ``keys`` are the rows of all places (``key_step`` 32) or of the first place of each window (``key_step``
    1). The maximum of the ``blocks`` elements of ``maxima`` is the maximum number of places of a row; it is
    unknown if ``blocks`` is 0.
    """

    kind: Any
    bounds: StepOperand = None
    length: int = 0
    keys: StepOperand = None
    key_step: int = 1
    maxima: StepOperand = None
    blocks: int = 0

    @classmethod
    def of(cls, order: MergeSort) -> Bounds:
        """Bounds of sorted places."""
        if order.tall:
            return cls(SEARCHED, order.keys, power_below(order.count), order.keys, order.key_step)
        return cls(SPANS, order.spans, keys=order.keys, key_step=order.key_step)


class Target(NamedTuple):
    """Output operand, with the sizes and strides of the loops over its rows, columns last."""

    out: StepOperand
    out_sizes: tuple[int, ...]
    out_strides: tuple[int, ...]

    @classmethod
    def matrix(cls, name: str, out: torch.Tensor) -> Target:
        return cls(name, tuple(out.shape), tuple(out.stride()))


class Terms(NamedTuple):
    """Operands of a term function."""

    terms: StepOperand
    places: StepOperand
    rows_of: StepOperand
    factors: StepOperand


class Walk(NamedTuple):
    """Sizes of the loops over places, and strides of the terms, places and factors in them.

    ``numbers`` are further parameters of a term function. (Triton 3.6 does not compile nested tuples.)
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    place_strides: tuple[int, ...] = (0,)
    factor_strides: tuple[int, ...] = (0,)
    numbers: tuple[int, ...] = (0,)


class SegmentSumSteps:
    """Workspace regions and launches that sum ``terms`` terms into rows of ``columns`` columns.

    ``longest`` is the maximum number of terms of a row. Rows of up to ``short`` terms are not cut into
    chunks. ``arrivals`` must be zeros before the launch.
    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        device: torch.device,
        count: int,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        longest: int,
        by_count: bool,
        short: int = CHUNK.value,
    ) -> None:
        self.count, self.rows, self.columns, self.short, self.by_count = count, rows, columns, short, by_count
        self.itemsize = dtype.itemsize
        self.sparse = rows > count
        self.compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.tuning = tuning = TUNING.on(device)
        half = self.sparse or columns * dtype.itemsize <= tuning.narrow_bytes
        self.tile = tuning.tile_of(columns, dtype.itemsize, tuning.tile_bytes // (2 if half else 1))
        self.tiles = -(-columns // self.tile[1])
        self.windows = -(-count // CHUNK.value) if longest > short else 0
        slots = 2 * self.windows
        self.partials = layout.take(slots * columns, self.compute)
        self.counts = layout.take(slots * self.tiles if by_count else 0, torch.int32)
        self.arrivals = layout.take(slots * self.tiles, torch.int32)

    def add_steps(
        self,
        steps: Steps,
        out: Target,
        terms: Terms,
        bounds: Bounds,
        walk: Walk,
        *,
        term: Any = plain_term,
        finish: Any = finish,
        fill: Any = fill_rows,
        accumulate: bool = False,
        every_row: bool = False,
        cleared: bool = False,
        only_long: bool = False,
        filled: int = 0,
    ) -> None:
        """Add the launches.

        ``term`` is the term function; ``terms`` and ``walk`` are its operands and their strides. ``finish``
        stores sums, and ``fill`` rows without terms if there are more rows than terms. Rows without terms are
        accumulated to only with ``every_row``. ``cleared``: the caller zeroes the arrivals.
        ``filled``: the number of last rows that the caller zeroes. ``only_long``: the caller sums the short
        rows.
        """
        (rows, columns), tuning = self.tile, self.tuning
        if self.windows and not cleared:
            add_clear(steps, self.arrivals, tuning.lanes)
        slot_blocks = -(-2 * self.windows // rows)
        long_programs = min(slot_blocks, tuning.long_programs) if bounds.blocks else slot_blocks
        sparse = self.sparse and bounds.kind in (SPANS, SEARCHED)
        owned = 0 if only_long else -(-(self.count if sparse else self.rows) // rows)
        parts = tuning.parts if sparse and owned * self.tiles >= tuning.parted else 1
        short_programs = -(-owned // parts)
        fill_rows = 1
        if sparse:
            fill_rows = min(max(tuning.fill_bytes // (columns * self.itemsize), 1), tuning.most_rows)
        fill_programs = -(-(self.rows - filled) // fill_rows) if sparse and not accumulate else 0
        if bounds.kind is SEARCHED and fill_programs:
            self.add_filling(steps, out, terms, walk, fill, filled)
            fill_programs = 0
        steps.add(
            sum_segments, (long_programs + short_programs + fill_programs) * self.tiles,
            self, out, terms, bounds, walk,
            slot_blocks=slot_blocks, long_programs=long_programs, short_programs=short_programs,
            fill_programs=fill_programs,
            TERM=term, FINISH=finish, FILL=fill, BOUNDS=bounds.kind, KEY_STEP=bounds.key_step,
            SHORT=self.short, SPARSE=sparse, ACCUMULATE=accumulate, EVERY_ROW=every_row,
            BY_COUNT=self.by_count,
            COMPUTE=tl.float64 if self.compute == torch.float64 else tl.float32,
            ROWS=rows, COLUMNS=columns, PARTS=parts, FILL_ROWS=fill_rows, UNROLL=tuning.unroll,
            STEP=common_step(self.itemsize, self.columns, out.out_strides, walk.strides),
            num_warps=tuning.warps,
        )  # fmt: skip

    def add_filling(
        self, steps: Steps, out: Target, terms: Terms, walk: Walk, fill: Any, filled: int
    ) -> None:
        """Add a launch that fills the rows that the caller does not zero, with terms or without.

        Contiguous rows are filled as one row, whatever their width.
        """
        rows, columns, row_stride = self.rows - filled, self.columns, out.out_strides[0]
        flat = out.out_strides == (columns, 1) and walk.factor_strides in ((columns, 1), (0,))
        if flat:
            rows, columns, row_stride = 1, rows * columns, 0
        most = self.tuning.fill_bytes // self.itemsize
        width = power_below(most) if flat else self.tile[1]
        height = 1 if flat else power_below(most // width) or 1
        tiles = -(-columns // width)
        strides = (row_stride, *out.out_strides[1:])
        steps.add(
            fill_table, -(-rows // height) * tiles, terms,
            out=out.out, rows=rows, columns=columns, tiles=tiles,
            out_sizes=(rows, columns) if flat else out.out_sizes, out_strides=strides,
            factor_strides=strides if flat else walk.factor_strides, FILL=fill, FLAT=flat,
            ROWS=height, COLUMNS=width, num_warps=self.tuning.warps,
        )  # fmt: skip


def add_clear(steps: Steps, counts: Region, lanes: int) -> None:
    """Add a launch that zeroes ``counts``."""
    steps.add(
        clear, -(-counts.count // lanes), counts=counts, count=counts.count, TILE=lanes, num_warps=WARPS
    )


class SortedSums(IndexedKernel[D]):
    """Workspace of a sort of the indices by row, and of the sums of their terms."""

    def __init__(self, desc: D, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        tall = TUNING.on(device).is_tall(desc.rows, desc.count, desc.columns * desc.dtype.itemsize)
        self.order = MergeSort(layout, device, desc.count, desc.rows, tall)
        self.sorted_by = self.order.sorted_by
        self.variant = self.order.variant
        self.summing = SegmentSumSteps(
            layout, device, desc.count, desc.rows, desc.columns, desc.dtype, desc.count, desc.by_count
        )
        self.set_workspace(layout)

    def zero_fill(self, name: str, out: torch.Tensor) -> tuple[ZeroFill | None, int]:
        """The last rows of operand ``name``, to be zeroed during the sort, and their number."""
        desc, row_bytes = self.desc, self.desc.columns * out.itemsize
        if not self.summing.sparse or not out.is_contiguous() or not row_bytes:
            return None, 0
        # The first of them is at a multiple of VECTOR elements.
        others = max(desc.rows - self.order.fill_bytes // row_bytes, 0)
        filled = max(desc.rows - -(-others // VECTOR.value) * VECTOR.value, 0)
        if filled * self.summing.tuning.worth_filling < desc.rows:
            return None, 0
        begin = (desc.rows - filled) * desc.columns
        return ZeroFill(name, begin, filled * desc.columns, out.itemsize), filled


class SegmentSum(SortedSums[IndexedDescriptor]):
    """Merge sort, then segment sum, for every plan that sums terms by row."""

    def compile(self) -> None:
        self.prepare(DescribedSum.of_sums(self.desc))

    def prepare(self, args: SummingArgs) -> Launch[SummingArgs]:
        desc, order = self.desc, self.order
        out, terms, indices = args.operands()
        out_name, terms_name, indices_name = operand_names(type(args))
        walk = loops(desc.shape, indices.stride(), terms.stride())
        steps = Steps(self.device, args)
        fill, filled = (None, 0) if args.accumulate else self.zero_fill(out_name, out)
        order.add_steps(steps, indices_name, walk, desc.padding, self.summing.arrivals, fill)
        self.summing.add_steps(
            steps,
            Target.matrix(out_name, out),
            Terms(terms_name, order.places, None, None),
            Bounds.of(order),
            term_walk(walk, terms, desc.columns),
            accumulate=args.accumulate,
            cleared=True,
            filled=filled,
        )
        return steps.launch


def term_walk(walk: Space, terms: torch.Tensor, columns: int) -> Walk:
    """Sizes and strides of the terms, columns last. ``walk`` has the strides of the terms second."""
    return Walk((*walk.sizes, columns), (*walk.strides[1], terms.stride(-1)))
