"""The ordered sum, in Triton: without float atomics, without waiting, however the terms are spread.

First the terms are ordered by segment (``order``): ``starts[row]`` to ``starts[row + 1]`` are the places of a
row's terms. A row of up to 32 is then summed by the program that owns it: the row itself, or its first place
where there are more rows than places; rows without a term are then filled with zeros, many at a time. The
last rows may be filled while terms are still being ordered, and written again if they have any.

A longer row is cut into chunks, each summed by whoever owns the window of 32 places in which the chunk
begins. At most two chunks of long rows begin in a window: if two did that are not the first of their row,
they would be of one row and 32 places apart; and a first chunk fills 32 places of its own. So a window and
one bit name a slot for the chunk's sum. Of the up to 32 slots that are added next, the program that comes
last adds them all, and leaves the sum in the first of them, which nobody else reads; then it is counted among
those whose sums are added after that. Who comes last differs from run to run; what is added, and in which
order, does not.
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
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import StepOperand, Steps, operand_names
from holdfast.backends.tuning import Tuned
from holdfast.core.plan import Launch
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.gpu_counting_sort import Counting, longest
from holdfast.ops.segment_sum.gpu_merge_sort import Blank, Order
from holdfast.ops.segment_sum.indexed import (
    DescribedSum,
    IndexedDescriptor,
    IndexedKernel,
    SummingArgs,
    loops,
)

CHUNK = tl.constexpr(indexed.CHUNK)
#: Warps of a program that clears counters.
WARPS = 4


@dataclass(frozen=True)
class Tuning:
    """The tuning of ``Summing``."""

    #: Bytes of an output tile.
    tile_bytes: int
    #: The most rows of a tile: fewer than there are threads, so that a thread loads the bounds of its rows.
    most_rows: int
    #: Programs for long rows, where it is known whether there are any.
    long_programs: int
    #: From so many tiles of places on, a program takes ``parts`` of them.
    parted: int
    #: Bytes that a program fills with zeros.
    fill_bytes: int
    #: Lanes of a program that clears counters.
    lanes: int
    parts: int = 4
    #: The most columns of a tile.
    most_columns: int = 1024
    #: Rows of up to so many bytes are summed in tiles of half the size; and others too if most have no term.
    narrow_bytes: int = 1024
    #: Rows are filled while terms are ordered if at least one in so many can be: they may be written twice.
    worth_filling: int = 4
    #: Terms whose loads are under way together.
    unroll: int = 4
    warps: int = 4

    def tile_of(self, columns: int, bytes_each: int, tile_bytes: int = 0) -> tuple[int, int]:
        """Rows and columns of a tile: as wide as the matrix, or a part of it that leaves little over."""
        elements = (tile_bytes or self.tile_bytes) // bytes_each
        width = min(triton.next_power_of_2(max(columns, 1)), self.most_columns, elements)
        while width > 128 and -(-columns // width) * width * 8 > columns * 9:
            width //= 2
        return min(elements // width, self.most_rows), width


TUNING = Tuned(
    gpu=Tuning(tile_bytes=8192, most_rows=64, long_programs=264, parted=4096, fill_bytes=16384, lanes=2048),
    interpreter=Tuning(
        tile_bytes=65536, most_rows=65536, long_programs=2, parted=2, fill_bytes=65536, lanes=65536
    ),
)

# How the places of a row are found: between neighbouring ``starts``; in a ``span`` of its own, whose end is 0
# if there are none; or as the next ``length`` of them.
STARTS, SPANS, EVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["count"])
def clear(counts, count, TILE: tl.constexpr):
    """Zeros."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(counts + number, tl.zeros([TILE], tl.int32), mask=number < count)


