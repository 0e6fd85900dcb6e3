"""The tree sum on the CPU, and how a kernel comes by the elements of its segments.

A job is one block of some segments: of a single one, of as many short ones as fill a block, or of some that
lie side by side in memory. A kernel makes the lanes of each job: all lanes of one segment after another or,
where the segments are side by side, one lane of all of them after another. Here lanes are halved and, when
all jobs are done, the sums of blocks are added up. Threads share out whole jobs, so that their number changes
no bit.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, copy, jit, kernel, on_demand, outlined, pointer
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.segments import Segments
from holdfast.core.stream import Workspace
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import Region, WorkspaceLayout, first_address
from holdfast.numerics.cpu import ITEM_SIZE, narrow, widen, zero
from holdfast.ops.tree_sum.blocks import BLOCK, LANES, blocks_of, lanes_of

#: The most segments of a job where they lie side by side, and the fewest for which it is worth it.
COLUMNS, _FEW_COLUMNS = 1024, 16
#: Bytes of a scratch run, and from one to the next: room for a block of the widest type.
_RUN_BYTES = BLOCK * 8
RUN = step_of(_RUN_BYTES)
#: The same of a run for one lane of segments that are side by side.
_LANE_BYTES = COLUMNS * 8
_LANE = step_of(_LANE_BYTES)

# The columns of a table of operands.
_ADDRESS, _KIND, _LAYOUT = 0, 1, 2
# How a tensor's elements lie: apart, in runs (those of the innermost loop), or in a row throughout.
_APART, _IN_RUNS, _THROUGHOUT = 0, 1, 2


class Jobs(NamedTuple):
    """How segments are cut. ``shape`` is (segments, length, blocks, segments of a job, whether side by side).

    ``over`` and ``within`` are the loops over segments and over the elements of one: their sizes, then the
    strides of each operand. ``table`` has a row for each operand.
    """

    number: int
    shape: tuple[int, int, int, int, bool]
    over: np.ndarray[Any, Any]
    within: np.ndarray[Any, Any]
    table: np.ndarray[Any, Any]


@lru_cache(maxsize=1024)
def jobs_of(segments: Segments) -> Jobs:
    """The jobs of ``segments``."""
    count, length = segments.count, segments.length
    outer, inner = segments.over, segments.within
    side = outer.sizes[-1]
    side_by_side = side >= _FEW_COLUMNS and outer.strides[0][-1] == 1 and inner.strides[0][-1] != 1
    # A job's elements fit in a scratch run, and so do its lanes, which can be more: a power of two a segment.
    taken = min(COLUMNS, side) if side_by_side else max(1, BLOCK // max(length, lanes_of(length)))
    groups = -(-side // taken) * (count // side) if side_by_side else -(-count // taken)
    table = np.zeros((len(outer.strides), 3), np.int64)
    for operand, steps in enumerate(inner.strides):
        dense = len(outer.sizes) == 1 and len(inner.sizes) == 1 and outer.strides[operand][0] == length
        table[operand, _LAYOUT] = _APART if steps[-1] != 1 else _THROUGHOUT if dense else _IN_RUNS
    blocks = blocks_of(length)
    shape = count, length, blocks, taken, side_by_side
    return Jobs(groups * blocks, shape, _loops(outer), _loops(inner), table)


def _loops(space: Space) -> np.ndarray[Any, Any]:
    return np.array([space.sizes, *space.strides], np.int64)


def sums_of(count: int, length: int, compute: Float, trees: int) -> tuple[list[Region], WorkspaceLayout]:
    """Where the sums of the blocks of all segments are, for each tree; and the workspace layout."""
    layout = WorkspaceLayout()
    return [layout.take(count * blocks_of(length), compute.torch) for _ in range(trees)], layout


def launch(
    first_level: Callable[[int, int, Any, tuple[int, ...]], None],
    segments: Segments,
    operands: Sequence[torch.Tensor],
    kinds: Sequence[int],
    totals: Sequence[int],
    sums: Sequence[Region],
    compute: Float,
    workspace: Workspace,
    *,
    factor: float,
    floor: float | None = None,
    accumulate: bool = False,
) -> None:
    """Run a first level over all jobs, and make totals of the sums that it leaves.

    ``first_level`` is given the first and last job, the walk over ``operands``, and where the sums of each
    tree go, which is in ``sums``. ``totals`` are the positions of the operands that take the totals of each.
    """
    jobs = jobs_of(segments)
    count, length, blocks, *_ = jobs.shape
    table = jobs.table.copy()
    table[:, _ADDRESS] = [operand.data_ptr() for operand in operands]
    table[:, _KIND] = kinds
    base = first_address(workspace)
    places = tuple(base + region.offset for region in sums)
    walk, scratch = (jobs.shape, jobs.over, jobs.within, table), scratch_for(len(operands))

    def level(first: int, last: int) -> None:
        first_level(first, last, (*walk, scratch.of_thread()), places)

    number = np.float64 if compute.bits == 64 else np.float32
    numbers = number(factor), number(floor or 0.0)

    def total(first: int, last: int) -> None:
        for operand, sums_of_tree in zip(totals, places, strict=True):
            with_scratch = (*walk, scratch.of_thread())
            add_up(first, last, with_scratch, operand, sums_of_tree, *numbers, floor is not None, accumulate)

    parallel(level, jobs.number, count * length)
    parallel(total, count, count * blocks)


def no_jobs() -> Any:
    """A walk without jobs, to compile a kernel with."""
    none = np.zeros((1, 1), np.int64)
    return (0, 0, 1, 1, False), none, none, np.zeros((1, 3), np.int64), 0


@cache
def compile_for(compute: Float) -> None:
    """Compile what adds up the sums of blocks."""
    number = np.float64 if compute.bits == 64 else np.float32
    compile_kernel(add_up, 0, 0, no_jobs(), 0, 0, number(0), number(0), False, False)


#: How often lanes are halved, and the sums of one lane itself.
_LEVELS = LANES.bit_length()
#: Scratch runs beside the two of each operand: two for the lanes of each of two trees, one for results, and
#: two for what is spread. After these, where segments are side by side, each tree has a run of one lane for
#: each level, and one for a new lane.
TREE = 2
RESULTS = 2 * TREE
_SPREAD = RESULTS + 1
_SPARE = _SPREAD + 2
_LANE_RUNS = _LEVELS + 1


@cache
def scratch_for(operands: int) -> Scratch:
    """The scratch of a walk over so many operands."""
    return Scratch("tree_sum", Runs(2 * operands + _SPARE, _RUN_BYTES), Runs(2 * _LANE_RUNS, _LANE_BYTES))


# A kernel's ``walk`` is (shape, over, within, table, address of the scratch). Each operand has two runs of
# the scratch, one for its elements as they are stored and one for the compute type; the spare ones come after
# those.


@jit
def spare(walk, number):
    """The address of one of the spare scratch runs."""
    return walk[4] + (2 * len(walk[3]) + number) * RUN


@jit
def place_of(walk, job):
    """A job's first segment and how many there are, its block's first element and how many there are."""
    outlined()
    count, length, blocks, taken, side_by_side = walk[0]
    over = walk[1]
    group = job // blocks
    begin = (job - group * blocks) * BLOCK
    first, rest = group * taken, count - group * taken
    if side_by_side:
        side = over[0, over.shape[1] - 1]
        parts = (side + taken - 1) // taken
        row = group // parts
        part = (group - row * parts) * taken
        first, rest = row * side + part, side - part
    return first, min(taken, rest), begin, min(BLOCK, length - begin)


@jit
def loop_offset(loops, operand, index):
    """The offset of an operand's element in some loops, by the number of the element."""
    outlined()
    offset = 0
    for d in range(loops.shape[1] - 1, 0, -1):
        rest = index // loops[0, d]
        offset += (index - rest * loops[0, d]) * loops[operand + 1, d]
        index = rest
    return offset + index * loops[operand + 1, 0]


