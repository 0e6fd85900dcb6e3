"""Scatter of single elements, and of rows of a few, on the CPU, without a sort.

The terms are read in the order of the index, and each is added to the running sums of its row. A state is one
vector: the sums of a row's current chunk, one for each element of the row, unused lanes, and a word with the
number of terms. A row of more than 32 terms also has a slot with the levels of its chunk sums, as in
``sum_row`` of ``segment_sum``. The last step adds up the levels.

``form`` is (a tuple with an item for each element of a row, a tuple with an item for each lane of a state):
kernels are compiled for its lengths.

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
    counted_loop,
    emit,
    jit,
    kernel,
    load_lanes,
    outlined,
    pointer,
    stack_slot,
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
    rows_of_lines,
    rows_of_run,
)
from holdfast.ops.scatter.plan import ScatterArgs, ScatterDescriptor
from holdfast.ops.segment_sum.cpu import CHUNK, JOINED, KEPT, LEVELS
from holdfast.ops.segment_sum.indexed import loops

#: Maximum number of elements of a row.
MOST_ELEMENTS = 7
#: Bits of a row's word for the number of terms in its current chunk. The other bits are its slot, from 1.
_COUNT_BITS = 6
_COUNT = 2**_COUNT_BITS - 1
#: Minimum number of terms of a row with a slot.
_LONG = CHUNK + 1

#: Rows of a tile if it has several lines, so that their states fit a cache, and minimum columns of a tile.
_TILE_ROWS, _TILE_COLUMNS = 2**17, 64

_SCRATCH = Scratch("scatter", Runs(4, 8 * RUN))
_RUN_STEP = step_of(8 * RUN)


def _form_of(elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The form of rows of this many elements: the lanes are a power of two."""
    return (0,) * elements, (0,) * 2 ** elements.bit_length()


@jit
def _slot_size(form):
    """Elements of a slot: the levels of each element of the row, and the number of chunks."""
    return len(form[0]) * LEVELS + 1


@jit
def _push(levels, total, chunks, like):
    """Add the sum of chunk number ``chunks``, from 1, to the levels of an element."""
    levels[0] += total
    full, level = chunks, 0
    while full % CHUNK == 0:
        levels[level + 1] += levels[level]
        levels[level] = zero(like)
        full //= CHUNK
        level += 1


@jit
def _chunks_of(slot_at, form, like):
    """A pointer to the number of chunks of a slot."""
    return pointer(slot_at + (_slot_size(form) - 1) * size_of(like), np.int32)


@jit
def _next_chunk(row, sums, words, word_step, slots_at, used, form, like):
    """Push the full chunk of a row and empty it. A new slot is number ``used``. Returns how many are used."""
    outlined()
    size, lanes = _slot_size(form) * size_of(like), len(form[1])
    slot = words[row * word_step] >> _COUNT_BITS
    if slot == 0:
        clear(slots_at + used * size, size)
        used += 1
        slot = np.int32(used)
    slot_at = slots_at + (slot - 1) * size
    chunks = _chunks_of(slot_at, form, like)
    chunks[0] += 1
    for element in range(len(form[0])):
        levels = pointer(slot_at + element * LEVELS * size_of(like), like)
        _push(levels, sums[lanes * row + element], chunks[0], like)
        sums[lanes * row + element] = zero(like)
    words[row * word_step] = slot << _COUNT_BITS
    return used


@emit
def _add_to_row(typingctx, states, row, values, first, count, form):
    """Add ``count`` terms from ``first`` on to the sums of a row, and their number to its word.

    The state is loaded and stored once, as one vector.
    """
    elements, lanes = map(len, form)
    integer = ir.IntType(32 if values.dtype == types.float32 else 64)

    def build(context, builder, signature, args):
        states, row, values, first, count, _ = args
        at, whole = builder.mul(row, row.type(lanes)), ir.VectorType(integer, lanes)
        state, places = load_lanes(builder, states, at, lanes), [ir.IntType(32)(i) for i in range(lanes)]
        slots = [stack_slot(builder, state.type.element) for _ in range(elements)]
        for slot, place in zip(slots, places, strict=False):
            builder.store(builder.extract_element(state, place), slot)
        with counted_loop(builder, count) as term:
            begin = builder.mul(builder.add(first, term), term.type(elements))
            for element, slot in enumerate(slots):
                value = builder.load(builder.gep(values, [builder.add(begin, term.type(element))]))
                builder.store(builder.fadd(builder.load(slot), value), slot)
        known = builder.bitcast(state, whole)
        word = builder.extract_element(known, places[-1])
        more = count if count.type.width == integer.width else builder.trunc(count, integer)
        known = builder.insert_element(known, builder.add(word, more), places[-1])
        state = builder.bitcast(known, state.type)
        for slot, place in zip(slots, places, strict=False):
            state = builder.insert_element(state, builder.load(slot), place)
        store_lanes(builder, state, states, at)
        return context.get_dummy_value()

    return types.none(states, row, values, first, count, form), build


