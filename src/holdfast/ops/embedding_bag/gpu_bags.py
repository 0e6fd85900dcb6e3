"""The bags of embedding_bag in Triton: their places, checks of indices and offsets, workspace regions.

Offsets are clamped wherever they are used, so wrong offsets access no foreign memory.
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
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core import device_errors
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.ops.embedding_bag.plan import BadOffset, BagDescriptor
from holdfast.ops.segment_sum.gpu import CHUNK, EVEN, STARTS, Bounds, add_clear
from holdfast.ops.segment_sum.gpu_index import power_below
from holdfast.ops.segment_sum.indexed import BadIndex, loops


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
    #: The tile has fewer bags if there would be fewer programs than this.
    bag_programs: int
    bag_warps: int = 1
    bag_unroll: int = 16
    #: Maximum indices of a short bag, which one program sums.
    short: int = 4 * CHUNK.value
    warps: int = 4


TUNING = Tuned(
    gpu=Tuning(lanes=1024, beside_lanes=256, weight_lanes=128, bag_bytes=512, bag_programs=528),
    interpreter=Tuning(lanes=65536, beside_lanes=65536, weight_lanes=4096, bag_bytes=65536, bag_programs=2),
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
def bag_places(offsets, offset_step, bag, exists, count, entries, length, OFFSETS: tl.constexpr):
    """First place and number of places of each bag."""
    if OFFSETS:
        # The last bag ends with the indices, or at the last offset.
        at = offsets + bag.to(tl.int64) * offset_step
        begin = tl.load(at, mask=exists, other=0)
        end = tl.load(at + offset_step, mask=exists & (bag + 1 < entries), other=count)
        first = tl.minimum(tl.maximum(begin, 0), count).to(tl.int32)
        amount = tl.minimum(tl.maximum(end, 0), count).to(tl.int32) - first
    else:
        first = bag * length
        amount = tl.zeros_like(first) + length
    return first, tl.where(exists, amount, 0)


def compute_of(desc: BagDescriptor) -> Any:
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
    the skipped indices of each bag. ``beside``: programs of another kernel's launch find the bags.
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