@on_demand
def _move(far, near, item, step, count, gather):
    """Carry elements that are ``step`` apart to or from a run."""
    for i in range(count):
        target, source = near + i * item, far + i * step * item
        if not gather:
            target, source = source, target
        if item == 2:
            pointer(target, np.uint16)[0] = pointer(source, np.uint16)[0]
        elif item == 4:
            pointer(target, np.uint32)[0] = pointer(source, np.uint32)[0]
        else:
            pointer(target, np.uint64)[0] = pointer(source, np.uint64)[0]


@jit
def _carry(loops, operand, memory, item, first, count, run, gather):
    """Carry elements from number ``first`` of some loops on into a run (``gather``), or out of one."""
    outlined()
    inner = loops.shape[1] - 1
    size, step = loops[0, inner], loops[operand + 1, inner]
    done = 0
    while done < count:
        index = (first + done) % size
        far = memory + loop_offset(loops, operand, first + done) * item
        near, here = run + done * item, min(count - done, size - index)
        if step != 1:
            _move(far, near, item, step, here, gather)
        elif gather:
            copy(near, far, here * item)
        else:
            copy(far, near, here * item)
        done += here


@jit
def load_shared(walk, operand, first, count, like):
    """What segments from ``first`` on have of an operand, as a run of the compute type."""
    outlined()
    _, over, _, table, scratch = walk
    kind = table[operand, _KIND]
    item, raw = kind & ITEM_SIZE, scratch + 2 * operand * RUN
    _carry(over, operand, table[operand, _ADDRESS], item, first, count, raw, True)
    if kind == item:
        return raw
    widen(raw, kind, 0, count, raw + RUN, like)
    return raw + RUN


