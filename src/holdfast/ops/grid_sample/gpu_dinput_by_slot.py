"""dinput and dgrid of bilinear samples with few channels, in Triton: a pixel sums the slots of its cells.

Every cell (see ``gpu_cells``) has a counter and a few slots. ``place_samples`` stores the number of each
sample in the next free slot of its cell; it also computes dgrid, and the largest exponent of each plane of
dout. ``sum_slots`` then sums the samples in the slots around each pixel.

A sample that finds no free slot is an extra. The first extra of a cell takes a holder: accumulators for each
corner and channel. ``add_extras`` adds the terms of the extras to the holders with integer atomics. If there
are more extras than ``extras`` has room for, or numbers that the fast sums do not handle (``settle_planes``),
``add_extras`` and ``sum_slots`` return at once, and ``gpu_dinput_by_sample`` computes dinput in the same
memory.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import ALIGNMENT, WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_cells import (
    LARGEST_SHIFT,
    cell_of,
    cells_of,
    clear_words,
    is_flat,
    place_offset,
)
from holdfast.ops.grid_sample.gpu_coordinates import (
    corner_weight,
    locate,
    located,
    offset_of,
    sampling_constants,
    unravel,
)
from holdfast.ops.grid_sample.gpu_dinput_by_cell import tiles_of
from holdfast.ops.grid_sample.gpu_dinput_by_sample import Gate, SampleSums, operands_of
from holdfast.ops.grid_sample.gpu_integer_sums import exponent_field, plane_shift, power_of_two
from holdfast.ops.grid_sample.gpu_slot_columns import EXTRAS, HOLDERS, TALLIES, sum_slots
from holdfast.ops.grid_sample.gpu_terms import (
    add_products,
    add_slopes,
    four_corners,
    load_changes,
    store_changes,
)
from holdfast.ops.grid_sample.plan import LIMIT, GridSampleBackwardArgs, GridSampleBackwardDescriptor, Mode

#: Words per plane of ``largest``: atomics of many programs on one address would be slow.
SPREAD = tl.constexpr(64)


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``SlotSums``."""

    #: Samples per program of ``place_samples``, one per thread, warps, and registers per thread in 3-D.
    tile: int
    warps: int
    registers: int
    #: Columns per program of ``sum_slots``, width of its tile, pixels of a column, and warps. It loads
    #: a row ahead if samples have at most ``most_ahead`` corners in all channels.
    lanes: int
    wide: int
    rows: int
    sum_warps: int
    most_ahead: int
    #: Maximum programs of ``add_extras``, and samples of each.
    extra_programs: int
    extra_tile: int
    #: Words cleared per program.
    cleared: int
    #: Warps of the other kernels.
    other_warps: int = 4
    #: Maximum and minimum number of slots of a cell. For dinput alone there are always ``slots``: with fewer,
    #: grids with noise would have too many extras.
    slots: int = 4
    least_slots: int = 2
    #: Maximum number of samples per pixel.
    most_dense: int = 2
    #: Samples for which there is room for one extra; the maximum if memory is short.
    samples_per_extra: int = 32
    most_per_extra: int = 256
    #: Minimum number of samples that are processed at a time if memory is short.
    least_portion: int = 2**20
    #: Planes per program of ``settle_planes``.
    planes: int = 16
    #: Minimum and maximum number of channels, and minimum number of elements of dout.
    least_channels: int = 2
    most_channels: int = 4
    least_elements: int = 2**19


TUNING = Tuned(
    gpu=Tuning(
        tile=256, warps=8, registers=64, lanes=32, wide=32, rows=8, sum_warps=1, most_ahead=16,
        extra_programs=528, extra_tile=128, cleared=4096,
    ),
    interpreter=Tuning(
        tile=8192, warps=4, registers=64, lanes=1024, wide=32, rows=8, sum_warps=4, most_ahead=16,
        extra_programs=2, extra_tile=64, cleared=65536, slots=2, samples_per_extra=4, least_portion=1,
        least_channels=1, least_elements=1,
    ),
)  # fmt: skip


