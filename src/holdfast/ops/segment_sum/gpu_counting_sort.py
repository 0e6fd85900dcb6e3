"""Indices in order where most rows have few, in Triton: without a sort.

Rows are counted: an atomic counter gives each index a number in its row, and a running sum over the rows
tells where each begins. That is a list of every row's places, in the order in which they happened to arrive.
So each place is put where it belongs: its rank is the number of lesser ones in the list. What arrives when
differs from run to run; what comes out does not.

The lists of LONG rows would take too long to compare. For those the indices are looked through from the first
to the last, in stretches: one launch counts, and the next one knows what comes before its stretch. Where most
rows would be long, because there are few of them, torch's radix sort is faster, and takes over.

Indices that crowd at a few rows wait for one another's counters; ``order`` sorts them without.
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
from holdfast.backends.tuning import Tuned
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.gpu_merge_sort import (
    find_starts,
    load_row,
    load_rows,
    power_below,
    sort,
)

CHUNK = tl.constexpr(indexed.CHUNK)
#: What is counted on the way: long rows, skipped indices, and from SPARE on two more things for whoever wants
#: the order.
LONG_ROWS, SKIPPED, SPARE, TALLIES = (tl.constexpr(number) for number in (0, 1, 2, 4))


@dataclass(frozen=True)
class Tuning:
    """The tuning of ``Counting``."""

    #: Indices of a program, one for each thread, and rows of one that counts through them.
    tile: int
    block: int
    #: Of long rows: indices that are looked through at a time, the most stretches, and the most programs.
    stride: int
    stretches: int
    programs: int
    #: Lanes of a program before and after a sort.
    lanes: int
    #: From so many indices to a row on, on average, torch.sort is used.
    dense: int = 64
    #: A list with more places than this is not compared.
    long: int = 1024
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(tile=128, block=4096, stride=4096, stretches=64, programs=528, lanes=2048),
    interpreter=Tuning(tile=16384, block=16384, stride=16384, stretches=2, programs=4, lanes=65536),
)


@triton.jit(do_not_specialize=["rows", "windows"])
def clear(starts, keys, tallies, rows, windows, TILE: tl.constexpr):
    """No index counted, no window owned, nothing in the tallies."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(starts + number, tl.zeros([TILE], tl.int32), mask=number <= rows)
    tl.store(keys + number, rows + tl.zeros([TILE], tl.int32), mask=number < windows)
    tl.store(tallies + number, tl.zeros([TILE], tl.int32), mask=number < TALLIES)