@jit
def spread(walk, number, shared, segments, count, like):
    """What segments have one of each, once for each of their ``count`` elements."""
    outlined()
    run = pointer(spare(walk, _SPREAD + number), like)
    for k in range(segments):
        value = shared[k]
        for i in range(count):
            run[k * count + i] = value
    return run


@jit
def _direct(walk, operand, first, segments, begin, count):
    """The address of the elements of a job, if they follow each other in memory; else 0."""
    outlined()
    _, over, within, table, _ = walk
    inner = within.shape[1] - 1
    size, layout = within[0, inner], table[operand, _LAYOUT]
    if layout == _APART or (segments > 1 and layout != _THROUGHOUT) or begin % max(size, 1) + count > size:
        return 0
    offset = loop_offset(over, operand, first) + loop_offset(within, operand, begin)
    return table[operand, _ADDRESS] + offset * (table[operand, _KIND] & ITEM_SIZE)


@jit
def load(walk, operand, first, segments, begin, count, like):
    """The elements of a job, segment after segment, as a run of the compute type."""
    outlined()
    _, over, within, table, scratch = walk
    memory, kind = table[operand, _ADDRESS], table[operand, _KIND]
    item, raw = kind & ITEM_SIZE, _direct(walk, operand, first, segments, begin, count)
    if raw == 0:
        raw = scratch + 2 * operand * RUN
        for k in range(segments):
            start = memory + loop_offset(over, operand, first + k) * item
            _carry(within, operand, start, item, begin, count, raw + k * count * item, True)
    if kind == item:
        return raw
    wide = scratch + (2 * operand + 1) * RUN
    widen(raw, kind, 0, segments * count, wide, like)
    return wide


@jit
def results(walk, operand, first, segments, begin, count, accumulate):
    """Where a job's results for an operand are to be put: where they belong, if that is a run of the type."""
    outlined()
    kind = walk[3][operand, _KIND]
    place = _direct(walk, operand, first, segments, begin, count)
    return spare(walk, RESULTS) if accumulate or kind != kind & ITEM_SIZE or place == 0 else place


@jit
def store(walk, operand, first, segments, begin, count, run, accumulate, like):
    """Carry a job's results from where they were put to where they belong, or add them to what is there."""
    outlined()
    _, over, within, table, scratch = walk
    memory, kind = table[operand, _ADDRESS], table[operand, _KIND]
    item, place = kind & ITEM_SIZE, _direct(walk, operand, first, segments, begin, count)
    if run == place:
        return
    if accumulate:
        fresh, old = (
            pointer(run, like),
            pointer(load(walk, operand, first, segments, begin, count, like), like),
        )
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
            _carry(within, operand, start, item, begin, count, raw + k * count * item, False)


@jit
def _row_place(walk, operand, first, element):
    """Where one element of each of some segments begins."""
    outlined()
    _, over, within, table, _ = walk
    offset = loop_offset(over, operand, first) + loop_offset(within, operand, element)
    return table[operand, _ADDRESS] + offset * (table[operand, _KIND] & ITEM_SIZE)


@jit
def load_row(walk, operand, first, segments, element, like):
    """One element of each of some segments that are side by side, as a run of the compute type."""
    outlined()
    _, over, _, table, scratch = walk
    kind, step = table[operand, _KIND], over[operand + 1, over.shape[1] - 1]
    item, raw = kind & ITEM_SIZE, _row_place(walk, operand, first, element)
    if step != 1:
        near = scratch + 2 * operand * RUN
        _move(raw, near, item, step, segments, True)
        raw = near
    if kind == item:
        return raw
    wide = scratch + (2 * operand + 1) * RUN
    widen(raw, kind, 0, segments, wide, like)
    return wide


@jit
def row_results(walk, operand, first, element, accumulate):
    """Where one result of each of some segments is to be put; they follow each other where they belong."""
    outlined()
    kind = walk[3][operand, _KIND]
    if accumulate or kind != kind & ITEM_SIZE:
        return spare(walk, RESULTS)
    return _row_place(walk, operand, first, element)


@jit
def store_row(walk, operand, first, segments, element, run, accumulate, like):
    """Carry such results from where they were put to where they belong, or add them to what is there."""
    outlined()
    kind, place = walk[3][operand, _KIND], _row_place(walk, operand, first, element)
    if run == place:
        return
    if accumulate:
        fresh, old = (
            pointer(run, like),
            pointer(load_row(walk, operand, first, segments, element, like), like),
        )
        for c in range(segments):
            fresh[c] = old[c] + fresh[c]
    if kind == kind & ITEM_SIZE:
        copy(place, run, segments * kind)
    else:
        narrow(run, segments, kind, place, like)


