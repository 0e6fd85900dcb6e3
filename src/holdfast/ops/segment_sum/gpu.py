"""The ordered sum, in Triton: without float atomics, without waiting, however the terms are spread.

First the terms are ordered by segment (``order``): ``starts[row]`` to ``starts[row + 1]`` are the places of a
row's terms. Then one kernel sums chunks of up to 32 terms. A row with no more than that is finished, and
one without any is filled with zeros, by the program that owns the row. A longer one is cut into chunks, each
summed by whoever owns the window of 32 places in which the chunk begins. At most two chunks of long rows
begin in a window: if two did that are not the first of their row, they would be of one row and 32 places
apart; and a first chunk fills 32 places of its own. So a window and one bit name a slot for the chunk's sum.
Each further level is one more launch: it adds up to 32 slots and leaves the sum in the first of them, which
nobody else reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.backends import interpreted
from holdfast.backends.gpu import StepOperand, Steps
from holdfast.core.pieces import Pieces
from holdfast.core.plan import Launch
from holdfast.core.strided import Space
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.affine.gpu import row_offsets
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.counting.gpu import Counting, longest
from holdfast.ops.segment_sum.indexed import (
    DescribedSum,
    IndexedDescriptor,
    IndexedKernel,
    SummingArgs,
    described_operands,
    loops,
)
from holdfast.ops.segment_sum.order.gpu import Order

CHUNK = tl.constexpr(indexed.CHUNK)
#: Bytes of an output tile, the warps that share it, and the terms whose loads are under way together. To the
#: interpreter a program costs the same however much it does.
TILE_BYTES = 65536 if interpreted() else 8192
WARPS = 4
#: Rows of up to so many bytes are summed in tiles of half the size.
NARROW_BYTES = 1024
UNROLL = 4
#: The same for sums of sums: there are few of them, so that each needs more loads under way.
SUMS_UNROLL = 8
#: The widest tile, in columns; and the highest, in rows: fewer than there are threads, so that each thread
#: loads what it needs to know of its own rows.
MOST_COLUMNS, MOST_ROWS = 1024, 65536 if interpreted() else 64

# How the places of a row are found: between neighbouring ``starts``; between neighbouring ``offsets``, which
# may be wrong and are kept within bounds; or as the next ``length`` of them.
STARTS, OFFSETS, EVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def places_of(bounds, row, exists, rows, entries, count, length, BOUNDS: tl.constexpr):
    """The first place of each row, and how many it has; none if it does not exist."""
    if BOUNDS == EVEN:
        first = row * length
        end = first + length
    elif BOUNDS == STARTS:
        first = tl.load(bounds + row, mask=exists, other=0)
        end = tl.load(bounds + row + 1, mask=exists, other=0)
    else:
        # The last bag ends where the indices do, unless an offset says where it ends.
        first = tl.load(bounds + row, mask=exists, other=0)
        end = tl.load(bounds + row + 1, mask=exists & (row + 1 < entries), other=count)
        first = tl.minimum(tl.maximum(first, 0), count).to(tl.int32)
        end = tl.minimum(tl.maximum(end, first.to(end.dtype)), count).to(tl.int32)
    return first, tl.where(exists, end - first, 0)


@triton.jit
def row_of(keys, mark, exists, rows, length, BOUNDS: tl.constexpr, KEY_STEP: tl.constexpr):
    """The row that the first place of a window belongs to; ``rows`` or more if none does."""
    if BOUNDS == EVEN:
        return tl.where(exists, mark * CHUNK // length, rows)
    else:
        return tl.load(keys + mark * KEY_STEP, mask=exists, other=rows)


@triton.jit
def plain_term(
    terms, places, rows_of, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Term ``number`` in order is row ``places[number]`` of the terms. All of them count."""
    place = tl.load(places + number, mask=here, other=0)
    at = terms + row_offsets(place, sizes, strides)[:, None] + column * strides[len(sizes) - 1]
    value = tl.load(at, mask=here[:, None] & inside, other=0.0)
    return widen(value, COMPUTE), here.to(tl.int32)