@triton.jit
def count_row(counts, arrivals, tallies, place, row, inside, rows, REST: tl.constexpr):
    """Each index gets a number in its row; skipped ones, if the REST is wanted, among themselves."""
    kept = row < rows
    arrival = tl.atomic_add(counts + row, tl.full(row.shape, 1, tl.int32), mask=kept, sem="relaxed")
    if REST:
        skipped = (inside & ~kept).to(tl.int32)
        before = tl.atomic_add(tallies + SKIPPED, tl.sum(skipped, 0), sem="relaxed")
        arrival = tl.where(kept, arrival, before + tl.cumsum(skipped, 0) - skipped)
    tl.store(arrivals + place, arrival, mask=inside)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def count_rows(
    counts,
    arrivals,
    tallies,
    indices,
    count,
    rows,
    padding,
    sizes,
    strides,
    REST: tl.constexpr,
    TILE: tl.constexpr,
):
    """``count_row`` for every index."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = load_row(indices, place, place < count, rows, padding, sizes, strides)
    count_row(counts, arrivals, tallies, place, row, place < count, rows, REST)


@triton.jit(do_not_specialize=["rows"])
def sum_counts(sums, counts, rows, BLOCK: tl.constexpr):
    """The indices of each block of rows."""
    follow()
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + block, tl.sum(tl.load(counts + row, mask=row < rows, other=0), 0))


@triton.jit
def sum_before(sums, first, count, BLOCK: tl.constexpr):
    """The sum of ``count`` numbers from ``first`` on."""
    total = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, count, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + first + number, mask=number < count, other=0)
    return tl.sum(total, 0)


@triton.jit
def longest(maxima, blocks):
    """The most places that a row has; if nobody knows, more than that."""
    most = tl.zeros([1024], tl.int32)
    for begin in range(0, blocks, 1024):
        number = begin + tl.arange(0, 1024)
        most = tl.maximum(most, tl.load(maxima + number, mask=number < blocks, other=0).to(tl.int32))
    return tl.where(blocks > 0, tl.max(most, 0), 2**31 - 1)


@triton.jit(do_not_specialize=["rows"])
def start_rows(starts, maxima, sums, tallies, long_rows, rows, LONG: tl.constexpr, BLOCK: tl.constexpr):
    """Where each row begins, in place of its count, and the most that a row of the block has.

    The last entry is where the rows that count end.
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
    REST: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every place into the list of its row. The REST are put last, in any order."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < count
    row = load_row(indices, place, inside, rows, padding, sizes, strides)
    kept = row < rows
    arrival = tl.load(arrivals + place, mask=inside, other=0)
    tl.store(listed + tl.load(starts + row, mask=kept, other=0) + arrival, place, mask=kept)
    if REST:
        at = count - 1 - arrival
        tl.store(places + at, place, mask=inside & ~kept)
        if RANKS:
            tl.store(ranks + place, at, mask=inside & ~kept)