@jit
def width_of(count):
    """The lanes that are needed for ``count`` elements: a power of two."""
    outlined()
    width = 1
    while width < min(count, LANES):
        width *= 2
    return width


@jit
def cleared(run, count, like):
    """A run of +0."""
    lanes = pointer(run, like)
    for i in range(count):
        lanes[i] = zero(like)
    return lanes


@jit
def put_sums(walk, tree, width, first, segments, begin, sums, like):
    """Halve the lanes of a job, segment after segment, and put the sums where those of its block go."""
    outlined()
    here, there = spare(walk, tree * TREE), spare(walk, tree * TREE + 1)
    while width > 1:
        width //= 2
        wide, half = pointer(here, like), pointer(there, like)
        for i in range(width * segments):
            half[i] = wide[2 * i] + wide[2 * i + 1]
        here, there = there, here
    _put(walk, here, first, segments, begin, sums, like)


@jit
def _put(walk, run, first, segments, begin, sums, like):
    found, out, blocks = pointer(run, like), pointer(sums, like), walk[0][2]
    for k in range(segments):
        out[(first + k) * blocks + begin // BLOCK] = found[k]


@jit
def lane_run(walk, tree, level):
    """Where the sums of 2**level lanes wait, one for each segment; after the last level, a new lane."""
    return spare(walk, _SPARE) + (tree * _LANE_RUNS + level) * _LANE


@jit
def new_lane(walk, tree, segments, like):
    """A lane of segments that are side by side, of +0."""
    return cleared(lane_run(walk, tree, _LEVELS), segments, like)


@jit
def halve_lane(walk, tree, lane, segments, like):
    """Add the new lane, which has number ``lane``, to its neighbour if that waits for it, and so on."""
    outlined()
    fresh, level = pointer(lane_run(walk, tree, _LEVELS), like), 0
    while lane >> level & 1:
        before = pointer(lane_run(walk, tree, level), like)
        for c in range(segments):
            fresh[c] = before[c] + fresh[c]
        level += 1
    waiting = pointer(lane_run(walk, tree, level), like)
    for c in range(segments):
        waiting[c] = fresh[c]


@jit
def put_lanes(walk, tree, lanes, first, segments, begin, sums, like):
    """Add what waits for lanes that do not exist, and put the sums where those of the block go."""
    outlined()
    total = new_lane(walk, tree, segments, like)
    for level in range(_LEVELS):
        if lanes >> level & 1:
            waiting = pointer(lane_run(walk, tree, level), like)
            for c in range(segments):
                total[c] = waiting[c] + total[c]
    _put(walk, lane_run(walk, tree, _LEVELS), first, segments, begin, sums, like)


@jit
def _total(sums, start, count, walk, like):
    """The sum of ``count`` sums by the further levels of the tree. Their memory is made use of on the way."""
    while count > 1:
        blocks = (count + BLOCK - 1) // BLOCK
        for block in range(blocks):
            begin = block * BLOCK
            here = min(BLOCK, count - begin)
            width = width_of(here)
            lanes = cleared(spare(walk, 0), width, like)
            for i in range(here):
                lanes[i & (LANES - 1)] += sums[start + begin + i]
            while width > 1:
                width //= 2
                for i in range(width):
                    lanes[i] = lanes[2 * i] + lanes[2 * i + 1]
            sums[start + block] = lanes[0]
        count = blocks
    return sums[start]


@kernel
def add_up(first, last, walk, operand, sums, factor, floor, floored, accumulate):
    """Make the totals of segments ``first`` to ``last`` of the sums of their blocks."""
    _, over, _, table, scratch = walk
    blocks, kind = walk[0][2], table[operand, _KIND]
    item, raw = kind & ITEM_SIZE, scratch + 2 * operand * RUN
    for begin in range(first, last, BLOCK):
        count = min(BLOCK, last - begin)
        totals, of_blocks = pointer(spare(walk, RESULTS), factor), pointer(sums, factor)
        for k in range(count):
            totals[k] = _total(of_blocks, (begin + k) * blocks, blocks, walk, factor) * factor
        if floored:
            for k in range(count):
                totals[k] = floor if totals[k] < floor else totals[k]
        if accumulate:
            old = pointer(load_shared(walk, operand, begin, count, factor), factor)
            for k in range(count):
                totals[k] = old[k] + totals[k]
        if kind == item:
            copy(raw, spare(walk, RESULTS), count * item)
        else:
            narrow(spare(walk, RESULTS), count, kind, raw, factor)
        _carry(over, operand, table[operand, _ADDRESS], item, begin, count, raw, False)
