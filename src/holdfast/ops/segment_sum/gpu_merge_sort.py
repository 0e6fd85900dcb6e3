"""Merge sort of indices by row, in Triton: sorted places, and where each row's places begin and end.

A place is a position in the flattened indices. Row and place are packed into one word, so words are distinct
and any sort of them is stable. Within a block, a word's rank is the number of smaller words in the block.
Then several sorted runs are merged at a time: a word's rank is its position in its own run plus the number of
smaller words in each other run, found by binary search. Programs are independent and use only the workspace.
Beyond ``max_merged`` indices torch's radix sort is faster.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import StepOperand, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.ops.segment_sum import indexed


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``MergeSort``."""

    #: Words per program of ``sort_blocks``; words compared with them at a time, and times per iteration.
    tile: int
    side: int
    sides: int
    #: Elements per program that merges or loads rows, and per program of ``find_spans``.
    lanes: int
    span_lanes: int
    #: Elements per program that zeroes spans.
    zero_tile: int
    #: More indices than this are sorted by torch.sort.
    max_merged: int = 2**17
    #: Words per block of ``sort_blocks``, and maximum number of runs merged at a time.
    block: int = 1024
    most_ways: int = 32
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(tile=32, side=32, sides=8, lanes=2048, span_lanes=512, zero_tile=4096),
    interpreter=Tuning(tile=256, side=1024, sides=1, lanes=65536, span_lanes=65536, zero_tile=65536),
)


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
    """Zero one tile of ``count`` elements."""
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.zeros([TILE], out.dtype.element_ty), mask=at < count)


@triton.jit
def load_row(indices, place, inside, rows, padding, sizes, strides):
    """Row of each index; ``rows``, which sorts last, if the index is padding or out of range."""
    index = tl.load(indices + row_offsets(place, sizes, strides), mask=inside, other=0)
    kept = inside & (index >= 0) & (index < rows) & (index != padding)
    return tl.where(kept, index, rows).to(tl.int32)


@triton.jit
def store_word(words, keys, places, at, word, inside, shift, LAST: tl.constexpr):
    """Store a word at its rank; after the LAST pass, store its row and place separately."""
    if LAST:
        tl.store(keys + at, (word >> shift).to(tl.int32), mask=inside)
        tl.store(places + at, (word - ((word >> shift) << shift)).to(tl.int32), mask=inside)
    else:
        tl.store(words + at, word, mask=inside)


