"""Indices in order, in Triton: the places of the indices sorted by row, and where each row's begin and end.

A row and a place make one word, so that no two words are equal and any way to sort them is stable. Blocks of
words are sorted by counting: a word's rank is the number of lesser words in its block. Then sorted runs are
merged, several at a time: a word's rank is its own place in its run, and the number of lesser words in each
of the others, found by bisection. Every program works on a tile of words alone, so nothing waits for another,
and the memory is that of the workspace. Beyond MERGED indices torch's radix sort is faster, and takes over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.backends import interpreted
from holdfast.backends.gpu import StepOperand, Steps
from holdfast.core.pieces import Piece, Pieces
from holdfast.core.strided import Space
from holdfast.ops.affine.gpu import row_offsets
from holdfast.ops.segment_sum import indexed

#: The indices from which on torch.sort is used.
MERGED = 2**17
#: Words of a block that is sorted by counting, and how many runs are merged at a time: few, or all there are.
BLOCK = 1024
FEW_WAYS, MOST_WAYS = 4, 32
#: Words that a program finds the ranks of, and words that it compares them with at a time. To the interpreter
#: a program costs the same however much it does.
TILE, SIDE = (256, 1024) if interpreted() else (32, 256)
#: Lanes of a program that merges or looks for starts, and of one that looks for spans.
LANES, SPAN_LANES = (65536, 65536) if interpreted() else (2048, 512)
WARPS = 4
#: Elements that a program clears.
CLEARED = 65536 if interpreted() else 4096


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
def clear_spans(spans, tile, rows, TILE: tl.constexpr):
    """No row has a place yet."""
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(spans + at, tl.zeros([TILE], tl.int32), mask=at < rows.to(tl.int64) * 2)


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
    return tl.where(inside, word, 2**31 - 1 if WORD == tl.int32 else 2**63 - 1)


@triton.jit
def put_word(words, keys, places, at, word, inside, shift, LAST: tl.constexpr):
    """A word where it belongs; taken apart, if it will not be moved again."""
    if LAST:
        tl.store(keys + at, (word >> shift).to(tl.int32), mask=inside)
        tl.store(places + at, (word - ((word >> shift) << shift)).to(tl.int32), mask=inside)
    else:
        tl.store(words + at, word, mask=inside)


@triton.jit(do_not_specialize=["count", "rows", "padding", "shift", "programs"])
def sort_blocks(
    words, keys, places, spans, indices, count, rows, padding, shift, programs, sizes, strides,
    WORD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr, LAST: tl.constexpr,
    CLEARED: tl.constexpr,
):  # fmt: skip
    """Sort each block by counting the lesser words of the block. Others clear the spans."""
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
    else:
        clear_spans(spans, program - programs, rows, CLEARED)


@triton.jit(do_not_specialize=["count", "run", "shift"])
def merge_runs(
    merged, keys, places, words, count, run, shift, TILE: tl.constexpr, WAYS: tl.constexpr, LAST: tl.constexpr
):
    """Merge WAYS neighbouring runs of ``run`` words each. A tile lies in one run."""
    start = tl.program_id(0) * TILE
    place = start + tl.arange(0, TILE)
    word = tl.load(words + place, mask=place < count, other=0)
    own = start // run
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


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def load_rows(keys, indices, count, rows, padding, sizes, strides, TILE: tl.constexpr):
    """The row of each index, for torch to sort."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = load_row(indices, place, place < count, rows, padding, sizes, strides)
    tl.store(keys + place, row, mask=place < count)


