"""embedding_bag, in Triton.

One program sums each short bag, in the order of the indices. Other programs of the same launch check indices
and offsets, report errors, and store where bags begin and the bag of every 32nd place (a position in the
flattened indices). A second launch sums longer bags as segments whose terms are rows of the table; it ends at
once if there are none.

The gradient of the table is a segment sum whose terms are rows of ``dout``, selected by bag. The gradient of
a mean is divided once per bag, before the sum. Offsets are clamped wherever they are used, so wrong offsets
access no foreign memory; the result of their bags is undefined until the error is raised.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

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
from holdfast.core.plan import Launch
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.embedding_bag.plan import (
    BadOffset,
    BagDescriptor,
    EmbeddingBagArgs,
    EmbeddingBagBackwardArgs,
    EmbeddingBagBackwardDescriptor,
    EmbeddingBagDescriptor,
)
from holdfast.ops.segment_sum.gpu import (
    CHUNK,
    EVEN,
    STARTS,
    Bounds,
    SegmentSumSteps,
    Target,
    Terms,
    Walk,
    add_clear,
    add_terms,
    finish,
    places_of,
)
from holdfast.ops.segment_sum.gpu import TUNING as SUM_TUNING
from holdfast.ops.segment_sum.gpu_merge_sort import MergeSort, power_below
from holdfast.ops.segment_sum.indexed import BadIndex, IndexedKernel, loops


@dataclass(frozen=True)
class Tuning:
    """Tuning of embedding_bag, besides that of the segment sum."""

    #: Elements per program of ``find_bags``: in its own launch, and in that of ``sum_short_bags``.
    lanes: int
    beside_lanes: int
    #: Elements per program of ``weight_gradients``.
    weight_lanes: int
    #: For ``sum_short_bags``: bytes of a tile, warps, and rows loaded together.
    bag_bytes: int
    bag_warps: int = 1
    bag_unroll: int = 16
    #: Maximum indices of a short bag, which one program sums.
    short: int = 4 * CHUNK.value
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(lanes=1024, beside_lanes=256, weight_lanes=128, bag_bytes=512),
    interpreter=Tuning(lanes=65536, beside_lanes=65536, weight_lanes=4096, bag_bytes=65536),
)


@triton.jit
def bag_of(offsets, offset_step, place, entries, step):
    """Bag of a place: the last that begins at or before it; -1 for none. A binary search over ``offsets``."""
    found = tl.zeros(place.shape, tl.int32)
    while step > 0:
        probe = found + step
        exists = probe <= entries
        there = tl.load(offsets + (probe - 1).to(tl.int64) * offset_step, mask=exists, other=0)
        found = tl.where(exists & (there <= place), probe, found)
        step = step // 2
    return found - 1


@triton.jit
def load_kept(indices, place, here, rows, padding, sizes, strides):
    """Row of each index, and whether it is kept: in range and not padding."""
    index = tl.load(indices + row_offsets(place, sizes, strides), mask=here, other=-1)
    return index, (index >= 0) & (index < rows) & (index != padding)


@triton.jit(
    do_not_specialize=[
        "count", "rows", "padding", "bags", "entries", "length", "step", "bad_index", "bad_offset",
    ]
)  # fmt: skip
def find_bags(
    starts, maxima, keys, bags_of, skipped, indices, offsets, reports,
    count, rows, padding, bags, entries, length, step, bad_index, bad_offset,
    offset_step, sizes, strides,
    OFFSETS: tl.constexpr, KEYS: tl.constexpr, BAGS: tl.constexpr, COUNT: tl.constexpr, RAISE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Process TILE indices, offsets and windows of 32 places.

    OFFSETS: check offsets, store the begin of bags and the block's longest bag. KEYS: store the bag of the
    first place of each window. BAGS: store the bag of each place. RAISE: report indices out of range. COUNT:
    count the skipped indices of each bag.
    """
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < count
    if OFFSETS:
        exists = number < entries
        at = offsets + number.to(tl.int64) * offset_step
        offset = tl.load(at, mask=exists, other=0)
        before = tl.load(at - offset_step, mask=exists & (number > 0), other=0)
        wrong = (offset < before) | (offset > count) | ((number == 0) & (offset != 0))
        report(reports, bad_offset, number, offset, exists & wrong)
        begin = tl.minimum(tl.maximum(offset, 0), count).to(tl.int32)
        tl.store(starts + number, tl.where(exists, begin, count), mask=number <= bags)
        end = tl.load(at + offset_step, mask=number + 1 < entries, other=count)
        amount = tl.minimum(tl.maximum(end, 0), count).to(tl.int32) - begin
        if tl.program_id(0) * TILE <= bags:
            tl.store(maxima + tl.program_id(0), tl.max(tl.where(number < bags, amount, 0), 0))
    if KEYS:
        window = bag_of(offsets, offset_step, number * CHUNK, entries, step)
        tl.store(
            keys + number, tl.where(window < 0, bags, window), mask=inside & (number <= (count - 1) // CHUNK)
        )
    if BAGS:
        if OFFSETS:
            bag = bag_of(offsets, offset_step, number, entries, step)
            bag = tl.where(bag < bags, bag, -1)
        else:
            bag = number // length
        tl.store(bags_of + number, bag, mask=inside)
    if RAISE or COUNT:
        index, kept = load_kept(indices, number, inside, rows, padding, sizes, strides)
        if RAISE:
            report(reports, bad_index, number, index, inside & ((index < 0) | (index >= rows)))
        if COUNT:
            one = tl.full([TILE], 1, tl.int32)
            tl.atomic_add(skipped + bag, one, mask=inside & ~kept & (bag >= 0), sem="relaxed")


@triton.jit
def table_term(
    weight, indices, unused, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Term ``number`` is the row of the table at index ``number``, if it is kept."""
    index, kept = load_kept(indices, number, here, numbers[0], numbers[1], sizes, place_strides)
    at = weight + (index.to(tl.int64) * strides[0])[:, None] + column * strides[1]
    # Few rows are read twice, so keep other data in the cache.
    value = tl.load(at, mask=kept[:, None] & inside, other=0.0, eviction_policy="evict_first")
    return widen(value, COMPUTE), kept.to(tl.int32)


@triton.jit
def weighted_table_term(
    weight, indices, unused, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``table_term`` times its weight. A skipped term is 0 * 0."""
    value, kept = table_term(
        weight, indices, unused, factors, number, here, column, inside, sizes, strides, place_strides,
        factor_strides, numbers, COMPUTE,
    )  # fmt: skip
    at = factors + row_offsets(number, sizes, factor_strides)
    factor = widen(tl.load(at, mask=kept > 0, other=0.0), COMPUTE)
    return value * factor[:, None], kept


@triton.jit
def load_bag(places, bags_of, number, here):
    """Place of term ``number`` in sorted order, and its bag; -1 for none."""
    place = tl.load(places + number, mask=here, other=0).to(tl.int32)
    return place, tl.load(bags_of + place, mask=here, other=-1)


@triton.jit
def load_bag_row(rows, bag, column, inside, strides, COMPUTE: tl.constexpr):
    at = rows + (bag.to(tl.int64) * strides[0])[:, None] + column * strides[1]
    return widen(tl.load(at, mask=(bag >= 0)[:, None] & inside, other=0.0), COMPUTE)


@triton.jit
def bag_term(
    dout, places, bags_of, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Term ``number`` in sorted order is the row of ``dout`` of its bag."""
    _, bag = load_bag(places, bags_of, number, here)
    return load_bag_row(dout, bag, column, inside, strides, COMPUTE), here.to(tl.int32)


@triton.jit
def weighted_bag_term(
    dout, places, bags_of, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``bag_term`` times the weight of the place."""
    place, bag = load_bag(places, bags_of, number, here)
    value = load_bag_row(dout, bag, column, inside, strides, COMPUTE)
    at = factors + row_offsets(place, sizes, factor_strides)
    factor = widen(tl.load(at, mask=bag >= 0, other=0.0), COMPUTE)
    return value * factor[:, None], here.to(tl.int32)


@triton.jit
def chosen_bag_term(
    dout, places, bags_of, chosen, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``bag_term`` in the columns whose maximum came from this place, zeros elsewhere."""
    place, bag = load_bag(places, bags_of, number, here)
    value = load_bag_row(dout, bag, column, inside, strides, COMPUTE)
    at = chosen + (bag.to(tl.int64) * numbers[0])[:, None] + column
    mine = tl.load(at, mask=(bag >= 0)[:, None] & inside, other=-1) == place[:, None]
    return tl.where(mine, value, 0.0), here.to(tl.int32)


@triton.jit
def add_bags(
    weight, indices, factors, begin, size, column, inside,
    sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sums of bags of up to 32 chunks, and the number of terms that are counted.

    A chunk sum is never -0.0, so adding a single one to +0.0 changes no bit.
    """
    total = tl.zeros([ROWS, COLUMNS], COMPUTE)
    counted = tl.zeros([ROWS], tl.int32)
    for at in range(0, tl.max(size, 0), CHUNK):
        if BY_COUNT:
            place = (begin + at)[:, None] + tl.arange(0, CHUNK)[None, :]
            here = (at + tl.arange(0, CHUNK))[None, :] < size[:, None]
            _, kept = load_kept(indices, place, here, numbers[0], numbers[1], sizes, place_strides)
            counted += tl.sum(kept.to(tl.int32), 1)
        chunk, _ = add_terms(
            weight, indices, indices, factors, begin + at, tl.minimum(size - at, CHUNK), column, inside,
            sizes, strides, place_strides, factor_strides, numbers,
            TERM, False, COMPUTE, ROWS, COLUMNS, UNROLL,
        )  # fmt: skip
        total += chunk
    return total, counted


@triton.jit(
    do_not_specialize=[
        "count", "bags", "entries", "length", "step", "bad_index", "bad_offset", "find_programs", "cleared",
    ]
)  # fmt: skip
def sum_short_bags(
    out, weight, indices, factors, offsets, starts, maxima, keys, arrivals, reports,
    count, bags, entries, length, step, bad_index, bad_offset, find_programs, cleared,
    offset_step, columns, tiles,
    out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, OFFSETS: tl.constexpr, KEYS: tl.constexpr, RAISE: tl.constexpr, SHORT: tl.constexpr,
    BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``find_bags`` for TILE elements, and zero ``arrivals``; or the sums of ROWS bags that are short."""
    follow()
    if tl.program_id(0) < find_programs:
        find_bags(
            starts, maxima, keys, keys, keys, indices, offsets, reports,
            count, numbers[0], numbers[1], bags, entries, length, step, bad_index, bad_offset,
            offset_step, sizes, place_strides,
            OFFSETS, KEYS, False, False, RAISE, TILE,
        )  # fmt: skip
        number = tl.program_id(0) * TILE + tl.arange(0, TILE)
        tl.store(arrivals + number, tl.zeros([TILE], tl.int32), mask=number < cleared)
    else:
        program = tl.program_id(0) - find_programs
        tile = program % tiles
        bag = program // tiles * ROWS + tl.arange(0, ROWS)
        column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
        inside = column < columns
        mine = bag < bags
        if OFFSETS:
            # The last bag ends with the indices, or at the last offset.
            at = offsets + bag.to(tl.int64) * offset_step
            begin = tl.load(at, mask=mine, other=0)
            end = tl.load(at + offset_step, mask=mine & (bag + 1 < entries), other=count)
            first = tl.minimum(tl.maximum(begin, 0), count).to(tl.int32)
            amount = tl.minimum(tl.maximum(end, 0), count).to(tl.int32) - first
            mine = mine & (amount <= SHORT)
        else:
            first = bag * length
            amount = tl.zeros([ROWS], tl.int32) + length
        total, counted = add_bags(
            weight, indices, factors, first, tl.where(mine, amount, 0), column, inside,
            sizes, strides, place_strides, factor_strides, numbers,
            TERM, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
        )  # fmt: skip
        finish(
            out, factors, bag, mine, total, amount, counted, column, inside, out_sizes, out_strides,
            factor_strides, numbers, False, BY_COUNT, COMPUTE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "padding", "bags", "length"])
def max_bags(
    out, weight, indices, starts,
    rows, padding, bags, length,
    columns, tiles, sizes, strides, weight_strides, out_strides,
    BOUNDS: tl.constexpr, PLACES: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Maximum of each column in ROWS bags: the first NaN, or the first of equals. PLACES: store its place."""
    follow()
    tile = tl.program_id(0) % tiles
    bag = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    inside = column < columns
    first, amount = places_of(starts, bag, bag < bags, length, BOUNDS)
    best = tl.zeros([ROWS, COLUMNS], COMPUTE)
    found = tl.full([ROWS, COLUMNS], -1, tl.int32)
    for begin in range(0, tl.max(amount, 0), UNROLL):
        for u in tl.static_range(UNROLL):
            place = first + (begin + u)
            index, kept = load_kept(indices, place, begin + u < amount, rows, padding, sizes, strides)
            at = weight + (index.to(tl.int64) * weight_strides[0])[:, None] + column * weight_strides[1]
            value = widen(tl.load(at, mask=kept[:, None] & inside, other=0.0), COMPUTE)
            better = (found < 0) | (value > best) | ((value != value) & (best == best))
            better = better & kept[:, None]
            best = tl.where(better, value, best)
            found = tl.where(better, place[:, None], found)
    to = out + (bag.to(tl.int64) * out_strides[0])[:, None] + column * out_strides[1]
    mask = (bag < bags)[:, None] & inside
    if PLACES:
        tl.store(to, found, mask=mask)
    else:
        tl.store(to, narrow(best, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["bags", "length"])
def divide_rows(
    divided, dout, starts, skipped, bags, length, columns, tiles, dout_strides,
    BOUNDS: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Divide the gradients of ROWS bags by the number of indices that their means count."""
    follow()
    tile = tl.program_id(0) % tiles
    bag = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    mask = (bag < bags)[:, None] & (column < columns)
    _, amount = places_of(starts, bag, bag < bags, length, BOUNDS)
    amount -= tl.load(skipped + bag, mask=bag < bags, other=0)
    at = dout + (bag.to(tl.int64) * dout_strides[0])[:, None] + column * dout_strides[1]
    value = widen(tl.load(at, mask=mask, other=0.0), COMPUTE)
    value = quotient(value, tl.maximum(amount, 1).to(COMPUTE)[:, None])
    tl.store(divided + bag.to(tl.int64)[:, None] * columns + column, value, mask=mask)


@triton.jit
def carry(lower, upper, full):
    """If ``full``, add level ``lower`` to level ``upper`` and restart ``lower`` from zero."""
    return tl.where(full, 0.0, lower), upper + tl.where(full, lower, 0.0)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def weight_gradients(
    out, dout, weight, indices, bags_of,
    count, rows, padding, columns,
    sizes, strides, out_strides, dout_strides, weight_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of TILE per-sample weights: ordered sums over the columns, loaded four at a time.

    Each lane reads its own row, so neighbouring lanes load from different rows; the cache keeps the lines.
    """
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < count
    index, kept = load_kept(indices, place, inside, rows, padding, sizes, strides)
    bag = tl.load(bags_of + place, mask=inside, other=-1)
    kept = kept & (bag >= 0)
    row = weight + (index.to(tl.int64) * weight_strides[0])[:, None]
    other = dout + (bag.to(tl.int64) * dout_strides[0])[:, None]
    one = tl.zeros([TILE], COMPUTE)
    two = tl.zeros([TILE], COMPUTE)
    three = tl.zeros([TILE], COMPUTE)
    four = tl.zeros([TILE], COMPUTE)
    five = tl.zeros([TILE], COMPUTE)
    six = tl.zeros([TILE], COMPUTE)
    chunks = (columns + CHUNK - 1) // CHUNK
    for chunk in range(0, chunks):
        total = tl.zeros([TILE], COMPUTE)
        for begin in range(0, CHUNK, 4):
            column = (tl.arange(0, 4) + (chunk * CHUNK + begin))[None, :].to(tl.int64)
            mask = kept[:, None] & (column < columns)
            a = widen(tl.load(row + column * weight_strides[1], mask=mask, other=0.0), COMPUTE)
            b = widen(tl.load(other + column * dout_strides[1], mask=mask, other=0.0), COMPUTE)
            even, odd = tl.split(tl.reshape(a * b, [TILE, 2, 2]))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            total = (((total + first) + second) + third) + fourth
        one += total
        done = chunk + 1
        one, two = carry(one, two, done % CHUNK == 0)
        two, three = carry(two, three, done % (CHUNK * CHUNK) == 0)
        three, four = carry(three, four, done % (CHUNK * CHUNK * CHUNK) == 0)
        four, five = carry(four, five, done % (CHUNK * CHUNK * CHUNK * CHUNK) == 0)
        five, six = carry(five, six, done % (CHUNK * CHUNK * CHUNK * CHUNK * CHUNK) == 0)
    # Add every level to the next, full or not: a sum is never -0.0, so adding +0.0 changes no bit.
    total = six + (five + (four + (three + (two + one))))
    to = out + row_offsets(place, sizes, out_strides)
    if ACCUMULATE:
        total = widen(tl.load(to, mask=kept, other=0.0), COMPUTE) + total
        inside = kept
    tl.store(to, narrow(total, out.dtype.element_ty), mask=inside)


def _compute(desc: BagDescriptor) -> Any:
    return tl.float64 if desc.dtype == torch.float64 else tl.float32


class Walks:
    """Sizes of the loops over the indices, and strides of the indices and ``others`` in them."""

    def __init__(self, desc: BagDescriptor, indices: torch.Tensor, *others: torch.Tensor | None) -> None:
        strides = [indices.stride() if t is None else t.stride() for t in (indices, *others)]
        self.space: Space = loops(desc.shape, *strides)
        self.sizes = (*self.space.sizes, 1)
        self.strides = [(*own, 0) for own in self.space.strides]


class Bags:
    """Workspace regions and launches that find the bags.

    ``keys``: store the bag of every 32nd place. ``bags``: store the bag of every place. ``counted``: count
    the skipped indices of each bag. ``beside``: ``sum_short_bags`` finds the bags.
    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        desc: BagDescriptor,
        device: torch.device,
        *,
        keys: bool,
        bags: bool,
        counted: bool,
        beside: bool = False,
    ) -> None:
        self.desc, self.device, self.tuning = desc, device, TUNING.on(device)
        lanes = self.tuning.beside_lanes if beside else self.tuning.lanes
        self.even = desc.offsets is None
        # At least one element, so that the workspace has an address.
        self.starts = layout.take(1 if self.even else desc.bags + 1, torch.int32)
        self.blocks = 0 if self.even else -(-(desc.bags + 1) // lanes)
        self.maxima = layout.take(self.blocks, torch.int32)
        self.windows = 0 if self.even or not keys else -(-desc.count // CHUNK.value)
        self.keys = layout.take(self.windows, torch.int32)
        self.bags_of = layout.take(desc.count if bags else 0, torch.int32)
        self.skipped = layout.take(desc.bags if counted else 0, torch.int32)

    def add_steps(self, steps: Steps, walks: Walks, offsets: torch.Tensor | None, raises: bool) -> None:
        desc, lanes = self.desc, self.tuning.lanes
        listed = self.bags_of.count > 0
        counted = listed and self.skipped.count > 0
        if self.skipped.count:
            add_clear(steps, self.skipped, lanes)
        work = self.work(raises)
        if not work:
            return
        steps.add(
            find_bags, -(-work // lanes), self, self.parameters(offsets, raises),
            count=desc.count, rows=desc.rows, padding=desc.padding, bags=desc.bags,
            length=max(desc.length, 1), sizes=walks.sizes, strides=walks.strides[0],
            BAGS=listed, COUNT=counted, TILE=lanes, num_warps=self.tuning.warps,
        )  # fmt: skip

    def parameters(self, offsets: torch.Tensor | None, raises: bool) -> dict[str, Any]:
        """Parameters of a kernel that finds the bags. Pointers that it does not use are "indices"."""
        desc, entries = self.desc, self.desc.offsets or 0
        reports = device_errors.reports_on(self.device) if raises or not self.even else None
        return {
            "offsets": "indices" if offsets is None else "offsets",
            "reports": reports.words if reports else "indices",
            "bad_index": reports.word(BadIndex(desc.rows)) if reports and raises else 0,
            "bad_offset": reports.word(BadOffset(desc.count)) if reports and not self.even else 0,
            "entries": entries,
            "step": power_below(entries),
            "offset_step": 1 if offsets is None else offsets.stride(0),
            "OFFSETS": not self.even,
            "KEYS": self.windows > 0,
            "RAISE": raises,
        }

    def work(self, raises: bool) -> int:
        """Number of elements that ``find_bags`` processes."""
        places = self.desc.count if raises or self.bags_of.count else 0
        return max(places, 0 if self.even else self.desc.bags + 1, self.windows)

    @property
    def bounds(self) -> Bounds:
        """Bounds of the places of each bag."""
        if self.even:
            return Bounds(EVEN, length=self.desc.length)
        return Bounds(STARTS, self.starts, keys=self.keys, maxima=self.maxima, blocks=self.blocks)


def _add_max(
    steps: Steps,
    bags: Bags,
    walks: Walks,
    out: StepOperand,
    weight_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
) -> None:
    """Add the launch of ``max_bags``; if ``out`` is a region, it takes the places of the maxima."""
    desc, tuning = bags.desc, SUM_TUNING.on(bags.device)
    rows, columns = tuning.tile_of(desc.columns, desc.compute.torch.itemsize)
    tiles = -(-desc.columns // columns)
    steps.add(
        max_bags, -(-desc.bags // rows) * tiles, desc,
        out=out, starts="indices" if bags.even else bags.starts, tiles=tiles, sizes=walks.sizes,
        strides=walks.strides[0], weight_strides=weight_strides, out_strides=out_strides,
        BOUNDS=bags.bounds.kind, PLACES=isinstance(out, Region), COMPUTE=_compute(desc),
        ROWS=rows, COLUMNS=columns, UNROLL=tuning.unroll, num_warps=tuning.warps,
    )  # fmt: skip


class EmbeddingBag(IndexedKernel[EmbeddingBagDescriptor]):
    """``sum_short_bags``, then the segment sum of longer bags; or ``find_bags``, then ``max_bags``."""

    def __init__(self, desc: EmbeddingBagDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout, self.tuning = WorkspaceLayout(), TUNING.on(device)
        sums, short = desc.mode != "max", self.tuning.short
        self.bags = Bags(
            layout, desc, device, keys=sums and desc.longest > short, bags=False, counted=False, beside=sums
        )
        self.summing = None
        if sums:
            self.summing = SegmentSumSteps(
                layout, device, desc.count, desc.bags, desc.columns, desc.dtype, desc.longest,
                desc.mode == "mean", short,
            )  # fmt: skip
        self.set_workspace(layout)

    def compile(self) -> None:
        self.prepare(EmbeddingBagArgs.described(self.desc))

    def prepare(self, args: EmbeddingBagArgs) -> Launch[EmbeddingBagArgs]:
        desc = self.desc
        weights = args.per_sample_weights
        walks = Walks(desc, args.indices, weights)
        steps = Steps(self.device, args)
        strides = tuple(args.weight.stride())
        if self.summing is None:
            self.bags.add_steps(steps, walks, args.offsets, desc.bad_index == "raise")
            _add_max(steps, self.bags, walks, "out", strides, tuple(args.out.stride()))
            return steps.launch
        out = Target.matrix("out", args.out)
        walk = Walk(walks.sizes, strides, walks.strides[0], walks.strides[1], (desc.rows, desc.padding))
        factors = "indices" if weights is None else "per_sample_weights"
        term = table_term if weights is None else weighted_table_term
        self.sum_short(steps, args, self.summing, out, walk, factors, term)
        if self.summing.windows:
            self.summing.add_steps(
                steps,
                out,
                Terms("weight", "indices", "indices", factors),
                self.bags.bounds,
                walk,
                term=term,
                cleared=True,
                only_long=True,
            )
        return steps.launch

    def sum_short(
        self, steps: Steps, args: EmbeddingBagArgs, summing: SegmentSumSteps, out: Target, walk: Walk,
        factors: str, term: Any,
    ) -> None:  # fmt: skip
        desc, bags, cleared, tuning = self.desc, self.bags, summing.arrivals.count, self.tuning
        raises = desc.bad_index == "raise"
        find_programs = -(-max(bags.work(raises), cleared) // tuning.beside_lanes)
        rows, columns = summing.tuning.tile_of(desc.columns, desc.dtype.itemsize, tuning.bag_bytes)
        tiles = -(-desc.columns // columns)
        owned = 0 if bags.even and desc.length > tuning.short else desc.bags
        steps.add(
            sum_short_bags, find_programs + -(-owned // rows) * tiles,
            bags, bags.parameters(args.offsets, raises), out, walk,
            factors=factors, arrivals=summing.arrivals, count=desc.count, bags=desc.bags, length=desc.length,
            find_programs=find_programs, cleared=cleared, columns=desc.columns, tiles=tiles,
            TERM=term, SHORT=tuning.short, BY_COUNT=summing.by_count, COMPUTE=_compute(desc),
            ROWS=rows, COLUMNS=columns, UNROLL=tuning.bag_unroll, TILE=tuning.beside_lanes,
            num_warps=tuning.bag_warps,
        )  # fmt: skip


class EmbeddingBagBackward(IndexedKernel[EmbeddingBagBackwardDescriptor]):
    """``find_bags``, then the segment sum by row, then ``weight_gradients``."""

    def __init__(self, desc: EmbeddingBagBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        mean = desc.sums and desc.mode == "mean"
        self.bags = Bags(layout, desc, device, keys=False, bags=True, counted=mean)
        elements = desc.bags * desc.columns
        self.divided = layout.take(elements, desc.compute.torch) if mean else None
        self.chosen = layout.take(elements, torch.int32) if desc.sums and desc.mode == "max" else None
        self.order = self.summing = None
        if desc.sums:
            row_bytes = desc.columns * desc.dtype.itemsize
            tall = SUM_TUNING.on(device).is_tall(desc.rows, desc.count, row_bytes)
            self.order = MergeSort(layout, device, desc.count, desc.rows, tall)
            self.summing = SegmentSumSteps(
                layout, device, desc.count, desc.rows, desc.columns, desc.dtype, desc.count, desc.by_count
            )
        self.set_workspace(layout)

    def compile(self) -> None:
        self.prepare(EmbeddingBagBackwardArgs.described(self.desc))

    def prepare(self, args: EmbeddingBagBackwardArgs) -> Launch[EmbeddingBagBackwardArgs]:
        desc = self.desc
        walks = Walks(desc, args.indices, args.per_sample_weights, args.dper_sample_weights)
        steps = Steps(self.device, args)
        self.bags.add_steps(steps, walks, args.offsets, False)
        if self.order is not None and self.summing is not None:
            assert args.dweight is not None
            terms, walk, term = self.terms(steps, args, walks)
            self.order.add_steps(steps, "indices", walks.space, desc.padding, self.summing.arrivals)
            self.summing.add_steps(
                steps,
                Target.matrix("dweight", args.dweight),
                terms,
                Bounds.of(self.order),
                walk,
                term=term,
                accumulate=args.accumulate,
                cleared=True,
            )
        if desc.dper_sample_weights and desc.count:
            self.differentiate_weights(steps, args, walks)
        return steps.launch

    def terms(self, steps: Steps, args: EmbeddingBagBackwardArgs, walks: Walks) -> tuple[Terms, Walk, Any]:
        """Operands, walk and term function of the gradient of the table."""
        desc = self.desc
        assert self.order is not None
        places, bags = self.order.places, self.bags.bags_of
        strides = tuple(args.dout.stride())
        walk = Walk(walks.sizes, strides)
        if self.divided is not None and desc.bags:
            tuning = SUM_TUNING.on(self.device)
            rows, columns = tuning.tile_of(desc.columns, desc.compute.torch.itemsize)
            tiles = -(-desc.columns // columns)
            steps.add(
                divide_rows, -(-desc.bags // rows) * tiles, desc,
                divided=self.divided, starts="indices" if self.bags.even else self.bags.starts,
                skipped=self.bags.skipped, tiles=tiles, dout_strides=strides,
                BOUNDS=self.bags.bounds.kind, COMPUTE=_compute(desc), ROWS=rows, COLUMNS=columns,
                num_warps=tuning.warps,
            )  # fmt: skip
            walk = Walk(walks.sizes, (desc.columns, 1))
            return Terms(self.divided, places, bags, "indices"), walk, bag_term
        if self.chosen is not None and desc.bags:
            assert args.weight is not None
            of_weight, of_chosen = tuple(args.weight.stride()), (desc.columns, 1)
            _add_max(steps, self.bags, walks, self.chosen, of_weight, of_chosen)
            walk = walk._replace(numbers=(desc.columns,))
            return Terms("dout", places, bags, self.chosen), walk, chosen_bag_term
        if args.per_sample_weights is not None:
            walk = walk._replace(factor_strides=walks.strides[1])
            return Terms("dout", places, bags, "per_sample_weights"), walk, weighted_bag_term
        return Terms("dout", places, bags, "indices"), walk, bag_term

    def differentiate_weights(self, steps: Steps, args: EmbeddingBagBackwardArgs, walks: Walks) -> None:
        desc, lanes = self.desc, self.bags.tuning.weight_lanes
        assert args.weight is not None
        steps.add(
            weight_gradients, -(-desc.count // lanes), desc,
            out="dper_sample_weights", bags_of=self.bags.bags_of, sizes=walks.sizes,
            strides=walks.strides[0], out_strides=walks.strides[2],
            dout_strides=tuple(args.dout.stride()), weight_strides=tuple(args.weight.stride()),
            ACCUMULATE=args.accumulate, COMPUTE=_compute(desc), TILE=lanes, num_warps=self.bags.tuning.warps,
        )  # fmt: skip
