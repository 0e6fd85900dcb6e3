"""dinput of 2-D bilinear samples, in Triton: samples are sorted by cell.

A cell is the square between four pixels, or fewer at the edge of the image. All samples of a cell have the
same pixel as their corner nw, and likewise for the other three corners. So the terms of a pixel are the
samples of the four cells around it, one cell after another. One sample is sorted for four terms.

With few channels, the terms are read from dout. With more, dout is first copied with channels last and
samples in the order of the cells.

A pixel of up to 32 terms is summed by one program. A pixel with more terms is a crowd: each of its chunks of
32 gets a slot. An atomic counter assigns the slots, and their order does not affect the sums. The slots are
reduced as those of long segments are (``reduce_chunks``).
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
from holdfast.backends.tuning import Tuned
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_channels_last import add_copy, store_fractions
from holdfast.ops.grid_sample.gpu_coordinates import (
    grid_strides_of,
    locate,
    offset_of,
    sampling_constants,
    sizes_of,
    strides_of,
    unravel,
)
from holdfast.ops.grid_sample.gpu_locality import count_scattered
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.gpu import reduce_chunks
from holdfast.ops.segment_sum.gpu_counting_sort import CALLER, CountingSort, count_row
from holdfast.ops.segment_sum.indexed import loops

CHUNK = tl.constexpr(indexed.CHUNK)
#: Position in the sort's ``tallies`` that counts the assigned slots.
SLOTS = tl.constexpr(CALLER.value)
#: Minimum number of channels for which dout is copied.
MANY_CHANNELS = 5
#: Registers of ``sum_pixels`` by item size; without a limit the compiler uses more, for ``list_crowds``.
SUM_REGISTERS = {2: 80, 4: 64}


@dataclass(frozen=True)
class Sums:
    """A tile of ``sum_pixels``: its pixels, its width in pixels, warps, and terms loaded together."""

    pixels: int
    wide: int
    warps: int
    unroll: int


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``CellSums``."""

    #: Samples per program of ``locate_cells``, one per thread, and warps.
    tile: int
    warps: int
    #: Threads per pixel with many channels.
    lanes: int
    #: Tiles for many channels and for few; with few, a warp runs until the longest of its pixels is done.
    many: Sums
    few: Sums
    #: Maximum programs of ``sum_chunks``.
    crowd_programs: int


TUNING = Tuned(
    gpu=Tuning(
        tile=256, warps=8, lanes=4, many=Sums(pixels=32, wide=16, warps=4, unroll=2),
        few=Sums(pixels=32, wide=16, warps=1, unroll=2), crowd_programs=1056,
    ),
    interpreter=Tuning(
        tile=16384, warps=4, lanes=16, many=Sums(pixels=4096, wide=64, warps=4, unroll=1),
        few=Sums(pixels=4096, wide=64, warps=4, unroll=1), crowd_programs=4,
    ),
)  # fmt: skip