@triton.jit
def places_of(bounds, row, exists, length, BOUNDS: tl.constexpr):
    """The first place of each row, and how many it has; none if it does not exist."""
    if BOUNDS == EVEN:
        first = row * length
        end = first + length
    elif BOUNDS == SPANS:
        at = bounds + row.to(tl.int64) * 2
        first = tl.load(at, mask=exists, other=0)
        end = tl.load(at + 1, mask=exists, other=0)
    else:
        first = tl.load(bounds + row, mask=exists, other=0)
        end = tl.load(bounds + row + 1, mask=exists, other=0)
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


@triton.jit
def slot_of(origin, chunk, windows):
    """The slot of a chunk of a row whose first place is in window ``origin``."""
    return origin + chunk + tl.where(chunk == 0, windows, 0)


@triton.jit
def sum_upwards(
    out, partials, counts, arrivals, row, origin, amount, chunk, mine, total, counted, column, inside,
    windows, columns, out_sizes, out_strides,
    ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Leave the sums of chunks in their slots, and add up the slots that this is the last to be done with.

    ``slot_of`` says which slots a row has; without windows they are side by side from ``origin`` on.
    ``reach`` is how many terms a slot holds, and in chunks how far it is from a sum of 32 slots to the next.
    Those that come to it are counted where no other sum's are: at the first chunk for the lowest level, one
    chunk further on for each level above. A sum of more than one slot has as many chunks.
    """
    reach = tl.full([], CHUNK, tl.int32)
    level = tl.full([], 0, tl.int32)
    while tl.max(mine.to(tl.int32), 0) > 0:
        held = slot_of(origin, chunk, windows)
        kept = partials + held.to(tl.int64)[:, None] * columns + column
        tl.store(kept, total, mask=mine[:, None] & inside)
        if BY_COUNT:
            tl.store(counts + held, counted, mask=mine)
        chunk -= chunk % reach
        size = tl.minimum((amount - chunk * CHUNK - 1) // reach + 1, CHUNK)
        # What all threads have stored comes before the count of any.
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
                held = slot_of(origin, chunk + (begin + u) * (reach // CHUNK), windows)
                at = partials + held.to(tl.int64)[:, None] * columns + column
                total += tl.load(at, mask=here[:, None] & inside, other=0.0)
                if BY_COUNT:
                    counted += tl.load(counts + held, mask=here, other=0)
        done = mine & ((amount - 1) // reach < CHUNK)
        finish(
            out, row, done, total, counted, column, inside, out_sizes, out_strides,
            ACCUMULATE, BY_COUNT, COMPUTE,
        )  # fmt: skip
        mine = mine & ~done
        reach *= CHUNK
        level += 1


@triton.jit
def sum_long_rows(
    out, terms, places, rows_of, factors, keys, bounds, partials, counts, arrivals,
    block, rows, length, windows, column, inside,
    columns, out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, BOUNDS: tl.constexpr, KEY_STEP: tl.constexpr, SHORT: tl.constexpr,
    ACCUMULATE: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Chunks of rows of more than SHORT terms, ROWS slots at a time."""
    slot = block * ROWS + tl.arange(0, ROWS)
    is_first = slot >= windows
    window = tl.where(is_first, slot - windows, slot)
    # A long row that begins in a window also has the first place after it.
    mark = window + tl.where(is_first, 1, 0)
    exists = (slot < 2 * windows) & (mark < windows)
    row = row_of(keys, mark, exists, rows, length, BOUNDS, KEY_STEP)
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
    sum_upwards(
        out, partials, counts, arrivals, row, first // CHUNK, amount, chunk, mine, total, counted, column,
        inside, windows, columns, out_sizes, out_strides,
        ACCUMULATE, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
    )  # fmt: skip


@triton.jit
def rows_begun(keys, place, rows, count):
    """The row of each place, and whether it is the row's first place."""
    row = tl.load(keys + place, mask=place < count, other=rows)
    before = tl.load(keys + place - 1, mask=(place > 0) & (place < count), other=-1)
    return row, (row < rows) & (row != before)


@triton.jit
def sum_short_rows(
    out, terms, places, rows_of, factors, keys, bounds,
    block, rows, count, length, column, inside,
    out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, BOUNDS: tl.constexpr, SPARSE: tl.constexpr, ACCUMULATE: tl.constexpr,
    EVERY_ROW: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """ROWS rows, or if SPARSE the rows that begin at ROWS places, as far as they have up to 32 terms."""
    number = block * ROWS + tl.arange(0, ROWS)
    if SPARSE:
        row, exists = rows_begun(keys, number, rows, count)
    else:
        row = number
        exists = row < rows
    first, amount = places_of(bounds, row, exists, length, BOUNDS)
    mine = exists & (amount <= CHUNK)
    if ACCUMULATE and not EVERY_ROW:
        mine = mine & (amount > 0)
    total, counted = add_terms(
        terms, places, rows_of, factors, first, tl.where(mine, amount, 0), column, inside,
        sizes, strides, place_strides, factor_strides, numbers,
        TERM, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
    )  # fmt: skip
    finish(
        out, row, mine, total, counted, column, inside, out_sizes, out_strides, ACCUMULATE, BY_COUNT, COMPUTE
    )


@triton.jit
def fill_rows(
    out, bounds, first_row, rows, length, column, inside, sizes, strides,
    BOUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Zeros in those of ROWS rows that have no term."""
    row = first_row + tl.arange(0, ROWS)
    _, amount = places_of(bounds, row, row < rows, length, BOUNDS)
    at = out + row_offsets(row, sizes, strides)[:, None] + column * strides[len(sizes) - 1]
    mask = ((row < rows) & (amount == 0))[:, None] & inside
    tl.store(at, tl.zeros([ROWS, COLUMNS], out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "rows",
        "count",
        "length",
        "windows",
        "slot_blocks",
        "programs",
        "owners",
        "fills",
        "blocks",
    ]
)
def sum_segments(
    out, terms, places, rows_of, factors, keys, bounds, maxima, partials, counts, arrivals,
    rows, count, length, windows, slot_blocks, programs, owners, fills, blocks,
    columns, tiles, out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, BOUNDS: tl.constexpr, KEY_STEP: tl.constexpr, SHORT: tl.constexpr,
    SPARSE: tl.constexpr, ACCUMULATE: tl.constexpr, EVERY_ROW: tl.constexpr, BY_COUNT: tl.constexpr,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    FILL_ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """First the long rows, then the short ones, PARTS times ROWS of them or of places to a program.

    Between them, every second program as long as there are both, rows are filled that have no term: sums wait
    for what they load, and leave the memory time for that.
    """
    follow()
    program = tl.program_id(0)
    sums = (programs + owners) * tiles
    both = tl.minimum(sums, fills * tiles)
    paired = program < 2 * both
    number = tl.where(paired, program // 2, program - both)
    filling = tl.where(paired, program % 2 == 1, sums == both)
    tile = number % tiles
    block = number // tiles
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns
    if filling:
        if SPARSE and not ACCUMULATE:
            fill_rows(
                out, bounds, block * FILL_ROWS, rows, length, column, inside, out_sizes, out_strides,
                BOUNDS, FILL_ROWS, COLUMNS,
            )  # fmt: skip
    elif block < programs:
        if longest(maxima, blocks) > SHORT:
            for slot_block in range(block, slot_blocks, programs):
                sum_long_rows(
                    out, terms, places, rows_of, factors, keys, bounds,
                    partials, counts + tile * (2 * windows), arrivals + tile * (2 * windows),
                    slot_block, rows, length, windows, column, inside,
                    columns, out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
                    TERM, BOUNDS, KEY_STEP, SHORT, ACCUMULATE, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
                )  # fmt: skip
    else:
        begun = tl.full([], 1, tl.int32)
        if PARTS > 1:
            # Where long rows have their places, none begins for many of them.
            place = (block - programs) * (PARTS * ROWS) + tl.arange(0, PARTS * ROWS)
            begun = tl.max(rows_begun(keys, place, rows, count)[1].to(tl.int32), 0)
        if begun > 0:
            for part in range(PARTS):
                sum_short_rows(
                    out, terms, places, rows_of, factors, keys, bounds,
                    (block - programs) * PARTS + part, rows, count, length, column, inside,
                    out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
                    TERM, BOUNDS, SPARSE, ACCUMULATE, EVERY_ROW, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
                )  # fmt: skip


class Bounds(NamedTuple):
    """How the places of a row are found, and where; or how many each row has.

    ``keys`` are the rows that places belong to: of every place, or of every 32nd; every ``key_step``-th of
    them is that of a 32nd place. The largest of the ``maxima``, as many as ``blocks``, is the most places
    that a row has; without any it is not known.
    """

    kind: Any
    at: StepOperand = None
    length: int = 0
    keys: StepOperand = None
    key_step: int = 1
    maxima: StepOperand = None
    blocks: int = 0

    @classmethod
    def of(cls, order: Order | Counting) -> Bounds:
        """Of rows whose places are in order."""
        if isinstance(order, Order):
            return cls(SPANS, order.spans, keys=order.keys, key_step=order.key_step)
        return cls(
            STARTS, order.starts, keys=order.keys, key_step=order.key_step,
            maxima=order.maxima, blocks=order.blocks,
        )  # fmt: skip


class Target(NamedTuple):
    """What is written: an operand, and the sizes and strides of the loops over its rows, columns last."""

    at: StepOperand
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def matrix(cls, at: StepOperand, out: torch.Tensor) -> Target:
        return cls(at, tuple(out.shape), tuple(out.stride()))


class Terms(NamedTuple):
    """The operands that a term is made of."""

    terms: StepOperand
    places: StepOperand
    rows_of: StepOperand
    factors: StepOperand


class Walk(NamedTuple):
    """The loops over places, and the strides of terms, places and factors in them, as a term needs them.

    ``numbers`` is what else a term needs. (Triton 3.6 does not compile tuples within tuples.)
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    place_strides: tuple[int, ...] = (0,)
    factor_strides: tuple[int, ...] = (0,)
    numbers: tuple[int, ...] = (0,)


class Summing:
    """What it takes to sum ``terms`` terms into rows of ``columns``: regions of the workspace, and steps.

    ``longest`` is the most terms that a row can have. Rows of up to ``short`` terms are not cut. ``arrivals``
    must be zeros before anything is summed.
    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        device: torch.device,
        terms: int,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        longest: int,
        by_count: bool,
        short: int = CHUNK.value,
    ) -> None:
        self.terms, self.rows, self.columns, self.short, self.by_count = terms, rows, columns, short, by_count
        self.itemsize = dtype.itemsize
        self.sparse = rows > terms
        self.compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.tuning = tuning = TUNING.on(device)
        half = self.sparse or columns * dtype.itemsize <= tuning.narrow_bytes
        self.tile = tuning.tile_of(columns, dtype.itemsize, tuning.tile_bytes // (2 if half else 1))
        self.tiles = -(-columns // self.tile[1])
        self.windows = -(-terms // CHUNK.value) if longest > short else 0
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
        accumulate: bool = False,
        every_row: bool = False,
        cleared: bool = False,
        only_long: bool = False,
        filled: int = 0,
    ) -> None:
        """Add the steps.

        ``terms`` are the operands of ``term``, and ``walk`` is how it finds its way through them. Rows
        without a term are accumulated to only with ``every_row``. ``cleared``: the caller already zeroed the
        arrivals. ``filled``: it zeroed so many of the last rows. ``only_long``: it sums the short rows.
        """
        (rows, columns), tuning = self.tile, self.tuning
        if self.windows and not cleared:
            add_clear(steps, self.arrivals, tuning.lanes)
        slot_blocks = -(-2 * self.windows // rows)
        programs = min(slot_blocks, tuning.long_programs) if bounds.blocks else slot_blocks
        sparse = self.sparse and bounds.kind is SPANS
        owned = 0 if only_long else -(-(self.terms if sparse else self.rows) // rows)
        parts = tuning.parts if sparse and owned * self.tiles >= tuning.parted else 1
        owners = -(-owned // parts)
        fill_rows = 1
        if sparse:
            fill_rows = min(max(tuning.fill_bytes // (columns * self.itemsize), 1), tuning.most_rows)
        fills = -(-(self.rows - filled) // fill_rows) if sparse and not accumulate else 0
        steps.add(
            sum_segments,
            (programs + owners + fills) * self.tiles,
            out=out.at,
            **terms._asdict(),
            keys=bounds.keys,
            bounds=bounds.at,
            maxima=bounds.maxima,
            partials=self.partials,
            counts=self.counts,
            arrivals=self.arrivals,
            rows=self.rows,
            count=self.terms,
            length=bounds.length,
            windows=self.windows,
            slot_blocks=slot_blocks,
            programs=programs,
            owners=owners,
            fills=fills,
            blocks=bounds.blocks,
            columns=self.columns,
            tiles=self.tiles,
            out_sizes=out.sizes,
            out_strides=out.strides,
            **walk._asdict(),
            TERM=term,
            BOUNDS=bounds.kind,
            KEY_STEP=bounds.key_step,
            SHORT=self.short,
            SPARSE=sparse,
            ACCUMULATE=accumulate,
            EVERY_ROW=every_row,
            BY_COUNT=self.by_count,
            COMPUTE=tl.float64 if self.compute == torch.float64 else tl.float32,
            ROWS=rows,
            COLUMNS=columns,
            PARTS=parts,
            FILL_ROWS=fill_rows,
            UNROLL=tuning.unroll,
            num_warps=tuning.warps,
        )


def add_clear(steps: Steps, counts: Region, lanes: int) -> None:
    """Add the step that zeroes a region."""
    steps.add(
        clear, -(-counts.count // lanes), counts=counts, count=counts.count, TILE=lanes, num_warps=WARPS
    )


class SegmentSum(IndexedKernel[IndexedDescriptor]):
    """Order, then sum; for every plan that sums its terms by row."""

    def __init__(self, desc: IndexedDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        self.order = Order(layout, device, desc.count, desc.rows)
        self.sorted_by = self.order.sorted_by
        self.variant = f"sorted by {self.sorted_by or 'merging'}"
        self.summing = Summing(
            layout, device, desc.count, desc.rows, desc.columns, desc.dtype, desc.count, desc.by_count
        )
        self.set_workspace(layout)

    def compile(self) -> None:
        self.prepare(DescribedSum.of(self.desc))

    def prepare(self, args: SummingArgs) -> Launch[SummingArgs]:
        desc, order = self.desc, self.order
        out, terms, indices = args.operands()
        out_name, terms_name, indices_name = operand_names(type(args))
        walk = loops(desc.shape, indices.stride(), terms.stride())
        steps = Steps(self.device, args)
        blank, filled = None, 0
        if self.summing.sparse and not args.accumulate and out.is_contiguous():
            filled = min(order.blank_bytes // max(desc.columns * out.itemsize, 1), desc.rows)
        if filled * self.summing.tuning.worth_filling >= desc.rows:
            blank = Blank(out_name, (desc.rows - filled) * desc.columns, filled * desc.columns, out.itemsize)
        else:
            filled = 0
        order.add_steps(steps, indices_name, walk, desc.padding, self.summing.arrivals, blank)
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
    """The sizes and strides of the terms, columns last; ``walk`` has their strides second."""
    return Walk((*walk.sizes, columns), (*walk.strides[1], terms.stride(-1)))
