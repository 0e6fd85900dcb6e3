"""Indices in order, in Triton: the places of the indices sorted by row, and where each row's begin and end.

A row and a place make one word, so that no two words are equal and any way to sort them is stable. Blocks of
words are sorted by counting: a word's rank is the number of lesser words in its block. Then sorted runs are
merged, several at a time: a word's rank is its own place in its run, and the number of lesser words in each
of the others, found by bisection. Every program works on a tile of words alone, so nothing waits for another,
and the memory is that of the workspace. Very many indices are sorted faster by torch's radix sort.

All of that waits most of the time. So others fill memory with zeros beside it, which will be needed later.
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
from holdfast.backends.steps import StepOperand, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.ops.segment_sum import indexed


@dataclass(frozen=True)
class Tuning:
    """The tuning of ``Order``."""

    #: Words that a program finds the ranks of, and words that it compares them with at a time.
    tile: int
    side: int
    #: Lanes of a program that merges or loads rows, and of one that looks for spans.
    lanes: int
    span_lanes: int
    #: Elements that a program clears.
    cleared: int
    #: Bytes that can be cleared in the time that a pass of sorting or merging takes, or one that finds spans.
    pass_bytes: int
    span_bytes: int
    #: More indices than this are sorted by torch.sort.
    merged: int = 2**17
    #: Words of a block that is sorted by counting, and how many runs are merged at a time: few, or all.
    block: int = 1024
    few_ways: int = 4
    most_ways: int = 32
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(
        tile=32, side=256, lanes=2048, span_lanes=512, cleared=4096, pass_bytes=24 * 2**20,
        span_bytes=8 * 2**20,
    ),
    interpreter=Tuning(
        tile=256, side=1024, lanes=65536, span_lanes=65536, cleared=65536, pass_bytes=4096, span_bytes=4096
    ),
)  # fmt: skip


@triton.jit
def lower_bound(sorted_values, value, count, step):
    """How many of ``count`` sorted values are less than ``value``; ``step`` is ``power_below(count)``."""
    found = tl.zeros(value.shape, tl.int32)
    while step > 0:
        probe = found + step
        exists = probe <= count
        there = tl.load(sorted_values + (probe - 1), mask=exists, other=0)
        found = tl.where(exists & (there < value), probe, found)
        step = step // 2
    return found


@triton.jit
def put_zeros(out, tile, count, TILE: tl.constexpr):
    """A tile of ``count`` zeros."""
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.zeros([TILE], out.dtype.element_ty), mask=at < count)


@triton.jit
def load_row(indices, place, inside, rows, padding, sizes, strides):
    """The row that each index names; ``rows`` itself, which sorts last, if it is to be skipped."""
    index = tl.load(indices + row_offsets(place, sizes, strides), mask=inside, other=0)
    kept = inside & (index >= 0) & (index < rows) & (index != padding)
    return tl.where(kept, index, rows).to(tl.int32)


@triton.jit
def load_word(indices, place, count, rows, padding, shift, sizes, strides, WORD: tl.constexpr):
    """Row and place in one word; past the end, more than any other."""
    inside = place < count
    row = load_row(indices, place, inside, rows, padding, sizes, strides)
    word = (row.to(WORD) << shift) | place.to(WORD)
    return tl.where(inside, word, 2**31 - 1 if tl.int32 == WORD else 2**63 - 1)


@triton.jit
def put_word(words, keys, places, at, word, inside, shift, LAST: tl.constexpr):
    """A word where it belongs; taken apart, if it will not be moved again."""
    if LAST:
        tl.store(keys + at, (word >> shift).to(tl.int32), mask=inside)
        tl.store(places + at, (word - ((word >> shift) << shift)).to(tl.int32), mask=inside)
    else:
        tl.store(words + at, word, mask=inside)


@triton.jit(do_not_specialize=["count", "rows", "padding", "shift", "programs", "clearers"])
def sort_blocks(
    words, keys, places, spans, blank, indices,
    count, rows, padding, shift, programs, clearers, words_of_spans, start, zeros, sizes, strides,
    WORD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, LAST: tl.constexpr,
    CLEARED: tl.constexpr,
):  # fmt: skip
    """Sort each block by counting the lesser words of the block. Others clear the spans, or blank memory."""
    follow()
    program = tl.program_id(0)
    if program < programs:
        place = program * TILE + tl.arange(0, TILE)
        block = program * TILE // BLOCK * BLOCK
        word = load_word(indices, place, count, rows, padding, shift, sizes, strides, WORD)
        less = tl.zeros([TILE, SIDE], tl.int32)
        for begin in range(block, tl.minimum(block + BLOCK, count), SIDE):
            other = load_word(
                indices, begin + tl.arange(0, SIDE), count, rows, padding, shift, sizes, strides, WORD
            )
            less += (other[None, :] < word[:, None]).to(tl.int32)
        put_word(words, keys, places, block + tl.sum(less, 1), word, place < count, shift, LAST)
    elif program < programs + clearers:
        put_zeros(spans, program - programs, words_of_spans, CLEARED)
    else:
        put_zeros(blank + start, program - programs - clearers, zeros, CLEARED)


@triton.jit
def merge_tile(
    merged, keys, places, words, count, run, shift, TILE: tl.constexpr, WAYS: tl.constexpr, LAST: tl.constexpr
):
    """A tile of words, which lies in one run, among WAYS neighbouring runs of ``run`` words each."""
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
    put_word(merged, keys, places, group * run + rank, word, place < count, shift, LAST)


@triton.jit(do_not_specialize=["count", "run", "shift", "programs"])
def merge_runs(
    merged, keys, places, words, blank, count, run, shift, programs, start, zeros,
    TILE: tl.constexpr, WAYS: tl.constexpr, LAST: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Merge runs, while others blank memory."""
    follow()
    if tl.program_id(0) < programs:
        merge_tile(merged, keys, places, words, count, run, shift, TILE, WAYS, LAST)
    else:
        put_zeros(blank + start, tl.program_id(0) - programs, zeros, CLEARED)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def load_rows(keys, indices, count, rows, padding, sizes, strides, TILE: tl.constexpr):
    """The row of each index, for torch to sort."""
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = load_row(indices, place, place < count, rows, padding, sizes, strides)
    tl.store(keys + place, row, mask=place < count)