@triton.jit
def finish(
    out, row, wanted, total, count, column, inside, sizes, strides,
    ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Write the rows that are ``wanted``, divided by the number of their terms, or added to what is there."""
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
    """The sums of ``size`` terms from ``begin`` on, one after another, and how many of them count."""
    total = tl.zeros([ROWS, COLUMNS], COMPUTE)
    counted = tl.zeros([ROWS], tl.int32)
    for at in range(0, tl.max(size, 0), UNROLL):
        for u in tl.static_range(UNROLL):
            value, counts_too = TERM(
                terms, places, rows_of, factors, begin + (at + u), at + u < size, column, inside,
                sizes, strides, place_strides, factor_strides, numbers, COMPUTE,
            )  # fmt: skip
            total += value
            if BY_COUNT:
                counted += counts_too
    return total, counted


@triton.jit(do_not_specialize=["rows", "entries", "count", "length", "windows", "window_blocks"])
def sum_segments(
    out, terms, places, rows_of, factors, keys, bounds, partials, counts, owners,
    rows, entries, count, length, windows, window_blocks,
    columns, tiles, out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, BOUNDS: tl.constexpr, KEY_STEP: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVERY_ROW: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Chunks of up to 32 terms: first those of long rows, ROWS slots at a time, then the short rows."""
    tile = tl.program_id(0) % tiles
    block = tl.program_id(0) // tiles
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns
    if block < window_blocks:
        slot = block * ROWS + tl.arange(0, ROWS)
        is_first = slot >= windows
        window = tl.where(is_first, slot - windows, slot)
        # A long row that begins in a window also has the first place after it.
        mark = window + tl.where(is_first, 1, 0)
        exists = (slot < 2 * windows) & (mark < windows)
        row = row_of(keys, mark, exists, rows, length, BOUNDS, KEY_STEP)
        first, amount = places_of(bounds, row, row < rows, rows, entries, count, length, BOUNDS)
        chunk = window - first // CHUNK
        left = amount - chunk * CHUNK
        mine = (amount > CHUNK) & tl.where(is_first, chunk == 0, (chunk > 0) & (left > 0))
        size = tl.where(mine, tl.minimum(left, CHUNK), 0)
        if tile == 0:
            tl.store(owners + slot, tl.where(mine, row, -1), mask=slot < 2 * windows)
        total, counted = add_terms(
            terms, places, rows_of, factors, first + chunk * CHUNK, size, column, inside,
            sizes, strides, place_strides, factor_strides, numbers,
            TERM, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
        )  # fmt: skip
        kept = partials + slot.to(tl.int64)[:, None] * columns + column
        tl.store(kept, total, mask=mine[:, None] & inside)
        if BY_COUNT:
            tl.store(counts + tile * (2 * windows) + slot, counted, mask=mine)
    else:
        row = (block - window_blocks) * ROWS + tl.arange(0, ROWS)
        first, amount = places_of(bounds, row, row < rows, rows, entries, count, length, BOUNDS)
        mine = (row < rows) & (amount <= CHUNK)
        if ACCUMULATE and not EVERY_ROW:
            mine = mine & (amount > 0)
        total, counted = add_terms(
            terms, places, rows_of, factors, first, tl.where(mine, amount, 0), column, inside,
            sizes, strides, place_strides, factor_strides, numbers,
            TERM, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
        )  # fmt: skip
        finish(
            out, row, mine, total, counted, column, inside, out_sizes, out_strides,
            ACCUMULATE, BY_COUNT, COMPUTE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "entries", "count", "length", "windows", "reach", "blocks"])