@jit
def _add_run(rows, values, count, sums, words, word_step, slots_at, used, form, like):
    """Add a run of terms to the states of their rows. Returns the number of used slots.

    If most terms have the row of the term before, those of one row are added together: a state that was just
    stored is slow to load.
    """
    repeated = 0
    for i in range(count - 1):
        repeated += rows[i] == rows[i + 1]
    together, i = 4 * repeated > 3 * count, 0
    while i < count:
        row = np.int64(rows[i])
        known = words[row * word_step] & _COUNT
        if known == CHUNK:
            used = _next_chunk(row, sums, words, word_step, slots_at, used, form, like)
            known = 0
        if together:
            end, last = i + 1, min(count, i + CHUNK - known)
            while end < last and rows[end] == rows[i]:
                end += 1
            _add_to_row(sums, row, values, i, end - i, form)
            i = end
        else:
            _add_to_row(sums, row, values, i, np.int64(1), form)
            i += 1
    return used


@jit
def _add_terms(begin, end, tile_row, width, states_at, slots_at, used, problem, scratch, form, like):
    """Add the terms ``begin`` to ``end``. Returns the number of used slots, or -1 - position of a bad index.

    The rows of a tile count from ``tile_row``. With a ``width``, these are consecutive columns of the tile.
    """
    src_at, src_kind, src_table, index, index_table, extent, step, cycle, index_type = problem
    size, inner, item = size_of(like), index_table.shape[1] - 1, src_kind & ITEM_SIZE
    length, index_step, src_inner = index_table[0, inner], index_table[1, inner], src_table.shape[1] - 1
    src_step = src_table[1, src_inner] if len(form[0]) == 1 else 1  # rows of several elements are contiguous
    elements, lanes = len(form[0]), len(form[1])
    sums, words = pointer(states_at, like), pointer(states_at + (lanes - 1) * size, np.int32)
    word_step = lanes * size // 4
    raw, wide, rows_at = scratch, scratch + _RUN_STEP, scratch + 2 * _RUN_STEP
    rows = pointer(rows_at, np.int32)
    indices, at = pointer(index, index_type), begin
    while at < end:
        run = min(end - at, RUN // elements)
        if src_inner > 0 or width:
            run = min(run, length - at % length)
        if cycle or width:
            place = offset_of(at, index_table)
            if cycle:
                inside = rows_of_cycle(indices, place, at % cycle, cycle, step, extent, run, rows)
            else:
                inside = rows_of_run(indices, place, index_step, at - begin, 1, width, extent, run, rows)
            bad = -1 if inside else at + first_bad(indices, place, index_step, extent, run)
        else:
            bad = rows_of_lines(indices, at, run, index_table, step, extent, tile_row, rows_at)
        if bad >= 0:
            return -1 - bad
        source = src_at + offset_of(at, src_table) * item
        values = pointer(load_run(source, src_kind, src_step, run * elements, raw, wide, like), like)
        used = _add_run(rows, values, run, sums, words, word_step, slots_at, used, form, like)
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
def _finish_long(states, element, slots_at, count, made, counts, form, like):
    """The sums of an element, and the numbers of terms, of rows of which some have slots."""
    outlined()
    size, lanes = size_of(like), len(form[1])
    for i in range(count):
        word, made[i] = _word(states[lanes * i + lanes - 1]), states[lanes * i + element]
        counts[i] = word & _COUNT
        if word >> _COUNT_BITS != 0:
            slot_at = slots_at + ((word >> _COUNT_BITS) - 1) * _slot_size(form) * size
            chunks = _chunks_of(slot_at, form, like)[0]
            counts[i] += chunks * CHUNK
            levels = pointer(slot_at + element * LEVELS * size, like)
            _push(levels, made[i], chunks + 1, like)
            for level in range(LEVELS - 1):
                levels[level + 1] += levels[level]
            made[i] = levels[LEVELS - 1]


@jit
def _finish_short(states, element, old, added, alpha, count, made, form):
    """The results of an element of rows, if none has a slot. Returns the words of all rows, one or another.

    The loop has no branches, and loads sums and words as one type, so that it vectorises.
    """
    lanes = len(form[1])
    element = element if len(form[0]) > 1 else 0  # a constant, for LLVM
    words = _word(states[lanes - 1])
    for i in range(count):
        total, kept = states[lanes * i + element], old[i]
        word = _word(states[lanes * i + lanes - 1])
        total = alpha * total
        total = kept + total if added else total
        made[i] = total if word != 0 else kept
        words |= word
    return words


@jit
def _finish(begin, end, states_at, slots_at, output, scratch, form, like):
    """Store the rows ``begin`` to ``end``, whose states start at ``states_at``.

    ``output`` is (address, kind, walk over rows, stride of the elements of a row, address of the base or 0,
    its walk over rows, its stride, its role, whether to divide by the number of terms, alpha).
    """
    (out_at, out_kind, out_walk, out_step, base_at, base_walk, base_step, role, by_count, alpha) = output
    item, elements, lanes = out_kind & ITEM_SIZE, len(form[0]), len(form[1])
    for first in range(begin, end, RUN):
        last = min(first + RUN, end)
        states = states_at + (first - begin) * lanes * size_of(like)
        for element in range(elements):
            base = base_at + element * base_step * item if base_at != 0 else base_at
            output_element = (
                out_at + element * out_step * item, out_kind, out_walk, base, base_walk, role, by_count, alpha
            )  # fmt: skip
            _finish_element(first, last, states, element, slots_at, output_element, scratch, form, like)


@jit
def _finish_element(first, last, states_at, element, slots_at, output, scratch, form, like):
    """``_finish`` of an element of at most ``RUN`` rows. ``output`` has no strides of elements."""
    out_at, out_kind, out_walk, base_at, base_walk, role, by_count, alpha = output
    size, count, states = size_of(like), last - first, pointer(states_at, like)
    raw, old_at, made_at = scratch, scratch + _RUN_STEP, scratch + 2 * _RUN_STEP
    old, made, counts = (
        pointer(old_at, like),
        pointer(made_at, like),
        pointer(scratch + 3 * _RUN_STEP, np.int32),
    )
    if base_at != 0:
        load_span(base_at, out_kind, base_walk, first, last, raw, old_at, like)
    else:
        clear(old_at, RUN * size)
    if role == KEPT:
        words = _finish_short(states, element, old, False, alpha, count, made, form)
    else:
        words = _finish_short(states, element, old, True, alpha, count, made, form)
    if words >> _COUNT_BITS == 0 and not by_count:
        store_span(made_at, out_at, out_kind, out_walk, first, last, False, raw, old_at, like)
        return
    _finish_long(states, element, slots_at, count, made, counts, form, like)
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
def sum_tiles(first, last, tiling, states_at, slots_at, problem, output, finish, scratch, form, like):
    """Sum the terms of the tiles ``first`` to ``last``. Returns the first bad index, or -1.

    ``tiling`` is (lines before ``dim``, length of the index along it, columns after it, its extent, groups
    of a tile, columns of a tile). ``problem`` is (address of src, kind, table of loops, address of the index,
    sizes of the loops over it with its strides and the strides of the rows, exclusive limit of the indices,
    distance of the rows of two consecutive indices, 0 or the lines of ``cycle_of``, a value of the type of
    the index). ``output`` is that of
    ``_finish``; with ``finish``, the rows of a tile are stored after its last term.
    """
    groups, length, columns, extent, tile_groups, tile_columns = tiling
    per_group, size = (columns + tile_columns - 1) // tile_columns, len(form[1]) * size_of(like)
    tile_terms, tile_rows = tile_groups * length * tile_columns, tile_groups * extent * tile_columns
    # The first tile's part of the states and slots is used again by all others.
    states_at += size * first * tile_rows
    slots_at += first * (tile_terms // _LONG + 1) * _slot_size(form) * size_of(like)
    for tile in range(first, last):
        group, column = tile // per_group * tile_groups, tile % per_group * tile_columns
        width = min(tile_columns, columns - column) if tile_columns < columns else 0
        count = min(tile_groups, groups - group)
        row, begin = group * extent * columns + column, group * length * columns + column
        clear(states_at, size * (extent * width if width else count * extent * columns))
        used = np.int64(0)
        # A part of the columns has a run of terms for each position along dim, and a run of rows.
        for i in range(length if width else 1):
            start = begin + i * columns
            end = start + (width if width else count * length * columns)
            used = _add_terms(start, end, row, width, states_at, slots_at, used, problem, scratch, form, like)
            if used < 0:
                return -1 - used
        for i in range((extent if width else 1) if finish else 0):
            start = row + i * columns
            end = start + (width if width else count * extent * columns)
            _finish(start, end, states_at + size * i * width, slots_at, output, scratch, form, like)
    return -1


@kernel
def finish_rows(first, last, rows, states_at, slots_at, output, scratch, form, like):
    """``_finish`` of the runs ``first`` to ``last`` of all rows."""
    begin, end = first * RUN, min(last * RUN, rows)
    states_at += len(form[1]) * size_of(like) * begin
    _finish(begin, end, states_at, slots_at, output, scratch, form, like)


@cache
def _compile(compute: Float, index_dtype: torch.dtype, elements: int) -> None:
    like, table = number(compute), np.ones((2, 1), np.int64)
    problem = (0, like.itemsize, table, 0, np.ones((3, 1), np.int64), 0, 0, 0, INDICES[index_dtype])
    output, scratch = (0, like.itemsize, (0, 1), 1, 0, (0, 1), 1, KEPT, False, like), _SCRATCH.of_thread()
    compile_check(index_dtype)
    form = _form_of(elements)
    compile_kernel(sum_tiles, 0, 0, (1,) * 6, 0, 0, problem, output, False, scratch, form, like)
    compile_kernel(finish_rows, 0, 0, 0, 0, 0, output, scratch, form, like)


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
        elements, lanes = map(len, _form_of(desc.columns))
        self.states = layout.take(tiles * self.tiling.rows * lanes, wide)
        self.slots = layout.take(tiles * (self.tiling.terms // _LONG + 1) * (elements * LEVELS + 1), wide)

    @staticmethod
    def serves(desc: ScatterDescriptor) -> bool:
        """Whether the rows have few elements, and a word can count all slots."""
        few = 0 < desc.columns <= MOST_ELEMENTS
        return few and desc.count // _LONG < 2 ** (31 - _COUNT_BITS)

    def reads(self, walk: Space, src: torch.Tensor) -> bool:
        """Whether rows of several elements are side by side in ``src``. ``walk`` has its strides second."""
        columns = self.desc.columns
        return columns == 1 or (self.desc.column_step(src) == 1 and walk.strides[1][-1] == columns)

    def compile(self) -> None:
        _compile(self.desc.compute, self.desc.index_dtype, self.desc.columns)

    def prepare(self, args: ScatterArgs, walk: Space, index_table: Any, role: int) -> Any:
        """A function that runs the sums. It returns the position of a bad index, or -1.

        ``walk`` has the strides of src second.
        """
        desc, tiling, compute = self.desc, self.tiling, self.desc.compute
        like, code, index_type = number(compute), kind(desc.dtype, compute.torch), INDICES[desc.index_dtype]
        alpha = type(like)(desc.alpha)
        own = loops(desc.shape, args.src.stride())  # one loop if the terms follow one another in memory
        flat = len(own.sizes) == 1 and (desc.columns == 1 or own.strides[0] == (desc.columns,))
        src_table = table_of(own.sizes, own.strides[0]) if flat else table_of(walk.sizes, walk.strides[1])
        cycle = cycle_of(desc, args.index, args.src) if tiling.tiles == 1 else 0
        form, steps = _form_of(desc.columns), (desc.column_step(args.out), desc.column_step(args.input))
        if cycle:
            src_table = table_of((desc.count,), (1,))
            index_table = np.array([[desc.count], [1], [0]], np.int64)
        base_table, out_table = (_rows_of(tensor, desc) for tensor in (args.input, args.out))
        own_index, several = loops(desc.shape, args.index.stride()), tiling.tiles > 1
        check_table = table_of(own_index.sizes, own_index.strides[0])
        walks, shape, tiles = (walk_of(out_table), walk_of(base_table)), tuple(tiling), tiling.tiles
        rows, count, extent, step, by_count = desc.rows, desc.count, desc.extent, desc.step, desc.by_count

        def run(first: int, addresses: Sequence[int]) -> int:
            out, input, index, src = addresses
            states, slots = first + self.states.offset, first + self.slots.offset
            problem = (src, code, src_table, index, index_table, extent, step, cycle, index_type)
            output = (out, code, walks[0], steps[0], input, walks[1], steps[1], role, by_count, alpha)
            if not several and threads_for(2 * rows) == 1:  # one call: for few rows, calls take longest
                alone = (0, 1, shape, states, slots, problem, output, True, _SCRATCH.of_thread(), form, like)
                return sum_tiles(*alone)  # type: ignore[no-any-return]
            # Nothing is written if an index is bad.
            bad = [first_outside(index, check_table, count, extent, index_type)] if several else []

            def add(first: int, last: int) -> None:
                scratch = _SCRATCH.of_thread()
                sums = (first, last, shape, states, slots, problem, output, several, scratch, form, like)
                bad.append(sum_tiles(*sums))

            def finish(first: int, last: int) -> None:
                finish_rows(first, last, rows, states, slots, output, _SCRATCH.of_thread(), form, like)

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