@triton.jit
def keep_extras(
    extras, slots, holders, tallies, extra, arrival, place, cell, all_cells, most_extras,
    WORDS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """List extras, and give the first extra of each cell a holder of WORDS accumulators."""
    listed = extra.to(tl.int32)
    position = tl.atomic_add(tallies + EXTRAS, tl.sum(listed, 0), sem="relaxed")
    position += tl.cumsum(listed, 0) - listed
    tl.store(extras + position, place, mask=extra & (position < most_extras))
    first = extra & (arrival == SLOTS)
    held = first.to(tl.int32)
    holder = tl.atomic_add(tallies + HOLDERS, tl.sum(held, 0), sem="relaxed")
    holder += tl.cumsum(held, 0) - held
    tl.store(slots + SLOTS * all_cells + cell, holder, mask=first)
    for word in tl.static_range(WORDS):
        start = tl.zeros(holder.shape, tl.int64)
        tl.store(holders + holder * WORDS + word, start, mask=first & (holder < most_extras))


@triton.jit
def measure(largest, d, n, channels, CHANNELS: tl.constexpr):
    """Update the largest exponent fields of the planes: 0 if all numbers are 0, 255 if one is not finite."""
    fields = (field_of(d[0]), field_of(d[1]), field_of(d[2]), field_of(d[3]))
    at = largest + n * channels * SPREAD + tl.program_id(0) % SPREAD
    if CHANNELS == 1:
        tl.atomic_max(at, tl.max(fields[0], 0), sem="relaxed")
    else:
        both = tl.join(tl.join(fields[0], fields[2]), tl.join(fields[1], fields[3]))
        most = tl.max(tl.reshape(both, (both.shape[0], 4)), 0)
        channel = tl.arange(0, 4)
        tl.atomic_max(at + channel * SPREAD, most, mask=channel < CHANNELS, sem="relaxed")


@triton.jit
def field_of(d):
    """The exponent field of each number; at least 1 if the number is not 0."""
    return tl.maximum(exponent_field(d), (d != 0.0).to(tl.int32))


@triton.jit
def load_pair(grid, number, at, inside, step, PACKED: tl.constexpr, COMPUTE: tl.constexpr):
    """x and y of samples at offsets ``at`` of a 2-D grid. PACKED: there is nothing between the numbers."""
    if PACKED:
        at = (number * 2)[:, None] + tl.arange(0, 2)[None, :]
        return tl.split(widen(tl.load(grid + at, mask=inside[:, None], other=0.0), COMPUTE))
    else:
        gx = widen(tl.load(grid + at, mask=inside, other=0.0), COMPUTE)
        return gx, widen(tl.load(grid + (at + step), mask=inside, other=0.0), COMPUTE)


@triton.jit
def store_pair(dgrid, number, changes, scale, inside):
    """Store the derivatives along x and y, with nothing between the numbers."""
    x = tl.where(scale[0] != 0, changes[0] * scale[0], 0.0)
    y = tl.where(scale[1] != 0, changes[1] * scale[1], 0.0)
    pair = narrow(tl.join(x, y), dgrid.dtype.element_ty)
    tl.store(dgrid + ((number * 2)[:, None] + tl.arange(0, 2)[None, :]), pair, mask=inside[:, None])


@triton.jit(do_not_specialize=["tiles", "cells", "all_cells", "most_extras"])
def place_samples(
    dgrid, counts, slots, extras, holders, tallies, largest, dout, image, grid,
    tiles, cells, all_cells, most_extras, channels, samples, sizes, out_sizes, dgrid_strides, dout_strides,
    image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DGRID: tl.constexpr, CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr, GRID_FLAT: tl.constexpr, FLAT: tl.constexpr, DGRID_FLAT: tl.constexpr,
    PACKED: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Place TILE samples of an image, one per thread, and compute their dgrid.

    PACKED: there is nothing between the coordinates of the grid, nor between those of dgrid.
    """
    follow()
    n = tl.program_id(0) // tiles
    number = (tl.program_id(0) - n * tiles) * TILE + tl.arange(0, TILE)
    inside = number < samples
    own_grid = grid + n.to(tl.int64) * grid_strides[0]
    grid_at = place_offset(number, out_sizes, grid_strides, AXES, GRID_FLAT).to(OFFSET)
    if AXES == 2:
        gx, gy = load_pair(own_grid, number, grid_at, inside, grid_step, PACKED, COMPUTE)
        first, t, scale = located(gx, gy, tl.zeros_like(gx), sizes, MODE, PADDING, ALIGNED)
    else:
        first, t, scale = locate(
            own_grid, grid_at, inside, grid_step, sizes, AXES, MODE, PADDING, ALIGNED, COMPUTE
        )
    base = dout + n.to(tl.int64) * dout_strides[0]
    base += place_offset(number, out_sizes, dout_strides, AXES, FLAT).to(OFFSET)
    d = load_changes(base, dout_step, inside, CHANNELS, COMPUTE)
    CORNERS: tl.constexpr = (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS)
    if DGRID:
        zeros = tl.zeros([TILE], COMPUTE)
        changes = (zeros, zeros, zeros)
        own_image = image + n.to(tl.int64) * image_strides[0]
        for corner in tl.static_range(0, CORNERS, 4):
            offsets, exist = four_corners(first, sizes, image_strides, corner // 4, AXES, OFFSET)
            s0, s1, s2, s3 = zeros, zeros, zeros, zeros
            for channel in tl.static_range(CHANNELS):
                s0, s1, s2, s3 = add_products(
                    s0, s1, s2, s3, d[channel], own_image, channel, image_step, offsets, COMPUTE
                )
            changes = add_slopes(changes, (s0, s1, s2, s3), exist, t, corner, AXES, TAPS, MODE)
        own_dgrid = dgrid + n.to(tl.int64) * dgrid_strides[0]
        target = place_offset(number, out_sizes, dgrid_strides, AXES, DGRID_FLAT).to(OFFSET)
        if PACKED and not ACCUMULATE:
            store_pair(own_dgrid, number, changes, scale, inside)
        else:
            store_changes(
                own_dgrid, target, changes, scale, inside, dgrid_step, AXES, MODE, ACCUMULATE, COMPUTE
            )
    measure(largest, d, n, channels, CHANNELS)
    cell, there = cell_of(first, sizes, AXES)
    cell += n * cells
    there = there & inside
    arrival = tl.atomic_add(counts + cell, tl.full([TILE], 1, tl.int32), mask=there, sem="relaxed")
    tl.store(slots + arrival * all_cells + cell, number, mask=there & (arrival < SLOTS))
    extra = there & (arrival >= SLOTS)
    if tl.max(extra.to(tl.int32), 0) > 0:
        keep_extras(
            extras, slots, holders, tallies, extra, arrival, n * samples + number, cell, all_cells,
            most_extras, CORNERS * CHANNELS, SLOTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["planes", "most_extras", "fraction_bits"])
def settle_planes(
    scales, tallies, largest, planes, most_extras, fraction_bits, PLANES: tl.constexpr
):  # fmt: skip
    """The scales 2**shift of PLANES planes.

    If a number is not finite, or 2**shift or its inverse is not a normal number, there are too many extras.
    """
    follow()
    plane = tl.program_id(0) * PLANES + tl.arange(0, PLANES)
    at = plane[:, None] * SPREAD + tl.arange(0, SPREAD)[None, :]
    field = tl.max(tl.load(largest + at, mask=(plane < planes)[:, None], other=0), 1)
    shift = plane_shift(field, fraction_bits, tl.float32)
    scale = power_of_two(tl.minimum(shift, LARGEST_SHIFT), tl.float32)
    tl.store(scales + plane, scale, mask=plane < planes)
    refused = (field == 255) | ((field > 0) & (shift > LARGEST_SHIFT))
    if tl.max(refused.to(tl.int32), 0) > 0:
        tl.atomic_max(tallies + EXTRAS, most_extras + 1, sem="relaxed")


@triton.jit(do_not_specialize=["programs", "cells", "all_cells", "most_extras"])
def add_extras(
    holders, slots, extras, tallies, scales, dout, grid,
    programs, cells, all_cells, most_extras, channels, samples, sizes, out_sizes, dout_strides,
    grid_strides, dout_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add the terms of the extras to the holders of their cells."""
    follow()
    amount = tl.load(tallies + EXTRAS)
    if amount > most_extras:
        return
    CORNERS: tl.constexpr = (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS)
    for begin in range(tl.program_id(0) * TILE, amount, programs * TILE):
        inside = begin + tl.arange(0, TILE) < amount
        place = tl.load(extras + begin + tl.arange(0, TILE), mask=inside, other=0)
        n = place // samples
        x, y, z = unravel(place - n * samples, out_sizes, AXES)
        first, t, _scale = locate(
            grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
            AXES, MODE, PADDING, ALIGNED, COMPUTE,
        )  # fmt: skip
        cell, _there = cell_of(first, sizes, AXES)
        holder = tl.load(slots + SLOTS * all_cells + n * cells + cell, mask=inside, other=0)
        target = holders + holder * (CORNERS * CHANNELS)
        base = dout + offset_of(n, x, y, z, dout_strides)
        for channel in tl.static_range(CHANNELS):
            d = widen(tl.load(base + channel * dout_step, mask=inside, other=0.0), COMPUTE)
            change = d * tl.load(scales + n * channels + channel, mask=inside, other=0.0)
            for corner in tl.static_range(CORNERS):
                term = (corner_weight(t, corner, AXES, TAPS, MODE) * change).to(tl.int64)
                tl.atomic_add(target + (corner * CHANNELS + channel), term, mask=inside, sem="relaxed")


class SlotSums:
    """Workspace regions and launches for dinput by slot, and dgrid if needed, in ``budget`` bytes.

    ``images`` images are processed at a time, and a cell has ``SLOTS`` slots. If memory is short, there are
    first fewer images at a time, then fewer slots and less room for extras.
    """

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor, budget: int
    ) -> None:
        self.desc, self.device, self.tuning, self.budget = desc, device, TUNING.on(device), budget
        self.cells = cells_of(desc)
        self.fits = self._fit()
        self._take(layout)

    def _fit(self) -> bool:
        """Choose ``images``, ``SLOTS`` and ``most_extras``; whether the regions fit the budget."""
        desc, tuning = self.desc, self.tuning
        most = LIMIT // ((tuning.slots + 1) * max(self.cells, desc.samples))
        least = max(-(-tuning.least_portion // max(desc.samples, 1)), 1)
        portions = range(-(-desc.batch // most), max(desc.batch // least, 1) + 1)
        sizes = sorted({-(-desc.batch // count) for count in portions}, reverse=True)
        fewest = tuning.least_slots if desc.needs_dgrid else tuning.slots
        choices = [(size, slots) for size in sizes for slots in range(tuning.slots, fewest, -1)]
        choices += [(size, fewest) for size in sizes]
        for self.images, self.SLOTS in choices:
            samples = self.images * desc.samples
            self.most_extras = max(samples // tuning.samples_per_extra, 1)
            missing = self._size() - self.budget
            if missing <= 0:
                return True
            if self.SLOTS == fewest:
                fewer = -(-(missing + 2 * ALIGNMENT) // (4 + 8 * desc.corners * desc.channels))
                self.most_extras = max(self.most_extras - fewer, 1)
                if self.most_extras * tuning.most_per_extra >= samples and self._size() <= self.budget:
                    return True
        return False

    def _size(self) -> int:
        layout = WorkspaceLayout()
        self._take(layout)
        return layout.size

    def _take(self, layout: WorkspaceLayout) -> None:
        self.all_cells, self.planes = self.images * self.cells, self.images * self.desc.channels
        sizes = [TALLIES.value, self.planes * SPREAD.value, self.all_cells]
        self.words, (self.tallies, self.largest, self.counts) = layout.take_together(sizes, torch.int32)
        self.scales = layout.take(self.planes, torch.float32)
        start = layout.size
        self.slots = layout.take((self.SLOTS + 1) * self.all_cells, torch.int32)
        self.extras = layout.take(self.most_extras, torch.int32)
        self.holders = layout.take(self.most_extras * self.desc.corners * self.desc.channels, torch.int64)
        room = max(layout.size, self.budget) - start
        with layout.reusing(start):
            portion = replace(self.desc, shape=(self.images, *self.desc.shape[1:]))
            self.instead = SampleSums(layout, self.device, portion, room)

    @staticmethod
    def serves(desc: GridSampleBackwardDescriptor, device: torch.device) -> bool:
        """Whether dinput may be summed by slot: bilinear, in float32, with few channels, and large enough."""
        tuning = TUNING.on(device)
        return (
            desc.needs_dinput
            and desc.mode == Mode.BILINEAR
            and desc.compute.bits == 32
            and tuning.least_channels <= desc.channels <= tuning.most_channels
            and desc.samples <= tuning.most_dense * desc.pixels
            and (tuning.slots + 1) * max(cells_of(desc), desc.samples) <= LIMIT
            and desc.batch * desc.channels * desc.samples >= tuning.least_elements
        )

    def add_steps(self, steps: Steps, args: GridSampleBackwardArgs) -> None:
        """Add the launches."""
        for first in range(0, self.desc.batch, self.images):
            self._add_portion(steps, args, first, min(self.images, self.desc.batch - first))

    def _add_portion(self, steps: Steps, args: GridSampleBackwardArgs, first: int, images: int) -> None:
        """Add the launches for ``images`` images from ``first``."""
        desc, tuning, grid = self.desc, self.tuning, args.grid
        words = self.words.count
        steps.add(
            clear_words, -(-words // tuning.cleared), self,
            words_count=words, TILE=tuning.cleared, num_warps=tuning.other_warps,
        )  # fmt: skip
        grids = [tensor for tensor in (grid, args.dgrid) if tensor is not None]
        packed = all(t.stride(-1) == 1 and is_flat((*desc.output_size, 2), t.stride()[1:]) for t in grids)
        sources = operands_of(desc, args, first, images) | sampling_constants(desc) | {
            "CHANNELS": desc.channels, "DGRID": args.dgrid is not None,
            "GRID_FLAT": is_flat(desc.output_size, grid.stride()[1:-1]),
            "DGRID_FLAT": is_flat(desc.output_size, grids[-1].stride()[1:-1]),
            "PACKED": desc.axes == 2 and packed,
        }  # fmt: skip
        tiles = -(-desc.samples // tuning.tile)
        steps.add(
            place_samples, images * tiles, sources, self,
            tiles=tiles, TILE=tuning.tile, num_warps=tuning.warps,
            registers=tuning.registers if desc.axes == 3 else None,
        )  # fmt: skip
        steps.add(
            settle_planes, -(-images * desc.channels // tuning.planes), self,
            planes=images * desc.channels, PLANES=tuning.planes, num_warps=tuning.other_warps,
            fraction_bits=desc.fraction_bits,
        )  # fmt: skip
        programs = min(-(-self.most_extras // tuning.extra_tile), tuning.extra_programs)
        steps.add(
            add_extras, programs, sources, self,
            programs=programs, TILE=tuning.extra_tile, num_warps=tuning.other_warps,
        )  # fmt: skip
        width, height = desc.image_size[-1], desc.image_size[-2]
        stacked = desc.pixels // (width * height) * -(-height // tuning.rows)
        wide = min(tuning.wide, triton.next_power_of_2(width))
        tiles = tiles_of(width, stacked, tuning.lanes, wide)
        steps.add(
            sum_slots, images * tiles, sources, self,
            tiles=tiles, stacked=stacked, LANES=tuning.lanes, WIDE=wide, ROWS=tuning.rows,
            AHEAD=desc.corners * desc.channels <= tuning.most_ahead, num_warps=tuning.sum_warps,
        )  # fmt: skip
        self.instead.add_steps(steps, args, Gate(self.tallies, self.most_extras), first, images)
