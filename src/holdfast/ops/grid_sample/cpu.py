"""grid_sample on the CPU.

Samples are processed in runs. The places and weights of a run (``cpu_places``) are computed once, then
used for every channel: to load values from the image, or to add terms to the integer sums of dinput. If there
are many float32 channels, ``LANES`` of them are processed at once (``cpu_lanes``).

dinput is computed in units: several channels of one image, each with a buffer of sums. A thread computes
whole units. If there are too few, a unit is split: each thread sums a part of the samples, and the sums of
all threads are added.
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
from holdfast.core.workspace_layout import Region, WorkspaceLayout, first_address
from holdfast.numerics.cpu import ITEM_SIZE, kind
from holdfast.numerics.cpu_walk import RUN, load_span, number, size_of, store_span, table_of
from holdfast.ops.grid_sample.cpu_channel_sums import CHUNK, add_levels, add_products, clear
from holdfast.ops.grid_sample.cpu_coordinates import (
    AXIS_ROWS,
    MODES,
    PADDINGS,
    ROW_BYTES,
    find_gradients,
    store_gradients,
)
from holdfast.ops.grid_sample.cpu_integer_sums import (
    add_marked_sums,
    add_sums,
    add_terms,
    clear_infinite,
    clear_sums,
    convert_sums,
    find_shift,
    mark_infinite,
    replace_marked,
    scale,
)
from holdfast.ops.grid_sample.cpu_lanes import (
    LANES,
    REALS,
    SUMS,
    add_terms_in_lanes,
    add_weighted_in_lanes,
    convert_lanes,
    lanes_to_rows,
    rows_to_lanes,
)
from holdfast.ops.grid_sample.cpu_places import add_weighted, gather_places, locate, pick
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

Table = np.ndarray[Any, Any]

_NEAREST = MODES[Mode.NEAREST]
#: Regions of scratch before the sums.
_RUNS = 7
#: Steps of ``_differentiate``.
_WHOLE, _PART, _TOTAL = 0, 1, 2

D = TypeVar("D", bound=SampleDescriptor)


@jit
def _first_channel(operand, n, channel):
    """Address of the first element of a channel of image ``n``."""
    address, kind, image_step, channel_step, _ = operand
    return address + (n * image_step + channel * channel_step) * (kind & ITEM_SIZE)


@jit
def _grid_of(grid, n):
    """The grid of image ``n``, for ``find_taps``."""
    return _first_channel(grid, n, 0), grid[1], grid[4], grid[3]


@jit
def part_of(count, part, parts):
    """Range of a part of ``count`` elements."""
    return count * part // parts, count * (part + 1) // parts


@jit
def _sample_lanes(n, channel, extent, problem, grid, image, steps, out, copy_at, scratch, like, columns):
    """Forward of ``LANES`` channels of an image from ``channel``."""
    outlined()
    _, pixels, samples, corners = extent
    offsets_at, weights_at, rows_at, raw, old, values_at, row_at = scratch
    for begin in range(0, pixels, RUN):
        count = min(RUN, pixels - begin)
        for c in range(LANES):
            source, target = _first_channel(image, n, channel + c), row_at + c * RUN * 4
            load_span(source, image[1], image[4], begin, begin + count, raw, target, like)
        rows_to_lanes(row_at, count, copy_at + begin * REALS)
    for begin in range(0, samples, RUN):
        count, tables = min(RUN, samples - begin), (offsets_at, weights_at)
        locate(_grid_of(grid, n), problem, steps, begin, count, tables, rows_at, raw, like, columns)
        for corner in range(0, corners, len(columns)):
            offsets = offsets_at + corner // len(columns) * RUN * 8
            weights = weights_at + corner * RUN * size_of(like)
            add_weighted_in_lanes(copy_at, weights, offsets, count, corner == 0, values_at, like, columns)
        lanes_to_rows(values_at, count, row_at)
        for c in range(LANES):
            source, target = row_at + c * RUN * 4, _first_channel(out, n, channel + c)
            store_span(source, target, out[1], out[4], begin, begin + count, False, raw, old, like)


@kernel
def _sample(
    first, last, parts, lanes, extent, problem, grid, image, steps, own_steps, out, scratch, like, columns
):
    """Forward of the tasks ``first`` to ``last``.

    An image has ``parts`` tasks, each with a part of its samples, or if ``lanes``, with ``LANES`` channels.

    ``extent`` is (channels, pixels, samples, corners). ``problem`` is (form, sizes, numbers) as in
    ``find_taps``. An operand is (address, kind, image stride, stride of the channels or of the grid's axes,
    table of the loops over samples or pixels). ``steps`` are the strides of the image in ``find_offsets``,
    ``own_steps`` those of a contiguous copy.
    """
    channels, _, samples, corners = extent
    offsets_at, weights_at, rows_at, raw, old, values_at, row_at, copy_at = scratch
    for task in range(first, last):
        n = task // parts
        if lanes:
            _sample_lanes(
                n, task % parts * LANES, extent, problem, grid, image, own_steps, out, copy_at, scratch[:7],
                like, columns,
            )  # fmt: skip
            continue
        from_sample, to_sample = part_of(samples, task % parts, parts)
        for begin in range(from_sample, to_sample, RUN):
            count, tables = min(RUN, to_sample - begin), (offsets_at, weights_at)
            locate(_grid_of(grid, n), problem, steps, begin, count, tables, rows_at, raw, like, columns)
            for channel in range(channels):
                source, target = _first_channel(image, n, channel), _first_channel(out, n, channel)
                for corner in range(0, corners, len(columns)):
                    offsets = offsets_at + corner // len(columns) * RUN * 8
                    weights = weights_at + corner * RUN * size_of(like)
                    gather_places(source, image[1], offsets, count, values_at, raw, like, columns)
                    if problem[0][2] == _NEAREST:
                        pick(values_at, weights, count, row_at, like)
                    else:
                        add_weighted(values_at, weights, count, corner == 0, row_at, like, columns)
                end = begin + count
                store_span(row_at, target, out[1], out[4], begin, end, False, raw, old, like)


@jit
def _steps_of_sums(width, pixels, like):
    """Bytes from a channel to the next in the sums of a unit, and from a pixel to the next."""
    words = size_of(like) // 4
    return (8, SUMS) if width == LANES and words == 1 else (pixels * words * 8, words * 8)


@jit
def _sum_terms(
    n, channel, width, begin, end, extent, problem, grid, image, steps, dout, dgrid, joint, bits, levels,
    accumulate, sparse, shifts_at, sums_at, totals_at, scratch, like, columns,
):  # fmt: skip
    """Integer sums of ``width`` channels from ``channel``, over samples ``begin`` to ``end``.

    ``joint``: also store dgrid of these samples; ``width`` is the number of channels. ``sparse``: all sums
    are zeros already. Returns whether all values of dout are finite, and if ``sparse`` the first pixel that
    was touched and the end of those that were.
    """
    outlined()
    low, high = extent[1], 0
    _, pixels, samples, corners = extent
    offsets_at, weights_at, rows_at, raw, _, terms_at, row_at = scratch
    shifts, all_finite, words = pointer(shifts_at, np.int64), True, size_of(like) // 4
    for c in range(width):
        source = _first_channel(dout, n, channel + c)
        shifts[c], finite = find_shift(source, dout[1], dout[4], samples, bits, row_at, raw, like)
        all_finite = all_finite and finite
    step, pixel = _steps_of_sums(width, pixels, like)
    together = pixel == SUMS
    if not sparse:
        clear_sums(sums_at, width * pixels * words)
    for marking in range(1 if all_finite else 2):
        for first in range(begin, end, RUN):
            count, tables = min(RUN, end - first), (offsets_at, weights_at)
            locate(_grid_of(grid, n), problem, steps, first, count, tables, rows_at, raw, like, columns)
            if sparse and marking == 0:
                for place in range(corners // len(columns)):
                    offsets = pointer(offsets_at + place * RUN * 8, np.int64)
                    for i in range(count):
                        low, high = min(low, offsets[i]), max(high, offsets[i])
            if joint and marking == 0:
                _store_dgrid(
                    n, first, count, extent, problem, image, dout, dgrid, levels, accumulate, totals_at,
                    scratch, like, columns,
                )  # fmt: skip
            for c in range(width):
                source, sums = _first_channel(dout, n, channel + c), sums_at + c * step
                row = row_at + c * RUN * size_of(like) if together else row_at
                load_span(source, dout[1], dout[4], first, first + count, raw, row, like)
                if marking == 0:
                    if not all_finite:
                        clear_infinite(row, count, like)
                    scale(row, count, shifts[c], like)
                for corner in range(0, 0 if together and marking == 0 else corners, len(columns)):
                    offsets = offsets_at + corner // len(columns) * RUN * 8
                    weights = weights_at + corner * RUN * size_of(like)
                    if marking == 0:
                        add_terms(row, weights, offsets, count, bits, terms_at, sums, like, columns)
                    else:
                        mark_infinite(row, weights, offsets, count, sums, pixel, like, columns)
            if together and marking == 0:
                rows_to_lanes(row_at, count, terms_at)
            for corner in range(0, corners if together and marking == 0 else 0, len(columns)):
                offsets = offsets_at + corner // len(columns) * RUN * 8
                weights = weights_at + corner * RUN * size_of(like)
                add_terms_in_lanes(terms_at, weights, offsets, count, sums_at, like, columns)
    return all_finite, low, min(high + len(columns), pixels)


@jit
def _clear_touched(width, low, high, pixels, sums_at, like):
    """Clear the sums of the pixels ``low`` to ``high`` of a unit."""
    step, pixel = _steps_of_sums(width, pixels, like)
    for c in range(1 if pixel == SUMS else width):
        clear_sums(sums_at + c * step + low * pixel, (high - low) * pixel // 8)


@jit
def _store_zeros(n, channel, width, begin, end, dinput, accumulate, scratch, like):
    """Store zeros in the pixels ``begin`` to ``end`` of the channels of a unit, or add them."""
    outlined()
    _, _, _, raw, old, _, row = scratch
    clear(row, RUN, like)
    for c in range(width):
        target = _first_channel(dinput, n, channel + c)
        for at in range(begin, end, RUN):
            last = min(at + RUN, end)
            if accumulate:  # the last sums are in the row
                clear(row, last - at, like)
            store_span(row, target, dinput[1], dinput[4], at, last, accumulate, raw, old, like)


@jit
def _store_sums(
    n, channel, width, begin, end, pixels, bits, shifts_at, all_finite, sums_at, dinput, accumulate, scratch,
    like,
):  # fmt: skip
    """Store pixels ``begin`` to ``end`` of the channels of a unit."""
    outlined()
    _, _, _, raw, old, values_at, row_at = scratch
    shifts, (step, pixel) = pointer(shifts_at, np.int64), _steps_of_sums(width, pixels, like)
    for at in range(begin, end, RUN):
        count = min(RUN, end - at)
        if pixel == SUMS:
            convert_lanes(sums_at + at * pixel, count, values_at)
            lanes_to_rows(values_at, count, row_at)
        for c in range(width):
            sums, target = sums_at + c * step + at * pixel, _first_channel(dinput, n, channel + c)
            row = row_at + c * RUN * size_of(like) if pixel == SUMS else row_at
            if pixel != SUMS:
                convert_sums(sums, count, bits, row, like)
            scale(row, count, -shifts[c], like)
            if not all_finite:
                replace_marked(sums, pixel, count, row, like)
            store_span(row, target, dinput[1], dinput[4], at, at + count, accumulate, raw, old, like)


@jit
def _store_dgrid(
    n, begin, count, extent, problem, image, dout, dgrid, levels, accumulate, totals_at, scratch, like,
    columns,
):  # fmt: skip
    """dgrid of ``count`` samples from ``begin`` of an image. They are located."""
    outlined()
    channels, _, _, corners = extent
    offsets_at, _, rows_at, raw, old, values_at, row_at = scratch
    level_size = corners * RUN * size_of(like)
    if problem[0][2] != _NEAREST:
        clear(totals_at, levels * corners * RUN if levels > 1 or channels == 0 else 0, like)
        for channel in range(channels):
            gradient, source = _first_channel(dout, n, channel), _first_channel(image, n, channel)
            load_span(gradient, dout[1], dout[4], begin, begin + count, raw, row_at, like)
            for corner in range(0, corners, len(columns)):
                offsets = offsets_at + corner // len(columns) * RUN * 8
                sums = totals_at + corner * RUN * size_of(like)
                gather_places(source, image[1], offsets, count, values_at, raw, like, columns)
                add_products(row_at, values_at, count, channel % CHUNK == 0, sums, like, columns)
            add_levels(totals_at, corners * RUN, levels, channel + 1, channels, like)
    find_gradients(rows_at, problem[0], count, totals_at + (levels - 1) * level_size, like)
    store_gradients(rows_at, _grid_of(dgrid, n), problem[0][0], begin, count, accumulate, raw, old, like)


@jit
def _add_threads(begin, end, width, pixels, others, sums_at, finite, like):
    """Add the sums of the other threads to those of the first, for pixels ``begin`` to ``end``."""
    words, (step, pixel) = size_of(like) // 4, _steps_of_sums(width, pixels, like)
    for other in range(1, others[0]):
        for c in range(1 if pixel == SUMS else width):
            target = sums_at + c * step + begin * pixel
            source, count = target + other * others[1], (end - begin) * pixel // 8
            if finite:
                add_sums(target, source, count)
            else:
                add_marked_sums(target, source, count, words)


@kernel
def _differentiate(
    step, first, last, units, parts, group, extent, problem, grid, image, steps, own_steps, dout, dinput,
    dgrid, joint, bits, levels, accumulate, sparse, others, scratch, like, columns,
):  # fmt: skip
    """One step of the backward. ``group`` is the number of channels of a unit, except the last of an image.

    WHOLE: tasks ``first`` to ``last``. The first ``units`` tasks are units of dinput. The others are dgrid of
    a part of the samples of an image, which has ``parts``.
    PART: the sums of unit ``units`` over samples ``first`` to ``last``.
    TOTAL: pixels ``first`` to ``last`` of unit ``units``, from the sums of all threads. ``others`` is (number
    of threads, bytes between their sums).

    The operands are as in ``_sample``. ``own_steps`` are the strides of a buffer of sums. ``sparse``: the
    samples touch few pixels, so only those have sums to clear and to convert.
    """
    channels, pixels, samples, _ = extent
    sparse = sparse and step == _WHOLE
    groups = (channels + group - 1) // group
    sums_at, shifts_at, totals_at = scratch[7:]
    shifts = pointer(shifts_at, np.int64)
    if sparse and first < units:
        clear_sums(sums_at, group * pixels * (size_of(like) // 4))
    for task in range(first, last if step == _WHOLE else first + 1):
        if step == _WHOLE and task >= units:
            n, part = (task - units) // parts, (task - units) % parts
            begin, end = part_of(samples, part, parts)
            for at in range(begin, end, RUN):
                count = min(RUN, end - at)
                locate(
                    _grid_of(grid, n), problem, steps, at, count, scratch[:2], scratch[2], scratch[3], like,
                    columns,
                )  # fmt: skip
                _store_dgrid(
                    n, at, count, extent, problem, image, dout, dgrid, levels, accumulate, totals_at,
                    scratch[:7], like, columns,
                )  # fmt: skip
            continue
        unit = task if step == _WHOLE else units
        n, channel = unit // groups, unit % groups * group
        width = min(group, channels - channel)
        if step != _TOTAL:
            begin, end = (0, samples) if step == _WHOLE else (first, last)
            finite, low, high = _sum_terms(
                n, channel, width, begin, end, extent, problem, grid, image, own_steps, dout, dgrid, joint,
                bits, levels, accumulate, sparse, shifts_at, sums_at, totals_at, scratch[:7], like, columns,
            )  # fmt: skip
            shifts[group] = finite
            if sparse:
                _store_sums(
                    n, channel, width, low, high, pixels, bits, shifts_at, finite, sums_at, dinput,
                    accumulate, scratch[:7], like,
                )  # fmt: skip
                _clear_touched(width, low, high, pixels, sums_at, like)
                _store_zeros(n, channel, width, 0, low, dinput, accumulate, scratch[:7], like)
                _store_zeros(n, channel, width, high, pixels, dinput, accumulate, scratch[:7], like)
                continue
        begin, end = (0, pixels) if step == _WHOLE else (first, last)
        if step == _TOTAL:
            _add_threads(begin, end, width, pixels, others, sums_at, shifts[group] == 1, like)
        if step != _PART:
            _store_sums(
                n, channel, width, begin, end, pixels, bits, shifts_at, shifts[group] == 1, sums_at, dinput,
                accumulate, scratch[:7], like,
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


def _table(sizes: Sequence[int], strides: Sequence[int]) -> Table:
    """The loops over the pixels or samples of one channel, in row-major order."""
    space = loops(sizes, strides)
    return table_of(space.sizes, space.strides[0])


def _steps(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, bool]:
    """The strides along x, y and z, and whether all offsets are int32."""
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    x, y, z = (*reversed(strides), 0)[:3]
    return x, y, z, span < 2**31


def _own_steps(desc: SampleDescriptor) -> tuple[int, int, int, bool]:
    """``_steps`` of a contiguous channel."""
    return _steps(desc.image_size, torch.empty(desc.image_size, device="meta").stride())


def _operand(
    tensor: torch.Tensor | None, axis: int, compute: Float, table: Table
) -> tuple[int, int, int, int, Table]:
    """(address, kind, image stride, stride of ``axis``, table) of a tensor."""
    if tensor is None:
        return 0, compute.bits // 8, 0, 0, table
    code = kind(tensor.dtype, compute.torch)
    return tensor.data_ptr(), code, tensor.stride(0), tensor.stride(axis), table


_NO_TABLE = table_of((1,), (1,))
_NO_STEPS = (1, 1, 1, True)


class _SampleKernel(SampleKernel[D]):
    """A kernel whose tasks run on several threads, each with its own scratch in the workspace."""

    #: Maximum number of threads.
    most_threads = 2**16

    def __init__(self, desc: D, device: torch.device) -> None:
        super().__init__(desc, device)
        self.problem = _Problem.of(desc)
        self.work = self.amount()
        self.slots = max(min(threads_for(self.work), self.most_threads, self.most_slots()), 1)
        self.parts = _parts(desc.batch, self.slots)
        self.layout = WorkspaceLayout()
        self.regions = self.take_regions()
        self.slot_bytes = self.layout.size
        self.layout.take_again(self.slots - 1)
        self.set_workspace(self.layout)

    def amount(self) -> int:
        """The amount of work, in terms of a sum."""
        desc = self.desc
        return desc.batch * (desc.channels + desc.axes) * desc.samples * desc.corners

    def most_slots(self) -> int:
        """Maximum number of threads such that the workspace is not too large."""
        return 2**16

    def take_regions(self) -> list[Region]:
        """Allocate the scratch of one thread: tables of a run, axis rows, and runs."""
        desc, take, compute = self.desc, self.layout.take, self.desc.compute.torch
        entries = desc.corners * RUN
        return [
            take(entries, torch.int64),
            take(entries, compute),
            self.layout.take_rows(3 * AXIS_ROWS, ROW_BYTES),
            *(take(count, compute) for count in (2 * RUN, RUN)),
            take(4 * RUN, torch.int64),
            take(LANES * RUN, compute),
        ]

    def scratch(self, base: int, slot: int) -> tuple[int, ...]:
        """Addresses of the regions of a slot."""
        return tuple(base + slot * self.slot_bytes + region.offset for region in self.regions)

    def run_tasks(self, work: Callable[[int, int, int], None], tasks: int) -> None:
        """Call ``work`` with ranges of tasks and a slot that no other thread uses, in parallel."""
        free = list(range(self.slots))

        def part(first: int, last: int) -> None:
            slot = free.pop()
            work(first, last, slot)
            free.append(slot)

        if self.slots == 1:
            work(0, tasks, 0)
        else:
            parallel(part, tasks, self.work)

    def columns(self, image: torch.Tensor | None) -> tuple[int, ...]:
        """Columns of a place: two where the linear taps along x are side by side in memory."""
        paired = self.desc.mode == Mode.BILINEAR and self.desc.image_size[-1] > 1
        return (0, 0) if paired and (image is None or image.stride(-1) == 1) else (0,)


def _parts(images: int, slots: int) -> int:
    """Number of parts of an image such that the tasks balance over the slots."""
    return -(-8 * slots // max(images, 1)) if slots > 1 else 1


class GridSample(_SampleKernel[GridSampleDescriptor]):
    """``_sample``."""

    #: Whether several channels may be sampled at once, from a copy of the image.
    lanes_allowed = True

    def copies(self) -> bool:
        """Whether a copy of the image in lanes pays off: enough samples, and tasks for all threads."""
        desc = self.desc
        groups, rest = divmod(desc.channels, LANES)
        units, copied = desc.batch * groups, self.slots * desc.pixels * REALS
        output = desc.batch * desc.channels * desc.samples * desc.input_dtype.itemsize
        balanced = units % self.slots == 0 or units >= 4 * self.slots
        suits = desc.compute.bits == 32 and desc.mode != Mode.NEAREST and rest == 0 and balanced
        return self.lanes_allowed and suits and 2 * desc.samples >= desc.pixels and copied <= output

    def take_regions(self) -> list[Region]:
        regions = super().take_regions()
        self.lanes = self.copies()
        if self.lanes:
            self.parts = self.desc.channels // LANES
        # ``rows_to_lanes`` writes whole squares.
        copied = (self.desc.pixels + LANES) * LANES * self.lanes
        return [*regions, self.layout.take(copied, self.desc.compute.torch)]

    def compile(self) -> None:
        _compile(self.desc.compute, self.columns(None))

    def prepare(self, args: GridSampleArgs) -> Launch[GridSampleArgs]:
        desc, compute = self.desc, self.desc.compute
        columns = self.columns(None if self.lanes else args.input)
        _compile(compute, columns)
        like, steps = number(compute), _steps(desc.image_size, args.input.stride()[2:])
        own_steps = _own_steps(desc)
        tables = (
            _table(desc.output_size, args.grid.stride()[1:-1]),
            _table(desc.image_size, args.input.stride()[2:]),
            _table(desc.output_size, args.out.stride()[2:]),
        )

        def launch(
            stream: Stream, workspace: Workspace, args: GridSampleArgs, addresses: Sequence[int]
        ) -> None:
            base = first_address(workspace)
            grid = _operand(args.grid, -1, compute, tables[0])
            image = _operand(args.input, 1, compute, tables[1])
            out = _operand(args.out, 1, compute, tables[2])

            def work(first: int, last: int, slot: int) -> None:
                _sample(
                    first, last, self.parts, self.lanes, self.problem.extent, self.problem[1:], grid, image,
                    steps, own_steps, out, self.scratch(base, slot), like, columns,
                )  # fmt: skip

            self.run_tasks(work, desc.batch * self.parts)

        return launch


class GridSampleBackward(_SampleKernel[GridSampleBackwardDescriptor]):
    """``_differentiate``."""

    #: Maximum number of channels of a unit.
    most_channels = LANES

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums of one channel, or 0 if they are not needed."""
        desc = self.desc
        return (desc.pixels + 1) * 2 * (desc.compute.bits // 8) * desc.needs_dinput

    @property
    def output_bytes(self) -> int:
        desc = self.desc
        dinput = desc.batch * desc.channels * desc.pixels * desc.needs_dinput * desc.input_dtype.itemsize
        return dinput + desc.batch * desc.samples * desc.axes * desc.needs_dgrid * desc.grid_dtype.itemsize

    def amount(self) -> int:
        # Every pixel is stored, whether a sample touches it or not; that takes a quarter as long as a term.
        desc = self.desc
        return super().amount() + desc.batch * desc.channels * desc.pixels * desc.needs_dinput // 4

    def most_slots(self) -> int:
        """The sums of all threads have at most half more bytes than the outputs."""
        return 3 * self.output_bytes // (2 * self.sums_bytes) if self.desc.needs_dinput else 2**16

    def channels_of_unit(self) -> int:
        """Maximum number of channels such that all threads are busy, and the sums are not too large."""
        desc = self.desc
        for group in range(min(self.most_channels, desc.channels), 1, -1):
            units, fits = desc.batch * -(-desc.channels // group), self.slots * group * self.sums_bytes
            even = desc.channels % group == 0 and units % self.slots == 0
            if fits <= self.output_bytes and (even or units >= 4 * self.slots):
                return group
        return 1

    def take_regions(self) -> list[Region]:
        regions = super().take_regions()
        desc, take = self.desc, self.layout.take
        self.group = self.channels_of_unit()
        self.units = desc.batch * -(-desc.channels // self.group) * desc.needs_dinput
        self.split = self.units % self.slots if self.units < 4 * self.slots else 0
        self.levels = 1
        while CHUNK**self.levels < desc.channels:
            self.levels += 1
        totals = self.levels * desc.corners * RUN
        needed = desc.needs_dgrid and desc.mode != Mode.NEAREST
        return [
            *regions,
            take(self.group * self.sums_bytes // 8, torch.int64),
            take(self.group + 1, torch.int64),
            take(totals if needed else 0, desc.compute.torch),
        ]

    def compile(self) -> None:
        _compile_backward(self.desc.compute, self.columns(None))

    def prepare(self, args: GridSampleBackwardArgs) -> Launch[GridSampleBackwardArgs]:
        desc, compute = self.desc, self.desc.compute
        columns = self.columns(args.input)
        _compile_backward(compute, columns)
        like, accumulate = number(compute), args.accumulate
        own_steps = _own_steps(desc)
        steps = own_steps if args.input is None else _steps(desc.image_size, args.input.stride()[2:])
        tables = (
            _table(desc.output_size, args.grid.stride()[1:-1]),
            _table(desc.output_size, args.dout.stride()[2:]),
            _NO_TABLE if args.dinput is None else _table(desc.image_size, args.dinput.stride()[2:]),
            _NO_TABLE if args.dgrid is None else _table(desc.output_size, args.dgrid.stride()[1:-1]),
        )
        whole = self.units - self.split
        # If a unit has all channels, it computes both gradients with the same tables.
        joint = self.units > 0 and desc.needs_dgrid and self.group == desc.channels and steps == own_steps
        tasks = whole + desc.batch * self.parts * (desc.needs_dgrid and not joint)
        others = self.slots, self.slot_bytes
        sparse = 0 < 2 * desc.samples * desc.corners <= desc.pixels

        def launch(
            stream: Stream, workspace: Workspace, args: GridSampleBackwardArgs, addresses: Sequence[int]
        ) -> None:
            base = first_address(workspace)
            grid = _operand(args.grid, -1, compute, tables[0])
            image = _operand(args.input, 1, compute, _NO_TABLE)
            dout = _operand(args.dout, 1, compute, tables[1])
            dinput = _operand(args.dinput, 1, compute, tables[2])
            dgrid = _operand(args.dgrid, -1, compute, tables[3])

            def run(step: int, first: int, last: int, unit: int, slot: int) -> None:
                # The total is added up in the sums of the first slot. All else belongs to the thread.
                sums = self.scratch(base, 0 if step == _TOTAL else slot)[_RUNS:]
                scratch = (*self.scratch(base, slot)[:_RUNS], *sums)
                _differentiate(
                    step, first, last, unit, self.parts, self.group, self.problem.extent, self.problem[1:],
                    grid, image, steps, own_steps, dout, dinput, dgrid, joint, desc.fraction_bits,
                    self.levels, accumulate, sparse, others, scratch, like, columns,
                )  # fmt: skip

            self.run_tasks(lambda first, last, slot: run(_WHOLE, first, last, whole, slot), tasks)
            for unit in range(whole, self.units):
                self.run_split(run, unit, base)

        return launch

    def run_split(self, run: Callable[..., None], unit: int, base: int) -> None:
        """Run a unit on all threads: first the sums of a part of the samples each, then their total."""

        def part(first: int, last: int) -> None:
            for slot in range(first, last):
                begin, end = (self.desc.samples * k // self.slots for k in (slot, slot + 1))
                run(_PART, begin, end, unit, slot)

        def total(first: int, last: int) -> None:
            begin, end = (self.desc.pixels * k // self.slots for k in (first, last))
            run(_TOTAL, begin, end, unit, first)

        parallel(part, self.slots, self.work)
        parallel(total, self.slots, self.work)


class LeanGridSample(GridSample):
    """``GridSample`` on one thread."""

    lanes_allowed = False
    most_threads = 1


class LeanGridSampleBackward(GridSampleBackward):
    """``GridSampleBackward`` on one thread with one channel at a time."""

    most_threads = 1
    most_channels = 1


def _empty(compute: Float) -> _Problem:
    """A problem without samples, for compiling kernels."""
    desc = GridSampleDescriptor(
        shape=(0, 0, 1, 1), output_size=(0, 0), input_dtype=compute.torch, grid_dtype=compute.torch
    )
    return _Problem.of(desc)


@cache
def _compile(compute: Float, columns: tuple[int, ...]) -> None:
    problem, operand = _empty(compute), _operand(None, 0, compute, _NO_TABLE)
    compile_kernel(
        _sample, 0, 0, 1, False, problem.extent, problem[1:], operand, operand, _NO_STEPS, _NO_STEPS, operand,
        (0,) * 8, number(compute), columns,
    )  # fmt: skip


@cache
def _compile_backward(compute: Float, columns: tuple[int, ...]) -> None:
    problem, operand = _empty(compute), _operand(None, 0, compute, _NO_TABLE)
    compile_kernel(
        _differentiate, _WHOLE, 0, 0, 0, 1, 1, problem.extent, problem[1:], operand, operand, _NO_STEPS,
        _NO_STEPS, operand, operand, operand, False, 0, 1, False, False, (1, 0), (0,) * 10, number(compute),
        columns,
    )  # fmt: skip
