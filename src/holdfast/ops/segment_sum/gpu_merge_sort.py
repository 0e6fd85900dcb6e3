"""Merge sort of indices by row, in Triton: sorted places, and where each row's places begin and end.

A place is a position in the flattened indices. Row and place are packed into one word, so words are distinct
and any sort of them is stable. Within a block, a word's rank is the number of smaller words in the block.
If there are several blocks, sorted runs are merged: a word's rank is its position in its own run plus the
number of smaller words in each other run, found by binary search. Programs are independent and use only the
workspace.
Beyond ``max_merged`` indices ``RadixSort`` is faster, and beyond ``max_radix`` torch's.

Sorting is bound by latency, so the same launches also zero memory that later kernels need.
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

from holdfast.backends.gpu import follow, report
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import StepOperand, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core import device_errors
from holdfast.core.device_errors import ErrorKind
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.gpu_index import Lines, ZeroFill, load_row, store_zeros
from holdfast.ops.segment_sum.gpu_radix_sort import RadixSort


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``MergeSort``."""

    #: Words per program of ``sort_blocks``, and words compared with them at a time.
    tile: int
    side: int
    #: Elements per program that merges or loads rows, and per program of ``find_spans``.
    lanes: int
    span_lanes: int
    #: Bytes per program that zeroes memory.
    zero_bytes: int
    #: Bytes that can be zeroed during a pass of sorting or merging, and during ``find_spans``.
    pass_bytes: int
    span_bytes: int
    #: More indices than this are sorted by ``RadixSort``; more than this by torch.sort, and more than
    #: ``max_radix_tall`` if the rows have more than two digits.
    max_merged: int
    max_radix: int
    max_radix_tall: int
    #: Words per block of ``sort_blocks``. Up to ``one_block`` words are one block, so that none are merged.
    block: int = 1024
    one_block: int = 4096
    #: Runs merged at a time in several passes, or at most in one pass.
    few_ways: int = 4
    most_ways: int = 32
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(
        tile=32, side=256, lanes=2048, span_lanes=512, zero_bytes=8192, pass_bytes=24 * 2**20,
        span_bytes=8 * 2**20, max_merged=2**13, max_radix=2**21, max_radix_tall=2**20,
    ),
    interpreter=Tuning(
        tile=256, side=512, lanes=65536, span_lanes=65536, zero_bytes=2**18, pass_bytes=4096, span_bytes=4096,
        max_merged=2048, max_radix=2**16, max_radix_tall=2**16, block=512, one_block=1024,
    ),
)  # fmt: skip


@triton.jit
def load_word(indices, place, count, rows, padding, shift, sizes, strides, lines, WORD: tl.constexpr):
    """Row and place packed into one word; the largest word past the end."""
    inside = place < count
    row = load_row(indices, place, inside, rows, padding, sizes, strides, lines)
    word = (row.to(WORD) << shift) | place.to(WORD)
    return tl.where(inside, word, 2**31 - 1 if tl.int32 == WORD else 2**63 - 1)


@triton.jit
def store_word(words, keys, places, at, word, inside, shift, LAST: tl.constexpr):
    """Store a word at its rank; after the LAST pass, store its row and place separately."""
    if LAST:
        tl.store(keys + at, (word >> shift).to(tl.int32), mask=inside)
        tl.store(places + at, (word - ((word >> shift) << shift)).to(tl.int32), mask=inside)
    else:
        tl.store(words + at, word, mask=inside)


@triton.jit(do_not_specialize=["count", "rows", "padding", "shift", "programs", "span_programs"])
def sort_blocks(
    words, keys, places, spans, fill, indices,
    count, rows, padding, shift, programs, span_programs, span_count, fill_start, fill_count,
    sizes, strides, lines,
    WORD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, LAST: tl.constexpr,
    ZERO_TILE: tl.constexpr,
):  # fmt: skip
    """Sort each block by counting smaller words. Further programs zero the spans and ``fill``."""
    follow()
    program = tl.program_id(0)
    if program < programs:
        place = program * TILE + tl.arange(0, TILE)
        block = program * TILE // BLOCK * BLOCK
        word = load_word(indices, place, count, rows, padding, shift, sizes, strides, lines, WORD)
        less = tl.zeros([TILE, SIDE], tl.int32)
        for begin in range(block, tl.minimum(block + BLOCK, count), SIDE):
            other = load_word(
                indices, begin + tl.arange(0, SIDE), count, rows, padding, shift, sizes, strides, lines, WORD
            )
            less += (other[None, :] < word[:, None]).to(tl.int32)
        store_word(words, keys, places, block + tl.sum(less, 1), word, place < count, shift, LAST)
    elif program < programs + span_programs:
        store_zeros(spans, program - programs, span_count, ZERO_TILE)
    else:
        store_zeros(fill + fill_start, program - programs - span_programs, fill_count, ZERO_TILE)


