"""Counting sort of indices by row, in Triton, for indices with few per row.

An atomic counter per row gives each index its arrival number, and a prefix sum over the rows gives the start
of each row. That makes a list of each row's places (positions in the flattened indices), in order of arrival,
which differs from run to run. Then each place moves to its rank: the number of smaller places in its list. So
the result does not depend on the order of arrival.

For long rows, comparing all places of a list would take too long. For these rows the indices are scanned in
order, in stretches: one launch counts the matches of each stretch, and the next stores them after those of
the stretches before. If there are many indices per row on average, torch's radix sort is faster and is used.

Many indices of one row contend for its counter; ``MergeSort`` does not have this problem.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import StepOperand, Steps
from holdfast.backends.tuning import Tuned, constants_of
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.gpu_merge_sort import find_starts, load_row, load_rows, power_below, sort

CHUNK = tl.constexpr(indexed.CHUNK)
#: Positions in ``tallies``: long rows, skipped indices, and two counters for the caller; then their number.
LONG_ROWS, SKIPPED, CALLER, TALLIES = (tl.constexpr(number) for number in (0, 1, 2, 4))


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``CountingSort``."""

    #: Indices per program, one per thread, and rows per program of the prefix sum.
    tile: int
    block: int
    #: For long rows: indices scanned at a time, maximum number of stretches, maximum number of programs.
    stride: int
    stretches: int
    programs: int
    #: Elements per program before and after torch.sort.
    lanes: int
    #: With more indices per row than this on average, torch.sort is used.
    dense: int = 64
    #: Rows with more places than this are long.
    long: int = 1024
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(tile=128, block=4096, stride=4096, stretches=64, programs=528, lanes=2048),
    interpreter=Tuning(tile=16384, block=16384, stride=16384, stretches=2, programs=4, lanes=65536),
)


@triton.jit(do_not_specialize=["rows", "windows"])
def clear(starts, keys, tallies, rows, windows, TILE: tl.constexpr):
    """Zero ``starts`` and ``tallies``, and set ``keys`` to ``rows``, which means no row."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(starts + number, tl.zeros([TILE], tl.int32), mask=number <= rows)
    tl.store(keys + number, rows + tl.zeros([TILE], tl.int32), mask=number < windows)
    tl.store(tallies + number, tl.zeros([TILE], tl.int32), mask=number < TALLIES)


@triton.jit
def count_row(counts, arrivals, tallies, place, row, inside, rows, WITH_SKIPPED: tl.constexpr):
    """Store the arrival number of each index in its row; WITH_SKIPPED: also among the skipped indices."""
    kept = row < rows
    arrival = tl.atomic_add(counts + row, tl.full(row.shape, 1, tl.int32), mask=kept, sem="relaxed")
    if WITH_SKIPPED:
        skipped = (inside & ~kept).to(tl.int32)
        before = tl.atomic_add(tallies + SKIPPED, tl.sum(skipped, 0), sem="relaxed")
        arrival = tl.where(kept, arrival, before + tl.cumsum(skipped, 0) - skipped)
    tl.store(arrivals + place, arrival, mask=inside)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def count_rows(
    counts, arrivals, tallies, indices, count, rows, padding, sizes, strides, WITH_SKIPPED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """``count_row`` for TILE indices."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = load_row(indices, place, place < count, rows, padding, sizes, strides)
    count_row(counts, arrivals, tallies, place, row, place < count, rows, WITH_SKIPPED)


@triton.jit(do_not_specialize=["rows"])
def sum_counts(sums, counts, rows, BLOCK: tl.constexpr):
    """Store the number of indices of a block of rows."""
    follow()
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + block, tl.sum(tl.load(counts + row, mask=row < rows, other=0), 0))


@triton.jit
def sum_before(sums, first, count, BLOCK: tl.constexpr):
    """Sum of ``count`` elements of ``sums`` from ``first``."""
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, count, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + first + number, mask=number < count, other=0)
    return tl.sum(total, 0)


@triton.jit
def longest(maxima, blocks):
    """Maximum number of places of a row; 2**31 - 1 if it is unknown, with ``blocks == 0``."""
    most = tl.zeros([1024], tl.int32)
    for begin in range(0, blocks, 1024):
        number = begin + tl.arange(0, 1024)
        most = tl.maximum(most, tl.load(maxima + number, mask=number < blocks, other=0).to(tl.int32))
    return tl.where(blocks > 0, tl.max(most, 0), 2**31 - 1)


