"""dinput and dgrid of bilinear samples with few channels, in Triton: a pixel sums the samples of its cells.

Every cell (see ``gpu_cells``) has a counter, a few slots, and a list. A slot holds the number of one sample.
``place_samples`` stores the number of each sample in the next free slot of its cell, or at the head of the
list if there is none. It also computes dgrid and the largest exponent of each plane of dout. ``sum_slots``
then sums the samples of the cells of each pixel.

A gate, one word in memory, selects between two ways to compute dinput. If a cell has very many samples, or
dout has numbers that are not finite, ``place_samples`` opens the gate: ``sum_slots`` returns at once, and
``gpu_dinput_by_sample`` computes dinput in the same memory. If the gate stays closed, the kernels of
``gpu_dinput_by_sample`` return at once.
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
    cell_of,
    cells_of,
    clear_words,
    is_flat,
    place_offset,
)
from holdfast.ops.grid_sample.gpu_coordinates import (
    locate,
    located,
    sampling_constants,
)
from holdfast.ops.grid_sample.gpu_dinput_by_cell import tiles_of
from holdfast.ops.grid_sample.gpu_dinput_by_sample import Gate, SampleSums, operands_of
from holdfast.ops.grid_sample.gpu_integer_sums import exponent_field
from holdfast.ops.grid_sample.gpu_slot_columns import SPREAD, sum_slots
from holdfast.ops.grid_sample.gpu_terms import (
    add_products,
    add_slopes,
    four_corners,
    load_changes,
    store_changes,
)
from holdfast.ops.grid_sample.plan import LIMIT, GridSampleBackwardArgs, GridSampleBackwardDescriptor, Mode
from holdfast.ops.segment_sum import indexed

#: Channels that are processed together.
GROUP = tl.constexpr(4)


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``SlotSums``."""

    #: Samples per program of ``place_samples``, one per thread, and warps.
    tile: int
    warps: int
    #: Columns per program of ``sum_slots``, width of its tile, pixels of a column, and warps. It loads
    #: a row ahead if samples have at most ``most_ahead`` corners in all channels of a group.
    lanes: int
    wide: int
    rows: int
    sum_warps: int
    most_ahead: int
    #: Pixels of a column in small problems. These have at most ``few_programs`` programs, which run at once.
    few_rows: int
    few_programs: int
    #: Words cleared per program.
    cleared: int
    #: Maximum registers per thread in 3-D, and of ``place_samples`` with several groups of channels.
    registers: int = 64
    #: Warps of the other kernels.
    other_warps: int = 4
    #: Maximum number of slots of a cell, and of samples of a cell.
    slots: int = 2
    longest: int = 64
    #: Maximum number of samples per pixel.
    most_dense: int = 2
    #: Minimum number of samples that are processed at a time if memory is short.
    least_portion: int = 2**20
    #: Minimum and maximum number of channels, and the maximum in 3-D.
    least_channels: int = 2
    most_channels: int = 16
    most_channels_3d: int = 8
    #: Minimum number of elements of dout. It is larger if the channels are more than a group but fewer than
    #: ``many``: then ``gpu_dinput_by_sample`` is faster for small problems.
    least_elements: int = 2**19
    least_in_groups: int = 2**22
    many: int = 8


TUNING = Tuned(
    gpu=Tuning(
        tile=256, warps=8, lanes=32, wide=32, rows=8, sum_warps=1, most_ahead=16, few_rows=4,
        few_programs=4096, cleared=4096,
    ),
    interpreter=Tuning(
        tile=8192, warps=4, lanes=1024, wide=32, rows=8, sum_warps=4, most_ahead=16, few_rows=4,
        few_programs=0, cleared=65536,
        longest=20, least_portion=1, least_channels=1, most_channels=5, most_channels_3d=5, least_elements=1,
        least_in_groups=1,
    ),
)  # fmt: skip


@triton.jit
def measure(gate, largest, d, first, CHANNELS: tl.constexpr):
    """Update the largest exponent fields of CHANNELS planes from ``first``.

    If a number is not finite, open the gate.
    """
    fields = tl.join(
        tl.join(exponent_field(d[0]), exponent_field(d[2])),
        tl.join(exponent_field(d[1]), exponent_field(d[3])),
    )
    most = tl.max(tl.reshape(fields, (fields.shape[0], 4)), 0)
    channel = tl.arange(0, 4)
    at = largest + (first + channel) * SPREAD + tl.program_id(0) % SPREAD
    tl.atomic_max(at, most, mask=channel < CHANNELS, sem="relaxed")
    open_gate(gate, most == 255)