@triton.jit
def put_place(places, ranks, keys, at, place, row, mask, RANKS: tl.constexpr):
    """A place where it belongs. The rows of every 32nd place are noted: its window's."""
    tl.store(places + at, place, mask=mask)
    tl.store(keys + at // CHUNK, row, mask=mask & (at % CHUNK == 0))
    if RANKS:
        tl.store(ranks + place, at, mask=mask)


@triton.jit(do_not_specialize=["rows", "padding"])
def order_lists(
    places, ranks, keys, listed, starts, indices, rows, padding, sizes, strides,
    RANKS: tl.constexpr, LONG: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every place of a list to its rank, if the list is not long."""
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
    put_place(places, ranks, keys, start + rank, place, row, inside, RANKS)


@triton.jit(do_not_specialize=["count", "rows", "padding", "stretches", "length"])
def order_long(
    places, ranks, keys, starts, tallies, long_rows, found, indices,
    count, rows, padding, stretches, length, programs, sizes, strides,
    PUT: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """For each long row and each stretch of the indices: how many there are, or then where they go."""
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
                put_place(places, ranks, keys, at + before, place, row + tl.zeros_like(place), match, RANKS)
                at += tl.sum(match.to(tl.int32), 0)
            else:
                total += match.to(tl.int32)
        if not PUT:
            tl.store(found + task, tl.sum(total, 0))


@triton.jit(do_not_specialize=["count"])
def rank_places(ranks, places, count, TILE: tl.constexpr):
    """Where each place is in the order."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.load(places + number, mask=number < count, other=0)
    tl.store(ranks + place, number, mask=number < count)


class Counting:
    """What it takes to order ``count`` indices of ``rows`` rows: regions of the workspace, and steps.

    ``starts`` has an entry more than there are rows. ``places`` has one for each index; if ``whole``, those
    of skipped indices come last, after the last entry of ``starts``, and ``ranks`` is where each place is in
    the order. ``keys`` are the rows of all places, or only of every 32nd; ``key_step`` says which. The
    largest of the ``maxima`` is the most places that a row has; there are as many as ``blocks``, none after
    a sort.
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
        """Make ready to count."""
        rows, tile = -1 if self.sorts else self.rows, self.tuning.block
        steps.add(
            clear,
            -(-max(rows + 1, self.windows, TALLIES.value) // tile),
            starts=self.starts,
            keys=self.keys,
            tallies=self.tallies,
            rows=rows,
            windows=self.windows,
            TILE=tile,
            num_warps=self.tuning.warps,
        )

    def add_steps(
        self, steps: Steps, indices: StepOperand, walk: Space, padding: int = -1, *, counted: bool = False
    ) -> None:
        """Add the steps; ``walk`` has the strides of the indices first.

        They are ``counted`` if a step between ``add_clear`` and these does it, by ``count_row``.
        """
        count, rows, tuning = self.count, self.rows, self.tuning
        looked_up: dict[str, Any] = {
            "indices": indices,
            "rows": rows,
            "padding": padding,
            "sizes": (*walk.sizes, 1),
            "strides": (*walk.strides[0], 0),
        }
        tile: dict[str, Any] = {"TILE": tuning.tile}
        warps: dict[str, Any] = {"num_warps": tuning.warps}
        places: dict[str, Any]
        programs = -(-count // tuning.tile)
        if self.sorts:
            self._add_sort(steps, looked_up)
            if self.whole:
                places = {"ranks": self.ranks, "places": self.places}
                steps.add(rank_places, programs, **places, count=count, **tile, **warps)
            return
        if not counted:
            self.add_clear(steps)
        if not count:
            return
        if not counted:
            steps.add(
                count_rows,
                programs,
                counts=self.starts,
                arrivals=self.arrivals,
                tallies=self.tallies,
                count=count,
                **looked_up,
                REST=self.whole,
                **tile,
                **warps,
            )
        block: dict[str, Any] = {"rows": rows, "BLOCK": tuning.block}
        steps.add(sum_counts, self.blocks, sums=self.sums, counts=self.starts, **block, **warps)
        steps.add(
            start_rows,
            self.blocks,
            starts=self.starts,
            maxima=self.maxima,
            sums=self.sums,
            tallies=self.tallies,
            long_rows=self.long_rows,
            LONG=tuning.long,
            **block,
            **warps,
        )
        places = {"places": self.places, "ranks": self.ranks, "starts": self.starts, "listed": self.listed}
        steps.add(
            list_places,
            programs,
            **places,
            arrivals=self.arrivals,
            count=count,
            **looked_up,
            REST=self.whole,
            RANKS=self.whole,
            **tile,
            **warps,
        )
        steps.add(
            order_lists,
            programs,
            **places,
            keys=self.keys,
            **looked_up,
            RANKS=self.whole,
            LONG=tuning.long,
            **tile,
            **warps,
        )
        if self.long_rows.count:
            self._add_long(steps, looked_up)

    def _add_long(self, steps: Steps, looked_up: dict[str, Any]) -> None:
        """Count the places of long rows in each stretch, then put them where they belong."""
        programs = min(self.found.count, self.tuning.programs)
        for put in (False, True):
            steps.add(
                order_long,
                programs,
                places=self.places,
                ranks=self.ranks,
                keys=self.keys,
                starts=self.starts,
                tallies=self.tallies,
                long_rows=self.long_rows,
                found=self.found,
                count=self.count,
                **looked_up,
                stretches=self.stretches,
                length=self.length,
                programs=programs,
                PUT=put,
                RANKS=self.whole,
                STRIDE=self.tuning.stride,
                num_warps=self.tuning.warps,
            )

    def _add_sort(self, steps: Steps, looked_up: dict[str, Any]) -> None:
        count, rows, lanes = self.count, self.rows, self.tuning.lanes
        tile: dict[str, Any] = {"TILE": lanes, "num_warps": self.tuning.warps}
        steps.add(load_rows, -(-count // lanes), keys=self.unsorted, count=count, **looked_up, **tile)
        steps.call(sort, self.unsorted, self.keys, self.places)
        steps.add(
            find_starts,
            -(-(rows + 1) // lanes),
            starts=self.starts,
            keys=self.keys,
            count=count,
            rows=rows,
            step=power_below(count),
            **tile,
        )
