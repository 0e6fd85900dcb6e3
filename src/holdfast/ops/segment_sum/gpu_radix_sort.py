"""Radix sort of indices by row, in Triton: for many indices, without other memory than the workspace.

Each pass orders the indices by one digit of their rows, the lowest first, and keeps the order of equal
digits. A tile of indices is sorted by digit, and its digits are counted (``sort_tiles``). The counts of the
tiles before it give the first position of each digit of a tile (``scan_digits``). Then every index goes to
the position of its digit plus its rank among the equal digits of its tile (``place_tiles``).
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

from holdfast.backends.gpu import COMPILED, follow
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.ops.segment_sum.gpu_index import ZeroFill, load_row, store_zeros


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``RadixSort``."""

    #: Elements of a block of ``scan_digits``, and bytes per program that zeroes memory; powers of two.
    block: int
    zero_bytes: int
    #: Indices of a tile.
    tile: int
    #: Maximum bits of a digit up to ``few`` indices, and for more. More digits have more counts.
    few: int
    most_bits: int
    most_bits_of_many: int
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(block=1024, zero_bytes=8192, tile=512, few=2**18, most_bits=9, most_bits_of_many=7),
    interpreter=Tuning(block=8, zero_bytes=2**18, tile=256, few=2**13, most_bits=4, most_bits_of_many=5),
)


@triton.jit
def load_key(keys, indices, place, count, rows, padding, sizes, strides, lines, FIRST: tl.constexpr):
    """Row of each index: in the FIRST pass from the indices, else from ``keys``. ``rows`` past the end."""
    inside = place < count
    if FIRST:
        return load_row(indices, place, inside, rows, padding, sizes, strides, lines)
    else:
        return tl.load(keys + place, mask=inside, other=rows)


@triton.jit
def store_sorted(words, word, TILE: tl.constexpr):
    """Store the words of a tile in ascending order."""
    if COMPILED:
        tl.store(words + tl.arange(0, TILE), tl.sort(word))
    else:  # Triton's interpreter would sort in Python, element by element
        tl.store(words + tl.sum((word[None, :] < word[:, None]).to(tl.int32), 1), word)


@triton.jit(do_not_specialize=["count", "rows", "padding", "shift", "tiles", "span_programs"])
def sort_tiles(
    words, counts, keys, spans, fill, indices,
    count, rows, padding, shift, tiles, span_programs, span_count, fill_start, fill_count,
    sizes, strides, lines,
    FIRST: tl.constexpr, DIGITS: tl.constexpr, TILE: tl.constexpr, ZERO_TILE: tl.constexpr,
):  # fmt: skip
    """Sort a tile by digit, and count its digits. Further programs zero the spans and ``fill``.

    A word is a digit and a position in the tile, so words are distinct and the sort is stable. Positions past
    the end come last: they have the largest digit, or count as if they had.
    """
    follow()
    tile = tl.program_id(0)
    if tile < tiles:
        own = tl.arange(0, TILE)
        place = tile * TILE + own
        row = load_key(keys, indices, place, count, rows, padding, sizes, strides, lines, FIRST)
        digit = tl.where(place < count, (row >> shift) & (DIGITS - 1), DIGITS - 1)
        store_sorted(words + tile * TILE, digit * TILE + own, TILE)
        tl.store(counts + tl.arange(0, DIGITS) * tiles + tile, tl.histogram(digit, DIGITS))
    elif tile < tiles + span_programs:
        store_zeros(spans, tile - tiles, span_count, ZERO_TILE)
    else:
        store_zeros(fill + fill_start, tile - tiles - span_programs, fill_count, ZERO_TILE)