@triton.jit
def measure_groups(
    gate, largest, dout, inside, step, GROUPS: tl.constexpr, REST: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """``measure`` dout of samples in all channels."""
    for group in range(GROUPS):
        d = load_group(dout, group * GROUP, step, inside, GROUP, COMPUTE)
        measure(gate, largest, d, group * GROUP, GROUP)
    if REST > 0:
        d = load_group(dout, GROUPS * GROUP, step, inside, REST, COMPUTE)
        measure(gate, largest, d, GROUPS * GROUP, REST)


@triton.jit
def open_gate(gate, mask):
    """Open the gate where the mask is set."""
    at = gate + tl.zeros(mask.shape, tl.int32)
    tl.store(at, tl.full(mask.shape, 1, tl.int32), mask=mask)


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


@triton.jit
def add_group(
    s0, s1, s2, s3, d, image, first, step, offsets, CHANNELS: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Add dout times pixel of CHANNELS channels from ``first`` to the sums of four corners, in order."""
    for k in tl.static_range(CHANNELS):
        s0, s1, s2, s3 = add_products(s0, s1, s2, s3, d[k], image, first + k, step, offsets, COMPUTE)
    return s0, s1, s2, s3


@triton.jit
def load_group(dout, first, step, inside, CHANNELS: tl.constexpr, COMPUTE: tl.constexpr):
    """dout of samples in CHANNELS channels from ``first``."""
    return load_changes(dout + tl.full([1], first, tl.int64) * step, step, inside, CHANNELS, COMPUTE)


@triton.jit
def sum_products(
    dout, image, inside, offsets, dout_step, image_step,
    GROUPS: tl.constexpr, REST: tl.constexpr, COMPUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Ordered sums of one chunk, that is over all channels, of dout times pixel, for four corners."""
    zeros = tl.zeros([TILE], COMPUTE)
    s0, s1, s2, s3 = zeros, zeros, zeros, zeros
    for group in range(GROUPS):
        d = load_group(dout, group * GROUP, dout_step, inside, GROUP, COMPUTE)
        s0, s1, s2, s3 = add_group(
            s0, s1, s2, s3, d, image, group * GROUP, image_step, offsets, GROUP, COMPUTE
        )
    if REST > 0:
        d = load_group(dout, GROUPS * GROUP, dout_step, inside, REST, COMPUTE)
        s0, s1, s2, s3 = add_group(
            s0, s1, s2, s3, d, image, GROUPS * GROUP, image_step, offsets, REST, COMPUTE
        )
    return s0, s1, s2, s3


@triton.jit(do_not_specialize=["tiles", "cells", "all_cells", "longest"])
def place_samples(
    dgrid, counts, slots, heads, successors, gate, largest, dout, image, grid,
    tiles, cells, all_cells, longest, channels, samples, sizes, out_sizes, dgrid_strides, dout_strides,
    image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DGRID: tl.constexpr, GROUPS: tl.constexpr, REST: tl.constexpr,
    SLOTS: tl.constexpr, GRID_FLAT: tl.constexpr, FLAT: tl.constexpr, DGRID_FLAT: tl.constexpr,
    PACKED: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Place TILE samples of an image, one per thread, and compute their dgrid.

    There are GROUPS groups of GROUP channels, and REST more; up to GROUP channels are REST.
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
    # The atomics are under way while dgrid is computed.
    cell, there = cell_of(first, sizes, AXES)
    cell += n * cells
    there = there & inside
    arrival = tl.atomic_add(counts + cell, tl.full([TILE], 1, tl.int32), mask=there, sem="relaxed")
    CORNERS: tl.constexpr = (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS)
    own_image = image + n.to(tl.int64) * image_strides[0]
    own_largest = largest + n * channels * SPREAD
    zeros = tl.zeros([TILE], COMPUTE)
    changes = (zeros, zeros, zeros)
    if GROUPS == 0:
        d = load_changes(base, dout_step, inside, REST, COMPUTE)
    if DGRID:
        for corner in tl.static_range(0, CORNERS, 4):
            offsets, exist = four_corners(first, sizes, image_strides, corner // 4, AXES, OFFSET)
            if GROUPS == 0:
                s0, s1, s2, s3 = add_group(
                    zeros, zeros, zeros, zeros, d, own_image, 0, image_step, offsets, REST, COMPUTE
                )
            else:
                s0, s1, s2, s3 = sum_products(
                    base, own_image, inside, offsets, dout_step, image_step, GROUPS, REST, COMPUTE, TILE
                )  # fmt: skip
            changes = add_slopes(changes, (s0, s1, s2, s3), exist, t, corner, AXES, TAPS, MODE)
        own_dgrid = dgrid + n.to(tl.int64) * dgrid_strides[0]
        target = place_offset(number, out_sizes, dgrid_strides, AXES, DGRID_FLAT).to(OFFSET)
        if PACKED and not ACCUMULATE:
            store_pair(own_dgrid, number, changes, scale, inside)
        else:
            store_changes(
                own_dgrid, target, changes, scale, inside, dgrid_step, AXES, MODE, ACCUMULATE, COMPUTE
            )
    if GROUPS == 0:
        measure(gate, own_largest, d, 0, REST)
    else:
        measure_groups(gate, own_largest, base, inside, dout_step, GROUPS, REST, COMPUTE)
    tl.store(slots + arrival * all_cells + cell, number, mask=there & (arrival < SLOTS))
    listed = there & (arrival >= SLOTS) & (arrival < longest)
    before = tl.atomic_xchg(heads + cell, number, mask=listed, sem="relaxed")
    tl.store(successors + n * samples + number, before, mask=listed)
    open_gate(gate, there & (arrival >= longest))


class SlotSums:
    """Workspace regions and launches for dinput by slot, and dgrid if needed, in ``budget`` bytes.

    ``images`` images are processed at a time, and a cell has ``SLOTS`` slots. If memory is short, there are
    first fewer slots, then fewer images at a time.
    """

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor, budget: int
    ) -> None:
        self.desc, self.device, self.tuning, self.budget = desc, device, TUNING.on(device), budget
        self.cells = cells_of(desc)
        self.fits = self._fit()
        self._take(layout)

    def _fit(self) -> bool:
        """Choose ``images`` and ``SLOTS``; whether the regions fit the budget."""
        desc, tuning = self.desc, self.tuning
        words = max((tuning.slots + 1) * max(self.cells, desc.samples), desc.channels * SPREAD.value)
        most = LIMIT // words  # kernels count words in 32 bits
        least = max(-(-tuning.least_portion // max(desc.samples, 1)), 1)
        portions = range(-(-desc.batch // most), max(desc.batch // least, 1) + 1)
        sizes = sorted({-(-desc.batch // count) for count in portions}, reverse=True)
        for self.images in sizes:
            for self.SLOTS in range(tuning.slots, 0, -1):
                layout = WorkspaceLayout()
                self._take(layout)
                if layout.size <= self.budget:
                    return True
        return False

    def _take(self, layout: WorkspaceLayout) -> None:
        desc = self.desc
        self.all_cells, planes = self.images * self.cells, self.images * desc.channels
        sizes = [ALIGNMENT // 4, planes * SPREAD.value, self.all_cells]
        self.words, (self.gate, self.largest, self.counts) = layout.take_together(sizes, torch.int32)
        self.slots = layout.take(self.SLOTS * self.all_cells, torch.int32)
        self.heads = layout.take(self.all_cells, torch.int32)
        self.successors = layout.take(self.images * desc.samples, torch.int32)
        # Once the gate is open, the memory behind it in the workspace is not used any more.
        start = self.largest.offset
        room = max(layout.size, self.budget) - start
        with layout.reusing(start):
            portion = replace(desc, shape=(self.images, *desc.shape[1:]))
            self.instead = SampleSums(layout, self.device, portion, room)

    @staticmethod
    def serves(desc: GridSampleBackwardDescriptor, device: torch.device) -> bool:
        """Whether dinput may be summed by slot: bilinear, in float32, with few channels, and large enough."""
        tuning = TUNING.on(device)
        most = tuning.most_channels_3d if desc.axes == 3 else tuning.most_channels
        between = GROUP.value < desc.channels < tuning.many
        return (
            desc.needs_dinput
            and desc.mode == Mode.BILINEAR
            and desc.compute.bits == 32
            and tuning.least_channels <= desc.channels <= min(most, indexed.CHUNK)
            and desc.samples <= tuning.most_dense * desc.pixels
            and (tuning.slots + 1) * max(cells_of(desc), desc.samples) <= LIMIT
            and desc.batch * desc.channels * desc.samples
            >= (tuning.least_in_groups if between else tuning.least_elements)
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
            "DGRID": args.dgrid is not None,
            "GRID_FLAT": is_flat(desc.output_size, grid.stride()[1:-1]),
            "DGRID_FLAT": is_flat(desc.output_size, grids[-1].stride()[1:-1]),
            "PACKED": desc.axes == 2 and packed,
        }  # fmt: skip
        groups, rest = divmod(desc.channels, GROUP.value)
        if desc.channels == GROUP.value:  # one group, whose dout stays in registers
            groups, rest = 0, desc.channels
        registers = tuning.registers if desc.axes == 3 else None
        tiles = -(-desc.samples // tuning.tile)
        steps.add(
            place_samples, images * tiles, sources, self,
            tiles=tiles, longest=tuning.longest, GROUPS=groups, REST=rest, TILE=tuning.tile,
            num_warps=tuning.warps, registers=tuning.registers if groups else registers,
        )  # fmt: skip
        width, height = desc.image_size[-1], desc.image_size[-2]
        layers, wide = desc.pixels // (width * height), min(tuning.wide, triton.next_power_of_2(width))
        for rows in (tuning.few_rows, tuning.rows):
            stacked = layers * -(-height // rows)
            tiles = tiles_of(width, stacked, tuning.lanes, wide)
            if images * tiles * max(groups, 1) <= tuning.few_programs:
                break
        for first_group, count, channels in ((0, groups, GROUP.value), (groups, 1, rest)):
            if count * channels:
                steps.add(
                    sum_slots, images * tiles * count, sources, self,
                    tiles=tiles, stacked=stacked, groups=count, first_channel=first_group * GROUP.value,
                    CHANNELS=channels, LANES=tuning.lanes, WIDE=wide, ROWS=rows,
                    AHEAD=desc.corners * channels <= tuning.most_ahead, num_warps=tuning.sum_warps,
                    registers=registers,
                )  # fmt: skip
        self.instead.add_steps(steps, args, Gate(self.gate, 0), first, images)
