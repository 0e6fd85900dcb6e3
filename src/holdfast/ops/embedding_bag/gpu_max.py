"""Mode "max" of embedding_bag, in Triton.

A program loads several places of a bag together. Each lane keeps the maximum of its own places; at the end
the maxima of a bag's lanes are compared. The result is the first NaN, or the first of equals, so it does not
depend on how the places are distributed over the lanes.

The gradient of each element of ``dout`` goes to one row. With few bags no sort is needed. One launch finds
the row and the place of every maximum, zeros the gradient, and stores the rank of each place: how many places
before it have the same row. In a second launch, the first bag that chose a row in a column adds the gradients
of all bags that chose it. The ranks tell in which chunk of 32 terms each of them is added.
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
from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import StepOperand, Steps
from holdfast.backends.tuning import Tuned, warps_for
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.embedding_bag.gpu_bags import Bags, Walks, bag_places, compute_of, find_bags, load_kept
from holdfast.ops.embedding_bag.plan import EmbeddingBagBackwardArgs, EmbeddingBagBackwardDescriptor
from holdfast.ops.segment_sum.gpu import CHUNK
from holdfast.ops.segment_sum.gpu_index import power_below


@dataclass(frozen=True)
class Tuning:
    """Tuning of mode "max"."""

    #: Elements of a tile of bags, places and columns; fewer bags if there would be fewer programs.
    elements: int
    programs: int
    #: Elements of a smaller tile, used if it gives at least ``many_programs`` programs. On an H200 it takes
    #: half the time with 1200 or 8192 programs, but up to twice the time with 375 or fewer.
    small_elements: int
    #: Elements per program that finds the bags.
    lanes: int
    #: Elements of a tile of ``add_chosen``.
    chosen_elements: int
    #: Places per program that ranks places, and places compared with them at a time.
    ranked: int
    side: int
    #: Elements per program that zeroes the gradient.
    zero_tile: int
    #: The gradient is found without a sort for at most this many bags, places, and pairs of bags in all
    #: columns. Every bag compares its rows with those of all bags, so the time grows with the number of bags.
    #: On an H200, this is faster than a sort with 75 bags and slower with 128.
    most_bags: int = 96
    most_places: int = 2**13
    most_pairs: int = 2**25
    #: Bags loaded together by ``add_chosen``.
    unroll: int = 8
    most_columns: int = 128
    least_columns: int = 32
    warps: int = 4
    many_programs: int = 528

    def width(self, columns: int) -> int:
        """Columns of a tile: all of them, or a power of two that pads them by at most 1/8."""
        width = min(triton.next_power_of_2(max(columns, 1)), self.most_columns)
        while width > self.least_columns and -(-columns // width) * width * 8 > columns * 9:
            width //= 2
        return width


TUNING = Tuned(
    gpu=Tuning(
        elements=1024, programs=264, small_elements=512, lanes=256, chosen_elements=128, ranked=16, side=256,
        zero_tile=4096,
    ),
    interpreter=Tuning(
        elements=65536, programs=2, small_elements=65536, lanes=65536, chosen_elements=4096, ranked=256,
        side=1024, zero_tile=65536, most_bags=12,
    ),
)  # fmt: skip

_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def best_of_lanes(best, found):
    """Maximum over axis 1 and its place; +0.0 and -1 if there is none. ``found`` is -1 in a lane without."""
    is_nan = best != best
    most = tl.max(tl.where((found < 0) | is_nan, -float("inf"), best), 1)
    place = tl.min(tl.where((found >= 0) & (best == most[:, None, :]), found, _NONE), 1)
    of_nan = tl.min(tl.where(is_nan, found, _NONE), 1)
    place = tl.where(of_nan < _NONE, of_nan, place)
    # One lane has this place. A sum of integers keeps its bits.
    bits = best.to(tl.int64 if best.dtype == tl.float64 else tl.int32, bitcast=True)
    bits = tl.sum(tl.where(found == place[:, None, :], bits, 0), 1)
    return bits.to(best.dtype, bitcast=True), tl.where(place == _NONE, -1, place)


@triton.jit
def max_of_bags(
    weight, indices, first, amount, column, inside, rows, padding, sizes, strides, weight_strides,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Maximum of each column in ROWS bags, and its place. The next indices are loaded beside the rows."""
    best = tl.zeros([ROWS, PLACES, COLUMNS], COMPUTE)
    found = tl.full([ROWS, PLACES, COLUMNS], -1, tl.int32)
    ahead = tl.arange(0, PLACES)[None, :]
    place, left = first[:, None] + ahead, amount[:, None] - ahead
    index, kept = load_kept(indices, place, left > 0, rows, padding, sizes, strides)
    for _ in range(0, tl.max(amount, 0), PLACES):
        at = weight + (index.to(tl.int64) * weight_strides[0])[:, :, None] + column * weight_strides[1]
        value = widen(tl.load(at, mask=kept[:, :, None] & inside, other=0.0), COMPUTE)
        left -= PLACES
        next_index, next_kept = load_kept(indices, place + PLACES, left > 0, rows, padding, sizes, strides)
        better = (found < 0) | (value > best) | ((value != value) & (best == best))
        better = better & kept[:, :, None]
        best = tl.where(better, value, best)
        found = tl.where(better, place[:, :, None], found)
        place += PLACES
        index, kept = next_index, next_kept
    return best_of_lanes(best, found)


