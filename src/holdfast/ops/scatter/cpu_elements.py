"""Scatter of single elements on the CPU, without a sort.

The terms are read in the order of the index, and each is added to the running sum of its row. A state has the
sum of a row's current chunk, and the number of its terms. A row of more than 32 terms also has a slot with
the levels of its chunk sums, as in ``sum_row`` of ``segment_sum``. The last step adds up the levels.

Lines along ``dim`` share no rows. They are divided into tiles: whole groups of lines that follow one another,
or some columns of one group. The states of a tile stay in the cache, and threads sum different tiles.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import (
    clear,
    compile_kernel,
    emit,
    jit,
    kernel,
    load_lanes,
    outlined,
    pointer,
    store_lanes,
)
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel, threads_for
from holdfast.core.dtypes import Float
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.cpu import ITEM_SIZE, as_real, kind, zero
from holdfast.numerics.cpu_walk import (
    RUN,
    load_run,
    load_span,
    number,
    offset_of,
    size_of,
    store_span,
    table_of,
    walk_of,
)
from holdfast.ops.scatter.cpu_index import (
    INDICES,
    RANDOM,
    compile_check,
    cycle_of,
    first_bad,
    first_outside,
    rows_of_cycle,
    rows_of_run,
)
from holdfast.ops.scatter.plan import ScatterArgs, ScatterDescriptor
from holdfast.ops.segment_sum.cpu import CHUNK, JOINED, KEPT, LEVELS
from holdfast.ops.segment_sum.indexed import loops

#: Elements of a slot: the levels, and the number of chunks.
_SLOT = LEVELS + 1
#: Bits of a row's word for the number of terms in its current chunk. The other bits are its slot, from 1.
_COUNT_BITS = 6
_COUNT = 2**_COUNT_BITS - 1
#: Minimum number of terms of a row with a slot.
_LONG = CHUNK + 1

#: Rows of a tile if it has several lines, so that their states fit a cache, and minimum columns of a tile.
_TILE_ROWS, _TILE_COLUMNS = 2**17, 64

_SCRATCH = Scratch("scatter", Runs(4, 8 * RUN))
_RUN_STEP = step_of(8 * RUN)


@jit
def _push(slot_at, total, like):
    """Add the sum of a chunk to the levels of a slot."""
    levels = pointer(slot_at, like)
    chunks = pointer(slot_at + LEVELS * size_of(like), np.int32)
    levels[0] += total
    chunks[0] += 1
    full, level = chunks[0], 0
    while full % CHUNK == 0:
        levels[level + 1] += levels[level]
        levels[level] = zero(like)
        full //= CHUNK
        level += 1


@jit
def _next_chunk(row, sums, words, word_step, slots_at, used, like):
    """Push the full chunk of a row and empty it. A new slot is number ``used``. Returns how many are used."""
    outlined()
    size = _SLOT * size_of(like)
    slot = words[row * word_step] >> _COUNT_BITS
    if slot == 0:
        clear(slots_at + used * size, size)
        used += 1
        slot = np.int32(used)
    _push(slots_at + (slot - 1) * size, sums[2 * row], like)
    sums[2 * row], words[row * word_step] = zero(like), slot << _COUNT_BITS
    return used


@emit
def _add_term(typingctx, states, row, value):
    """Add a term to the sum of a row, and 1 to its word. Both are loaded and stored as one vector."""
    integer = ir.IntType(32 if value == types.float32 else 64)

    def build(context, builder, signature, args):
        states, row, value = args
        at = builder.mul(row, row.type(2))
        state, first = load_lanes(builder, states, at, 2), ir.IntType(32)(0)
        total = builder.fadd(builder.extract_element(state, first), value)
        whole = ir.VectorType(integer, 2)
        state = builder.bitcast(builder.insert_element(state, total, first), whole)
        state = builder.add(state, ir.Constant(whole, [0, 1]))
        store_lanes(builder, builder.bitcast(state, ir.VectorType(value.type, 2)), states, at)
        return context.get_dummy_value()

    return types.none(states, row, value), build


@jit
def _add_run(rows, values, count, sums, words, word_step, slots_at, used, like):
    """Add a run of terms to the states of their rows. Returns the number of used slots."""
    for i in range(count):
        row = np.int64(rows[i])
        if words[row * word_step] & _COUNT == CHUNK:
            used = _next_chunk(row, sums, words, word_step, slots_at, used, like)
        _add_term(sums, row, values[i])
    return used


@jit
def _add_terms(begin, end, tile_row, width, states_at, slots_at, used, problem, scratch, like):
    """Add the terms ``begin`` to ``end``. Returns the number of used slots, or -1 - position of a bad index.

    The rows of a tile count from ``tile_row``. With a ``width``, these are consecutive columns of the tile.
    """
    src_at, src_kind, src_table, index, index_table, extent, step, cycle, index_type = problem
    size, inner, item = size_of(like), index_table.shape[1] - 1, src_kind & ITEM_SIZE
    length, index_step, line_step = index_table[0, inner], index_table[1, inner], index_table[2, inner]
    sums, words, word_step = pointer(states_at, like), pointer(states_at + size, np.int32), 2 * size // 4
    raw, wide, rows = scratch, scratch + _RUN_STEP, pointer(scratch + 2 * _RUN_STEP, np.int32)
    indices, at = pointer(index, index_type), begin
    while at < end:
        run = min(min(length - at % length, end - at), RUN)
        place = offset_of(at, index_table)
        if cycle:
            inside = rows_of_cycle(indices, place, at % cycle, cycle, step, extent, run, rows)
        elif width:
            inside = rows_of_run(indices, place, index_step, at - begin, 1, width, extent, run, rows)
        else:
            line = offset_of(at, index_table, 2) - tile_row
            inside = rows_of_run(indices, place, index_step, line, line_step, step, extent, run, rows)
        if not inside:
            return -1 - at - first_bad(indices, place, index_step, extent, run)
        source = src_at + offset_of(at, src_table) * item
        values = pointer(load_run(source, src_kind, src_table[1, inner], run, raw, wide, like), like)
        used = _add_run(rows, values, run, sums, words, word_step, slots_at, used, like)
        at += run
    return used


@emit
def _word(typingctx, state):
    """The word of a row as an integer; ``state`` is the element after its sum."""
    integer = types.int32 if state == types.float32 else types.int64

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(integer))

    return integer(state), build


@jit
def _finish_long(states, slots_at, count, made, counts, like):
    """The sums and numbers of terms of rows of which some have slots."""
    outlined()
    size = size_of(like)
    for i in range(count):
        word, made[i] = _word(states[2 * i + 1]), states[2 * i]
        counts[i] = word & _COUNT
        if word >> _COUNT_BITS != 0:
            slot_at = slots_at + ((word >> _COUNT_BITS) - 1) * _SLOT * size
            counts[i] += pointer(slot_at + LEVELS * size, np.int32)[0] * CHUNK
            _push(slot_at, made[i], like)
            levels = pointer(slot_at, like)
            for level in range(LEVELS - 1):
                levels[level + 1] += levels[level]
            made[i] = levels[LEVELS - 1]


@jit
def _finish_short(states, old, added, alpha, count, made):
    """The results of rows that are sums, if none has a slot. Returns the words of all rows, one or another.

    The loop has no branches, and loads sums and words as one type, so that it vectorises.
    """
    words = _word(states[1])
    for i in range(count):
        total, kept, word = states[2 * i], old[i], _word(states[2 * i + 1])
        total = alpha * total
        total = kept + total if added else total
        made[i] = total if word != 0 else kept
        words |= word
    return words


@jit
def _finish(begin, end, states_at, slots_at, output, scratch, like):
    """Store the rows ``begin`` to ``end``, whose states start at ``states_at``.

    ``output`` is (address, kind, walk over rows, address of the base or 0, its walk over rows, its role,
    whether to divide by the number of terms, alpha).
    """
    out_at, out_kind, out_walk, base_at, base_walk, role, by_count, alpha = output
    size = size_of(like)
    raw, old_at, made_at = scratch, scratch + _RUN_STEP, scratch + 2 * _RUN_STEP
    old, made, counts = (
        pointer(old_at, like),
        pointer(made_at, like),
        pointer(scratch + 3 * _RUN_STEP, np.int32),
    )
    for first in range(begin, end, RUN):
        last = min(first + RUN, end)
        count = last - first
        states = pointer(states_at + (first - begin) * 2 * size, like)
        if base_at != 0:
            load_span(base_at, out_kind, base_walk, first, last, raw, old_at, like)
        else:
            clear(old_at, RUN * size)
        if role == KEPT:
            words = _finish_short(states, old, False, alpha, count, made)
        else:
            words = _finish_short(states, old, True, alpha, count, made)
        if words >> _COUNT_BITS == 0 and not by_count:
            store_span(made_at, out_at, out_kind, out_walk, first, last, False, raw, old_at, like)
            continue
        _finish_long(states, slots_at, count, made, counts, like)
        # Each assignment rounds to the compute type.
        if alpha != 1:
            for i in range(count):
                made[i] = alpha * made[i]
        if by_count and role != JOINED:
            for i in range(count):
                made[i] = made[i] / as_real(counts[i], like)
        if role != KEPT:
            for i in range(count):
                made[i] = old[i] + made[i]
        if by_count and role == JOINED:
            for i in range(count):
                made[i] = made[i] / as_real(counts[i] + 1, like)
        for i in range(count):
            total, kept = made[i], old[i]
            made[i] = total if counts[i] != 0 else kept
        store_span(made_at, out_at, out_kind, out_walk, first, last, False, raw, old_at, like)


@kernel
def sum_tiles(first, last, tiling, states_at, slots_at, problem, output, finish, scratch, like):
    """Sum the terms of the tiles ``first`` to ``last``. Returns the first bad index, or -1.

    ``tiling`` is (lines before ``dim``, length of the index along it, columns after it, its extent, groups
    of a tile, columns of a tile). ``problem`` is (address of src, kind, table of loops, address of the index,
    sizes of the loops over it with its strides and the strides of the rows, exclusive limit of the indices,
    distance of the rows of two consecutive indices, 0 or the lines of ``cycle_of``, a value of the type of
    the index). ``output`` is that of
    ``_finish``; with ``finish``, the rows of a tile are stored after its last term.
    """
    groups, length, columns, extent, tile_groups, tile_columns = tiling
    per_group, size = (columns + tile_columns - 1) // tile_columns, size_of(like)
    tile_terms, tile_rows = tile_groups * length * tile_columns, tile_groups * extent * tile_columns
    # The first tile's part of the states and slots is used again by all others.
    states_at += 2 * size * first * tile_rows
    slots_at += first * (tile_terms // _LONG + 1) * _SLOT * size
    for tile in range(first, last):
        group, column = tile // per_group * tile_groups, tile % per_group * tile_columns
        width = min(tile_columns, columns - column) if tile_columns < columns else 0
        count = min(tile_groups, groups - group)
        row, begin = group * extent * columns + column, group * length * columns + column
        clear(states_at, 2 * size * (extent * width if width else count * extent * columns))
        used = np.int64(0)
        # A part of the columns has a run of terms for each position along dim, and a run of rows.
        for i in range(length if width else 1):
            start = begin + i * columns
            end = start + (width if width else count * length * columns)
            used = _add_terms(start, end, row, width, states_at, slots_at, used, problem, scratch, like)
            if used < 0:
                return -1 - used
        for i in range((extent if width else 1) if finish else 0):
            start = row + i * columns
            end = start + (width if width else count * extent * columns)
            _finish(start, end, states_at + 2 * size * i * width, slots_at, output, scratch, like)
    return -1


@kernel
def finish_rows(first, last, rows, states_at, slots_at, output, scratch, like):
    """``_finish`` of the runs ``first`` to ``last`` of all rows."""
    begin, end = first * RUN, min(last * RUN, rows)
    _finish(begin, end, states_at + 2 * size_of(like) * begin, slots_at, output, scratch, like)


@cache
def _compile(compute: Float, index_dtype: torch.dtype) -> None:
    like, table = number(compute), np.ones((2, 1), np.int64)
    problem = (0, like.itemsize, table, 0, np.ones((3, 1), np.int64), 0, 0, 0, INDICES[index_dtype])
    output, scratch = (0, like.itemsize, (0, 1), 0, (0, 1), KEPT, False, like), _SCRATCH.of_thread()
    compile_check(index_dtype)
    compile_kernel(sum_tiles, 0, 0, (1,) * 6, 0, 0, problem, output, False, scratch, like)
    compile_kernel(finish_rows, 0, 0, 0, 0, 0, output, scratch, like)


class _Tiling(NamedTuple):
    """The index as (groups, length, columns), with ``dim`` in the middle, and the size of a tile."""

    groups: int
    length: int
    columns: int
    extent: int
    tile_groups: int
    tile_columns: int

    @classmethod
    def of(cls, desc: ScatterDescriptor) -> Self:
        """One tile if the index does not cover the table along the axes other than ``dim``."""
        dim, shape, table = desc.dim, desc.shape, desc.table
        groups, columns = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if not desc.count or (*shape[:dim], *shape[dim + 1 :]) != (*table[:dim], *table[dim + 1 :]):
            return cls(1, desc.count, 1, desc.rows, 1, 1)
        lines = _TILE_ROWS // desc.extent // 16 * 16
        if lines >= 4 * columns:
            sizes = (min(groups, lines // columns // 4), columns)
        else:
            sizes = (1, min(columns, max(lines, _TILE_COLUMNS)))
        return cls(groups, shape[dim], columns, desc.extent, *sizes)

    @property
    def tiles(self) -> int:
        return -(-self.groups // self.tile_groups) * -(-self.columns // self.tile_columns)

    @property
    def terms(self) -> int:
        """Maximum number of terms of a tile."""
        return self.tile_groups * self.length * self.tile_columns

    @property
    def rows(self) -> int:
        """Maximum number of rows of a tile."""
        return self.tile_groups * self.extent * self.tile_columns


class ElementSums:
    """Workspace regions and runs of ``sum_tiles`` and ``finish_rows``."""

    def __init__(self, layout: WorkspaceLayout, desc: ScatterDescriptor) -> None:
        self.desc, self.tiling = desc, _Tiling.of(desc)
        wide, tiles = desc.compute.torch, self.tiling.tiles
        self.states = layout.take(tiles * self.tiling.rows * 2, wide)
        self.slots = layout.take(tiles * (self.tiling.terms // _LONG + 1) * _SLOT, wide)

    def compile(self) -> None:
        _compile(self.desc.compute, self.desc.index_dtype)

    def prepare(self, args: ScatterArgs, walk: Space, index_table: Any, role: int) -> Any:
        """A function that runs the sums. It returns the position of a bad index, or -1.

        ``walk`` has the strides of src second.
        """
        desc, tiling, compute = self.desc, self.tiling, self.desc.compute
        like, code, index_type = number(compute), kind(desc.dtype, compute.torch), INDICES[desc.index_dtype]
        alpha = type(like)(desc.alpha)
        src_table = np.array([walk.sizes, walk.strides[1]], np.int64)
        cycle = cycle_of(desc, args.index, args.src) if tiling.tiles == 1 else 0
        if cycle:
            src_table = table_of((desc.count,), (1,))
            index_table = np.array([[desc.count], [1], [0]], np.int64)
        base_table, out_table = (_rows_of(tensor, desc) for tensor in (args.input, args.out))
        check_table, several = index_table[:2].copy(), tiling.tiles > 1
        walks, shape, tiles = (walk_of(out_table), walk_of(base_table)), tuple(tiling), tiling.tiles
        rows, count, extent, step, by_count = desc.rows, desc.count, desc.extent, desc.step, desc.by_count

        def run(first: int, addresses: Sequence[int]) -> int:
            out, input, index, src = addresses
            states, slots = first + self.states.offset, first + self.slots.offset
            problem = (src, code, src_table, index, index_table, extent, step, cycle, index_type)
            output = (out, code, walks[0], input, walks[1], role, by_count, alpha)
            if not several and threads_for(2 * rows) == 1:  # one call: for few rows, calls take longest
                alone = (0, 1, shape, states, slots, problem, output, True, _SCRATCH.of_thread(), like)
                return sum_tiles(*alone)  # type: ignore[no-any-return]
            # Nothing is written if an index is bad.
            bad = [first_outside(index, check_table, count, extent, index_type)] if several else []

            def add(first: int, last: int) -> None:
                scratch = _SCRATCH.of_thread()
                sums = (first, last, shape, states, slots, problem, output, several, scratch, like)
                bad.append(sum_tiles(*sums))

            def finish(first: int, last: int) -> None:
                finish_rows(first, last, rows, states, slots, output, _SCRATCH.of_thread(), like)

            if max(bad, default=-1) < 0:
                parallel(add, tiles, count * RANDOM)
            wrong = max(bad)
            if wrong < 0 and not several:
                parallel(finish, -(-rows // RUN), 2 * rows)
            return wrong

        run.tables = out_table, base_table  # type: ignore[attr-defined]  # used by the walks
        return run


def _rows_of(tensor: torch.Tensor | None, desc: ScatterDescriptor) -> Any:
    if tensor is None:
        return np.ones((2, 1), np.int64)
    walk = loops(desc.table, tensor.stride())
    return np.array([walk.sizes, walk.strides[0]], np.int64)
