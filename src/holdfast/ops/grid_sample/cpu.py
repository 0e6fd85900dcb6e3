"""grid_sample on the CPU.

A task is a part of one image: a range of its channels and, for dgrid, of its samples. It first computes the
pixel and the weight of every corner of every sample, in arrays indexed [corner, sample]. Then it processes
bundles of channels (``cpu_channel_vectors``) in loops that only multiply and add.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, jit, kernel, outlined, pointer
from holdfast.backends.threads import parallel, threads_for
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import WorkspaceLayout, first_address
from holdfast.numerics.cpu import ITEM_SIZE, kind, zero
from holdfast.numerics.cpu_walk import RUN, number, size_of, store_span, table_of
from holdfast.ops.grid_sample.cpu_channel_vectors import (
    add_weighted_rows,
    clear_row,
    copy_row,
    load_bundle,
    set_weighted_rows,
    store_bundle,
)
from holdfast.ops.grid_sample.cpu_coordinates import (
    AXIS_ROWS,
    BLOCK,
    MODES,
    PADDINGS,
    ROW,
    ROW_BYTES,
    find_taps,
    pixel_of,
    product_of,
    scale_row,
)
from holdfast.ops.grid_sample.cpu_gradient_sums import (
    CHUNK,
    add_levels,
    add_products,
    clear,
    count_terms,
    list_crowds,
    scatter_rows,
    sum_crowds,
)
from holdfast.ops.grid_sample.plan import (
    MARGIN,
    TAPS,
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    GridSampleDescriptor,
    Mode,
    SampleDescriptor,
    SampleKernel,
)
from holdfast.ops.segment_sum.indexed import loops

_NEAREST = MODES[Mode.NEAREST]
#: Scratch rows: those of three axes, and three for ``_store_dgrid``.
_ROWS = 3 * AXIS_ROWS + 3
#: Possible numbers of channels of a bundle.
LANES = (1, 4)

D = TypeVar("D", bound=SampleDescriptor)


@jit
def _locate(grid, form, sizes, numbers, samples, pixel_at, weight_at, rows_at, raw, like):
    """Compute the pixel and the weight of every corner and sample, indexed [corner, sample]."""
    axes, taps = form[0], form[1]
    corners = taps * taps * (taps if axes == 3 else 1)
    for begin in range(0, samples, BLOCK):
        count = min(BLOCK, samples - begin)
        find_taps(grid, form, sizes, numbers, begin, count, rows_at, raw, like)
        for corner in range(corners):
            at = corner * samples + begin
            pixel_of(rows_at, corner, axes, taps, sizes[0], sizes[1], count, pixel_at + at * 4)
            product_of(rows_at, corner, axes, taps, -1, count, weight_at + at * size_of(like), like)


@jit
def _first_channel(operand, n, channel):
    """Address of the first pixel of a channel of image ``n``."""
    address, kind, image_step, channel_step = operand
    return address + (n * image_step + channel * channel_step) * (kind & ITEM_SIZE)


@jit
def _load(operand, table, n, channel, width, count, rows_at, scratch, like, lanes):
    """Load a bundle of ``width`` channels of image ``n``."""
    address = _first_channel(operand, n, channel)
    load_bundle(address, operand[1], operand[3], table, width, count, rows_at, scratch, like, lanes)


@jit
def _store(rows_at, operand, table, n, channel, width, count, accumulate, scratch, like, lanes):
    address = _first_channel(operand, n, channel)
    kind, step = operand[1], operand[3]
    store_bundle(rows_at, address, kind, step, table, width, count, accumulate, scratch, like, lanes)


@jit
def _four_sources(addresses_at, index, samples, first, rows, row):
    """Addresses of the pixels of four corners of a sample, from corner ``first``."""
    pixel = pointer(addresses_at, np.int32)
    at = first * samples + index
    return (
        rows + np.int64(pixel[at]) * row,
        rows + np.int64(pixel[at + samples]) * row,
        rows + np.int64(pixel[at + 2 * samples]) * row,
        rows + np.int64(pixel[at + 3 * samples]) * row,
    )


@jit
def _sample_rows(image_at, pixel_at, weight_at, corners, samples, out_at, like, lanes):
    """Sum the corners of every sample, four at a time. Pixel -1, before the first, holds zeros."""
    outlined()
    row, weight = len(lanes) * size_of(like), pointer(weight_at, like)
    for first in range(0, corners, 4):
        at = first * samples
        for i in range(samples):
            sources = _four_sources(pixel_at, i, samples, first, image_at, row)
            weights = (
                weight[at + i],
                weight[at + samples + i],
                weight[at + 2 * samples + i],
                weight[at + 3 * samples + i],
            )
            if first == 0:
                set_weighted_rows(out_at + i * row, sources, weights, lanes)
            else:
                add_weighted_rows(out_at + i * row, sources, weights, lanes)


@jit
def _pick_rows(image_at, pixel_at, samples, out_at, like, lanes):
    """Copy the pixel of each sample, for mode nearest."""
    outlined()
    row, pixel = len(lanes) * size_of(like), pointer(pixel_at, np.int32)
    for i in range(samples):
        copy_row(out_at + i * row, image_at + np.int64(pixel[i]) * row, like, lanes)


@kernel
def _sample(first, last, parts, extent, form, sizes, numbers, grid, image, out, tables, scratch, like, lanes):
    """Forward of the tasks ``first`` to ``last``; each image has ``parts`` tasks.

    ``extent`` is (channels, pixels, samples, corners). ``form``, ``sizes`` and ``numbers`` are as in
    ``find_taps``. ``grid`` is (address, kind, image stride, axis stride); ``image`` and ``out`` are (address,
    kind, image stride, channel stride). ``tables`` hold their loops over samples or pixels.
    """
    channels, pixels, samples, corners = extent
    grid_table, image_table, out_table = tables
    pixel_at, weight_at, rows_at, lines_at, image_at, out_at = scratch
    located, row = -1, len(lanes) * size_of(like)
    for task in range(first, last):
        n, part = task // parts, task % parts
        begin, end = part_of(channels, part, parts, len(lanes))
        if begin < end and n != located:
            source = (_first_channel(grid, n, 0), grid[1], grid_table, grid[3])
            _locate(source, form, sizes, numbers, samples, pixel_at, weight_at, rows_at, lines_at, like)
            located = n
        for channel in range(begin, end, len(lanes)):
            width = min(len(lanes), end - channel)
            _load(image, image_table, n, channel, width, pixels, image_at, lines_at, like, lanes)
            clear_row(image_at - row, like, lanes)
            if form[2] == _NEAREST:
                _pick_rows(image_at, pixel_at, samples, out_at, like, lanes)
            else:
                _sample_rows(image_at, pixel_at, weight_at, corners, samples, out_at, like, lanes)
            _store(out_at, out, out_table, n, channel, width, samples, False, lines_at, like, lanes)


@jit
def part_of(count, part, parts, whole):
    """Range of a part of ``count`` elements, with bounds that are multiples of ``whole``."""
    layout = (count + whole - 1) // whole
    return min(layout * part // parts * whole, count), min(layout * (part + 1) // parts * whole, count)


@jit
def _store_dgrid(
    dgrid, table, source, form, sizes, numbers, begin, end, samples, pixel_at, sums_at, accumulate, rows_at,
    lines_at, like,
):  # fmt: skip
    """dgrid of samples ``begin`` to ``end``, from the sums over channels of their corners."""
    outlined()
    axes, taps = form[0], form[1]
    corners = taps * taps * (taps if axes == 3 else 1)
    address, kind, step = dgrid
    slope_at = rows_at + 3 * AXIS_ROWS * ROW
    change_at, old = slope_at + ROW, slope_at + 2 * ROW
    slope, change = pointer(slope_at, like), pointer(change_at, like)
    for at in range(begin, end, BLOCK):
        count = min(BLOCK, end - at)
        find_taps(source, form, sizes, numbers, at, count, rows_at, lines_at, like)
        for a in range(axes):
            clear(change_at, count, like)
            if form[2] != _NEAREST:
                for corner in range(corners):
                    product_of(rows_at, corner, axes, taps, a, count, slope_at, like)
                    pixel = pointer(pixel_at + (corner * samples + at) * 4, np.int32)
                    sums = pointer(sums_at + ((at - begin) * corners + corner) * size_of(like), like)
                    for i in range(count):
                        more = change[i] + slope[i] * sums[i * corners]
                        change[i] = more if pixel[i] != -1 else change[i]
            scale = pointer(scale_row(rows_at, a), like)
            for i in range(count):
                change[i] = change[i] * scale[i] if scale[i] != zero(like) else zero(like)
            target = address + a * step * (kind & ITEM_SIZE)
            store_span(change_at, target, kind, table, at, at + count, accumulate, lines_at, old, like)


@kernel
def _differentiate(
    first, last, parts, needs, extent, form, sizes, numbers, grid, image, dout, dinput, dgrid, tables, levels,
    accumulate, scratch, like, lanes,
):  # fmt: skip
    """Backward of the tasks ``first`` to ``last``; each image has ``parts`` tasks.

    A task computes dinput of a part of the channels, and dgrid of a part of the samples. ``needs`` is
    (dinput is needed, dgrid is needed). The operands are as in ``_sample``.
    """
    channels, pixels, samples, corners = extent
    grid_table, image_table, dout_table, dinput_table, dgrid_table = tables
    (
        pixel_at, weight_at, rows_at, lines_at, dout_at, image_at, dinput_at, terms_at, crowds_at, counts_at,
        sums_at,
    ) = scratch  # fmt: skip
    located, crowded = -1, 0
    for task in range(first, last):
        n, part = task // parts, task % parts
        source = (_first_channel(grid, n, 0), grid[1], grid_table, grid[3])
        if n != located:
            _locate(source, form, sizes, numbers, samples, pixel_at, weight_at, rows_at, lines_at, like)
            located, crowded = n, 0
            if needs[0] and count_terms(pixel_at, corners * samples, counts_at, pixels) > CHUNK:
                crowded = list_crowds(pixel_at, corners * samples, counts_at, pixels, terms_at, crowds_at)
        begin, end = part_of(channels, part, parts, len(lanes))
        from_sample, to_sample = part_of(samples, part, parts, 1)
        count = to_sample - from_sample
        sums = needs[1] and form[2] != _NEAREST
        for level in range(levels if sums else 0):
            clear(sums_at + level * count * corners * size_of(like), count * corners, like)
        for channel in range(0, channels, len(lanes)):
            width, own = min(len(lanes), channels - channel), needs[0] and channel >= begin and channel < end
            if own or sums:
                _load(dout, dout_table, n, channel, width, samples, dout_at, lines_at, like, lanes)
            if own:
                scatter_rows(dout_at, pixel_at, weight_at, corners, samples, dinput_at, pixels, like, lanes)
                if crowded > 0:
                    sum_crowds(
                        crowded, terms_at, crowds_at, dout_at, weight_at, samples, dinput_at, rows_at, like,
                        lanes,
                    )  # fmt: skip
                _store(
                    dinput_at, dinput, dinput_table, n, channel, width, pixels, accumulate, lines_at, like,
                    lanes,
                )  # fmt: skip
            if sums:
                _load(image, image_table, n, channel, width, pixels, image_at, lines_at, like, lanes)
                add_products(
                    dout_at, image_at, pixel_at, corners, samples, from_sample, count, channel % CHUNK == 0,
                    sums_at, like, lanes,
                )  # fmt: skip
                add_levels(sums_at, count * corners, levels, channel + width, channels, like)
        if needs[1]:
            total_at = sums_at + (levels - 1) * count * corners * size_of(like)
            target = (_first_channel(dgrid, n, 0), dgrid[1], dgrid[3])
            _store_dgrid(
                target, dgrid_table, source, form, sizes, numbers, from_sample, to_sample, samples, pixel_at,
                total_at, accumulate, rows_at, lines_at, like,
            )  # fmt: skip


def _axis_numbers(size: int, desc: SampleDescriptor) -> tuple[Any, ...]:
    """Constants of an axis in the compute type.

    The size, the last pixel, a coordinate beyond the image, pixels per unit of the grid, the coordinate of
    the first mirror, and the period of the reflection.
    """
    size_or_steps = size - 1 if desc.align_corners else size
    first_mirror = 0 if desc.align_corners else -0.5
    values = (size, size - 1, size + MARGIN - 1, size_or_steps / 2, first_mirror, 2 * size_or_steps)
    make = type(number(desc.compute))
    return tuple(make(value) for value in values)


class _Problem(NamedTuple):
    """Kernel parameters of a descriptor."""

    extent: tuple[int, int, int, int]
    form: tuple[int, int, int, int, int]
    sizes: tuple[int, ...]
    numbers: tuple[Any, ...]

    @classmethod
    def of(cls, desc: SampleDescriptor) -> _Problem:
        sizes = (*reversed(desc.image_size), 1)[:3]
        return cls(
            (desc.channels, desc.pixels, desc.samples, desc.corners),
            (
                desc.axes,
                TAPS[desc.mode],
                MODES[desc.mode],
                PADDINGS[desc.padding_mode],
                int(desc.align_corners),
            ),
            sizes,
            tuple(_axis_numbers(size, desc) for size in sizes),
        )


def _table(sizes: Sequence[int], strides: Sequence[int]) -> np.ndarray[Any, Any]:
    """The loops over the pixels or samples of one channel, in row-major order."""
    space = loops(sizes, strides)
    return table_of(space.sizes, space.strides[0])


def _operand(tensor: torch.Tensor | None, axis: int, compute: Float) -> tuple[int, int, int, int]:
    """(address, kind, image stride, stride of ``axis``) of a tensor."""
    if tensor is None:
        return 0, compute.bits // 8, 0, 0
    return tensor.data_ptr(), kind(tensor.dtype, compute.torch), tensor.stride(0), tensor.stride(axis)


_NO_TABLE = table_of((1,), (1,))


class _SampleKernel(SampleKernel[D]):
    """A kernel whose tasks run on several threads, each with its own scratch in the workspace."""

    #: Maximum bytes of bundles per thread, which limits the channels of a bundle.
    bundle_bytes = 2**26
    #: Maximum number of threads.
    most_threads = 2**16

    def __init__(self, desc: D, device: torch.device) -> None:
        super().__init__(desc, device)
        self.problem = _Problem.of(desc)
        self.work = desc.batch * (desc.channels + desc.axes) * desc.samples * desc.corners
        threads = min(threads_for(self.work), self.most_threads)
        self.parts = _parts(desc.batch, threads)
        self.tasks = desc.batch * self.parts
        self.slots = max(min(threads, self.tasks), 1)
        self.lanes = (0,) * self._lanes(threads)
        self.layout = WorkspaceLayout()
        self.take_regions()
        self.slot_bytes = self.layout.size
        self.layout.take_again(self.slots - 1)
        self.set_workspace(self.layout)

    def rows_of_bundles(self) -> tuple[int, ...]:
        """Number of rows of each bundle."""
        raise NotImplementedError

    def _lanes(self, threads: int) -> int:
        """Maximum channels of a bundle such that every thread has a bundle, and the bundles fit in memory."""
        desc, row = self.desc, sum(self.rows_of_bundles()) * self.desc.compute.bits // 8
        fitting = [
            lanes
            for lanes in LANES
            if desc.batch * (desc.channels // lanes) >= threads and lanes * row <= self.bundle_bytes
        ]
        return max(fitting, default=1)

    def take_regions(self) -> None:
        """Allocate the scratch of one thread."""
        compute, entries = self.desc.compute.torch, self.desc.samples * self.desc.corners
        lines = (len(self.lanes) + 2) * RUN
        self.located = [
            self.layout.take(entries, torch.int32),
            self.layout.take(entries, compute),
            self.layout.take_rows(_ROWS, ROW_BYTES),
            self.layout.take(lines, compute),
        ]
        # Each has one more row, before the first.
        self.bundles = [
            self.layout.take((rows + 1) * len(self.lanes) if rows else 0, compute)
            for rows in self.rows_of_bundles()
        ]

    def scratch(self, base: int) -> tuple[int, ...]:
        """Addresses of the regions, and of the first row of each bundle."""
        row = len(self.lanes) * self.desc.compute.bits // 8
        located = (base + region.offset for region in self.located)
        return (*located, *(base + region.offset + row for region in self.bundles))

    def run_tasks(self, work: Callable[[int, int, int], None], workspace: Workspace) -> None:
        """Call ``work`` with ranges of tasks and the address of a thread's scratch, in parallel."""
        base = first_address(workspace)

        def part(first: int, last: int) -> None:
            begin, end = (self.tasks * slot // self.slots for slot in (first, last))
            work(begin, end, base + first * self.slot_bytes)

        parallel(part, self.slots, self.work)


def _parts(images: int, threads: int) -> int:
    """Number of parts of an image such that the tasks balance over the threads."""
    parts = 1
    while images * parts < 4 * threads and images * parts % threads:
        parts += 1
    return parts


class GridSample(_SampleKernel[GridSampleDescriptor]):
    """``_sample``."""

    def rows_of_bundles(self) -> tuple[int, ...]:
        return self.desc.pixels, self.desc.samples

    def compile(self) -> None:
        _compile(self.desc.compute, self.lanes)

    def prepare(self, args: GridSampleArgs) -> Launch[GridSampleArgs]:
        desc, compute = self.desc, self.desc.compute
        self.compile()
        like = number(compute)
        tables = (
            _table(desc.output_size, args.grid.stride()[1:-1]),
            _table(desc.image_size, args.input.stride()[2:]),
            _table(desc.output_size, args.out.stride()[2:]),
        )

        def launch(
            stream: Stream, workspace: Workspace, args: GridSampleArgs, addresses: Sequence[int]
        ) -> None:
            operands = (
                _operand(args.grid, -1, compute),
                _operand(args.input, 1, compute),
                _operand(args.out, 1, compute),
            )

            def work(first: int, last: int, base: int) -> None:
                _sample(
                    first, last, self.parts, *self.problem, *operands, tables, self.scratch(base), like,
                    self.lanes,
                )  # fmt: skip

            self.run_tasks(work, workspace)

        return launch


class GridSampleBackward(_SampleKernel[GridSampleBackwardDescriptor]):
    """``_differentiate``."""

    def rows_of_bundles(self) -> tuple[int, ...]:
        desc = self.desc
        return desc.samples, desc.pixels * desc.needs_dgrid, desc.pixels * desc.needs_dinput

    def take_regions(self) -> None:
        super().take_regions()
        desc, take = self.desc, self.layout.take
        listed = desc.samples * desc.corners if desc.needs_dinput else 0
        self.terms, self.crowds = (take(count, torch.int32) for count in (listed, 3 * (listed // CHUNK + 1)))
        self.counts = take(desc.pixels + 1 if desc.needs_dinput else 0, torch.int32)
        self.levels = 1
        while CHUNK**self.levels < desc.channels:
            self.levels += 1
        summed = self.levels * desc.corners * -(-desc.samples // self.parts)
        needed = desc.needs_dgrid and desc.mode != Mode.NEAREST
        self.sums = take(summed if needed else 0, desc.compute.torch)

    def scratch(self, base: int) -> tuple[int, ...]:
        terms, crowds, sums = (base + region.offset for region in (self.terms, self.crowds, self.sums))
        # Terms outside the image are counted at pixel -1.
        return (*super().scratch(base), terms, crowds, base + self.counts.offset + 4, sums)

    def compile(self) -> None:
        _compile_backward(self.desc.compute, self.lanes)

    def prepare(self, args: GridSampleBackwardArgs) -> Launch[GridSampleBackwardArgs]:
        desc, compute = self.desc, self.desc.compute
        self.compile()
        like = number(compute)
        tables = (
            _table(desc.output_size, args.grid.stride()[1:-1]),
            _NO_TABLE if args.input is None else _table(desc.image_size, args.input.stride()[2:]),
            _table(desc.output_size, args.dout.stride()[2:]),
            _NO_TABLE if args.dinput is None else _table(desc.image_size, args.dinput.stride()[2:]),
            _NO_TABLE if args.dgrid is None else _table(desc.output_size, args.dgrid.stride()[1:-1]),
        )
        accumulate, needs = args.accumulate, (desc.needs_dinput, desc.needs_dgrid)

        def launch(
            stream: Stream, workspace: Workspace, args: GridSampleBackwardArgs, addresses: Sequence[int]
        ) -> None:
            operands = (
                _operand(args.grid, -1, compute),
                _operand(args.input, 1, compute),
                _operand(args.dout, 1, compute),
                _operand(args.dinput, 1, compute),
                _operand(args.dgrid, -1, compute),
            )

            def work(first: int, last: int, base: int) -> None:
                _differentiate(
                    first, last, self.parts, needs, *self.problem, *operands, tables, self.levels, accumulate,
                    self.scratch(base), like, self.lanes,
                )  # fmt: skip

            self.run_tasks(work, workspace)

        return launch


class LeanGridSample(GridSample):
    """``GridSample`` on one thread, one channel at a time."""

    bundle_bytes = 0
    most_threads = 1


class LeanGridSampleBackward(GridSampleBackward):
    """``GridSampleBackward`` on one thread, one channel at a time."""

    bundle_bytes = 0
    most_threads = 1


def _empty(compute: Float) -> tuple[Any, ...]:
    """A problem without samples, for compiling kernels."""
    desc = GridSampleDescriptor(
        shape=(0, 0, 1, 1), output_size=(0, 0), input_dtype=compute.torch, grid_dtype=compute.torch
    )
    return tuple(_Problem.of(desc))


@cache
def _compile(compute: Float, lanes: tuple[int, ...]) -> None:
    operands = (_operand(None, 0, compute),) * 3
    compile_kernel(
        _sample, 0, 0, 1, *_empty(compute), *operands, (_NO_TABLE,) * 3, (0,) * 6, number(compute), lanes
    )


@cache
def _compile_backward(compute: Float, lanes: tuple[int, ...]) -> None:
    operands = (_operand(None, 0, compute),) * 5
    compile_kernel(
        _differentiate, 0, 0, 1, (False, False), *_empty(compute), *operands, (_NO_TABLE,) * 5, 1, False,
        (0,) * 11, number(compute), lanes,
    )  # fmt: skip