@triton.jit(
    do_not_specialize=[
        "count", "rows", "padding", "bags", "entries", "length", "bad_index", "bad_offset", "find_programs",
    ]
)  # fmt: skip
def max_bags(
    out, weight, indices, offsets, starts, maxima, reports,
    count, rows, padding, bags, entries, length, bad_index, bad_offset, find_programs,
    offset_step, columns, tiles, sizes, strides, weight_strides, out_strides,
    OFFSETS: tl.constexpr, RAISE: tl.constexpr, FOUND: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``find_bags`` for TILE elements; or the maxima of ROWS bags, or their places if FOUND."""
    follow()
    if tl.program_id(0) < find_programs:
        find_bags(
            starts, maxima, indices, indices, indices, indices, offsets, reports,
            count, rows, padding, bags, entries, length, 0, bad_index, bad_offset, offset_step, sizes,
            strides, OFFSETS, False, False, False, RAISE, TILE,
        )  # fmt: skip
    else:
        program = tl.program_id(0) - find_programs
        bag = program // tiles * ROWS + tl.arange(0, ROWS)
        column = (program % tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
        inside = column < columns
        first, amount = bag_places(offsets, offset_step, bag, bag < bags, count, entries, length, OFFSETS)
        best, found = max_of_bags(
            weight, indices, first, amount, column[None, :, :], inside[None, :, :], rows, padding, sizes,
            strides, weight_strides, COMPUTE, ROWS, PLACES, COLUMNS,
        )  # fmt: skip
        to = out + (bag.to(tl.int64) * out_strides[0])[:, None] + column * out_strides[1]
        if FOUND:
            tl.store(to, found, mask=(bag < bags)[:, None] & inside)
        else:
            tl.store(to, narrow(best, out.dtype.element_ty), mask=(bag < bags)[:, None] & inside)


@triton.jit
def rank_places(
    ranks, out, indices, block, count, rows, padding, columns, sizes, strides, out_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the number of places before each of TILE places that have the same row.

    If ACCUMULATE, add zeros to the rows that have places: -0.0 becomes +0.0 without any other term.
    """
    place = block * TILE + tl.arange(0, TILE)
    index, kept = load_kept(indices, place, place < count, rows, padding, sizes, strides)
    same = tl.zeros([TILE, SIDE], tl.int32)
    for begin in range(0, tl.minimum(block * TILE + TILE, count), SIDE):
        before = begin + tl.arange(0, SIDE)
        other = tl.load(indices + row_offsets(before, sizes, strides), mask=before < count, other=-1)
        same += ((other[None, :] == index[:, None]) & (before[None, :] < place[:, None])).to(tl.int32)
    rank = tl.sum(same, 1)
    tl.store(ranks + place, rank, mask=kept)
    if ACCUMULATE:
        for start in range(0, columns, COLUMNS):
            column = (start + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
            at = out + (index.to(tl.int64) * out_strides[0])[:, None] + column * out_strides[1]
            mask = (kept & (rank == 0))[:, None] & (column < columns)
            old = widen(tl.load(at, mask=mask, other=0.0), COMPUTE)
            tl.store(at, narrow(old + 0.0, out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "count", "rows", "padding", "bags", "entries", "length", "bad_offset", "find_programs",
        "max_programs", "rank_programs",
    ]
)  # fmt: skip
def choose_rows(
    out, chosen_rows, chosen, ranks, weight, indices, offsets, starts, maxima, reports,
    count, rows, padding, bags, entries, length, bad_offset, find_programs, max_programs, rank_programs,
    offset_step, columns, tiles, zero_rows, zero_columns, zero_tiles,
    sizes, strides, weight_strides, out_strides, zero_strides,
    OFFSETS: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
    RANKED: tl.constexpr, SIDE: tl.constexpr, ZERO_ROWS: tl.constexpr, ZERO_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``find_bags``; or the row and place of the maxima of ROWS bags; or ranks; or zeros in ``out``."""
    follow()
    program = tl.program_id(0)
    maximum = program - find_programs
    rank = maximum - max_programs
    zero = rank - rank_programs
    if maximum < 0:
        find_bags(
            starts, maxima, indices, indices, indices, indices, offsets, reports,
            count, rows, padding, bags, entries, length, 0, 0, bad_offset, offset_step, sizes, strides,
            OFFSETS, False, False, False, False, LANES,
        )  # fmt: skip
    elif rank < 0:
        bag = maximum // tiles * ROWS + tl.arange(0, ROWS)
        column = (maximum % tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
        inside = column < columns
        first, amount = bag_places(offsets, offset_step, bag, bag < bags, count, entries, length, OFFSETS)
        _, found = max_of_bags(
            weight, indices, first, amount, column[None, :, :], inside[None, :, :], rows, padding, sizes,
            strides, weight_strides, COMPUTE, ROWS, PLACES, COLUMNS,
        )  # fmt: skip
        row = tl.load(indices + row_offsets(found, sizes, strides), mask=found >= 0, other=-1).to(tl.int32)
        at = bag.to(tl.int64)[:, None] * columns + column
        mask = (bag < bags)[:, None] & inside
        tl.store(chosen + at, found, mask=mask)
        tl.store(chosen_rows + at, row, mask=mask)
    elif zero < 0:
        rank_places(
            ranks, out, indices, rank, count, rows, padding, columns, sizes, strides, out_strides,
            ACCUMULATE, COMPUTE, RANKED, SIDE, COLUMNS,
        )  # fmt: skip
    else:
        row = zero // zero_tiles * ZERO_ROWS + tl.arange(0, ZERO_ROWS)
        column = (zero % zero_tiles).to(tl.int64) * ZERO_COLUMNS + tl.arange(0, ZERO_COLUMNS)[None, :]
        at = out + row.to(tl.int64)[:, None] * zero_strides[0] + column * zero_strides[1]
        mask = (row < zero_rows)[:, None] & (column < zero_columns)
        tl.store(at, tl.zeros([ZERO_ROWS, ZERO_COLUMNS], out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bags"])
def add_chosen(
    out, dout, chosen_rows, chosen, ranks, bags, columns, tiles, dout_strides, out_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """For ROWS bags, the sums of the rows that no earlier bag chose in the same column.

    A sum of 32 terms is added to ``two`` when the next chunk begins, and 32 chunks to ``three``.
    """
    follow()
    bag = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns
    own = tl.load(chosen_rows + bag.to(tl.int64) * columns + column, mask=(bag < bags) & inside, other=-1)
    wanted = own >= 0
    one = tl.zeros([ROWS, COLUMNS], COMPUTE)
    two = tl.zeros([ROWS, COLUMNS], COMPUTE)
    three = tl.zeros([ROWS, COLUMNS], COMPUTE)
    last = tl.zeros([ROWS, COLUMNS], tl.int32)
    for begin in range(0, bags, UNROLL):
        for u in tl.static_range(UNROLL):
            other = tl.full([1, 1], u, tl.int64) + begin
            at = other * columns + column
            row = tl.load(chosen_rows + at, mask=(other < bags) & inside, other=-1)
            place = tl.load(chosen + at, mask=(other < bags) & inside, other=-1)
            rank = tl.load(ranks + place, mask=place >= 0, other=0)
            at = dout + other * dout_strides[0] + column * dout_strides[1]
            value = widen(tl.load(at, mask=row >= 0, other=0.0), COMPUTE)
            mine = (row == own) & (own >= 0)
            wanted = wanted & ~(mine & (other < bag))
            ended = mine & (rank // CHUNK != last // CHUNK)
            two = tl.where(ended, two + one, two)
            one = tl.where(ended, 0.0, one)
            ended = mine & (rank // (CHUNK * CHUNK) != last // (CHUNK * CHUNK))
            three = tl.where(ended, three + two, three)
            two = tl.where(ended, 0.0, two)
            one = tl.where(mine, one + value, one)
            last = tl.where(mine, rank, last)
    total = three + (two + one)
    to = out + own.to(tl.int64) * out_strides[0] + column * out_strides[1]
    if ACCUMULATE:
        total = widen(tl.load(to, mask=wanted, other=0.0), COMPUTE) + total
    tl.store(to, narrow(total, out.dtype.element_ty), mask=wanted)


class BagMaxima:
    """Tiles of the launch that finds the maxima of bags."""

    def __init__(self, bags: Bags) -> None:
        desc = bags.desc
        self.bags, self.tuning = bags, TUNING.on(bags.device)
        self.width = self.tuning.width(desc.columns)
        self.tiles = -(-desc.columns // self.width)
        self.places, self.rows = self.tile_of(self.tuning.small_elements)
        if self.programs < self.tuning.many_programs:
            self.places, self.rows = self.tile_of(self.tuning.elements)

    def tile_of(self, elements: int) -> tuple[int, int]:
        """Places and bags of a tile of at most ``elements`` elements."""
        desc = self.bags.desc
        mean = -(-desc.count // max(desc.bags, 1))
        places = min(triton.next_power_of_2(max(mean, 1)), elements // self.width)
        most = power_below(desc.bags * self.tiles // self.tuning.programs) or 1
        return places, min(elements // (self.width * places), most)

    @property
    def programs(self) -> int:
        return -(-self.bags.desc.bags // self.rows) * self.tiles

    def find_programs(self, raises: bool) -> int:
        """Programs that check the bags."""
        return -(-self.bags.work(raises) // self.tuning.lanes)

    def parameters(self, walks: Walks, weight: torch.Tensor) -> dict[str, Any]:
        """Parameters of a kernel that finds maxima."""
        desc = self.bags.desc
        return {
            "count": desc.count,
            "rows": desc.rows,
            "padding": desc.padding,
            "bags": desc.bags,
            "length": desc.length,
            "columns": desc.columns,
            "tiles": self.tiles,
            "sizes": walks.sizes,
            "strides": walks.strides[0],
            "weight_strides": tuple(weight.stride()),
            "COMPUTE": compute_of(desc),
            "ROWS": self.rows,
            "PLACES": self.places,
            "COLUMNS": self.width,
        }

    def add_steps(
        self,
        steps: Steps,
        walks: Walks,
        weight: torch.Tensor,
        offsets: torch.Tensor | None,
        out: StepOperand,
        out_strides: tuple[int, ...],
        raises: bool | None,
    ) -> None:
        """Add the launch of ``max_bags``; if ``out`` is a region, it takes the places of the maxima.

        ``raises``: whether indices out of range are reported; None if another launch checks the bags.
        """
        found = self.bags.parameters(offsets, bool(raises))
        find_programs = 0 if raises is None else self.find_programs(raises)
        steps.add(
            max_bags, find_programs + self.programs, self.bags, found, **self.parameters(walks, weight),
            find_programs=find_programs, out=out, out_strides=out_strides, FOUND=isinstance(out, Region),
            TILE=self.tuning.lanes,
            num_warps=warps_for(self.rows * self.places * self.width, self.tuning.warps),
        )  # fmt: skip


class FewBags:
    """Workspace regions and launches of the gradient of the maxima of few bags."""

    def __init__(self, layout: WorkspaceLayout, bags: Bags) -> None:
        desc = bags.desc
        self.maxima, self.tuning = BagMaxima(bags), TUNING.on(bags.device)
        self.chosen = layout.take(desc.bags * desc.columns, torch.int32)
        self.chosen_rows = layout.take(desc.bags * desc.columns, torch.int32)
        self.ranks = layout.take(desc.count, torch.int32)

    @staticmethod
    def suits(desc: EmbeddingBagBackwardDescriptor, device: torch.device) -> bool:
        tuning = TUNING.on(device)
        return (
            desc.sums
            and desc.mode == "max"
            and 0 < desc.bags <= tuning.most_bags
            and desc.count <= tuning.most_places
            and desc.bags**2 * desc.columns <= tuning.most_pairs
        )

    def add_steps(self, steps: Steps, walks: Walks, args: EmbeddingBagBackwardArgs) -> None:
        maxima, bags, tuning = self.maxima, self.maxima.bags, self.tuning
        desc = bags.desc
        assert args.dweight is not None and args.weight is not None
        strides = tuple(args.dweight.stride())
        zeroed, zero_strides = (desc.rows, desc.columns), strides
        if args.dweight.is_contiguous():
            zeroed, zero_strides = (1, desc.rows * desc.columns), (0, 1)
        zero_columns = min(triton.next_power_of_2(zeroed[1]), tuning.zero_tile)
        zero_rows = max(tuning.zero_tile // zero_columns, 1) if zeroed[0] > 1 else 1
        zero_tiles = -(-zeroed[1] // zero_columns)
        find_programs, rank_programs = maxima.find_programs(False), -(-desc.count // tuning.ranked)
        zero_programs = 0 if args.accumulate else -(-zeroed[0] // zero_rows) * zero_tiles
        steps.add(
            choose_rows, find_programs + maxima.programs + rank_programs + zero_programs,
            bags, bags.parameters(args.offsets, False), self,
            **maxima.parameters(walks, args.weight), maxima=bags.maxima, out="dweight",
            find_programs=find_programs, max_programs=maxima.programs, rank_programs=rank_programs,
            zero_rows=zeroed[0], zero_columns=zeroed[1], zero_tiles=zero_tiles, out_strides=strides,
            zero_strides=zero_strides, ACCUMULATE=args.accumulate, LANES=tuning.lanes, RANKED=tuning.ranked,
            SIDE=tuning.side, ZERO_ROWS=zero_rows, ZERO_COLUMNS=zero_columns,
            num_warps=tuning.warps,
        )  # fmt: skip
        columns = min(triton.next_power_of_2(desc.columns), tuning.least_columns)
        rows = min(tuning.chosen_elements // columns, triton.next_power_of_2(desc.bags))
        tiles = -(-desc.columns // columns)
        steps.add(
            add_chosen, -(-desc.bags // rows) * tiles, desc, self, out="dweight", tiles=tiles,
            dout_strides=tuple(args.dout.stride()), out_strides=strides, ACCUMULATE=args.accumulate,
            COMPUTE=compute_of(desc), ROWS=rows, COLUMNS=columns, UNROLL=tuning.unroll, num_warps=1,
        )  # fmt: skip
