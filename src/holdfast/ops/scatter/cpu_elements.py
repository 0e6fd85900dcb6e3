"""Scatter of single elements on the CPU, without a sort.

The terms are read in the order of the index, and each is added to the running sum of its row. A state has the
sum of a row's current chunk, and the number of its terms. A row of more than 32 terms also has a slot with
the levels of its chunk sums, as in ``sum_row`` of ``segment_sum``. The last step adds up the levels.

Lines along ``dim`` share no rows, so groups of lines that follow one another are summed by several threads.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import clear, compile_kernel, jit, kernel, outlined, pointer
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.cpu import kind, zero
from holdfast.numerics.cpu_walk import RUN, load_span, number, offset_of, size_of, store_span
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
def _next_chunk(row, word, slots_at, used, sums, like):
    """Push a full chunk. Returns the word of the row with an empty chunk. A new slot is number ``used``."""
    outlined()
    size = _SLOT * size_of(like)
    slot = word >> _COUNT_BITS
    if slot == 0:
        slot = used + 1
        clear(slots_at + used * size, size)
    _push(slots_at + (slot - 1) * size, sums[2 * row], like)
    sums[2 * row] = zero(like)
    return slot << _COUNT_BITS


@kernel
def add_elements(
    first, last, groups, states_at, slots_at, source, index, index_table, bounds, scratch, like, index_type
):  # fmt: skip
    """Sum the terms of the groups ``first`` to ``last``. Returns the first bad index, or -1.

    ``groups`` is (terms of a group, rows of a group). ``source`` is (address, kind, table of loops).
    ``index_table`` has the sizes of the loops over the index, its strides, and the strides of the rows.
    ``bounds`` is (exclusive limit of the indices, distance of the rows of two consecutive indices).
    """
    group_terms, group_rows = groups
    src_at, src_kind, src_table = source
    extent, step = bounds
    size, inner = size_of(like), index_table.shape[1] - 1
    length, index_step, line_step = index_table[0, inner], index_table[1, inner], index_table[2, inner]
    clear(states_at + first * group_rows * 2 * size, (last - first) * group_rows * 2 * size)
    sums, words, word_step = pointer(states_at, like), pointer(states_at + size, np.int32), 2 * size // 4
    raw, wide = scratch, scratch + _RUN_STEP
    at, end = first * group_terms, last * group_terms
    used = at // _LONG
    indices, values = pointer(index, index_type), pointer(wide, like)
    while at < end:
        stop = min(at + RUN, end)
        load_span(src_at, src_kind, src_table, at, stop, raw, wide, like)
        begin = at
        while at < stop:
            run = min(length - at % length, stop - at)
            place, line = offset_of(at, index_table), offset_of(at, index_table, 2)
            for i in range(run):
                given = np.int64(indices[place + i * index_step])
                if given < 0 or given >= extent:
                    return at + i
                row = given * step + line + i * line_step
                word = words[row * word_step]
                if word & _COUNT == CHUNK:
                    new = word >> _COUNT_BITS == 0
                    word = np.int32(_next_chunk(row, word, slots_at, used, sums, like))
                    used += new
                sums[2 * row] += values[at - begin + i]
                words[row * word_step] = word + 1
            at += run
    return -1


@kernel
def finish_elements(first, last, rows, states_at, slots_at, output, base, by_count, alpha, scratch, like):
    """Store the rows of the runs ``first`` to ``last``.

    ``output`` is (address, kind, table of loops); ``base`` is (address or 0, table of loops, role).
    """
    out_at, out_kind, out_table = output
    base_at, base_table, role = base
    size = size_of(like)
    states, words, word_step = pointer(states_at, like), pointer(states_at + size, np.int32), 2 * size // 4
    raw, old_at, made_at = scratch, scratch + _RUN_STEP, scratch + 2 * _RUN_STEP
    old, made = pointer(old_at, like), pointer(made_at, like)
    for run in range(first, last):
        begin, end = run * RUN, min(run * RUN + RUN, rows)
        if base_at != 0:
            load_span(base_at, out_kind, base_table, begin, end, raw, old_at, like)
        else:
            clear(old_at, RUN * size)
        for i in range(end - begin):
            row = begin + i
            word, made[i] = words[row * word_step], states[2 * row]
            if word == 0:
                made[i] = old[i]
                continue
            terms = word & _COUNT
            if word >> _COUNT_BITS != 0:
                slot_at = slots_at + ((word >> _COUNT_BITS) - 1) * _SLOT * size
                terms += pointer(slot_at + LEVELS * size, np.int32)[0] * CHUNK
                _push(slot_at, made[i], like)
                levels = pointer(slot_at, like)
                for level in range(LEVELS - 1):
                    levels[level + 1] += levels[level]
                made[i] = levels[LEVELS - 1]
            # Each assignment rounds to the compute type. (A quotient by an integer is computed in float64.)
            if alpha != 1:
                made[i] = alpha * made[i]
            if by_count and role != JOINED:
                made[i] = made[i] / (np.int32(terms) + zero(like))
            if role != KEPT:
                made[i] = old[i] + made[i]
            if by_count and role == JOINED:
                made[i] = made[i] / (np.int32(terms + 1) + zero(like))
        store_span(made_at, out_at, out_kind, out_table, begin, end, False, raw, old_at, like)


@cache
def _compile(compute: Float, index_type: Any) -> None:
    like, table = number(compute), np.ones((2, 1), np.int64)
    compile_kernel(
        add_elements, 0, 0, (0, 0), 0, 0, (0, like.itemsize, table), 0, np.ones((3, 1), np.int64), (0, 0),
        _SCRATCH.of_thread(), like, index_type,
    )  # fmt: skip
    compile_kernel(
        finish_elements, 0, 0, 0, 0, 0, (0, like.itemsize, table), (0, table, KEPT), False, like,
        _SCRATCH.of_thread(), like,
    )  # fmt: skip


class ElementSums:
    """Workspace regions and runs of ``add_elements`` and ``finish_elements``."""

    def __init__(self, layout: WorkspaceLayout, desc: ScatterDescriptor) -> None:
        self.desc = desc
        wide = desc.compute.torch
        self.states = layout.take(2 * desc.rows, wide)
        self.slots = layout.take((desc.count // _LONG + 1) * _SLOT, wide)

    def compile(self, index_type: Any) -> None:
        _compile(self.desc.compute, index_type)

    def prepare(self, args: ScatterArgs, walk: Space, index_table: Any, index_type: Any, role: int) -> Any:
        """A function that runs the sums. It returns the position of a bad index, or -1.

        ``walk`` has the strides of src second.
        """
        desc, compute = self.desc, self.desc.compute
        like, code = number(compute), kind(desc.dtype, compute.torch)
        alpha = type(like)(desc.alpha)
        src_table = np.array([walk.sizes, walk.strides[1]], np.int64)
        base_table, out_table = (_rows_of(tensor, desc) for tensor in (args.input, args.out))
        before = math.prod(desc.shape[: desc.dim])
        # Groups of lines that follow one another; the index covers the table along the axes before ``dim``.
        groups = before if desc.shape[: desc.dim] == desc.table[: desc.dim] and before else 1
        sizes, runs = (desc.count // groups, desc.rows // groups), -(-desc.rows // RUN)

        def run(first: int, addresses: Sequence[int]) -> int:
            out, input, index, src = addresses
            states, slots = first + self.states.offset, first + self.slots.offset
            bad: list[int] = []

            def add(first: int, last: int) -> None:
                bad.append(
                    add_elements(
                        first, last, sizes, states, slots, (src, code, src_table), index, index_table,
                        (desc.extent, desc.step), _SCRATCH.of_thread(), like, index_type,
                    )
                )  # fmt: skip

            def finish(first: int, last: int) -> None:
                finish_elements(
                    first, last, desc.rows, states, slots, (out, code, out_table), (input, base_table, role),
                    desc.by_count, alpha, _SCRATCH.of_thread(), like,
                )  # fmt: skip

            parallel(add, groups, desc.count)
            wrong = [position for position in bad if position >= 0]
            if not wrong:
                parallel(finish, runs, desc.rows)
            return min(wrong, default=-1)

        return run


def _rows_of(tensor: torch.Tensor | None, desc: ScatterDescriptor) -> Any:
    if tensor is None:
        return np.ones((2, 1), np.int64)
    walk = loops(desc.table, tensor.stride())
    return np.array([walk.sizes, walk.strides[0]], np.int64)
