"""grid_sample on the CPU.

Samples are processed in runs. The places and weights of a run (``cpu_places``) are computed once, then
used for every channel: to load values from the image, or to add terms to the integer sums of dinput. Two
linear taps along x are loaded, and added, together (``cpu_pairs``). If there are many float32 channels,
``LANES`` of them are processed at once (``cpu_lanes``).

dinput is computed in units: several channels of one image, each with a buffer of sums. A thread computes
whole units. If there are too few, a unit is split: each thread sums a part of the samples, and the sums of
all threads are added.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from holdfast.backends.cpu import jit, numbers_of, outlined, pointer, take, team_kernel
from holdfast.backends.threads import threads_together
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import contiguous_strides
from holdfast.core.workspace_layout import BOUND_BYTES, Region, WorkspaceLayout, first_address
from holdfast.numerics.cpu_walk import RUN, load_span, number, size_of, store_span, table_of
from holdfast.ops.grid_sample.cpu_bands import differentiate_bands, facts_of, run_bands
from holdfast.ops.grid_sample.cpu_channel_sums import CHUNK
from holdfast.ops.grid_sample.cpu_coordinates import (
    AXIS_ROWS,
    MODES,
    ROW_BYTES,
)
from holdfast.ops.grid_sample.cpu_gradients import first_channel, grid_of, part_of, store_dgrid, sum_terms
from holdfast.ops.grid_sample.cpu_integer_sums import clear_sums, pixel_of, place_of
from holdfast.ops.grid_sample.cpu_lanes import (
    LANES,
    REALS,
    add_weighted_in_lanes,
    lanes_to_rows,
    rows_to_lanes,
)
from holdfast.ops.grid_sample.cpu_pairs import PAIRED, add_weighted_pairs, in_pairs, prefetch_places
from holdfast.ops.grid_sample.cpu_places import add_weighted, gather_places, locate, pick
from holdfast.ops.grid_sample.cpu_task import (
    ACCUMULATE,
    BITS,
    DGRID,
    DINPUT,
    END,
    GRID,
    GROUP,
    IMAGE,
    JOINT,
    LEVELS,
    NEXT,
    NUMBERS,
    OUT,
    OWN_STEPS,
    PARTS,
    SHARE,
    SLOT_BYTES,
    SLOTS,
    SPARSE,
    STEP,
    STEPS,
    THREAD,
    UNIT,
    UNITS,
    Layout,
    Slots,
    Template,
    extent_of,
    memory_steps,
    problem_of,
    rows_of_sums,
    runs_of,
    steps_of,
    sums_of,
    tensor_of,
)
from holdfast.ops.grid_sample.cpu_units import (
    add_threads,
    clear_places,
    find_shifts,
    steps_of_sums,
    store_sums,
    store_zeros,
)
from holdfast.ops.grid_sample.plan import (
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    GridSampleDescriptor,
    Mode,
    SampleDescriptor,
    SampleKernel,
)

_NEAREST = MODES[Mode.NEAREST]
#: Ranges of tasks per thread.
_RANGES = 8
#: Rows of the image of a multiple of this many pixels are a power of two apart, or nearly, and the number of
#: places that separates their sums.
_COLLIDING, _UNUSED = 128, 8
#: Steps of ``_differentiate``.
_WHOLE, _PART, _TOTAL = 0, 1, 2

D = TypeVar("D", bound=SampleDescriptor)


@jit
def _sample_lanes(n, channel, extent, problem, grid, image, steps, out, copy_at, scratch, like, columns):
    """Forward of ``LANES`` channels of an image from ``channel``."""
    outlined()
    _, pixels, samples, corners = extent
    offsets_at, weights_at, rows_at, raw, old, values_at, row_at = scratch
    for begin in range(0, pixels, RUN):
        count = min(RUN, pixels - begin)
        for c in range(LANES):
            source, target = first_channel(image, n, channel + c), row_at + c * RUN * 4
            load_span(source, image[1], image[4], begin, begin + count, raw, target, like)
        rows_to_lanes(row_at, count, copy_at + begin * REALS)
    for begin in range(0, samples, RUN):
        count, tables = min(RUN, samples - begin), (offsets_at, weights_at)
        locate(grid_of(grid, n), problem, steps, begin, count, tables, rows_at, raw, like, columns)
        for corner in range(0, corners, len(columns)):
            offsets = offsets_at + corner // len(columns) * RUN * 8
            weights = weights_at + corner * RUN * size_of(like)
            add_weighted_in_lanes(copy_at, weights, offsets, count, corner == 0, values_at, like, columns)
        lanes_to_rows(values_at, count, row_at)
        for c in range(LANES):
            source, target = row_at + c * RUN * 4, first_channel(out, n, channel + c)
            store_span(source, target, out[1], out[4], begin, begin + count, False, raw, old, like)


@jit
def _sample_joint(begin, end, extent, problem, grid, image, steps, out, scratch, like, columns):
    """Forward of samples of several images, numbered through all images, which have one channel each."""
    outlined()
    _, _, samples, corners = extent
    offsets_at, weights_at, rows_at, raw, old, _, row_at = scratch
    size = size_of(like)
    for first in range(begin, end, RUN):
        count, tables = min(RUN, end - first), (offsets_at, weights_at)
        last = first + count
        locate(grid_of(grid, 0), problem, steps, first, count, tables, rows_at, raw, like, columns)
        for n in range(first // samples, (last - 1) // samples + 1):
            own, own_end = max(n * samples, first) - first, min((n + 1) * samples, last) - first
            for place in range(corners // 2):
                offsets = pointer(offsets_at + place * RUN * 8, np.int64)
                for i in range(own, own_end):
                    offsets[i] += n * image[2]
        prefetch_places(image[0], 0, 1, offsets_at + RUN * 8, count, size)
        for corner in range(0, corners, 4):
            own_offsets, weights = offsets_at + corner // 2 * RUN * 8, weights_at + corner * RUN * size
            add_weighted_pairs(image[0], 0, 1, own_offsets, weights, count, corner == 0, row_at, like)
        store_span(row_at, out[0], out[1], out[4], first, last, False, raw, old, like)


@jit
def _sample(
    first, last, parts, lanes, extent, problem, grid, image, steps, own_steps, out, copy_at, scratch, like,
    columns,
):  # fmt: skip
    """Forward of the tasks ``first`` to ``last``.

    An image has ``parts`` tasks, each with a part of its samples, or if ``lanes``, with ``LANES`` channels.

    ``extent`` is (channels, pixels, samples, corners). ``problem`` is (form, sizes, numbers) as in
    ``find_taps``. An operand is (address, kind, image stride, stride of the channels or of the grid's axes,
    walk over samples or pixels). ``steps`` are the strides of the image in ``find_offsets``, ``own_steps``
    those of a contiguous copy.
    """
    outlined()
    channels, _, samples, corners = extent
    offsets_at, weights_at, rows_at, raw, old, values_at, row_at = scratch
    size, pairs = size_of(like), in_pairs(image, like, columns)
    for task in range(first, last):
        n = task // parts
        if lanes:
            _sample_lanes(
                n, task % parts * LANES, extent, problem, grid, image, own_steps, out, copy_at, scratch,
                like, columns,
            )  # fmt: skip
            continue
        from_sample, to_sample = part_of(samples, task % parts, parts)
        for begin in range(from_sample, to_sample, RUN):
            count, tables = min(RUN, to_sample - begin), (offsets_at, weights_at)
            locate(grid_of(grid, n), problem, steps, begin, count, tables, rows_at, raw, like, columns)
            if pairs:  # the lower row; the upper one was often the lower row of samples before
                lower, step = offsets_at + RUN * 8, image[3] * size
                prefetch_places(first_channel(image, n, 0), step, channels, lower, count, size)
            channel, end = 0, begin + count
            while channel < channels:
                source, width = first_channel(image, n, channel), 1
                if pairs:
                    width = min(PAIRED, channels - channel)
                    for corner in range(0, corners, 4):
                        offsets, weights = tables[0] + corner // 2 * RUN * 8, tables[1] + corner * RUN * size
                        add_weighted_pairs(
                            source, image[3] * size, width, offsets, weights, count, corner == 0, row_at, like
                        )
                else:
                    for corner in range(0, corners, len(columns)):
                        offsets = offsets_at + corner // len(columns) * RUN * 8
                        weights = weights_at + corner * RUN * size
                        gather_places(source, image[1], offsets, count, values_at, raw, like, columns)
                        if problem[0][2] == _NEAREST:
                            pick(values_at, weights, count, row_at, like)
                        else:
                            add_weighted(values_at, weights, count, corner == 0, row_at, like, columns)
                for c in range(width):
                    row, target = row_at + c * RUN * size, first_channel(out, n, channel + c)
                    store_span(row, target, out[1], out[4], begin, end, False, raw, old, like)
                channel += width


@team_kernel(NUMBERS)
def sample(task):
    """``_sample``: take ranges of tasks until none is left."""
    numbers, like, columns = numbers_of(task), task[0][-2], task[0][-1]
    slot = take(numbers, THREAD, 1)
    if slot >= numbers[SLOTS]:
        return
    end, share = numbers[END], numbers[SHARE]
    while True:
        first = take(numbers, NEXT, share)
        if first >= end:
            break
        last = min(first + share, end)
        extent, problem, scratch = extent_of(numbers), problem_of(numbers, like), runs_of(numbers, slot)
        grid, image, out = tensor_of(numbers, GRID), tensor_of(numbers, IMAGE), tensor_of(numbers, OUT)
        if numbers[JOINT] != 0:
            samples = end // numbers[PARTS] * extent[2]  # of all images
            _sample_joint(
                part_of(samples, first, end)[0], part_of(samples, last, end)[0], extent, problem, grid,
                image, steps_of(numbers, STEPS), out, scratch, like, columns,
            )  # fmt: skip
            continue
        _sample(
            first, last, numbers[PARTS], numbers[GROUP] != 0, extent, problem, grid, image,
            steps_of(numbers, STEPS), steps_of(numbers, OWN_STEPS), out, sums_of(numbers, slot)[0], scratch,
            like, columns,
        )  # fmt: skip


@jit
def _differentiate(
    step, first, last, units, parts, group, extent, problem, grid, image, steps, own_steps, dout, dinput,
    dgrid, joint, bits, levels, accumulate, sparse, others, sums, scratch, like, columns,
):  # fmt: skip
    """One step of the backward. ``group`` is the number of channels of a unit, except the last of an image.

    WHOLE: tasks ``first`` to ``last``. The first ``units`` tasks are units of dinput. The others are dgrid of
    a part of the samples of an image, which has ``parts``.
    PART: the sums of unit ``units`` over samples ``first`` to ``last``.
    TOTAL: pixels ``first`` to ``last`` of unit ``units``, from the sums of all threads. ``others`` is (number
    of threads, bytes between their sums).

    The operands are as in ``_sample``. ``own_steps`` are the strides of a buffer of sums. ``sparse``: the
    samples touch few pixels, so only those have sums to clear and to convert. All sums are zeros before.
    """
    outlined()
    channels, pixels, samples, _ = extent
    rows = rows_of_sums(problem, own_steps)
    places = place_of(pixels, rows)
    sparse = sparse and step == _WHOLE
    groups = (channels + group - 1) // group
    sums_at, shifts_at, totals_at = sums
    shifts = pointer(shifts_at, np.int64)
    for task in range(first, last if step == _WHOLE else first + 1):
        if step == _WHOLE and task >= units:
            n, part = (task - units) // parts, (task - units) % parts
            begin, end = part_of(samples, part, parts)
            for at in range(begin, end, RUN):
                count = min(RUN, end - at)
                locate(
                    grid_of(grid, n), problem, steps, at, count, scratch[:2], scratch[2], scratch[3], like,
                    columns,
                )  # fmt: skip
                store_dgrid(
                    n, at, count, extent, problem, image, dout, dgrid, levels, accumulate, totals_at,
                    scratch, like, columns,
                )  # fmt: skip
            continue
        unit = task if step == _WHOLE else units
        n, channel = unit // groups, unit % groups * group
        width = min(group, channels - channel)
        if step != _TOTAL:
            begin, end = (0, samples) if step == _WHOLE else (first, last)
            finite = find_shifts(n, channel, width, samples, dout, bits, shifts_at, scratch, like)
            if not sparse:
                clear_sums(sums_at, width * places * (size_of(like) // 4))
            layout = (sums_at, *steps_of_sums(width, places, like))
            touched, touched_end = sum_terms(
                n, channel, width, begin, end, extent, problem, grid, image, steps, own_steps, dout, dgrid,
                joint, bits, levels, accumulate, sparse, shifts_at, finite, layout, totals_at, scratch, like,
                columns,
            )  # fmt: skip
            shifts[group] = finite
            if sparse:
                low, high = pixel_of(touched, rows), pixel_of(touched_end - 1, rows) + 1
                store_sums(
                    n, channel, width, low, high, places, rows, bits, shifts_at, finite, sums_at, dinput,
                    accumulate, scratch, like,
                )  # fmt: skip
                clear_places(width, touched, touched_end, places, sums_at, like)
                store_zeros(n, channel, width, 0, low, dinput, accumulate, scratch, like)
                store_zeros(n, channel, width, high, pixels, dinput, accumulate, scratch, like)
                continue
        begin, end = (0, pixels) if step == _WHOLE else (first, last)
        if step == _TOTAL:
            add_threads(
                place_of(begin, rows), place_of(end, rows), width, places, others, sums_at,
                shifts[group] == 1, like,
            )  # fmt: skip
        if step != _PART:
            store_sums(
                n, channel, width, begin, end, places, rows, bits, shifts_at, shifts[group] == 1, sums_at,
                dinput, accumulate, scratch, like,
            )  # fmt: skip


@team_kernel(NUMBERS)
def differentiate(task):
    """One step of ``_differentiate``.

    WHOLE: take ranges of tasks until none is left. PART and TOTAL: take parts of the samples or of the
    pixels, of which there is one per slot. A part uses the memory of the slot of its number.
    """
    numbers, like, columns = numbers_of(task), task[0][-2], task[0][-1]
    extent, step, slots, group = extent_of(numbers), numbers[STEP], numbers[SLOTS], numbers[GROUP]
    end, share, sparse = numbers[END], numbers[SHARE], numbers[SPARSE] != 0
    slot = take(numbers, THREAD, 1)
    if slot >= slots:
        return
    if step == _WHOLE and sparse:
        rows = rows_of_sums(problem_of(numbers, like), steps_of(numbers, OWN_STEPS))
        clear_sums(sums_of(numbers, slot)[0], group * place_of(extent[1], rows) * (size_of(like) // 4))
    while True:
        first = take(numbers, NEXT, share)
        if first >= end:
            break
        last, unit = min(first + share, end), numbers[UNITS]
        if step != _WHOLE:
            slot, unit = first, numbers[UNIT]
            first, last = part_of(extent[2] if step == _PART else extent[1], slot, slots)
        # The total is added up in the sums of the first slot. All else belongs to the thread.
        sums = sums_of(numbers, 0 if step == _TOTAL else slot)
        _differentiate(
            step, first, last, unit, numbers[PARTS], group, extent, problem_of(numbers, like),
            tensor_of(numbers, GRID), tensor_of(numbers, IMAGE), steps_of(numbers, STEPS),
            steps_of(numbers, OWN_STEPS), tensor_of(numbers, OUT), tensor_of(numbers, DINPUT),
            tensor_of(numbers, DGRID), numbers[JOINT] != 0, numbers[BITS], numbers[LEVELS],
            numbers[ACCUMULATE] != 0, sparse, (slots, numbers[SLOT_BYTES]), sums, runs_of(numbers, slot),
            like, columns,
        )  # fmt: skip


def _own_steps(desc: SampleDescriptor, unused: int = 0) -> tuple[int, int, int, bool]:
    """``memory_steps`` of a channel whose rows are followed by ``unused`` places."""
    *others, columns = desc.image_size
    return memory_steps(desc.image_size, contiguous_strides((*others, columns + unused)))


class _SampleKernel(SampleKernel[D]):
    """A kernel whose tasks run on several threads, each with its own scratch in the workspace."""

    #: Maximum number of threads.
    most_threads = 2**16

    def __init__(self, desc: D, device: torch.device) -> None:
        super().__init__(desc, device)
        self.made_for_threads = torch.get_num_threads()
        self.work = self.amount()
        self.slots = max(min(threads_together(self.work), self.most_threads, self.most_slots()), 1)
        self.parts = _parts(desc.batch, self.slots)
        self.layout = WorkspaceLayout()
        self.regions = [*self.take_runs(self.layout), *self.take_regions()]
        self.slot_bytes = self.layout.size
        self.layout.take_again(self.slots - 1)
        self.set_workspace(self.layout)

    def amount(self) -> int:
        """The amount of work, in elements; a term of a sum takes as long as two."""
        desc = self.desc
        return 2 * desc.batch * (desc.channels + desc.axes) * desc.samples * desc.corners

    def most_slots(self) -> int:
        """Maximum number of threads such that the workspace is not too large."""
        return 2**16

    def take_runs(self, layout: WorkspaceLayout) -> list[Region]:
        """Allocate scratch of one thread: tables of a run, axis rows, and runs."""
        desc, take, compute = self.desc, layout.take, self.desc.compute.torch
        entries = desc.corners * RUN
        return [
            take(entries, torch.int64),
            take(entries, compute),
            layout.take_rows(3 * AXIS_ROWS, ROW_BYTES),
            *(take(count, compute) for count in (2 * RUN, RUN)),
            take(4 * RUN, torch.int64),
            take(LANES * RUN, compute),
        ]

    def take_regions(self) -> list[Region]:
        """Allocate the other scratch of one thread."""
        raise NotImplementedError

    @property
    def memory(self) -> Slots:
        return Slots(self.slots, self.slot_bytes, [region.offset for region in self.regions])

    def share(self, tasks: int) -> int:
        """How many tasks a thread takes at once."""
        return max(tasks // (_RANGES * self.slots), 1)

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

    def joint(self, args: GridSampleArgs) -> bool:
        """Whether to number the samples through all images: they are few in each, and side by side."""
        desc, pairs = self.desc, len(self.columns(args.input)) == 2
        few = desc.channels == 1 and 0 < desc.samples < RUN and not self.lanes
        side_by_side = args.grid.is_contiguous() and args.out.is_contiguous()
        return few and side_by_side and pairs and desc.input_dtype == desc.compute.torch

    def take_regions(self) -> list[Region]:
        self.lanes = self.copies()
        if self.lanes:
            self.parts = self.desc.channels // LANES
        # ``rows_to_lanes`` writes whole squares.
        copied = (self.desc.pixels + LANES) * LANES * self.lanes
        return [self.layout.take(copied, self.desc.compute.torch)]

    def compile(self) -> None:
        sample.compiled(number(self.desc.compute), self.columns(None))

    def prepare(self, args: GridSampleArgs) -> Launch[GridSampleArgs]:
        desc, compute, joint = self.desc, self.desc.compute, self.joint(args)
        grid, image, out = (
            Layout.of(args.grid, -1, compute, desc.output_size),
            Layout.of(args.input, 1, compute, desc.image_size),
            Layout.of(args.out, 1, compute, desc.output_size),
        )
        if joint:  # loops over the samples of all images: a single sample of an image has no stride
            samples = desc.batch * desc.samples
            grid = grid._replace(table=table_of((samples,), (desc.axes,)))
            out = out._replace(table=table_of((samples,), (1,)))
        template = Template(
            sample, desc, (grid, image, out),
            (memory_steps(desc.image_size, args.input.stride()[2:]), _own_steps(desc)), self.memory,
            (self.parts, self.lanes, 0, joint), self.columns(None if self.lanes else args.input), self.work,
        )  # fmt: skip
        tasks = desc.batch * self.parts
        share = self.share(tasks)

        def run(stream: int, workspace: int, out: int, image: int, grid: int) -> None:
            """Sample tensors at these addresses, in a workspace at an aligned address."""
            template.run(template.task(workspace, grid, image, out), tasks, share)

        def launch(
            stream: Stream, workspace: Workspace, args: GridSampleArgs, addresses: Sequence[int]
        ) -> None:
            run(0, first_address(workspace), *addresses)

        if self.workspace_size <= BOUND_BYTES:
            launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch


class GridSampleBackward(_SampleKernel[GridSampleBackwardDescriptor]):
    """``_differentiate``."""

    #: Maximum number of channels of a unit.
    most_channels = LANES
    #: Maximum number of channels that are differentiated by bands.
    most_channels_of_bands = LANES - 1

    def __init__(self, desc: GridSampleBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.threads = min(threads_together(self.work), self.most_threads)
        rows, row_bytes = desc.image_size[0], desc.channels * self.sums_bytes // max(desc.image_size[0], 1)
        #: Maximum rows of all bands together. Their sums have at most 1.4 times the bytes of the outputs.
        self.room = min(rows + rows // 4 + 2 * self.threads, 7 * self.output_bytes // (5 * max(row_bytes, 1)))
        suits = desc.batch == 1 and desc.needs_dinput and desc.needs_dgrid and self.threads > 1
        few = 0 < desc.channels <= self.most_channels_of_bands
        self.banded = suits and few and self.room >= rows + rows // 8
        if self.banded:
            layout = WorkspaceLayout()
            facts = layout.take(facts_of(desc.channels), torch.int64)
            shifts, totals = layout.take(desc.channels, torch.int64), self.take_totals(layout)
            regions = [*self.take_runs(layout), facts, shifts, totals]
            self.band_slots = Slots(self.threads, layout.size, [region.offset for region in regions])
            layout.take_again(self.threads - 1)
            self.bands = layout.take(-(-self.room * row_bytes // 8), torch.int64)
            self.set_workspace(self.layout, layout)

    @property
    def unused(self) -> int:
        """Unused places after the sums of each row of the image; see ``cpu_integer_sums``."""
        return _UNUSED if self.desc.image_size[-1] % _COLLIDING == 0 else 0

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums of one channel, or 0 if they are not needed."""
        desc = self.desc
        places = desc.pixels + desc.pixels // max(desc.image_size[-1], 1) * self.unused
        return (places + 1) * 2 * (desc.compute.bits // 8) * desc.needs_dinput

    @property
    def output_bytes(self) -> int:
        desc = self.desc
        dinput = desc.batch * desc.channels * desc.pixels * desc.needs_dinput * desc.input_dtype.itemsize
        return dinput + desc.batch * desc.samples * desc.axes * desc.needs_dgrid * desc.grid_dtype.itemsize

    def amount(self) -> int:
        # Every pixel is stored, whether a sample touches it or not; that takes a quarter as long as a term.
        desc = self.desc
        return super().amount() + desc.batch * desc.channels * desc.pixels * desc.needs_dinput // 2

    def most_slots(self) -> int:
        """The sums of all threads have at most half more bytes than the outputs."""
        return 3 * self.output_bytes // (2 * self.sums_bytes) if self.desc.needs_dinput else 2**16

    def channels_of_unit(self) -> int:
        """Maximum number of channels such that all threads are busy.

        The sums of all threads have at most 1.4 times the bytes of the outputs.
        """
        desc = self.desc
        for group in range(min(self.most_channels, desc.channels), 1, -1):
            units, fits = desc.batch * -(-desc.channels // group), self.slots * group * self.sums_bytes
            even = desc.channels % group == 0 and units % self.slots == 0
            if 5 * fits <= 7 * self.output_bytes and (even or units >= 4 * self.slots):
                return group
        return 1

    def take_regions(self) -> list[Region]:
        desc, take = self.desc, self.layout.take
        self.group = self.channels_of_unit()
        self.units = desc.batch * -(-desc.channels // self.group) * desc.needs_dinput
        self.split = self.units % self.slots if self.units < 4 * self.slots else 0
        self.levels = 1
        while CHUNK**self.levels < desc.channels:
            self.levels += 1
        return [
            take(self.group * self.sums_bytes // 8, torch.int64),
            take(self.group + 1, torch.int64),
            self.take_totals(self.layout),
        ]

    def take_totals(self, layout: WorkspaceLayout) -> Region:
        """Allocate the sums over channels of dgrid."""
        needed = self.desc.needs_dgrid and self.desc.mode != Mode.NEAREST
        return layout.take(self.levels * self.desc.corners * RUN * needed, self.desc.compute.torch)

    def compile(self) -> None:
        differentiate.compiled(number(self.desc.compute), self.columns(None))

    def prepare(self, args: GridSampleBackwardArgs) -> Launch[GridSampleBackwardArgs]:
        desc, compute, own_steps = self.desc, self.desc.compute, _own_steps(self.desc, self.unused)
        steps = own_steps
        if args.input is not None:
            steps = memory_steps(desc.image_size, args.input.stride()[2:])
        layouts = (
            Layout.of(args.grid, -1, compute, desc.output_size),
            Layout.of(args.input, 1, compute, desc.image_size),
            Layout.of(args.dout, 1, compute, desc.output_size),
            Layout.of(args.dinput, 1, compute, desc.image_size),
            Layout.of(args.dgrid, -1, compute, desc.output_size),
        )
        whole = self.units - self.split
        # If a unit has all channels, it computes both gradients with the same weights.
        joint = self.units > 0 and desc.needs_dgrid and self.group == desc.channels
        tasks = whole + desc.batch * self.parts * (desc.needs_dgrid and not joint)
        sparse = whole > 0 and 0 < 2 * desc.samples * desc.corners <= desc.pixels
        rest = (
            self.parts, self.group, whole, joint, desc.fraction_bits, self.levels, args.accumulate, sparse,
        )  # fmt: skip
        template = Template(
            differentiate, desc, layouts, (steps, own_steps), self.memory, rest, self.columns(args.input),
            self.work,
        )  # fmt: skip
        share, bands = self.share(tasks), None
        if self.banded:
            of_bands = (
                1, desc.channels, 1, True, desc.fraction_bits, self.levels, args.accumulate, False,
                self.bands.offset, self.room, True,
            )  # fmt: skip
            bands = Template(
                differentiate_bands, desc, layouts, (steps, own_steps), self.band_slots, of_bands,
                self.columns(args.input), self.work,
            )  # fmt: skip

        def run(
            stream: int, workspace: int, dinput: int, dgrid: int, dout: int, image: int, grid: int
        ) -> None:
            """Differentiate tensors at these addresses, in a workspace at an aligned address."""
            addresses = (grid, image, dout, dinput, dgrid)
            if bands is not None and run_bands(bands, bands.task(workspace, *addresses), self.threads):
                return
            task = template.task(workspace, *addresses)
            if tasks:
                template.run(task, tasks, share, _WHOLE)
            for unit in range(whole, self.units):  # on all threads: the sums of a part each, then their total
                template.run(task, self.slots, 1, _PART, unit)
                template.run(task, self.slots, 1, _TOTAL, unit)

        def launch(
            stream: Stream, workspace: Workspace, args: GridSampleBackwardArgs, addresses: Sequence[int]
        ) -> None:
            run(0, first_address(workspace), *addresses)

        if self.workspace_size <= BOUND_BYTES:
            launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch


class LeanGridSample(GridSample):
    """``GridSample`` on one thread."""

    lanes_allowed = False
    most_threads = 1


class LeanGridSampleBackward(GridSampleBackward):
    """``GridSampleBackward`` on one thread with one channel at a time."""

    most_threads = 1
    most_channels = 1
    most_channels_of_bands = 0