@triton.jit(do_not_specialize=["count", "samples", "cells", "rows"])
def locate_cells(
    keys, counts, arrivals, tallies, fractions, grid,
    count, samples, cells, rows, sizes, out_sizes, grid_strides, grid_step,
    COUNT: tl.constexpr, WITH_SKIPPED: tl.constexpr, FRACTIONS: tl.constexpr, CHECK_LOCALITY: tl.constexpr,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the cell of each sample; ``rows`` if all its corners are outside the image.

    COUNT: count the samples of each cell. FRACTIONS: store the fractions, in the order of the samples.
    CHECK_LOCALITY: count the scattered groups.
    """
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < count
    n = number // samples
    x, y, z = unravel(number - n * samples, out_sizes, AXES)
    first, t, _scale = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    column, row = first[0] + 1, first[1] + 1
    there = (column >= 0) & (column <= sizes[0]) & (row >= 0) & (row <= sizes[1]) & inside
    cell = tl.where(there, n * cells + row * (sizes[0] + 1) + column, rows)
    tl.store(keys + number, cell, mask=inside)
    if COUNT:
        count_row(counts, arrivals, tallies, number, cell, inside, rows, WITH_SKIPPED)
    if FRACTIONS:
        store_fractions(fractions, number, t, inside)
    if CHECK_LOCALITY:
        count_scattered(tallies, first, TILE)


@triton.jit
def terms_around(starts, pixel, exists, pixels, cells, width):
    """The terms of each pixel: first those with the pixel as corner nw, then as ne, sw and se.

    Returns the number of terms; for each corner the difference between the sorted position of a sample and
    the number of its term; and the numbers of the first terms of ne, sw and se.
    """
    n, place = pixel // pixels, pixel % pixels
    above = starts + n * cells + place // width * (width + 1) + place % width
    below = above + (width + 1)
    a0 = tl.load(above, mask=exists, other=0)
    a1 = tl.load(above + 1, mask=exists, other=0)
    a2 = tl.load(above + 2, mask=exists, other=0)
    b0 = tl.load(below, mask=exists, other=0)
    b1 = tl.load(below + 1, mask=exists, other=0)
    b2 = tl.load(below + 2, mask=exists, other=0)
    ne = b2 - b1
    sw = b2 - b0
    se = sw + (a2 - a1)
    return se + (a1 - a0), b1, b0 - ne, a1 - sw, a0 - se, ne, sw, se


@triton.jit
def load_block(
    dout, at, here, first, channels, step, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, COMPUTE: tl.constexpr
):
    """Load one block of channels of dout; 0 for missing samples and channels."""
    channel = first + BLOCK * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    at = dout + at[:, None] + channel.to(tl.int64) * step
    return widen(tl.load(at, mask=here[:, None] & (channel < channels), other=0.0), COMPUTE)


@triton.jit
def add_terms(
    dout, fractions, places, around, begin, size, first, channels, sizes, strides,
    BY_PLACE: tl.constexpr, COMPUTE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sums of ``size`` terms from ``begin``, added one after another, in BLOCKS blocks of channels.

    dout (with these sizes and strides) and the fractions are in sorted order, or BY_PLACE in the order of the
    samples.
    """
    nw_base, ne_base, sw_base, se_base = around[1], around[2], around[3], around[4]
    ne, sw, se = around[5], around[6], around[7]
    step = strides[len(sizes) - 1]
    zeros = tl.zeros([PIXELS, CHANNELS], COMPUTE)
    sum_0, sum_1, sum_2, sum_3 = zeros, zeros, zeros, zeros
    for at in range(0, tl.max(size, 0), UNROLL):
        for u in tl.static_range(UNROLL):
            here = at + u < size
            term = begin + (at + u)
            above = tl.where(term < se, sw_base, se_base)
            number = term + tl.where(term < sw, tl.where(term < ne, nw_base, ne_base), above)
            if BY_PLACE:
                number = tl.load(places + number, mask=here, other=0).to(tl.int32)
            east = ((term >= ne) & (term < sw)) | (term >= se)
            tx = tl.load(fractions + 2 * number.to(tl.int64), mask=here, other=0.0)
            ty = tl.load(fractions + 2 * number.to(tl.int64) + 1, mask=here, other=0.0)
            weight = tl.where(east, tx, 1.0 - tx) * tl.where(term >= sw, ty, 1.0 - ty)
            weight = tl.where(here, weight, 0.0)[:, None]
            row = row_offsets(number, sizes, strides)
            sum_0 += weight * load_block(dout, row, here, first, channels, step, 0, CHANNELS, COMPUTE)
            if BLOCKS > 1:
                sum_1 += weight * load_block(dout, row, here, first, channels, step, 1, CHANNELS, COMPUTE)
            if BLOCKS > 2:
                sum_2 += weight * load_block(dout, row, here, first, channels, step, 2, CHANNELS, COMPUTE)
                sum_3 += weight * load_block(dout, row, here, first, channels, step, 3, CHANNELS, COMPUTE)
    return sum_0, sum_1, sum_2, sum_3


@triton.jit
def store_pixels(
    dinput, pixel, wanted, sums, first, channels, pixels, sizes, strides, step,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the ``wanted`` pixels, or add to them if ACCUMULATE."""
    x, y, z = unravel(pixel % pixels, sizes, 2)
    at = dinput + offset_of(pixel // pixels, x, y, z, strides)[:, None]
    for b in tl.static_range(BLOCKS):
        channel = (first + b * CHANNELS + tl.arange(0, CHANNELS))[None, :]
        mask = wanted[:, None] & (channel < channels)
        total = sums[b]
        if ACCUMULATE:
            total = widen(tl.load(at + channel.to(tl.int64) * step, mask=mask, other=0.0), COMPUTE) + total
        tl.store(at + channel.to(tl.int64) * step, narrow(total, dinput.dtype.element_ty), mask=mask)


@triton.jit
def pixels_of_tile(number, width, across, images_rows, PIXELS: tl.constexpr, WIDE: tl.constexpr):
    """Pixels of a tile of width WIDE, and whether they exist. The images are stacked along y."""
    lane = tl.arange(0, PIXELS)
    x = number % across * WIDE + lane % WIDE
    y = number // across * (PIXELS // WIDE) + lane // WIDE
    return y * width + x, (x < width) & (y < images_rows)


@triton.jit
def list_crowds(tallies, owners, chunks, arrivals, pixel, amount, slots, tiles):
    """Assign a slot to every chunk of every crowd; store its pixel and chunk number.

    Zero the arrival counters of the slot, one for each of the ``tiles`` of channels.
    """
    wanted = tl.where(amount > CHUNK, (amount + CHUNK - 1) // CHUNK, 0)
    first = tl.atomic_add(tallies + SLOTS, tl.sum(wanted, 0), sem="relaxed")
    first += tl.cumsum(wanted, 0) - wanted
    for begin in range(0, tl.max(wanted, 0), 8):
        chunk = begin + tl.arange(0, 8)[None, :]
        slot = first[:, None] + chunk
        mask = chunk < wanted[:, None]
        tl.store(owners + slot, pixel[:, None] + tl.zeros_like(slot), mask=mask)
        tl.store(chunks + slot, chunk + tl.zeros_like(slot), mask=mask)
        for tile in range(tiles):
            tl.store(arrivals + tile * slots + slot, tl.zeros_like(slot), mask=mask)


@triton.jit(do_not_specialize=["pixels", "cells", "tiles", "across", "stacked", "slots", "crowd_tiles"])
def sum_pixels(
    dinput, tallies, owners, chunks, arrivals, dout, fractions, places, starts,
    pixels, cells, tiles, across, stacked, slots, crowd_tiles, channels, sizes, dout_sizes, dout_strides,
    dinput_strides, dinput_step,
    BY_PLACE: tl.constexpr, CROWDS: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
    WIDE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum a tile of pixels in BLOCKS * CHANNELS channels. CROWDS: assign slots to crowds."""
    follow()
    first = tl.program_id(0) % tiles * (BLOCKS * CHANNELS)
    pixel, exists = pixels_of_tile(tl.program_id(0) // tiles, sizes[0], across, stacked, PIXELS, WIDE)
    around = terms_around(starts, pixel, exists, pixels, cells, sizes[0])
    amount = around[0]
    mine = exists & (amount <= CHUNK)
    sums = add_terms(
        dout, fractions, places, around, tl.zeros_like(amount), tl.where(mine, amount, 0), first, channels,
        dout_sizes, dout_strides, BY_PLACE, COMPUTE, PIXELS, CHANNELS, BLOCKS, UNROLL,
    )  # fmt: skip
    store_pixels(
        dinput, pixel, mine, sums, first, channels, pixels, sizes, dinput_strides, dinput_step,
        ACCUMULATE, COMPUTE, CHANNELS, BLOCKS,
    )  # fmt: skip
    if CROWDS and (first == 0) & (tl.max(amount, 0) > CHUNK):
        list_crowds(tallies, owners, chunks, arrivals, pixel, amount, slots, crowd_tiles)


@triton.jit
def load_slots(owners, chunks, slot, taken, starts, pixels, cells, width):
    """Whether slots are assigned, their pixels and chunk numbers, and ``terms_around`` of the pixels."""
    exists = slot < taken
    pixel = tl.load(owners + slot, mask=exists, other=0)
    chunk = tl.load(chunks + slot, mask=exists, other=0)
    return exists, pixel, chunk, terms_around(starts, pixel, exists, pixels, cells, width)


@triton.jit(do_not_specialize=["pixels", "cells", "slots", "tiles", "programs"])
def sum_chunks(
    dinput, partials, tallies, owners, chunks, arrivals, dout, fractions, places, starts,
    pixels, cells, slots, tiles, programs, channels, sizes, dout_sizes, dout_strides,
    dinput_sizes, dinput_strides,
    BY_PLACE: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the chunks of crowds, PIXELS slots and CHANNELS channels at a time, and reduce them."""
    follow()
    taken = tl.load(tallies + SLOTS)
    for task in range(tl.program_id(0), tl.cdiv(taken, PIXELS) * tiles, programs):
        tile = task % tiles
        slot = task // tiles * PIXELS + tl.arange(0, PIXELS)
        exists, pixel, chunk, around = load_slots(
            owners, chunks, slot, taken, starts, pixels, cells, sizes[0]
        )
        size = tl.where(exists, tl.minimum(around[0] - chunk * CHUNK, CHUNK), 0)
        sums = add_terms(
            dout, fractions, places, around, chunk * CHUNK, size, tile * CHANNELS, channels,
            dout_sizes, dout_strides, BY_PLACE, COMPUTE, PIXELS, CHANNELS, 1, UNROLL,
        )  # fmt: skip
        channel = (tile * CHANNELS + tl.arange(0, CHANNELS))[None, :].to(tl.int64)
        reduce_chunks(
            dinput, partials, arrivals, arrivals + tile * slots, pixel, slot - chunk, around[0], chunk,
            exists, sums[0], tl.zeros([PIXELS], tl.int32), channel, channel < channels,
            0, channels, dinput_sizes, dinput_strides,
            ACCUMULATE, False, COMPUTE, PIXELS, CHANNELS, UNROLL,
        )  # fmt: skip


class CellSums:
    """Workspace regions and launches that compute dinput of ``images`` images by cell.

    ``rows`` is the copy of dout; empty with few channels.
    """

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor, images: int
    ) -> None:
        self.desc, self.device, self.images, self.tuning = desc, device, images, TUNING.on(device)
        height, width = desc.image_size
        self.count, self.cells = images * desc.samples, (height + 1) * (width + 1)
        self.copies = desc.channels >= MANY_CHANNELS
        self.keys = layout.take(self.count, torch.int32)
        self.order = CountingSort(layout, device, self.count, images * self.cells, whole=self.copies)
        self.fractions = layout.take(2 * self.count, desc.compute.torch)
        self.rows = layout.take(self.count * desc.channels if self.copies else 0, desc.input_dtype)
        # A crowd of n > 32 terms has less than n / 32 + 1 chunks, so at most n / 16.
        crowded = desc.samples > CHUNK.value
        self.slots = self.count * desc.corners // (CHUNK.value // 2) if crowded else 0
        self.owners, self.chunks = (layout.take(self.slots, torch.int32) for _ in range(2))
        self.partials = layout.take(self.slots * desc.channels, desc.compute.torch)
        # ``lanes`` threads share a copied row of channels, each with up to 16 bytes.
        most = self.tuning.lanes * 16 // desc.input_dtype.itemsize
        share = min(triton.next_power_of_2(max(desc.channels, 1)), most)
        self.share = share if self.copies else 1
        self.tiles = -(-desc.channels // self.share)
        self.arrivals = layout.take(self.slots * self.tiles, torch.int32)

    def depends_on_locality(self, args: GridSampleBackwardArgs) -> bool:
        """Whether the locality of the grid decides the order in which dgrid is computed."""
        return self.copies and args.dgrid is not None and args.dout.stride(1) != 1

    def add_cells(self, steps: Steps, args: GridSampleBackwardArgs, grid: StepOperand) -> None:
        """Add the launches that find the cells of the samples."""
        desc, count, order = self.desc, self.count, self.order
        counts = not order.sorts
        order.add_clear(steps)
        if count:
            steps.add(
                locate_cells,
                -(-count // self.tuning.tile),
                keys=self.keys,
                counts=order.starts,
                arrivals=order.arrivals if counts else self.keys,
                tallies=order.tallies,
                fractions=self.fractions,
                grid=grid,
                count=count,
                samples=desc.samples,
                cells=self.cells,
                rows=order.rows,
                sizes=sizes_of(desc.image_size),
                out_sizes=sizes_of(desc.output_size),
                grid_strides=grid_strides_of(args.grid),
                grid_step=args.grid.stride(-1),
                COUNT=counts,
                WITH_SKIPPED=order.whole,
                FRACTIONS=not self.copies,
                CHECK_LOCALITY=self.depends_on_locality(args),
                **sampling_constants(desc),
                TILE=self.tuning.tile,
                num_warps=self.tuning.warps,
            )

    def add_steps(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        dinput: StepOperand,
        dout: StepOperand,
        grid: StepOperand,
    ) -> None:
        """Add the launches that sort the samples by cell and sum them."""
        desc, count, order = self.desc, self.count, self.order
        order.add_steps(steps, self.keys, Space((count,), ((1,),)), counted=not order.sorts)
        if count and self.copies:
            ranked = self.fractions, order.ranks, grid
            add_copy(steps, self.device, desc, args, self.images, self.rows, dout, ranked)
        if desc.channels:
            self.add_sums(steps, args, dinput, dout)

    def add_sums(
        self, steps: Steps, args: GridSampleBackwardArgs, dinput: StepOperand, dout: StepOperand
    ) -> None:
        """Add the launches of ``sum_pixels`` and ``sum_chunks``."""
        desc, order, channels = self.desc, self.order, self.desc.channels
        sizes, tile = sizes_of(desc.image_size), self.tuning.many if self.copies else self.tuning.few
        assert args.dinput is not None
        if self.copies:
            dout = self.rows
            dout_sizes: tuple[int, ...] = (self.count, channels)
            dout_strides: tuple[int, ...] = (channels, 1)
            blocks = min(triton.next_power_of_2(self.tiles), 4)
        else:
            walk = loops((self.images, *desc.output_size), args.dout.stride()[:1] + args.dout.stride()[2:])
            dout_sizes, dout_strides = (*walk.sizes, channels), (*walk.strides[0], args.dout.stride(1))
            blocks = triton.next_power_of_2(channels)
        tiles = -(-channels // (self.share * blocks))
        across, stacked = -(-sizes[0] // tile.wide), self.images * sizes[1]
        common: dict[str, Any] = {
            "dinput": dinput,
            "tallies": order.tallies,
            "owners": self.owners,
            "chunks": self.chunks,
            "arrivals": self.arrivals,
            "dout": dout,
            "fractions": self.fractions,
            "places": order.places,
            "starts": order.starts,
            "pixels": desc.pixels,
            "cells": self.cells,
            "slots": self.slots,
            "channels": channels,
            "sizes": sizes,
            "dout_sizes": dout_sizes,
            "dout_strides": dout_strides,
            "BY_PLACE": not self.copies,
            "ACCUMULATE": args.accumulate,
            "COMPUTE": sampling_constants(desc)["COMPUTE"],
            "PIXELS": tile.pixels,
            "CHANNELS": self.share,
            "UNROLL": tile.unroll,
            "num_warps": tile.warps,
        }
        steps.add(
            sum_pixels,
            across * -(-stacked // (tile.pixels // tile.wide)) * tiles,
            **common,
            tiles=tiles,
            across=across,
            stacked=stacked,
            crowd_tiles=self.tiles,
            dinput_strides=strides_of(args.dinput),
            dinput_step=args.dinput.stride(1),
            CROWDS=self.slots > 0,
            WIDE=tile.wide,
            BLOCKS=blocks,
            registers=SUM_REGISTERS.get(desc.input_dtype.itemsize) if self.copies else None,
        )
        if not self.slots:
            return
        programs = min(-(-self.slots // tile.pixels) * self.tiles, self.tuning.crowd_programs)
        out = loops((self.images, *desc.image_size), args.dinput.stride()[:1] + args.dinput.stride()[2:])
        steps.add(
            sum_chunks,
            programs,
            **common,
            partials=self.partials,
            tiles=self.tiles,
            programs=programs,
            dinput_sizes=(*out.sizes, channels),
            dinput_strides=(*out.strides[0], args.dinput.stride(1)),
        )