@triton.jit(do_not_specialize=["rows"])
def start_rows(starts, maxima, sums, tallies, long_rows, rows, LONG: tl.constexpr, BLOCK: tl.constexpr):
    """Replace the counts in ``starts`` by the start of each row; the last entry is the end of the last row.

    Also store the block's maximum count, and list its long rows.
    """
    follow()
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    amount = tl.load(starts + row, mask=row < rows, other=0)
    start = sum_before(sums, 0, block, 1024) + tl.cumsum(amount, 0) - amount
    tl.store(starts + row, start, mask=row <= rows)
    tl.store(maxima + block, tl.max(amount, 0))
    is_long = amount > LONG
    if tl.max(is_long.to(tl.int32), 0) > 0:
        ones = tl.full([BLOCK], 1, tl.int32)
        number = tl.atomic_add(tallies + LONG_ROWS + tl.zeros_like(row), ones, mask=is_long)
        tl.store(long_rows + number, row, mask=is_long)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def list_places(
    listed, places, ranks, starts, arrivals, indices, count, rows, padding, sizes, strides,
    WITH_SKIPPED: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store each place in the list of its row. WITH_SKIPPED: skipped places come last, in any order."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < count
    row = load_row(indices, place, inside, rows, padding, sizes, strides)
    kept = row < rows
    arrival = tl.load(arrivals + place, mask=inside, other=0)
    tl.store(listed + tl.load(starts + row, mask=kept, other=0) + arrival, place, mask=kept)
    if WITH_SKIPPED:
        at = count - 1 - arrival
        tl.store(places + at, place, mask=inside & ~kept)
        if RANKS:
            tl.store(ranks + place, at, mask=inside & ~kept)


@triton.jit
def store_place(places, ranks, keys, at, place, row, mask, RANKS: tl.constexpr):
    """Store a place at its position in sorted order; store the row of every 32nd position in ``keys``."""
    tl.store(places + at, place, mask=mask)
    tl.store(keys + at // CHUNK, row, mask=mask & (at % CHUNK == 0))
    if RANKS:
        tl.store(ranks + place, at, mask=mask)


@triton.jit(do_not_specialize=["rows", "padding"])
def order_lists(
    places, ranks, keys, listed, starts, indices, rows, padding, sizes, strides,
    RANKS: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Move each place of a list to its rank, unless the row is long."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < tl.load(starts + rows)
    place = tl.load(listed + number, mask=inside, other=0)
    row = load_row(indices, place, inside, rows, padding, sizes, strides)
    start = tl.load(starts + row, mask=inside, other=0)
    amount = tl.load(starts + row + 1, mask=inside, other=0) - start
    inside = inside & (amount <= LONG)
    compared = tl.where(inside & (amount > 1), amount, 0)
    rank = tl.zeros([TILE], tl.int32)
    for begin in range(0, tl.max(compared, 0), 4):
        for u in tl.static_range(4):
            other = tl.load(listed + start + (begin + u), mask=begin + u < compared, other=2**31 - 1)
            rank += (other < place).to(tl.int32)
    store_place(places, ranks, keys, start + rank, place, row, inside, RANKS)


@triton.jit(do_not_specialize=["count", "rows", "padding", "stretches", "length"])
def order_long(
    places, ranks, keys, starts, tallies, long_rows, found, indices,
    count, rows, padding, stretches, length, programs, sizes, strides,
    PUT: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """For each long row and each stretch of the indices: count the matches, or with PUT store them."""
    follow()
    tasks = tl.load(tallies + LONG_ROWS) * stretches
    for task in range(tl.program_id(0), tasks, programs):
        row = tl.load(long_rows + task // stretches)
        stretch = task % stretches
        total = tl.zeros([STRIDE], tl.int32)
        at = 0
        if PUT:
            at = tl.load(starts + row) + sum_before(found, task - stretch, stretch, 64)
        for begin in range(stretch * length, tl.minimum(stretch * length + length, count), STRIDE):
            place = begin + tl.arange(0, STRIDE)
            match = load_row(indices, place, place < count, rows, padding, sizes, strides) == row
            if PUT:
                before = tl.cumsum(match.to(tl.int32), 0) - 1
                store_place(places, ranks, keys, at + before, place, row + tl.zeros_like(place), match, RANKS)
                at += tl.sum(match.to(tl.int32), 0)
            else:
                total += match.to(tl.int32)
        if not PUT:
            tl.store(found + task, tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"])
def rank_places(ranks, places, count, TILE: tl.constexpr):
    """Store the position of each place in sorted order."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.load(places + number, mask=number < count, other=0)
    tl.store(ranks + place, number, mask=number < count)


class CountingSort:
    """Workspace regions and launches that sort ``count`` indices by row.

    ``starts`` has ``rows + 1`` entries. ``places`` has one per index; if ``whole``, those of skipped indices
    come last, from ``starts[rows]``, and ``ranks`` holds the position of each place in sorted order. ``keys``
    are the rows of all places (``key_step`` 32) or of every 32nd (``key_step`` 1). The maximum of the
    ``blocks`` elements of ``maxima`` is the maximum number of places of a row; torch.sort has none.
    """

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, count: int, rows: int, *, whole: bool = False
    ) -> None:
        self.count, self.rows, self.whole = count, rows, whole
        self.tuning = tuning = TUNING.on(device)
        self.sorts = count > tuning.dense * rows
        self.starts = layout.take(rows + 1, torch.int32)
        self.ranks = layout.take(count if whole else 0, torch.int32)
        self.tallies = layout.take(TALLIES.value, torch.int32)
        self.windows = 0 if self.sorts else -(-count // CHUNK.value)
        if self.sorts:
            self.key_step, self.blocks, self.maxima = CHUNK.value, 0, self.starts
            self.keys, self.unsorted = (layout.take(count, torch.int32) for _ in range(2))
            self.places = layout.take(count, torch.int64)
            return
        self.key_step = 1
        self.blocks = rows // tuning.block + 1
        self.length = -(-count // (tuning.stretches * tuning.stride)) * tuning.stride
        self.stretches = -(-count // max(self.length, 1))
        most_long = count // (tuning.long + 1)
        self.keys = layout.take(self.windows, torch.int32)
        self.places, self.arrivals, self.listed = (layout.take(count, torch.int32) for _ in range(3))
        self.sums, self.maxima = (layout.take(self.blocks, torch.int32) for _ in range(2))
        self.long_rows = layout.take(most_long, torch.int32)
        self.found = layout.take(most_long * self.stretches, torch.int32)

    def add_clear(self, steps: Steps) -> None:
        """Add the launch of ``clear``."""
        rows, tile = -1 if self.sorts else self.rows, self.tuning.block
        programs = -(-max(rows + 1, self.windows, TALLIES.value) // tile)
        steps.add(clear, programs, self, rows=rows, TILE=tile, num_warps=self.tuning.warps)

    def add_steps(
        self, steps: Steps, indices: StepOperand, walk: Space, padding: int = -1, *, counted: bool = False
    ) -> None:
        """Add the launches; ``walk`` has the strides of the indices first.

        ``counted``: the caller adds ``add_clear`` and a launch that calls ``count_row`` before.
        """
        tuning, programs = self.tuning, -(-self.count // self.tuning.tile)
        loaded = {
            "indices": indices,
            "padding": padding,
            "sizes": (*walk.sizes, 1),
            "strides": (*walk.strides[0], 0),
        }
        constants = constants_of(tuning) | {"WITH_SKIPPED": self.whole, "RANKS": self.whole}

        def add(kernel: Any, programs: int, /, **parameters: Any) -> None:
            steps.add(kernel, programs, self, loaded, constants, num_warps=tuning.warps, **parameters)

        if self.sorts:
            add(load_rows, -(-self.count // tuning.lanes), keys=self.unsorted, TILE=tuning.lanes)
            steps.call(sort, self.unsorted, self.keys, self.places)
            step, starts = power_below(self.count), -(-(self.rows + 1) // tuning.lanes)
            add(find_starts, starts, step=step, TILE=tuning.lanes)
            if self.whole:
                add(rank_places, programs)
            return
        if not counted:
            self.add_clear(steps)
        if not self.count:
            return
        if not counted:
            add(count_rows, programs, counts=self.starts)
        add(sum_counts, self.blocks, counts=self.starts)
        add(start_rows, self.blocks)
        add(list_places, programs)
        add(order_lists, programs)
        if self.long_rows.count:
            # Count the places of long rows in each stretch, then store them.
            programs = min(self.found.count, tuning.programs)
            for put in (False, True):
                add(order_long, programs, programs=programs, PUT=put)