def sum_partials(
    out, bounds, maxima, partials, counts, owners,
    rows, entries, count, length, windows, reach, blocks,
    columns, tiles, out_sizes, out_strides,
    BOUNDS: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The next level, ROWS slots at a time: sums of up to 32 slots, each of which holds ``reach`` terms.

    A slot is the first of 32 if as many chunks of its row come before it as are a multiple of ``reach``.
    """
    if longest(maxima, blocks) > reach:
        tile = tl.program_id(0) % tiles
        slot = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
        exists = slot < 2 * windows
        row = tl.load(owners + slot, mask=exists, other=-1)
        first, amount = places_of(
            bounds, tl.maximum(row, 0), exists & (row >= 0), rows, entries, count, length, BOUNDS
        )
        origin = first // CHUNK
        chunk = tl.where(slot >= windows, 0, slot - origin)
        mine = (amount > reach) & (chunk % reach == 0)
        size = tl.where(mine, tl.minimum((amount - chunk * CHUNK + reach - 1) // reach, CHUNK), 0)
        most = tl.max(size, 0)
        if most > 0:
            column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
            inside = column < columns
            total = tl.zeros([ROWS, COLUMNS], COMPUTE)
            counted = tl.zeros([ROWS], tl.int32)
            for begin in range(0, most, UNROLL):
                for u in tl.static_range(UNROLL):
                    here = begin + u < size
                    term = chunk + (begin + u) * (reach // CHUNK)
                    held = origin + term + tl.where(term == 0, windows, 0)
                    at = partials + held.to(tl.int64)[:, None] * columns + column
                    total += tl.load(at, mask=here[:, None] & inside, other=0.0)
                    if BY_COUNT:
                        counted += tl.load(counts + tile * (2 * windows) + held, mask=here, other=0)
            done = amount <= reach * CHUNK
            kept = partials + slot.to(tl.int64)[:, None] * columns + column
            tl.store(kept, total, mask=(mine & ~done)[:, None] & inside)
            if BY_COUNT:
                tl.store(counts + tile * (2 * windows) + slot, counted, mask=mine & ~done)
            finish(
                out, row, mine & done, total, counted, column, inside, out_sizes, out_strides,
                ACCUMULATE, BY_COUNT, COMPUTE,
            )  # fmt: skip


def tile_of(columns: int, bytes_each: int, tile_bytes: int = 0) -> tuple[int, int]:
    """Rows and columns of a tile: as wide as the matrix, or a part of it that leaves little over."""
    elements = (tile_bytes or TILE_BYTES) // bytes_each
    width = min(triton.next_power_of_2(max(columns, 1)), MOST_COLUMNS, elements)
    while width > 128 and -(-columns // width) * width * 8 > columns * 9:
        width //= 2
    return min(elements // width, MOST_ROWS), width


class Bounds(NamedTuple):
    """How the places of a row are found, where, and how many entries that has; or how many each row has.

    ``keys`` are the rows that places belong to: of every place, or of every ``key_step``-th. The largest of
    the ``maxima``, as many as ``blocks``, is the most places that a row has; without any it is not known.
    """

    kind: Any
    at: StepOperand = 0
    entries: int = 0
    length: int = 0
    keys: StepOperand = 0
    key_step: int = 1
    maxima: StepOperand = 0
    blocks: int = 0

    @classmethod
    def of(cls, order: Order | Counting) -> Bounds:
        """Of rows whose places are in order."""
        found = cls(STARTS, order.starts, order.rows + 1, keys=order.keys, key_step=order.key_step)
        if isinstance(order, Counting):
            return found._replace(maxima=order.maxima, blocks=order.blocks)
        return found


class Target(NamedTuple):
    """What is written: an operand, and the sizes and strides of the loops over its rows, columns last."""

    at: StepOperand
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def matrix(cls, at: StepOperand, out: torch.Tensor) -> Target:
        return cls(at, tuple(out.shape), tuple(out.stride()))


class Walk(NamedTuple):
    """The loops over places, and the strides of terms, places and factors in them, as a term needs them.

    ``numbers`` is what else it needs. (Tuples within tuples Triton 3.6 does not compile.)
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    place_strides: tuple[int, ...] = (0,)
    factor_strides: tuple[int, ...] = (0,)
    numbers: tuple[int, ...] = (0,)


class Summing:
    """What it takes to sum ``terms`` terms into rows of ``columns``: pieces of the workspace, and steps.

    ``longest`` is the most terms that a row can have.
    """

    def __init__(
        self,
        pieces: Pieces,
        terms: int,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        longest: int,
        by_count: bool,
    ) -> None:
        self.terms, self.rows, self.columns, self.longest, self.by_count = (
            terms,
            rows,
            columns,
            longest,
            by_count,
        )
        self.compute = torch.float64 if dtype == torch.float64 else torch.float32
        narrow = columns * dtype.itemsize <= NARROW_BYTES
        self.tile = tile_of(columns, dtype.itemsize, TILE_BYTES // 2 if narrow else TILE_BYTES)
        self.tiles = -(-columns // self.tile[1])
        self.windows = -(-terms // CHUNK.value) if longest > CHUNK.value else 0
        slots = 2 * self.windows
        self.partials = pieces.take(slots * columns, self.compute)
        self.counts = pieces.take(slots * self.tiles if by_count else 0, torch.int32)
        self.owners = pieces.take(slots, torch.int32)

    def add_steps(
        self,
        steps: Steps,
        out: Target,
        terms: Sequence[StepOperand],
        bounds: Bounds,
        walk: Walk,
        *,
        term: Any = plain_term,
        accumulate: bool = False,
        every_row: bool = False,
    ) -> None:
        """Add the steps.

        ``terms`` are the four operands of ``term``, and ``walk`` is how it finds its way through them. Rows
        without a term are not accumulated to, unless it is to be ``every_row``.
        """
        rows, columns = self.tile
        compute = tl.float64 if self.compute == torch.float64 else tl.float32
        constants = {
            "BOUNDS": bounds.kind,
            "ACCUMULATE": accumulate,
            "BY_COUNT": self.by_count,
            "COMPUTE": compute,
            "ROWS": rows,
            "COLUMNS": columns,
            "UNROLL": UNROLL,
        }
        slot_blocks = -(-2 * self.windows // rows)
        steps.add(
            sum_segments,
            (slot_blocks + -(-self.rows // rows)) * self.tiles,
            (out.at, *terms, bounds.keys, bounds.at, self.partials, self.counts, self.owners),
            (
                self.rows, bounds.entries, self.terms, bounds.length, self.windows, slot_blocks,
                self.columns, self.tiles, out.sizes, out.strides, *walk,
            ),
            {"TERM": term, "KEY_STEP": bounds.key_step, "EVERY_ROW": every_row, **constants},
            WARPS,
        )  # fmt: skip
        reach = CHUNK.value
        while reach < self.longest:
            steps.add(
                sum_partials,
                slot_blocks * self.tiles,
                (out.at, bounds.at, bounds.maxima, self.partials, self.counts, self.owners),
                (
                    self.rows, bounds.entries, self.terms, bounds.length, self.windows, reach, bounds.blocks,
                    self.columns, self.tiles, out.sizes, out.strides,
                ),
                {**constants, "UNROLL": SUMS_UNROLL},
                WARPS,
            )  # fmt: skip
            reach *= CHUNK.value


class SegmentSum(IndexedKernel[IndexedDescriptor]):
    """Order, then sum; for every plan that sums its terms by row."""

    def __init__(self, desc: IndexedDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        pieces = Pieces()
        self.order = Order(pieces, desc.count, desc.rows)
        self.sorted_by = self.order.sorted_by
        self.summing = Summing(
            pieces, desc.count, desc.rows, desc.columns, desc.dtype, desc.count, desc.by_count
        )
        self.workspace_size = pieces.size

    def compile(self) -> None:
        out, terms, indices = described_operands(self.desc).values()
        self.prepare(DescribedSum((out, terms, indices)))

    def prepare(self, args: SummingArgs) -> Launch[SummingArgs]:
        desc, order = self.desc, self.order
        out, terms, indices = args.operands()
        walk = loops(desc.shape, indices.stride(), terms.stride())
        steps = Steps(self.device, args)
        order.add_steps(steps, 2, walk, desc.padding)
        self.summing.add_steps(
            steps,
            Target.matrix(0, out),
            (1, order.places, 0, 0),
            Bounds.of(order),
            term_walk(walk, terms, desc.columns),
            accumulate=args.accumulate,
        )
        return steps.launch


def term_walk(walk: Space, terms: torch.Tensor, columns: int) -> Walk:
    """The sizes and strides of the terms, columns last; ``walk`` has their strides second."""
    return Walk((*walk.sizes, columns), (*walk.strides[1], terms.stride(-1)))