@triton.jit(do_not_specialize=["tiles"])
def scan_digits(counts, totals, tiles, BLOCK: tl.constexpr):
    """Replace the counts of a digit by the sums of those of the tiles before; store their total."""
    follow()
    digit = tl.program_id(0)
    total = tl.full([], 0, tl.int32)
    for begin in range(0, tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        at = counts + digit * tiles + tile
        count = tl.load(at, mask=tile < tiles, other=0)
        tl.store(at, total + tl.cumsum(count, 0) - count, mask=tile < tiles)
        total += tl.sum(count, 0)
    tl.store(totals + digit, total)


@triton.jit(do_not_specialize=["count", "rows", "padding", "tiles"])
def place_tiles(
    next_keys, next_places, words, counts, totals, keys, places, indices,
    count, rows, padding, tiles, sizes, strides, lines,
    FIRST: tl.constexpr, DIGITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Move the rows and places of a tile to their positions after this pass."""
    follow()
    tile = tl.program_id(0)
    own, digits = tl.arange(0, TILE), tl.arange(0, DIGITS)
    word = tl.load(words + tile * TILE + own)
    digit = word // TILE
    here, total = tl.histogram(digit, DIGITS), tl.load(totals + digits)
    start = tl.cumsum(total, 0) - total + tl.load(counts + digits * tiles + tile)
    target = tl.gather(start - (tl.cumsum(here, 0) - here), digit, 0) + own
    old = tile * TILE + word % TILE
    row = load_key(keys, indices, old, count, rows, padding, sizes, strides, lines, FIRST)
    place = old
    if not FIRST:
        place = tl.load(places + old, mask=old < count, other=0)
    tl.store(next_keys + target, row, mask=old < count)
    tl.store(next_places + target, place, mask=old < count)


class RadixSort:
    """Workspace regions and launches that sort ``count`` indices. ``result`` are their rows and places."""

    def __init__(
        self,
        layout: WorkspaceLayout,
        device: torch.device,
        count: int,
        rows: int,
        result: tuple[Region, Region],
    ) -> None:
        self.count, self.rows, self.tuning = count, rows, TUNING.on(device)
        tuning = self.tuning
        self.tile = tuning.tile
        most_bits = tuning.most_bits if count <= tuning.few else tuning.most_bits_of_many
        bits = max(rows.bit_length(), 1)
        self.passes = -(-bits // most_bits)
        self.bits = -(-bits // self.passes)
        self.tiles = -(-count // self.tile)
        self.words = layout.take(self.tiles * self.tile, torch.int32)
        self.counts = layout.take(self.tiles << self.bits, torch.int32)
        self.totals = layout.take(1 << self.bits, torch.int32)
        others = count if self.passes > 1 else 0
        other = layout.take(others, torch.int32), layout.take(others, torch.int32)
        #: Rows and places after each pass, alternating such that the last are the result.
        self.results = [(result, other)[number % 2] for number in reversed(range(self.passes))]

    def add_steps(
        self, steps: Steps, loaded: Mapping[str, Any], spans: Region, fill: ZeroFill, size: int
    ) -> ZeroFill:
        """Add the launches. Each pass zeroes ``size`` bytes of ``fill``; returns the rest."""
        tuning, digits, zero_tile = self.tuning, 1 << self.bits, fill.tile(self.tuning.zero_bytes)
        keys, places = self.results[0]  # not read by the first pass
        for number, (next_keys, next_places) in enumerate(self.results):
            first = number == 0
            span_count = spans.count if first else 0
            span_programs = -(-span_count // zero_tile)
            now, fill = fill.split(size)
            steps.add(
                sort_tiles, self.tiles + span_programs + -(-now.elements // zero_tile),
                self, now.parameters, loaded, keys=keys, spans=spans, shift=number * self.bits,
                span_programs=span_programs, span_count=span_count, FIRST=first, DIGITS=digits,
                TILE=self.tile, ZERO_TILE=zero_tile, num_warps=tuning.warps,
            )  # fmt: skip
            steps.add(scan_digits, digits, self, BLOCK=tuning.block, num_warps=tuning.warps)
            steps.add(
                place_tiles, self.tiles, self, loaded, next_keys=next_keys, next_places=next_places,
                keys=keys, places=places, FIRST=first, DIGITS=digits, TILE=self.tile, num_warps=tuning.warps,
            )  # fmt: skip
            keys, places = next_keys, next_places
        return fill