@triton.jit(do_not_specialize=["count", "rows", "padding", "programs"])
def load_rows_beside(
    keys, spans, indices, count, rows, padding, programs, words_of_spans, sizes, strides,
    TILE: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """The same, while others clear the spans."""
    follow()
    if tl.program_id(0) < programs:
        load_rows(keys, indices, count, rows, padding, sizes, strides, TILE)
    else:
        put_zeros(spans, tl.program_id(0) - programs, words_of_spans, CLEARED)


@triton.jit(do_not_specialize=["count", "rows", "cleared", "programs"])
def find_spans(
    spans, counters, keys, blank, count, rows, cleared, programs, start, zeros,
    TILE: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Where each row that has places begins and ends among the sorted keys. Counters are cleared.

    Others blank memory.
    """
    follow()
    if tl.program_id(0) < programs:
        place = tl.program_id(0) * TILE + tl.arange(0, TILE)
        row = tl.load(keys + place, mask=place < count, other=rows)
        before = tl.load(keys + place - 1, mask=(place > 0) & (place < count), other=-1)
        after = tl.load(keys + place + 1, mask=place + 1 < count, other=rows + 1)
        at = spans + row.to(tl.int64) * 2
        tl.store(at, place, mask=(row < rows) & (row != before))
        tl.store(at + 1, place + 1, mask=(row < rows) & (row != after))
        tl.store(counters + place, tl.zeros([TILE], tl.int32), mask=place < cleared)
    else:
        put_zeros(blank + start, tl.program_id(0) - programs, zeros, CLEARED)


@triton.jit(do_not_specialize=["count", "rows", "step"])
def find_starts(starts, keys, count, rows, step, TILE: tl.constexpr):
    """Where each row begins among the sorted keys; the last entry is where the rows that count end."""
    follow()
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(starts + row, lower_bound(keys, row, count, step), mask=row <= rows)


def power_below(count: int) -> int:
    """The largest power of two that is no more than ``count``; 0 for 0."""
    return 1 << (count.bit_length() - 1) if count > 0 else 0


def sort(keys: torch.Tensor, ordered: torch.Tensor, places: torch.Tensor) -> None:
    torch.sort(keys, stable=True, out=(ordered, places))


class Blank(NamedTuple):
    """Elements of an operand that are to be zeros, from ``start`` on."""

    at: StepOperand
    start: int
    elements: int
    itemsize: int

    def split(self, size: int) -> tuple[Blank, Blank]:
        """Up to ``size`` bytes of it, and the rest."""
        now = min(size // self.itemsize, self.elements)
        rest = self._replace(start=self.start + now, elements=self.elements - now)
        return self._replace(elements=now), rest

    @property
    def parameters(self) -> dict[str, Any]:
        """What a kernel that clears memory beside its own work is given."""
        return {"blank": self.at, "start": self.start, "zeros": self.elements}


class Order:
    """What it takes to order ``count`` indices of ``rows`` rows: regions of the workspace, and steps.

    ``places`` has one for each index, those of skipped ones last; ``keys`` are the rows of all places. Twice
    the row is where ``spans`` has the first of its places in that order, and next to it the one after the
    last; 0 if it has none.
    """

    key_step = indexed.CHUNK

    def __init__(self, layout: WorkspaceLayout, device: torch.device, count: int, rows: int) -> None:
        self.count, self.rows, self.tuning = count, rows, TUNING.on(device)
        self.merges = count <= self.tuning.merged
        self.sorted_by = "" if self.merges else "torch.sort"
        self.shift = max(count - 1, 0).bit_length()
        wide = (rows + 1) << self.shift > 2**31
        self.word, word = (tl.int64, torch.int64) if wide else (tl.int32, torch.int32)
        self.keys = layout.take(count, torch.int32)
        self.places = layout.take(count, torch.int32 if self.merges else torch.int64)
        # A multiple of 16 is known to the compiler as one, and cleared by whole vectors.
        self.spans = layout.take(-(-2 * rows // 16) * 16, torch.int32)
        self.words: tuple[Region, ...]
        if self.merges:
            ways = self._ways()
            self.words = tuple(layout.take(count, word) for _ in range(min(len(ways), 2)))
        else:
            self.words = (layout.take(count, torch.int32),)

    def _ways(self) -> list[int]:
        """How many runs are merged at a time, pass after pass."""
        few, most = self.tuning.few_ways, self.tuning.most_ways
        runs, ways = -(-self.count // self.tuning.block), []
        if 1 < runs <= most:
            return [most if runs > most // 2 else most // 2]
        while runs > 1:
            ways.append(few)
            runs = -(-runs // few)
        return ways

    @property
    def blank_bytes(self) -> int:
        """How much memory can be blanked beside the steps."""
        if not self.merges or not self.count:
            return 0
        return (1 + len(self._ways())) * self.tuning.pass_bytes + self.tuning.span_bytes

    def add_steps(
        self,
        steps: Steps,
        indices: StepOperand,
        walk: Space,
        padding: int,
        counters: Region,
        blank: Blank | None = None,
    ) -> None:
        """Add the steps; ``walk`` has the strides of the indices first.

        They clear the ``counters`` too, and what is to be ``blank``, of up to ``blank_bytes``.
        """
        count, tuning, cleared = self.count, self.tuning, self.tuning.cleared
        blank = blank or Blank(self.keys, 0, 0, 1)
        looked_up: dict[str, Any] = {
            "indices": indices,
            "count": count,
            "rows": self.rows,
            "padding": padding,
            "sizes": (*walk.sizes, 1),
            "strides": (*walk.strides[0], 0),
        }
        if self.merges:
            blank = self._add_merges(steps, looked_up, blank)
        else:
            programs = -(-count // tuning.lanes)
            steps.add(
                load_rows_beside,
                programs + -(-self.spans.count // cleared),
                keys=self.words[0],
                spans=self.spans,
                **looked_up,
                programs=programs,
                words_of_spans=self.spans.count,
                TILE=tuning.lanes,
                CLEARED=cleared,
                num_warps=tuning.warps,
            )
            steps.call(sort, self.words[0], self.keys, self.places)
        if count:
            programs = -(-max(count, counters.count) // tuning.span_lanes)
            steps.add(
                find_spans,
                programs + -(-blank.elements // cleared),
                spans=self.spans,
                counters=counters,
                keys=self.keys,
                **blank.parameters,
                count=count,
                rows=self.rows,
                cleared=counters.count,
                programs=programs,
                TILE=tuning.span_lanes,
                CLEARED=cleared,
                num_warps=tuning.warps,
            )

    def _add_merges(self, steps: Steps, looked_up: dict[str, Any], blank: Blank) -> Blank:
        """Sort blocks, then merge them. Returns what is left to be blanked."""
        count, tuning, cleared, ways = self.count, self.tuning, self.tuning.cleared, self._ways()
        programs, clearers = -(-count // tuning.tile), -(-self.spans.count // cleared)
        now, blank = blank.split(tuning.pass_bytes)
        steps.add(
            sort_blocks,
            programs + clearers + -(-now.elements // cleared),
            words=(*self.words, self.keys)[0],
            keys=self.keys,
            places=self.places,
            spans=self.spans,
            **now.parameters,
            **looked_up,
            shift=self.shift,
            programs=programs,
            clearers=clearers,
            words_of_spans=self.spans.count,
            WORD=self.word,
            BLOCK=tuning.block,
            TILE=tuning.tile,
            SIDE=tuning.side,
            LAST=not ways,
            CLEARED=cleared,
            num_warps=tuning.warps,
        )
        run = tuning.block
        for number, way in enumerate(ways):
            source, target = self.words[number % 2], self.words[(number + 1) % len(self.words)]
            tile = min(tuning.lanes // way, tuning.block)
            programs = -(-count // tile)
            now, blank = blank.split(tuning.pass_bytes)
            steps.add(
                merge_runs,
                programs + -(-now.elements // cleared),
                merged=target,
                keys=self.keys,
                places=self.places,
                words=source,
                **now.parameters,
                count=count,
                run=run,
                shift=self.shift,
                programs=programs,
                TILE=tile,
                WAYS=way,
                LAST=number == len(ways) - 1,
                CLEARED=cleared,
                num_warps=tuning.warps,
            )
            run *= way
        return blank
