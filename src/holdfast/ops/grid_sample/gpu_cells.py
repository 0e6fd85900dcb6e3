"""Samples of bilinear mode listed by cell, in Triton.

A cell is the square between four pixels, or the cube between eight; at the edge of the image some of these
pixels do not exist. All samples of a cell have the same pixel as their first corner, and likewise for the
other corners. So the terms of a pixel of dinput are the samples of the cells around it.

Four launches make the lists. ``clear_words`` clears all counters. ``survey`` counts the samples of each cell,
counts scattered groups of samples, and finds the largest exponent of each plane of dout. ``assign_starts``
gives each cell a range of positions, and each plane its scale. ``list_samples`` stores the place of each
sample (its number) and its fractions at its position; if the samples are scattered, it also copies dout with
channels last, one row per position. The order of the ranges, and of the samples in a range, is arbitrary:
integer sums do not depend on it.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import Part, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import widen
from holdfast.ops.grid_sample.gpu_coordinates import (
    grid_strides_of,
    locate,
    offset_of,
    sampling_constants,
    sizes_of,
    strides_of,
    unravel,
)
from holdfast.ops.grid_sample.gpu_integer_sums import exponent_field, plane_shift, power_of_two
from holdfast.ops.grid_sample.gpu_locality import count_scattered, is_scattered
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor

#: Positions in ``tallies`` after that of ``gpu_locality``: samples outside all cells, assigned positions,
#: segments of crowds, and crowds of several segments; then the number of tallies.
SKIPPED, ASSIGNED, SEGMENTS, LONG, TALLIES = (tl.constexpr(number) for number in (1, 2, 3, 4, 8))
#: The largest exponent for which both 2**shift and 2**-shift are normal numbers.
LARGEST_SHIFT = tl.constexpr(126)


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``Cells``."""

    #: Samples per program, one per thread, and warps.
    tile: int
    warps: int
    #: Elements of a plane that a program measures, and elements loaded together.
    measured: int
    vector: int
    #: Cells per program of ``assign_starts``.
    block: int
    #: Elements of a tile of the copy, its maximum number of channels, and the maximum number of programs.
    copied: int
    channels: int = 64
    copy_programs: int = 4224
    #: Words cleared per program.
    cleared: int = 4096


TUNING = Tuned(
    gpu=Tuning(tile=128, warps=4, measured=16384, vector=2048, block=2048, copied=4096),
    interpreter=Tuning(
        tile=8192,
        warps=4,
        measured=2**18,
        vector=16384,
        block=16384,
        copied=2**13,
        cleared=65536,
        copy_programs=1,
    ),
)


@triton.jit
def place_offset(sample, out_sizes, strides, AXES: tl.constexpr, FLAT: tl.constexpr):
    """Offset of a sample from the first sample of its plane. FLAT: the samples have one stride."""
    if FLAT:
        return sample.to(tl.int64) * strides[1]
    else:
        x, y, z = unravel(sample, out_sizes, AXES)
        return x.to(tl.int64) * strides[1] + y.to(tl.int64) * strides[2] + z.to(tl.int64) * strides[3]


@triton.jit
def cell_of(first, sizes, AXES: tl.constexpr):
    """The cell of samples with these first taps, and whether any of its pixels is inside the image."""
    column, row = first[0] + 1, first[1] + 1
    there = (column >= 0) & (column <= sizes[0]) & (row >= 0) & (row <= sizes[1])
    if AXES == 3:
        layer = first[2] + 1
        there = there & (layer >= 0) & (layer <= sizes[2])
        row += layer * (sizes[1] + 1)
    return row * (sizes[0] + 1) + column, there


@triton.jit
def position_of(
    starts, arrivals, number, n, first, inside, count, cells, sizes, AXES: tl.constexpr
):  # fmt: skip
    """The positions of samples: in the range of their cell, or from the end if they are outside all cells."""
    cell, there = cell_of(first, sizes, AXES)
    arrival = tl.load(arrivals + number, mask=inside, other=0)
    start = tl.load(starts + n * cells + cell, mask=inside & there, other=0)
    return tl.where(there, start + arrival, count - 1 - arrival)


