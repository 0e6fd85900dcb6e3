"""The tree sum on the CPU, with functions that load and store the elements of segments.

A job is one block of one segment, of several short segments that fill a block together, or of segments that
are side by side (adjacent in memory). The op's kernel computes the lanes of each job: segment by segment or,
for segments side by side, lane by lane with all segments in one run. This module reduces the lanes to block
sums and, after all jobs, adds the block sums. Each job runs on one thread, so the number of threads changes
no bit.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from holdfast.backends.cpu import (
    TeamKernel,
    address_of,
    copy,
    fence,
    jit,
    next_range,
    numbers_of,
    on_demand,
    outlined,
    pointer,
    scratch_of_next,
    team_kernel,
)
from holdfast.backends.private import TaskFunction, task_bytes, task_of
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import run_together, threads_together
from holdfast.core.dtypes import Float
from holdfast.core.segments import Segments
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.cpu import ITEM_SIZE, narrow, widen, zero
from holdfast.numerics.cpu_walk import number, walk_of
from holdfast.ops.tree_sum.blocks import BLOCK, LANES, blocks_of, lanes_of

#: Maximum segments per job when they are side by side, and the minimum to process them side by side.
COLUMNS, _MIN_COLUMNS = 1024, 16
#: Bytes of a scratch run (one block of the widest type), and the distance between runs.
_RUN_BYTES = BLOCK * 8
RUN = step_of(_RUN_BYTES)
#: The same for a run of one lane of segments side by side.
_LANE_BYTES = COLUMNS * 8
_LANE = step_of(_LANE_BYTES)

# Parts of the operand table, each with a number for every operand.
_ADDRESS, _KIND, _LAYOUT = 0, 1, 2
# Layout of an operand: strided, contiguous along the innermost loop, or contiguous over all segments.
_STRIDED, _INNER_CONTIGUOUS, _CONTIGUOUS = 0, 1, 2

# A task has these numbers, of which the first 7 differ between calls: the next unit and the number of threads
# that have started, which the threads share; the number of threads that have scratch memory, its address, the
# units of a range, and the addresses of the block sums of both trees. Then the scratch bytes of a thread, the
# number of units, the shape of the jobs, the loops over and within segments, the number of operands, the
# address of factor, floor and scalars, a flag, whether totals are added to the outputs, and the position of
# the output. A value of the compute type follows, then the operand table.
NUMBERS, _VARIABLES, SUMS = 23, 7, 5
_SHAPE, _OVER, _WITHIN, _OPERANDS, _REALS, FLAG, ACCUMULATE, _OUTPUT = 9, 14, 16, 18, 19, 20, 21, 22
#: The position of the scalars among the reals.
SCALARS = 2
#: Ranges of units per thread.
_RANGES = 4


class Jobs(NamedTuple):
    """The jobs of some segments. ``shape`` is (segments, length, blocks, segments per job, side by side).

    ``over`` and ``within`` are the loops over segments and over the elements of a segment: row 0 holds the
    sizes, row 1 + k the strides of operand k. There is a layout for each operand.
    """

    number: int
    shape: tuple[int, int, int, int, bool]
    over: np.ndarray[Any, Any]
    within: np.ndarray[Any, Any]
    layouts: tuple[int, ...]


@lru_cache(maxsize=1024)
def jobs_of(segments: Segments) -> Jobs:
    count, length = segments.count, segments.length
    outer, inner = segments.over, segments.within
    side = outer.sizes[-1]
    side_by_side = side >= _MIN_COLUMNS and outer.strides[0][-1] == 1 and inner.strides[0][-1] != 1
    # A scratch run must hold a job's elements and also its lanes, which are a power of two per segment.
    per_job = min(COLUMNS, side) if side_by_side else max(1, BLOCK // max(length, lanes_of(length)))
    groups = -(-side // per_job) * (count // side) if side_by_side else -(-count // per_job)
    layouts = [_STRIDED] * len(outer.strides)
    for operand, steps in enumerate(inner.strides):
        dense = len(outer.sizes) == 1 and len(inner.sizes) == 1 and outer.strides[operand][0] == length
        layouts[operand] = _STRIDED if steps[-1] != 1 else _CONTIGUOUS if dense else _INNER_CONTIGUOUS
    blocks = blocks_of(length)
    shape = count, length, blocks, per_job, side_by_side
    return Jobs(groups * blocks, shape, _loops(outer), _loops(inner), tuple(layouts))


def _loops(space: Space) -> np.ndarray[Any, Any]:
    return np.array([space.sizes, *space.strides], np.int64)


def workspace_sums(
    count: int, length: int, compute: Float, trees: int
) -> tuple[list[Region], WorkspaceLayout]:
    """Workspace regions for the block sums of all segments, one per tree."""
    layout = WorkspaceLayout()
    return [layout.take(count * blocks_of(length), compute.torch) for _ in range(trees)], layout


class TreeSum:
    """``first_level`` over all jobs, then the sums of its block sums, for operands of one layout.

    ``first_level`` is a ``team_kernel(NUMBERS)``, which gets ``scalars`` and ``flag``. It stores the block
    sums of each tree in ``sums``, regions of the workspace. ``kinds`` are those of the operands. ``totals``
    are the positions of the outputs among the operands, one per tree.
    """

    def __init__(
        self,
        first_level: TeamKernel,
        segments: Segments,
        kinds: Sequence[int],
        totals: Sequence[int],
        sums: Sequence[Region],
        compute: Float,
        *,
        factor: float,
        floor: float | None = None,
        scalars: Sequence[float] = (),
        flag: bool = False,
        accumulate: bool = False,
    ) -> None:
        jobs, like = jobs_of(segments), number(compute)
        reals = np.array([[factor, floor or 0.0, *scalars]], type(like))
        self._kept = jobs, reals  # in use
        self._sums, self._scratch = [region.offset for region in sums], scratch_for(len(kinds))
        count, length, blocks, *_ = jobs.shape

        def task(units: int, position: int, flag: bool) -> bytes:
            return task_bytes(
                *[0] * _VARIABLES, self._scratch.size, units, *jobs.shape, *walk_of(jobs.over),
                *walk_of(jobs.within), len(kinds), walk_of(reals)[0], flag, accumulate, position, 0,
                *[0] * len(kinds), *kinds, *jobs.layouts,
            )  # fmt: skip

        self._task = task_of(NUMBERS + 1 + 3 * len(kinds))
        self._operands = slice(NUMBERS + 1, NUMBERS + 1 + len(kinds))
        self._first = first_level.compiled(like), task(jobs.number, 0, flag), jobs.number, count * length
        adder, floored = add_block_sums.compiled(like), floor is not None
        self._totals = [(adder, task(count, at, floored), count, count * blocks) for at in totals]

    def run(self, workspace: int, addresses: Sequence[int]) -> None:
        """Sum operands at these addresses, on torch's number of threads."""
        places = [workspace + offset for offset in self._sums]
        self._call(*self._first, places[0], places[-1], addresses)
        for total, place in zip(self._totals, places, strict=True):
            self._call(*total, place, place, addresses)

    def _call(
        self, kernel: TaskFunction, constants: bytes, units: int, elements: int, sums: int, more_sums: int,
        addresses: Sequence[int],
    ) -> None:  # fmt: skip
        threads = threads_together(elements)
        share = units if threads == 1 else -(-units // (_RANGES * threads))
        task = self._task.from_buffer_copy(constants)
        task[:_VARIABLES] = (0, 0, threads, self._scratch.of_team(threads), max(share, 1), sums, more_sums)
        task[self._operands] = addresses
        run_together(kernel, task, elements)


#: Levels of the sum over lanes: single lanes, then one per halving.
_LEVELS = LANES.bit_length()
#: Scratch runs after the two of each operand: two for the lanes of each of two trees, one for results, and
#: two for repeated values. Lane runs follow, for segments side by side: per tree one for each level, and one
#: for the new lane.
RUNS_PER_TREE = 2
RESULTS = 2 * RUNS_PER_TREE
_REPEATED = RESULTS + 1
_RUNS = _REPEATED + 2
_LANE_RUNS = _LEVELS + 1


@cache
def scratch_for(operands: int) -> Scratch:
    """Scratch of a walk over ``operands`` operands."""
    return Scratch("tree_sum", Runs(2 * operands + _RUNS, _RUN_BYTES), Runs(2 * _LANE_RUNS, _LANE_BYTES))


# A kernel's ``walk`` is (shape, over, within, table, scratch address, number of operands). Loops are (sizes,
# strides of all operands, number of loops). Each operand has two scratch runs: one for stored elements, one
# for the compute type. The other runs follow.


@jit
def _loops_at(address, count):
    return pointer(address, np.int64), pointer(address + 8 * count, np.int64), count


@jit
def walk_in(numbers, scratch):
    """The walk of a task, for a thread with this scratch memory."""
    operands = numbers[_OPERANDS]
    table = address_of(numbers) + 8 * (NUMBERS + 1)
    shape = (
        numbers[_SHAPE], numbers[_SHAPE + 1], numbers[_SHAPE + 2], numbers[_SHAPE + 3],
        numbers[_SHAPE + 4] != 0,
    )  # fmt: skip
    over = _loops_at(numbers[_OVER], numbers[_OVER + 1])
    within = _loops_at(numbers[_WITHIN], numbers[_WITHIN + 1])
    rows = (
        pointer(table, np.int64), pointer(table + 8 * operands, np.int64),
        pointer(table + 16 * operands, np.int64),
    )  # fmt: skip
    return shape, over, within, rows, scratch, operands


@jit
def reals_in(numbers, like):
    """Factor, floor and scalars of a task."""
    return pointer(numbers[_REALS], like)


@jit
def thread_scratch(numbers):
    """The scratch memory of a thread that starts; 0 if it has none."""
    return scratch_of_next(numbers, numbers[2], numbers[3], numbers[7])


@jit
def next_units(numbers):
    """The next range of units; an empty one if none is left."""
    return next_range(numbers, numbers[4], numbers[8])


@jit
def scratch_run(walk, number):
    """Address of a scratch run after those of the operands."""
    return walk[4] + (2 * walk[5] + number) * RUN


@jit
def job_range(walk, job):
    """A job's first segment, number of segments, first element and number of elements per segment."""
    outlined()
    count, length, blocks, per_job, side_by_side = walk[0]
    over = walk[1]
    group = job // blocks
    begin = (job - group * blocks) * BLOCK
    first, rest = group * per_job, count - group * per_job
    if side_by_side:
        side = over[0][over[2] - 1]
        parts = (side + per_job - 1) // per_job
        row = group // parts
        part = (group - row * parts) * per_job
        first, rest = row * side + part, side - part
    return first, min(per_job, rest), begin, min(BLOCK, length - begin)


@jit
def loop_offset(loops, operand, index):
    """Offset of an operand's element number ``index`` in ``loops``."""
    outlined()
    sizes, strides, count = loops
    offset, at = np.int64(0), operand * count
    for d in range(count - 1, 0, -1):
        rest = index // sizes[d]
        offset += (index - rest * sizes[d]) * strides[at + d]
        index = rest
    return offset + index * strides[at]


@on_demand
def _copy_strided(memory, run, item, step, count, gather):
    """Copy elements that are ``step`` apart into a run (``gather``), or a run to them."""
    for i in range(count):
        target, source = run + i * item, memory + i * step * item
        if not gather:
            target, source = source, target
        if item == 2:
            pointer(target, np.uint16)[0] = pointer(source, np.uint16)[0]
        elif item == 4:
            pointer(target, np.uint32)[0] = pointer(source, np.uint32)[0]
        else:
            pointer(target, np.uint64)[0] = pointer(source, np.uint64)[0]


@jit
def _copy_elements(loops, operand, memory, item, first, count, run, gather):
    """Copy ``count`` elements of ``loops`` from number ``first`` into a run (``gather``), or back."""
    outlined()
    sizes, strides, loop_count = loops
    size, step = sizes[loop_count - 1], strides[(operand + 1) * loop_count - 1]
    done = 0
    while done < count:
        index = (first + done) % size
        element_at = memory + loop_offset(loops, operand, first + done) * item
        run_at, chunk = run + done * item, min(count - done, size - index)
        if step != 1:
            _copy_strided(element_at, run_at, item, step, chunk, gather)
        elif gather:
            copy(run_at, element_at, chunk * item)
        else:
            copy(element_at, run_at, chunk * item)
        done += chunk


@jit
def load_per_segment(walk, operand, first, count, like):
    """An operand with one value per segment: a run of ``count`` values from segment ``first``, widened."""
    outlined()
    _, over, _, table, scratch, _ = walk
    kind = table[_KIND][operand]
    item, raw = kind & ITEM_SIZE, scratch + 2 * operand * RUN
    _copy_elements(over, operand, table[_ADDRESS][operand], item, first, count, raw, True)
    if kind == item:
        return raw
    widen(raw, kind, 0, count, raw + RUN, like)
    return raw + RUN


@jit
def repeat_values(walk, number, shared, segments, count, like):
    """Repeat each segment's value for each of its ``count`` elements."""
    outlined()
    run = pointer(scratch_run(walk, _REPEATED + number), like)
    for k in range(segments):
        value = shared[k]
        for i in range(count):
            run[k * count + i] = value
    return run


@jit
def _direct(walk, operand, first, segments, begin, count):
    """Address of a job's elements if they are contiguous in memory; else 0."""
    outlined()
    _, over, within, table, _, _ = walk
    size, layout = within[0][within[2] - 1], table[_LAYOUT][operand]
    if layout == _STRIDED or (segments > 1 and layout != _CONTIGUOUS) or begin % max(size, 1) + count > size:
        return 0
    offset = loop_offset(over, operand, first) + loop_offset(within, operand, begin)
    return table[_ADDRESS][operand] + offset * (table[_KIND][operand] & ITEM_SIZE)


@jit
def load(walk, operand, first, segments, begin, count, like):
    """A job's elements, segment after segment: a run of the compute type."""
    outlined()
    _, over, within, table, scratch, _ = walk
    memory, kind = table[_ADDRESS][operand], table[_KIND][operand]
    item, raw = kind & ITEM_SIZE, _direct(walk, operand, first, segments, begin, count)
    if raw == 0:
        raw = scratch + 2 * operand * RUN
        for k in range(segments):
            start = memory + loop_offset(over, operand, first + k) * item
            _copy_elements(within, operand, start, item, begin, count, raw + k * count * item, True)
    if kind == item:
        return raw
    wide = scratch + (2 * operand + 1) * RUN
    widen(raw, kind, 0, segments * count, wide, like)
    return wide


@jit
def result_address(walk, operand, first, segments, begin, count, accumulate):
    """Where a kernel writes a job's results: contiguous memory of the compute type, or else scratch."""
    outlined()
    kind = walk[3][_KIND][operand]
    place = _direct(walk, operand, first, segments, begin, count)
    return scratch_run(walk, RESULTS) if accumulate or kind != kind & ITEM_SIZE or place == 0 else place


@jit
def store(walk, operand, first, segments, begin, count, run, accumulate, like):
    """Copy a job's results from ``run`` to the operand, or add them to it; nothing if they are there."""
    outlined()
    _, over, within, table, scratch, _ = walk
    memory, kind = table[_ADDRESS][operand], table[_KIND][operand]
    item, place = kind & ITEM_SIZE, _direct(walk, operand, first, segments, begin, count)
    if run == place:
        return
    if accumulate:
        fresh = pointer(run, like)
        old = pointer(load(walk, operand, first, segments, begin, count, like), like)
        for i in range(segments * count):
            fresh[i] = old[i] + fresh[i]
    raw = place if place != 0 else scratch + 2 * operand * RUN
    if kind == item:
        copy(raw, run, segments * count * item)
    else:
        narrow(run, segments * count, kind, raw, like)
    if place == 0:
        for k in range(segments):
            start = memory + loop_offset(over, operand, first + k) * item
            _copy_elements(within, operand, start, item, begin, count, raw + k * count * item, False)


@jit
def _row_place(walk, operand, first, element):
    """Address of element number ``element`` of segment ``first``."""
    outlined()
    _, over, within, table, _, _ = walk
    offset = loop_offset(over, operand, first) + loop_offset(within, operand, element)
    return table[_ADDRESS][operand] + offset * (table[_KIND][operand] & ITEM_SIZE)


@jit
def load_row(walk, operand, first, segments, element, like):
    """Element number ``element`` of each of ``segments`` segments side by side: a run of the compute type."""
    outlined()
    _, over, _, table, scratch, _ = walk
    kind, step = table[_KIND][operand], over[1][(operand + 1) * over[2] - 1]
    item, raw = kind & ITEM_SIZE, _row_place(walk, operand, first, element)
    if step != 1:
        run = scratch + 2 * operand * RUN
        _copy_strided(raw, run, item, step, segments, True)
        raw = run
    if kind == item:
        return raw
    wide = scratch + (2 * operand + 1) * RUN
    widen(raw, kind, 0, segments, wide, like)
    return wide


@jit
def row_result_address(walk, operand, first, element, accumulate):
    """As ``result_address``, for one element of each segment side by side, which are contiguous."""
    outlined()
    kind = walk[3][_KIND][operand]
    if accumulate or kind != kind & ITEM_SIZE:
        return scratch_run(walk, RESULTS)
    return _row_place(walk, operand, first, element)


@jit
def store_row(walk, operand, first, segments, element, run, accumulate, like):
    """As ``store``, for one element of each segment side by side."""
    outlined()
    kind, place = walk[3][_KIND][operand], _row_place(walk, operand, first, element)
    if run == place:
        return
    if accumulate:
        fresh = pointer(run, like)
        old = pointer(load_row(walk, operand, first, segments, element, like), like)
        for c in range(segments):
            fresh[c] = old[c] + fresh[c]
    if kind == kind & ITEM_SIZE:
        copy(place, run, segments * kind)
    else:
        narrow(run, segments, kind, place, like)


@jit
def lane_count(count):
    """Number of lanes that ``count`` elements use: a power of two."""
    outlined()
    width = 1
    while width < min(count, LANES):
        width *= 2
    return width


@jit
def zeroed(run, count, like):
    """Fill a run with +0."""
    lanes = pointer(run, like)
    for i in range(count):
        lanes[i] = zero(like)
    return lanes


@jit
def store_block_sums(walk, tree, width, first, segments, begin, sums, like):
    """Reduce a job's lanes, which lie segment after segment, and store the block sum of each segment."""
    outlined()
    source, target = scratch_run(walk, tree * RUNS_PER_TREE), scratch_run(walk, tree * RUNS_PER_TREE + 1)
    while width > 1:
        width //= 2
        wide, half = pointer(source, like), pointer(target, like)
        for i in range(width * segments):
            half[i] = wide[2 * i] + wide[2 * i + 1]
        source, target = target, source
    _store_block_sums(walk, source, first, segments, begin, sums, like)


@jit
def _store_block_sums(walk, run, first, segments, begin, sums, like):
    found, out, blocks = pointer(run, like), pointer(sums, like), walk[0][2]
    for k in range(segments):
        out[(first + k) * blocks + begin // BLOCK] = found[k]


@jit
def lane_run(walk, tree, level):
    """Run of the pending sums of 2**level lanes, one per segment; level ``_LEVELS`` is the new lane."""
    return scratch_run(walk, _RUNS) + (tree * _LANE_RUNS + level) * _LANE


@jit
def new_lane(walk, tree, segments, like):
    """A lane of +0, one element per segment side by side."""
    return zeroed(lane_run(walk, tree, _LEVELS), segments, like)


@jit
def add_lane(walk, tree, lane, segments, like):
    """Add the new lane, number ``lane``, to the pending sums: a carry in a binary counter of lanes."""
    outlined()
    fresh, level = pointer(lane_run(walk, tree, _LEVELS), like), 0
    while lane >> level & 1:
        before = pointer(lane_run(walk, tree, level), like)
        for c in range(segments):
            fresh[c] = before[c] + fresh[c]
        level += 1
    pending = pointer(lane_run(walk, tree, level), like)
    for c in range(segments):
        pending[c] = fresh[c]


@jit
def store_lane_sums(walk, tree, lanes, first, segments, begin, sums, like):
    """Add the pending sums, as if the missing lanes were zeros, and store the block sums."""
    outlined()
    total = new_lane(walk, tree, segments, like)
    for level in range(_LEVELS):
        if lanes >> level & 1:
            pending = pointer(lane_run(walk, tree, level), like)
            for c in range(segments):
                total[c] = pending[c] + total[c]
    _store_block_sums(walk, lane_run(walk, tree, _LEVELS), first, segments, begin, sums, like)


@jit
def _total(sums, start, count, walk, like):
    """Add ``count`` block sums by the further levels of the tree. ``sums`` is overwritten."""
    while count > 1:
        blocks = (count + BLOCK - 1) // BLOCK
        for block in range(blocks):
            begin = block * BLOCK
            chunk = min(BLOCK, count - begin)
            width = lane_count(chunk)
            lanes = zeroed(scratch_run(walk, 0), width, like)
            for i in range(chunk):
                lanes[i & (LANES - 1)] += sums[start + begin + i]
            while width > 1:
                width //= 2
                for i in range(width):
                    lanes[i] = lanes[2 * i] + lanes[2 * i + 1]
            sums[start + block] = lanes[0]
        count = blocks
    return sums[start]


@jit
def _add_block_sums(first, last, walk, operand, sums, factor, floor, floored, accumulate):
    """Add the block sums of segments ``first`` to ``last`` and store the totals."""
    _, over, _, table, scratch, _ = walk
    blocks, kind = walk[0][2], table[_KIND][operand]
    item, raw = kind & ITEM_SIZE, scratch + 2 * operand * RUN
    for begin in range(first, last, BLOCK):
        count = min(BLOCK, last - begin)
        totals, block_sums = pointer(scratch_run(walk, RESULTS), factor), pointer(sums, factor)
        for k in range(count):
            totals[k] = _total(block_sums, (begin + k) * blocks, blocks, walk, factor) * factor
        if floored:
            for k in range(count):
                totals[k] = floor if totals[k] < floor else totals[k]
        if accumulate:
            old = pointer(load_per_segment(walk, operand, begin, count, factor), factor)
            for k in range(count):
                totals[k] = old[k] + totals[k]
        if kind == item:
            copy(raw, scratch_run(walk, RESULTS), count * item)
        else:
            narrow(scratch_run(walk, RESULTS), count, kind, raw, factor)
        _copy_elements(over, operand, table[_ADDRESS][operand], item, begin, count, raw, False)


@team_kernel(NUMBERS)
def add_block_sums(task):
    """Take ranges of segments and add their block sums, until none is left. The flag: there is a floor."""
    numbers, reals = numbers_of(task), reals_in(numbers_of(task), task[0][-1])
    scratch = thread_scratch(numbers)
    if scratch == 0:
        return
    walk = walk_in(numbers, scratch)
    while True:
        first, last = next_units(numbers)
        if first == last:
            break
        _add_block_sums(
            first, last, walk, numbers[_OUTPUT], numbers[SUMS], reals[0], reals[1], numbers[FLAG] != 0,
            numbers[ACCUMULATE] != 0,
        )  # fmt: skip
    fence()