@triton.jit
def load_word(indices, place, count, rows, padding, sizes, strides, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Row of each index, and its place in its block, in one word; the largest word past the end."""
    inside = place < count
    row = load_row(indices, place, inside, rows, padding, sizes, strides)
    word = row.to(WORD) * BLOCK + place % BLOCK
    return tl.where(inside, word, 2**31 - 1 if tl.int32 == WORD else 2**63 - 1)


@triton.jit(do_not_specialize=["count", "rows", "padding", "shift", "programs"])
def sort_blocks(
    words, keys, places, spans, indices,
    count, rows, padding, shift, programs, span_count, sizes, strides,
    BLOCK_WORD: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SIDE: tl.constexpr, SIDES: tl.constexpr, LAST: tl.constexpr, ZERO_TILE: tl.constexpr,
):  # fmt: skip
    """Sort each block by counting smaller words. Further programs zero the spans."""
    follow()
    program = tl.program_id(0)
    if program < programs:
        place = program * TILE + tl.arange(0, TILE)
        block = program * TILE // BLOCK * BLOCK
        word = load_word(indices, place, count, rows, padding, sizes, strides, BLOCK_WORD, BLOCK)
        less = tl.zeros([TILE, SIDE], tl.int32)
        for begin in range(block, tl.minimum(block + BLOCK, count), SIDE * SIDES):
            for side in tl.static_range(SIDES):
                at = begin + side * SIDE + tl.arange(0, SIDE)
                other = load_word(indices, at, count, rows, padding, sizes, strides, BLOCK_WORD, BLOCK)
                less += (other[None, :] < word[:, None]).to(tl.int32)
        word = ((word // BLOCK).to(WORD) << shift) | place.to(WORD)
        store_word(words, keys, places, block + tl.sum(less, 1), word, place < count, shift, LAST)
    else:
        store_zeros(spans, program - programs, span_count, ZERO_TILE)


@triton.jit(do_not_specialize=["count", "run", "shift"])
def merge_runs(
    merged, keys, places, words, count, run, shift, TILE: tl.constexpr, WAYS: tl.constexpr, LAST: tl.constexpr
):
    """Merge a tile of words, all in one run, into WAYS neighbouring runs of ``run`` words each."""
    follow()
    begin = tl.program_id(0) * TILE
    place = begin + tl.arange(0, TILE)
    word = tl.load(words + place, mask=place < count, other=0)
    own = begin // run
    group = own // WAYS * WAYS
    # Neighbouring threads search one run for neighbouring words, and so load neighbouring addresses.
    other = group + tl.arange(0, WAYS)
    begin = (other * run)[:, None]
    size = tl.where(other == own, 0, tl.minimum(tl.maximum(count - other * run, 0), run))[:, None]
    less = tl.zeros([WAYS, TILE], tl.int32)
    step = run
    while step > 0:
        probe = less + step
        exists = probe <= size
        there = tl.load(words + (begin + probe - 1), mask=exists, other=0)
        less = tl.where(exists & (there < word[None, :]), probe, less)
        step = step // 2
    rank = place - own * run + tl.sum(less, 0)
    store_word(merged, keys, places, group * run + rank, word, place < count, shift, LAST)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def load_rows(keys, indices, count, rows, padding, sizes, strides, TILE: tl.constexpr):
    """Store the row of each index, for torch.sort."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = load_row(indices, place, place < count, rows, padding, sizes, strides)
    tl.store(keys + place, row, mask=place < count)


@triton.jit(do_not_specialize=["count", "rows", "padding", "programs"])
def load_rows_and_zero(
    keys, spans, indices, count, rows, padding, programs, span_count, sizes, strides,
    TILE: tl.constexpr, ZERO_TILE: tl.constexpr,
):  # fmt: skip
    """``load_rows``. Further programs zero the spans."""
    follow()
    if tl.program_id(0) < programs:
        load_rows(keys, indices, count, rows, padding, sizes, strides, TILE)
    else:
        store_zeros(spans, tl.program_id(0) - programs, span_count, ZERO_TILE)


@triton.jit(do_not_specialize=["count", "rows", "counter_count"])
def find_spans(spans, counters, keys, count, rows, counter_count, TILE: tl.constexpr):
    """Store where each row with places begins and ends in the sorted keys, and zero the counters."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(keys + place, mask=place < count, other=rows)
    before = tl.load(keys + place - 1, mask=(place > 0) & (place < count), other=-1)
    after = tl.load(keys + place + 1, mask=place + 1 < count, other=rows + 1)
    at = spans + row.to(tl.int64) * 2
    tl.store(at, place, mask=(row < rows) & (row != before))
    tl.store(at + 1, place + 1, mask=(row < rows) & (row != after))
    tl.store(counters + place, tl.zeros([TILE], tl.int32), mask=place < counter_count)


def power_below(count: int) -> int:
    """Largest power of two up to ``count``; 0 for 0."""
    return 1 << (count.bit_length() - 1) if count > 0 else 0


def sort(keys: torch.Tensor, ordered: torch.Tensor, places: torch.Tensor) -> None:
    torch.sort(keys, stable=True, out=(ordered, places))


class MergeSort:
    """Workspace regions and launches that sort ``count`` indices by row.

    ``places`` has one place per index, in sorted order, those of skipped indices last. ``keys`` are their
    rows. ``spans[2 * row]`` and ``spans[2 * row + 1]`` are the begin and end of a row's places. If the row
    has none, they are zeros with ``every_row``, otherwise undefined.
    """

    key_step = indexed.CHUNK

    def __init__(self, layout: WorkspaceLayout, device: torch.device, count: int, rows: int) -> None:
        self.count, self.rows, self.tuning = count, rows, TUNING.on(device)
        self.merges = count <= self.tuning.max_merged
        self.sorted_by = "" if self.merges else "torch.sort"
        self.shift = max(count - 1, 0).bit_length()
        wide = (rows + 1) << self.shift > 2**31
        self.word, word = (tl.int64, torch.int64) if wide else (tl.int32, torch.int32)
        self.block_word = tl.int64 if (rows + 1) * self.tuning.block > 2**31 else tl.int32
        self.keys = layout.take(count, torch.int32)
        self.places = layout.take(count, torch.int32 if self.merges else torch.int64)
        # Triton specializes multiples of 16, and then zeroes whole vectors.
        self.spans = layout.take(-(-2 * rows // 16) * 16, torch.int32)
        self.words: tuple[Region, ...]
        if self.merges:
            ways = self._ways()
            self.words = tuple(layout.take(count, word) for _ in range(min(len(ways), 2)))
        else:
            self.words = (layout.take(count, torch.int32),)

    def _ways(self) -> list[int]:
        """Number of runs that each pass merges at a time: powers of two, in as few passes as possible."""
        doublings = (max(self.count - 1, 0) // self.tuning.block).bit_length()
        most = self.tuning.most_ways.bit_length() - 1
        passes = -(-doublings // most)
        return [2 ** ((doublings + i) // passes) for i in reversed(range(passes))]

    def add_steps(
        self,
        steps: Steps,
        indices: StepOperand,
        walk: Space,
        padding: int,
        counters: Region,
        *,
        every_row: bool,
    ) -> None:
        """Add the launches; ``walk`` has the strides of the indices first. They also zero ``counters``."""
        count, tuning, zero_tile = self.count, self.tuning, self.tuning.zero_tile
        loaded = {
            "indices": indices,
            "padding": padding,
            "sizes": (*walk.sizes, 1),
            "strides": (*walk.strides[0], 0),
        }
        programs = -(-count // (tuning.tile if self.merges else tuning.lanes))
        span_count = self.spans.count if every_row else 0
        zeroing = {"programs": programs, "span_count": span_count, "ZERO_TILE": zero_tile}
        first_programs = programs + -(-span_count // zero_tile)
        if self.merges:
            self._add_merges(steps, loaded, zeroing, first_programs)
        else:
            steps.add(
                load_rows_and_zero, first_programs, self, loaded, zeroing,
                keys=self.words[0], TILE=tuning.lanes, num_warps=tuning.warps,
            )  # fmt: skip
            steps.call(sort, self.words[0], self.keys, self.places)
        if count:
            steps.add(
                find_spans, -(-max(count, counters.count) // tuning.span_lanes), self,
                counters=counters, counter_count=counters.count, TILE=tuning.span_lanes,
                num_warps=tuning.warps,
            )  # fmt: skip

    def _add_merges(
        self, steps: Steps, loaded: Mapping[str, Any], zeroing: Mapping[str, Any], first_programs: int
    ) -> None:
        """Add the launches that sort blocks and merge them."""
        count, tuning, ways = self.count, self.tuning, self._ways()
        steps.add(
            sort_blocks, first_programs, self, loaded, zeroing,
            words=(*self.words, self.keys)[0], BLOCK_WORD=self.block_word, WORD=self.word, BLOCK=tuning.block,
            TILE=tuning.tile, SIDE=tuning.side, SIDES=tuning.sides, LAST=not ways, num_warps=tuning.warps,
        )  # fmt: skip
        run = tuning.block
        for number, way in enumerate(ways):
            source, target = self.words[number % 2], self.words[(number + 1) % len(self.words)]
            tile = min(tuning.lanes // way, max(tuning.block // 8, 1))
            steps.add(
                merge_runs, -(-count // tile), self, merged=target, words=source, run=run,
                TILE=tile, WAYS=way, LAST=number == len(ways) - 1, num_warps=tuning.warps,
            )  # fmt: skip
            run *= way