@triton.jit
def clear_words(words, words_count, TILE: tl.constexpr):
    """Zero ``words``. The stores are wide, because ``words_count`` is a multiple of 16."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(words + number, tl.zeros([TILE], tl.int32), mask=number < words_count)


@triton.jit
def count_cells(
    counts, arrivals, tallies, grid, tile, count, samples, cells, sizes, out_sizes, grid_strides, grid_step,
    LOCALITY: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr,
    ALIGNED: tl.constexpr, COMPUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count TILE samples, and store how many samples of its cell each has found before it."""
    number = tile * TILE + tl.arange(0, TILE)
    inside = number < count
    n = number // samples
    x, y, z = unravel(number - n * samples, out_sizes, AXES)
    first, _t, _scale = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    cell, there = cell_of(first, sizes, AXES)
    ones = tl.full([TILE], 1, tl.int32)
    arrival = tl.atomic_add(counts + n * cells + cell, ones, mask=inside & there, sem="relaxed")
    skipped = (inside & (there == 0)).to(tl.int32)
    if tl.max(skipped, 0) > 0:
        before = tl.atomic_add(tallies + SKIPPED, tl.sum(skipped, 0), sem="relaxed")
        arrival = tl.where(there, arrival, before + tl.cumsum(skipped, 0) - skipped)
    tl.store(arrivals + number, arrival, mask=inside)
    if LOCALITY:
        count_scattered(tallies, first, AXES, TILE)