@triton.jit
def merge_tile(
    merged, keys, places, words, count, run, shift, TILE: tl.constexpr, WAYS: tl.constexpr, LAST: tl.constexpr
):
    """Merge a tile of words, all in one run, into WAYS neighbouring runs of ``run`` words each."""
    begin = tl.program_id(0) * TILE
    place = begin + tl.arange(0, TILE)
    word = tl.load(words + place, mask=place < count, other=0)
    own = begin // run
    group = own // WAYS * WAYS
    other = group + tl.arange(0, WAYS)
    begin = (other * run)[None, :]
    size = tl.where(other == own, 0, tl.minimum(tl.maximum(count - other * run, 0), run))[None, :]
    less = tl.zeros([TILE, WAYS], tl.int32)
    step = run
    while step > 0:
        probe = less + step
        exists = probe <= size
        there = tl.load(words + (begin + probe - 1), mask=exists, other=0)
        less = tl.where(exists & (there < word[:, None]), probe, less)
        step = step // 2
    rank = place - own * run + tl.sum(less, 1)
    store_word(merged, keys, places, group * run + rank, word, place < count, shift, LAST)


@triton.jit(do_not_specialize=["count", "run", "shift", "programs"])
def merge_runs(
    merged, keys, places, words, fill, count, run, shift, programs, fill_start, fill_count,
    TILE: tl.constexpr, WAYS: tl.constexpr, LAST: tl.constexpr, ZERO_TILE: tl.constexpr,
):  # fmt: skip
    """Merge runs. Further programs zero ``fill``."""
    follow()
    if tl.program_id(0) < programs:
        merge_tile(merged, keys, places, words, count, run, shift, TILE, WAYS, LAST)
    else:
        store_zeros(fill + fill_start, tl.program_id(0) - programs, fill_count, ZERO_TILE)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def load_rows(
    keys, indices, count, rows, padding, sizes, strides, lines, LOWEST: tl.constexpr, TILE: tl.constexpr
):
    """Store the row of each index plus LOWEST, for torch.sort."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = load_row(indices, place, place < count, rows, padding, sizes, strides, lines)
    tl.store(keys + place, (row + LOWEST).to(keys.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["count", "rows", "padding", "programs"])
def load_rows_and_zero(
    keys, spans, indices, count, rows, padding, programs, span_count, sizes, strides, lines,
    LOWEST: tl.constexpr, TILE: tl.constexpr, ZERO_TILE: tl.constexpr,
):  # fmt: skip
    """``load_rows``. Further programs zero the spans."""
    follow()
    if tl.program_id(0) < programs:
        load_rows(keys, indices, count, rows, padding, sizes, strides, lines, LOWEST, TILE)
    else:
        store_zeros(spans, tl.program_id(0) - programs, span_count, ZERO_TILE)


@triton.jit
def row_at(ordered, place, exists, other, LOWEST: tl.constexpr):
    """The row of a sorted key; ``other`` if the place does not exist."""
    return tl.where(exists, tl.load(ordered + place, mask=exists, other=0).to(tl.int32) - LOWEST, other)


@triton.jit(do_not_specialize=["count", "rows", "counter_count", "programs", "word"])
def find_spans(
    spans, counters, keys, ordered, fill, places, indices, reports,
    count, rows, counter_count, programs, fill_start, fill_count, word, sizes, strides,
    LOWEST: tl.constexpr, STORE: tl.constexpr, RAISE: tl.constexpr, TILE: tl.constexpr,
    ZERO_TILE: tl.constexpr,
):  # fmt: skip
    """If STORE, store where each row with places begins and ends in the sorted keys. Zero the counters.

    ``ordered`` are the sorted keys of torch.sort, rows plus LOWEST. If they are shorter than ``keys``, their
    rows are stored there. If RAISE, indices without a row are reported. Further programs zero ``fill``.
    """
    follow()
    if tl.program_id(0) < programs:
        place = tl.program_id(0) * TILE + tl.arange(0, TILE)
        row = row_at(ordered, place, place < count, rows, LOWEST)
        if ordered.dtype != keys.dtype:
            tl.store(keys + place, row, mask=place < count)
        if STORE:
            before = row_at(ordered, place - 1, (place > 0) & (place < count), -1, LOWEST)
            after = row_at(ordered, place + 1, place + 1 < count, rows + 1, LOWEST)
            at = spans + row.to(tl.int64) * 2
            tl.store(at, place, mask=(row < rows) & (row != before))
            tl.store(at + 1, place + 1, mask=(row < rows) & (row != after))
        tl.store(counters + place, tl.zeros([TILE], tl.int32), mask=place < counter_count)
        if RAISE:
            bad = (place < count) & (row >= rows)
            number = tl.load(places + place, mask=bad, other=0)
            index = tl.load(indices + row_offsets(number, sizes, strides), mask=bad, other=0)
            report(reports, word, number, index, bad)
    else:
        store_zeros(fill + fill_start, tl.program_id(0) - programs, fill_count, ZERO_TILE)


def shortest_key(rows: int) -> torch.dtype:
    """The shortest dtype that has a key for each row, and one for no row. torch.sort has a pass per byte."""
    return torch.uint8 if rows < 2**8 else torch.int16 if rows < 2**16 else torch.int32


def sort(keys: torch.Tensor, ordered: torch.Tensor, places: torch.Tensor) -> None:
    torch.sort(keys, stable=True, out=(ordered, places))


class MergeSort:
    """Workspace regions and launches that sort ``count`` indices by row.

    ``places`` has one place per index, in sorted order, those of skipped indices last. ``keys`` are their
    rows. ``spans[2 * row]`` and ``spans[2 * row + 1]`` are the begin and end of a row's places, zeros if it
    has none. A ``tall`` table has no spans: they would take longer than its sums.
    """

    key_step = indexed.CHUNK

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, count: int, rows: int, tall: bool = False
    ) -> None:
        self.count, self.rows, self.tall, self.tuning = count, rows, tall, TUNING.on(device)
        self.merges = count <= self.tuning.max_merged
        most = (
            self.tuning.max_radix if rows < 2**18 else min(self.tuning.max_radix, self.tuning.max_radix_tall)
        )
        self.sorted_by = "" if count <= max(most, self.tuning.max_merged) else "torch.sort"
        self.shift = max(count - 1, 0).bit_length()
        wide = (rows + 1) << self.shift > 2**31
        self.word, word = (tl.int64, torch.int64) if wide else (tl.int32, torch.int32)
        self.keys = layout.take(count, torch.int32)
        self.places = layout.take(count, torch.int64 if self.sorted_by else torch.int32)
        # Triton specializes multiples of 16, and then zeroes whole vectors.
        self.spans = layout.take(0 if tall else -(-2 * rows // 16) * 16, torch.int32)
        self.words: tuple[Region, ...] = ()
        #: The sorted keys: rows plus ``lowest``.
        self.ordered, self.lowest = self.keys, 0
        self.radix: RadixSort | None = None
        if self.merges:
            ways = self._ways()
            self.words = tuple(layout.take(count, word) for _ in range(min(len(ways), 2)))
        elif self.sorted_by:
            key = shortest_key(rows)
            self.words = (layout.take(count, key),)
            if key != torch.int32:
                self.ordered, self.lowest = layout.take(count, key), torch.iinfo(key).min
        else:
            self.radix = RadixSort(layout, device, count, rows, (self.keys, self.places))

    @property
    def variant(self) -> str:
        """How the indices are sorted."""
        return f"sorted by {self.sorted_by or ('merging' if self.merges else 'digits')}"

    @property
    def launches(self) -> int:
        """Number of launches that can zero memory, besides ``find_spans``."""
        return self.radix.passes if self.radix else 1 + len(self._ways()) if self.merges else 0

    @property
    def block(self) -> int:
        """Words per block of ``sort_blocks``."""
        tuning = self.tuning
        whole = int(triton.next_power_of_2(max(self.count, 1)))
        return max(whole, tuning.block) if whole <= tuning.one_block else tuning.block

    def _ways(self) -> list[int]:
        """Number of runs that each pass merges at a time."""
        few, most = self.tuning.few_ways, self.tuning.most_ways
        runs, ways = -(-self.count // self.block), []
        if 1 < runs <= most:
            return [most if runs > most // 2 else most // 2]
        while runs > 1:
            ways.append(few)
            runs = -(-runs // few)
        return ways

    @property
    def fill_bytes(self) -> int:
        """Bytes that the launches can zero at no cost. If the table is tall, all of it."""
        if self.tall:
            return 2**62
        if not self.launches or not self.count:
            return 0
        return self.launches * self.tuning.pass_bytes + self.tuning.span_bytes

    def add_steps(
        self,
        steps: Steps,
        indices: StepOperand,
        walk: Space,
        padding: int,
        counters: Region,
        fill: ZeroFill | None = None,
        lines: Lines | None = None,
        bad_index: ErrorKind | None = None,
    ) -> None:
        """Add the launches; ``walk`` has the strides of the indices first.

        They also zero ``counters``, and ``fill``, of up to ``fill_bytes``. Indices out of range are reported
        as ``bad_index``, if it is given.
        """
        count, tuning = self.count, self.tuning
        fill = fill or ZeroFill(self.keys, 0, 0, 4)
        zero_tile = fill.tile(tuning.zero_bytes)
        loaded = {
            "indices": indices,
            "padding": padding,
            "sizes": (*walk.sizes, 1),
            "strides": (*walk.strides[0], 0),
            "lines": (lines.extent, lines.step, *lines.strides, 0) if lines else (0,),
        }
        # ``find_spans`` zeroes the rest.
        size = max(tuning.pass_bytes, fill.elements * fill.itemsize // (self.launches + 1))
        if self.merges:
            fill = self._add_merges(steps, loaded, fill, size)
        elif self.radix:
            fill = self.radix.add_steps(steps, loaded, self.spans, fill, size)
        else:
            programs = -(-count // tuning.lanes)
            steps.add(
                load_rows_and_zero, programs + -(-self.spans.count // zero_tile), self, loaded,
                keys=self.words[0], programs=programs, span_count=self.spans.count, LOWEST=self.lowest,
                TILE=tuning.lanes, ZERO_TILE=zero_tile, num_warps=tuning.warps,
            )  # fmt: skip
            steps.call(sort, self.words[0], self.ordered, self.places)
        if count:
            programs = -(-max(count, counters.count) // tuning.span_lanes)
            reports = device_errors.reports_on(steps.device) if bad_index else None
            steps.add(
                find_spans, programs + -(-fill.elements // zero_tile), self, fill.parameters, loaded,
                counters=counters, counter_count=counters.count, programs=programs,
                reports=reports.words if reports else None,
                word=reports.word(bad_index) if reports and bad_index else 0,
                LOWEST=self.lowest, STORE=not self.tall, RAISE=reports is not None, TILE=tuning.span_lanes,
                ZERO_TILE=zero_tile, num_warps=tuning.warps,
            )  # fmt: skip

    def _add_merges(self, steps: Steps, loaded: Mapping[str, Any], fill: ZeroFill, size: int) -> ZeroFill:
        """Add the launches that sort blocks and merge them. Each zeroes ``size`` bytes; returns the rest."""
        count, tuning, ways = self.count, self.tuning, self._ways()
        zero_tile = fill.tile(tuning.zero_bytes)
        programs, span_programs = -(-count // tuning.tile), -(-self.spans.count // zero_tile)
        now, fill = fill.split(size)
        steps.add(
            sort_blocks, programs + span_programs + -(-now.elements // zero_tile),
            self, now.parameters, loaded,
            words=(*self.words, self.keys)[0], programs=programs, span_programs=span_programs,
            span_count=self.spans.count, WORD=self.word, BLOCK=self.block, TILE=tuning.tile, SIDE=tuning.side,
            LAST=not ways, ZERO_TILE=zero_tile, num_warps=tuning.warps,
        )  # fmt: skip
        run = self.block
        for number, way in enumerate(ways):
            source, target = self.words[number % 2], self.words[(number + 1) % len(self.words)]
            tile = min(tuning.lanes // way, run)
            programs = -(-count // tile)
            now, fill = fill.split(size)
            steps.add(
                merge_runs, programs + -(-now.elements // zero_tile), self, now.parameters,
                merged=target, words=source, run=run, programs=programs, TILE=tile, WAYS=way,
                LAST=number == len(ways) - 1, ZERO_TILE=zero_tile, num_warps=tuning.warps,
            )  # fmt: skip
            run *= way
        return fill