@triton.jit(do_not_specialize=["count", "rows", "padding", "programs"])
def load_rows_beside(
    keys, spans, indices, count, rows, padding, programs, sizes, strides,
    TILE: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """The same, while others clear the spans."""
    if tl.program_id(0) < programs:
        load_rows(keys, indices, count, rows, padding, sizes, strides, TILE)
    else:
        clear_spans(spans, tl.program_id(0) - programs, rows, CLEARED)


@triton.jit(do_not_specialize=["count", "rows", "cleared"])
def find_spans(spans, counters, keys, count, rows, cleared, TILE: tl.constexpr):
    """Where each row that has places begins and ends among the sorted keys. Counters are cleared."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(keys + place, mask=place < count, other=rows)
    before = tl.load(keys + place - 1, mask=(place > 0) & (place < count), other=-1)
    after = tl.load(keys + place + 1, mask=place + 1 < count, other=rows + 1)
    at = spans + row.to(tl.int64) * 2
    tl.store(at, place, mask=(row < rows) & (row != before))
    tl.store(at + 1, place + 1, mask=(row < rows) & (row != after))
    tl.store(counters + place, tl.zeros([TILE], tl.int32), mask=place < cleared)


@triton.jit(do_not_specialize=["count", "rows", "step"])
def find_starts(starts, keys, count, rows, step, TILE: tl.constexpr):
    """Where each row begins among the sorted keys; the last entry is where the rows that count end."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(starts + row, lower_bound(keys, row, count, step), mask=row <= rows)


def power_below(count: int) -> int:
    """The largest power of two that is no more than ``count``; 0 for 0."""
    return 1 << (count.bit_length() - 1) if count > 0 else 0


def sort(keys: torch.Tensor, ordered: torch.Tensor, places: torch.Tensor) -> None:
    torch.sort(keys, stable=True, out=(ordered, places))


class Order:
    """What it takes to order ``count`` indices of ``rows`` rows: pieces of the workspace, and steps.

    ``places`` has one for each index, those of skipped ones last; ``keys`` are the rows of all places. Twice
    the row is where ``spans`` has the first of its places in that order, and next to it the one after the
    last; 0 if it has none.
    """

    key_step = indexed.CHUNK

    def __init__(self, pieces: Pieces, count: int, rows: int) -> None:
        self.count, self.rows = count, rows
        self.merges = count <= MERGED
        self.sorted_by = "" if self.merges else "torch.sort"
        self.shift = max(count - 1, 0).bit_length()
        wide = (rows + 1) << self.shift > 2**31
        self.word, word = (tl.int64, torch.int64) if wide else (tl.int32, torch.int32)
        self.keys = pieces.take(count, torch.int32)
        self.places = pieces.take(count, torch.int32 if self.merges else torch.int64)
        self.spans = pieces.take(2 * rows, torch.int32)
        self.words: tuple[Piece, ...]
        if self.merges:
            ways = self._ways()
            self.words = tuple(pieces.take(count, word) for _ in range(min(len(ways), 2)))
        else:
            self.words = (pieces.take(count, torch.int32),)

    def _ways(self) -> list[int]:
        """How many runs are merged at a time, pass after pass."""
        runs, ways = -(-self.count // BLOCK), []
        if 1 < runs <= MOST_WAYS:
            return [MOST_WAYS if runs > MOST_WAYS // 2 else MOST_WAYS // 2]
        while runs > 1:
            ways.append(FEW_WAYS)
            runs = -(-runs // FEW_WAYS)
        return ways

    def add_steps(
        self, steps: Steps, indices: StepOperand, walk: Space, padding: int, counters: Piece
    ) -> None:
        """Add the steps; ``walk`` has the strides of the indices first. They clear the ``counters`` too."""
        count, rows = self.count, self.rows
        sizes, strides = (*walk.sizes, 1), (*walk.strides[0], 0)
        clearers = -(-2 * rows // CLEARED)
        if self.merges:
            ways = self._ways()
            programs = -(-count // TILE)
            steps.add(
                sort_blocks,
                programs + clearers,
                ((*self.words, self.keys)[0], self.keys, self.places, self.spans, indices),
                (count, rows, padding, self.shift, programs, sizes, strides),
                {
                    "WORD": self.word, "BLOCK": BLOCK, "TILE": TILE, "SIDE": SIDE, "LAST": not ways,
                    "CLEARED": CLEARED,
                },
                WARPS,
            )  # fmt: skip
            run = BLOCK
            for number, way in enumerate(ways):
                source, target = self.words[number % 2], self.words[(number + 1) % len(self.words)]
                tile = min(LANES // way, BLOCK)
                steps.add(
                    merge_runs,
                    -(-count // tile),
                    (target, self.keys, self.places, source),
                    (count, run, self.shift),
                    {"TILE": tile, "WAYS": way, "LAST": number == len(ways) - 1},
                    WARPS,
                )
                run *= way
        else:
            programs = -(-count // LANES)
            steps.add(
                load_rows_beside,
                programs + clearers,
                (self.words[0], self.spans, indices),
                (count, rows, padding, programs, sizes, strides),
                {"TILE": LANES, "CLEARED": CLEARED},
                WARPS,
            )
            steps.call(sort, self.words[0], self.keys, self.places)
        if count:
            steps.add(
                find_spans,
                -(-max(count, counters.count) // SPAN_LANES),
                (self.spans, counters, self.keys),
                (count, rows, counters.count),
                {"TILE": SPAN_LANES},
                WARPS,
            )