@triton.jit
def measure_planes(
    largest, special, dout, task, parts, samples, channels, out_sizes, dout_strides, dout_step,
    AXES: tl.constexpr, COMPUTE: tl.constexpr, FLAT: tl.constexpr, VECTOR: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """A part of CHANNELS planes: the largest finite exponent field, and whether all numbers are finite."""
    tiles = tl.cdiv(channels, CHANNELS)
    part, group = task % parts, task // parts
    n, channel = group // tiles, group % tiles * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    base = dout + n.to(tl.int64) * dout_strides[0] + channel.to(tl.int64) * dout_step
    share = tl.cdiv(samples, parts)
    end = tl.minimum(part * share + share, samples)
    most = tl.zeros([VECTOR, CHANNELS], tl.int32)
    odd = tl.zeros([VECTOR, CHANNELS], tl.int32)
    for begin in range(part * share, end, VECTOR):
        sample = (begin + tl.arange(0, VECTOR))[:, None]
        at = base + place_offset(sample, out_sizes, dout_strides, AXES, FLAT)
        value = tl.load(at, mask=(sample < end) & (channel < channels), other=0.0)
        field = exponent_field(widen(value, COMPUTE))
        most = tl.maximum(most, tl.where(field < 255, field, 0))
        odd = tl.maximum(odd, field)
    plane = n * channels + group % tiles * CHANNELS + tl.arange(0, CHANNELS)
    exists = group % tiles * CHANNELS + tl.arange(0, CHANNELS) < channels
    tl.atomic_max(largest + plane, tl.max(most, 0), mask=exists, sem="relaxed")
    not_finite = (tl.max(odd, 0) == 255).to(tl.int32)
    tl.atomic_max(special + plane, not_finite, mask=exists & (not_finite > 0), sem="relaxed")


@triton.jit(do_not_specialize=["locating", "count", "samples", "cells", "parts"])
def survey(
    counts, arrivals, tallies, largest, special, grid, dout,
    locating, count, samples, cells, parts, channels, sizes, out_sizes, grid_strides, dout_strides, grid_step,
    dout_step,
    LOCALITY: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr,
    ALIGNED: tl.constexpr, COMPUTE: tl.constexpr, FLAT: tl.constexpr, TILE: tl.constexpr,
    VECTOR: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The first ``locating`` programs count the samples of the cells, the others measure dout."""
    follow()
    program = tl.program_id(0)
    if program < locating:
        count_cells(
            counts, arrivals, tallies, grid, program, count, samples, cells, sizes, out_sizes, grid_strides,
            grid_step, LOCALITY, AXES, MODE, PADDING, ALIGNED, COMPUTE, TILE,
        )  # fmt: skip
    else:
        measure_planes(
            largest, special, dout, program - locating, parts, samples, channels, out_sizes, dout_strides,
            dout_step, AXES, COMPUTE, FLAT, VECTOR, CHANNELS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "all_cells", "planes", "fraction_bits"])
def assign_starts(
    starts, scales, tallies, counts, largest, special, blocks, all_cells, planes, fraction_bits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The starts of BLOCK cells; past ``blocks`` programs, the scales of BLOCK planes.

    The scale of a plane is 2**shift; 0 if it has numbers that are not finite, or if 2**shift or its inverse
    is not a normal number.
    """
    follow()
    block = tl.program_id(0)
    if block < blocks:
        cell = block * BLOCK + tl.arange(0, BLOCK)
        amount = tl.load(counts + cell, mask=cell < all_cells, other=0)
        first = tl.atomic_add(tallies + ASSIGNED, tl.sum(amount, 0), sem="relaxed")
        tl.store(starts + cell, first + tl.cumsum(amount, 0) - amount, mask=cell < all_cells)
    else:
        plane = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
        shift = plane_shift(tl.load(largest + plane, mask=plane < planes, other=0), fraction_bits, tl.float32)
        plain = (tl.load(special + plane, mask=plane < planes, other=1) == 0) & (shift <= LARGEST_SHIFT)
        scale = tl.where(plain, power_of_two(tl.minimum(shift, LARGEST_SHIFT), tl.float32), 0.0)
        tl.store(scales + plane, scale, mask=plane < planes)


@triton.jit(do_not_specialize=["listing", "copying", "copies", "count", "samples", "cells", "copy_tiles"])
def list_samples(
    places, fractions, rows, tallies, starts, arrivals, grid, dout,
    listing, copying, copies, count, samples, cells, copy_tiles, channels, sizes, out_sizes, grid_strides,
    dout_strides, grid_step, dout_step,
    LOCALITY: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr,
    ALIGNED: tl.constexpr, COMPUTE: tl.constexpr, TILE: tl.constexpr, SAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The first ``listing`` programs store the places and fractions of TILE samples.

    If the samples are scattered, ``copying`` others make ``copies`` copies of SAMPLES samples in CHANNELS
    channels.
    """
    follow()
    program = tl.program_id(0)
    if program < listing:
        number = program * TILE + tl.arange(0, TILE)
        inside = number < count
        n = number // samples
        x, y, z = unravel(number - n * samples, out_sizes, AXES)
        first, t, _scale = locate(
            grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
            AXES, MODE, PADDING, ALIGNED, COMPUTE,
        )  # fmt: skip
        at = position_of(starts, arrivals, number, n, first, inside, count, cells, sizes, AXES)
        tl.store(places + at, number, mask=inside)
        for a in tl.static_range(AXES):
            tl.store(fractions + at.to(tl.int64) * AXES + a, t[a], mask=inside)
    elif LOCALITY and is_scattered(tallies, count):
        for task in range(program - listing, copies, copying):
            copy_samples(
                rows, starts, arrivals, grid, dout, task % copy_tiles, task // copy_tiles * SAMPLES, count,
                samples, cells, channels, sizes, out_sizes, grid_strides, dout_strides, grid_step, dout_step,
                AXES, MODE, PADDING, ALIGNED, COMPUTE, SAMPLES, CHANNELS,
            )  # fmt: skip


@triton.jit
def copy_samples(
    rows, starts, arrivals, grid, dout, tile, begin,
    count, samples, cells, channels, sizes, out_sizes, grid_strides, dout_strides, grid_step, dout_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, SAMPLES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Copy dout of SAMPLES samples from ``begin`` in one tile of CHANNELS channels to their positions."""
    number = begin + tl.arange(0, SAMPLES)
    inside = number < count
    n = number // samples
    x, y, z = unravel(number - n * samples, out_sizes, AXES)
    first, _t, _scale = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    channel = (tile * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    mask = inside[:, None] & (channel < channels)
    source = dout + offset_of(n, x, y, z, dout_strides)[:, None] + channel.to(tl.int64) * dout_step
    value = tl.load(source, mask=mask, other=0.0)
    at = position_of(starts, arrivals, number, n, first, inside, count, cells, sizes, AXES)
    tl.store(rows + (at.to(tl.int64) * channels)[:, None] + channel, value, mask=mask)


def is_flat(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the axes of these sizes and strides are one axis with the last stride."""
    return all(
        stride == inner * size for stride, inner, size in zip(strides, strides[1:], sizes[1:], strict=False)
    )


class Cells:
    """Workspace regions and launches that list the samples of ``images`` images by cell.

    ``starts`` and ``counts`` are the ranges of the cells, ``places`` and ``fractions`` the samples in the
    order of the cells. If ``copies``, ``rows`` holds dout in that order, if the samples are scattered.
    ``scales`` are the scales of the planes; ``largest`` and ``special`` tell how to scale planes of scale 0.
    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        device: torch.device,
        desc: GridSampleBackwardDescriptor,
        images: int,
        copies: bool,
    ) -> None:
        self.desc, self.copies, self.tuning = desc, copies, TUNING.on(device)
        self.samples, self.channels, self.cells = desc.samples, desc.channels, cells_of(desc)
        self._set_images(images)
        sizes = [TALLIES.value, self.planes, self.planes, self.all_cells]
        self.words, (self.tallies, self.largest, self.special, self.counts) = layout.take_together(
            sizes, torch.int32
        )
        self.starts = layout.take(self.all_cells, torch.int32)
        self.scales = layout.take(self.planes, torch.float32)
        self.arrivals, self.places = (layout.take(self.count, torch.int32) for _ in range(2))
        self.fractions = layout.take(desc.axes * self.count, torch.float32)
        self.rows = layout.take(self.count * desc.channels if copies else 0, desc.input_dtype)

    def _set_images(self, images: int) -> None:
        self.images, self.count = images, images * self.samples
        self.all_cells, self.planes = images * self.cells, images * self.channels

    def of_images(self, images: int) -> Cells:
        """The same regions for at most as many images."""
        other = copy(self)
        other._set_images(images)
        return other

    def parameters(self, args: GridSampleBackwardArgs, first: int) -> dict[str, Any]:
        """Parameters of the kernels for the images from ``first``."""
        desc, dout = self.desc, args.dout
        return {
            "grid": Part("grid", first, self.images),
            "dout": Part("dout", first, self.images),
            "sizes": sizes_of(desc.image_size),
            "out_sizes": sizes_of(desc.output_size),
            "grid_strides": grid_strides_of(args.grid),
            "grid_step": args.grid.stride(-1),
            "dout_strides": strides_of(dout),
            "dout_step": dout.stride(1),
            "fraction_bits": desc.fraction_bits,
            "FLAT": is_flat(desc.output_size, dout.stride()[2:]),
            "LOCALITY": self.depends_on_locality(args),
            **sampling_constants(desc),
        }

    def depends_on_locality(self, args: GridSampleBackwardArgs) -> bool:
        """Whether dout is copied if the samples are scattered. With channels last it never is."""
        return self.copies and args.dout.stride(1) != 1

    def add_steps(self, steps: Steps, args: GridSampleBackwardArgs, first: int) -> None:
        """Add the launches for the images from ``first``."""
        desc, tuning = self.desc, self.tuning
        parameters = self.parameters(args, first)
        words = self.words.count
        steps.add(
            clear_words,
            -(-words // tuning.cleared),
            self,
            words_count=words,
            TILE=tuning.cleared,
            num_warps=tuning.warps,
        )
        tiles = -(-self.count // tuning.tile)
        # A program measures several planes if they are small, or if their numbers alternate in memory.
        together = min(triton.next_power_of_2(desc.channels), tuning.channels)
        if args.dout.stride(1) != 1:
            together = max(min(tuning.vector // triton.next_power_of_2(desc.samples), together), 1)
        parts = -(-desc.samples * together // tuning.measured)
        steps.add(
            survey,
            tiles + self.images * -(-desc.channels // together) * parts,
            parameters,
            self,
            locating=tiles,
            parts=parts,
            TILE=tuning.tile,
            VECTOR=max(tuning.vector // together, 1),
            CHANNELS=together,
            num_warps=tuning.warps,
        )
        blocks = -(-self.all_cells // tuning.block)
        steps.add(
            assign_starts,
            blocks + -(-self.planes // tuning.block),
            self,
            blocks=blocks,
            fraction_bits=desc.fraction_bits,
            BLOCK=tuning.block,
            num_warps=tuning.warps,
        )
        channels = min(triton.next_power_of_2(desc.channels), tuning.channels)
        samples, copy_tiles = max(tuning.copied // channels, 1), -(-desc.channels // channels)
        copies = -(-self.count // samples) * copy_tiles if parameters["LOCALITY"] else 0
        copying = min(copies, tuning.copy_programs)
        steps.add(
            list_samples,
            tiles + copying,
            parameters,
            self,
            listing=tiles,
            copying=copying,
            copies=copies,
            copy_tiles=copy_tiles,
            TILE=tuning.tile,
            SAMPLES=samples,
            CHANNELS=channels,
            num_warps=tuning.warps,
        )


def cells_of(desc: GridSampleBackwardDescriptor) -> int:
    """Number of cells of an image."""
    return math.prod(size + 1 for size in desc.image_size)
