"""The ordered sum on the CPU.

A stable counting sort groups the places (positions in the flattened indices) of each row's terms:
``places[starts[row]]`` to ``places[starts[row + 1] - 1]``. Then one thread sums each row, up to COLUMNS
columns at a time, in a run of the compute type. The rows are partitioned into units of equal work (rows plus
terms); a row with more terms than a thread's share is split by columns. Neither changes the order of
additions.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import (
    LINE,
    clear,
    compile_kernel,
    copy,
    counted_loop,
    emit,
    fence,
    jit,
    kernel,
    load_lanes,
    numbers_of,
    on_demand,
    outlined,
    pointer,
    prefetch_address,
    prefetch_line,
    splat,
    stack_slot,
    store_lanes,
    stream_zeros,
    take,
    team_kernel,
)
from holdfast.backends.private import task_of
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import run_together, threads_together
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import BOUND_BYTES, WorkspaceLayout, first_address
from holdfast.numerics.cpu import BFLOAT16, ITEM_SIZE, as_real, kind, load_real_lanes, real, store_real, zero
from holdfast.numerics.cpu_walk import (
    load_run,
    move,
    number,
    offset_at,
    offset_of,
    size_of,
    store_run,
    table_of,
    walk_of,
)
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.cpu_few_terms import FewTerms, Filling, is_tall
from holdfast.ops.segment_sum.indexed import BadIndex, IndexedDescriptor, IndexedKernel, SummingArgs, loops

CHUNK = indexed.CHUNK
#: Columns summed at a time, few enough that the scratch runs stay in the cache.
COLUMNS = 2048
#: Units of equal work per thread.
_SHARES = 16
#: Levels of chunk sums, enough for 2**31 terms.
LEVELS = 7
#: Bytes of a scratch run (COLUMNS elements of the widest type), and the distance between runs.
RUN_BYTES = COLUMNS * 8
_RUN = step_of(RUN_BYTES)
# Scratch runs: four terms in the compute type, stored elements, the sum, the addresses of loaded terms, and
# the levels of chunk sums.
_RAW, _SUM, _ADDRESSES, _LEVEL = 4, 5, 6, 7
_SCRATCH = Scratch("segment_sum", Runs(_LEVEL + LEVELS, RUN_BYTES))
_SCRATCH_BYTES = _SCRATCH.size
#: Elements of a vector, and vectors of a sum that are kept in registers together.
_LANES, _VECTORS = 8, 8
#: Prefetch distance in terms.
_AHEAD = 16
#: Maximum number of columns of ``_sum_short_row``, and of its terms of bfloat16.
_FEW_COLUMNS, _FEW_BFLOAT16 = 16, 8
#: Minimum bytes that are cleared by non-temporal stores, and minimum bytes of such an output. A smaller
#: output may stay in a cache for its next reader.
_STREAMED_ZEROS, _STREAMED_OUTPUT = 2**12, 2**25

# A task of ``sum_segments``: 42 numbers, of which the first 19 differ between calls, then alpha. The threads
# share the first two: the next unit, and the number of threads that have started. Last are the numbers of
# ``RowSort``.
_NUMBERS, _VARIABLES, _NEXT, _THREAD, _SORT = 42, 19, 0, 1, 37
# The numbers of a task that are addresses of scratch memory, the workspace and tensors.
_PLACED = slice(3, 12)
_Task = task_of(_NUMBERS + 1)

Table = np.ndarray[Any, Any]

# Factor of a term: none, a weight per place, or 1 for the columns that chose this place and 0 elsewhere.
PLAIN, TIMES, CHOSEN = 0, 1, 2
# What a base is for: the result of rows without terms; added to the sum, which was divided by its number of
# terms if it is a mean; or one more term of the mean.
KEPT, ADDED, JOINED = 0, 1, 2


@jit
def load_index(address, item, number, table):
    """Index ``number`` as int64."""
    offset = offset_of(number, table)
    if item == 4:
        return np.int64(pointer(address, np.int32)[offset])
    return pointer(address, np.int64)[offset]


@kernel
def first_outside(address, item, table, count, rows):
    """Position of the first index out of range; -1 if there is none."""
    if item == 8 and table.shape[1] == 1 and table[1, 0] == 1:  # this loop vectorises
        contiguous, valid = pointer(address, np.int64), 0
        for n in range(count):
            valid += (contiguous[n] >= 0) & (contiguous[n] < rows)
        if valid == count:
            return -1
    for n in range(count):
        index = load_index(address, item, n, table)
        if index < 0 or index >= rows:
            return n
    return -1


@jit
def _sort(indices, walk, count, rows, padding, starts, places):
    """``counting_sort`` of indices of one type."""
    contiguous = walk[1] == 1 and offset_at(1, walk) == 1
    for row in range(rows + 2):
        starts[row] = 0
    for n in range(count):
        index = np.int64(indices[n if contiguous else offset_at(n, walk)])
        if index >= 0 and index < rows and index != padding:
            starts[index + 2] += 1
    most = 0
    for row in range(2, rows + 2):
        most = max(most, starts[row])
        starts[row] += starts[row - 1]
    # Now starts[row + 1] is the begin of the row. Each place of the row increments it, up to the row's end.
    for n in range(count):
        index = np.int64(indices[n if contiguous else offset_at(n, walk)])
        if index >= 0 and index < rows and index != padding:
            places[starts[index + 1]] = n
            starts[index + 1] += 1
    return most


@jit
def _sort_places(address, item, walk, count, rows, padding, starts_at, places_at):
    """``counting_sort`` inside a kernel."""
    outlined()
    starts, places = pointer(starts_at, np.int32), pointer(places_at, np.int32)
    if item == 4:
        return _sort(pointer(address, np.int32), walk, count, rows, padding, starts, places)
    return _sort(pointer(address, np.int64), walk, count, rows, padding, starts, places)


@kernel
def counting_sort(address, item, walk, count, rows, padding, starts_at, places_at):
    """Stable counting sort of the places by row. Returns the maximum number of places of a row.

    ``walk`` is the table of the loops over the indices: (address, number of loops).
    """
    return _sort_places(address, item, walk, count, rows, padding, starts_at, places_at)


@on_demand
def _scaled(run, how, address, number, place, count, result, like):
    """Multiply a term by its weight, or zero the columns that chose another place.

    ``place`` is the offset of the row in the array of chosen places.
    """
    values, scaled = pointer(run, like), pointer(result, like)
    if how == CHOSEN:
        chosen = pointer(address + place * 4, np.int32)
        for i in range(count):
            scaled[i] = values[i] if chosen[i] == number else zero(like)
    else:
        weight = pointer(address, like)[number]
        for i in range(count):
            scaled[i] = values[i] * weight


@jit
def _load_term(number, slot, source, factor, column, count, scratch, like):
    """Load a term. Returns the address of its elements in the compute type; 0 if the term is skipped."""
    outlined()
    address, kind, step, walk, rows_at = source
    row = np.int64(number)
    if rows_at != 0:
        row = np.int64(pointer(rows_at, np.int32)[number])
        if row < 0:
            return 0
    begin = address + (offset_at(row, walk) + column * step) * (kind & ITEM_SIZE)
    wide = scratch + slot * _RUN
    run = load_run(begin, kind, step, count, scratch + _RAW * _RUN, wide, like)
    if factor[0] != PLAIN:
        how, weights, columns = factor
        _scaled(run, how, weights, number, row * columns + column, count, wide, like)
        run = wide
    return run


@on_demand
def _add(total, term, count, fresh, like):
    """Add a term to a sum; ``fresh``: the sum starts from +0."""
    sums, a = pointer(total, like), pointer(term, like)
    if fresh:
        for i in range(count):
            sums[i] = zero(like) + a[i]
    else:
        for i in range(count):
            sums[i] += a[i]


def _vector_add(vectors: int, lanes: int) -> Any:
    """Make an intrinsic that adds terms, one after another, to ``vectors`` vectors of a sum.

    The vectors stay in registers until all terms are added; a loop over columns inside a loop over terms
    would load and store the sum for each term. ``terms`` points to the addresses of the terms, ``later`` to
    as many addresses to prefetch. If ``weights`` points to numbers, each term is multiplied by its weight.
    ``stored`` is a value of the type of the terms' elements: the compute type, or bits of bfloat16.
    """

    @emit
    def add(typingctx, total, terms, later, weights, term_count, column, fresh, stored):
        def build(context, builder, signature, args):
            total, terms, later, weights, term_count, column, fresh, stored = args
            begin, number, real = builder.gep(total, [column]), column.type, total.type.pointee
            vector = ir.VectorType(real, lanes)
            per_line = LINE // context.get_abi_sizeof(stored.type)
            sums = [stack_slot(builder, vector) for _ in range(vectors)]
            starts = [number(i * lanes) for i in range(vectors)]

            def run(addresses, index):
                address = builder.load(builder.gep(addresses, [index]))
                return builder.gep(builder.inttoptr(address, stored.type.as_pointer()), [column])

            for kept in sums:
                builder.store(ir.Constant(vector, [0.0] * lanes), kept)
            with builder.if_then(builder.not_(fresh)):
                for kept, start in zip(sums, starts, strict=True):
                    builder.store(load_lanes(builder, begin, start, lanes), kept)
            with counted_loop(builder, term_count) as index:
                ahead = run(later, index)
                for place in range(0, vectors * lanes, per_line):
                    prefetch_line(builder, builder.gep(ahead, [number(place)]))
                term = run(terms, index)
                values = [load_real_lanes(builder, term, start, lanes, real) for start in starts]
                if weights.type.pointee == real:
                    weight = splat(builder, builder.load(builder.gep(weights, [index])), lanes)
                    values = [builder.fmul(value, weight) for value in values]
                for kept, value in zip(sums, values, strict=True):
                    builder.store(builder.fadd(builder.load(kept), value), kept)
            for kept, start in zip(sums, starts, strict=True):
                store_lanes(builder, builder.load(kept), begin, start)
            return context.get_dummy_value()

        return types.none(total, terms, later, weights, term_count, column, fresh, stored), build

    return add


_add_to_vectors, _add_to_vector = _vector_add(_VECTORS, _LANES), _vector_add(1, _LANES)
_add_to_column = _vector_add(1, 1)


@jit
def _add_all(total, terms, later, weights, term_count, count, fresh, stored, like):
    sums, done, fresh = pointer(total, like), 0, fresh != 0
    terms, later = pointer(terms, np.int64), pointer(later, np.int64)
    while done + _VECTORS * _LANES <= count:
        _add_to_vectors(sums, terms, later, weights, term_count, done, fresh, stored)
        done += _VECTORS * _LANES
    while done + _LANES <= count:
        _add_to_vector(sums, terms, later, weights, term_count, done, fresh, stored)
        done += _LANES
    while done < count:
        _add_to_column(sums, terms, later, weights, term_count, done, fresh, stored)
        done += 1


@on_demand
def _add_terms(total, terms, later, term_count, count, fresh, like):
    """Add terms to a sum one after another; ``fresh``: the sum starts from +0."""
    _add_all(total, terms, later, pointer(0, np.int8), term_count, count, fresh, like, like)


@on_demand
def _add_weighted(total, terms, later, weights, term_count, count, fresh, like):
    """Add terms times their weights."""
    _add_all(total, terms, later, pointer(weights, like), term_count, count, fresh, like, like)


@on_demand
def _add_bfloat16(total, terms, later, weights, term_count, count, fresh, like):
    """Add terms of bfloat16 times their weights."""
    _add_all(total, terms, later, pointer(weights, like), term_count, count, fresh, np.uint16(0), like)


@on_demand
def _clear(total, count, like):
    sums = pointer(total, like)
    for i in range(count):
        sums[i] = zero(like)


@jit
def _place_of(at, places_at):
    """Place of the sorted term ``at``."""
    return np.int64(pointer(places_at, np.int32)[at]) if places_at != 0 else np.int64(at)


@jit
def _row_of(place, rows_at):
    """Row of the source that holds the term of a place; -1 if the term is skipped."""
    return np.int64(pointer(rows_at, np.int32)[place]) if rows_at != 0 else place


@jit
def _sum_rows(first, last, end, places_at, source, factor, column, count, total, scratch, like):
    """``_sum_chunk`` for contiguous terms of the compute type or bfloat16, which need no copy."""
    outlined()
    terms = pointer(scratch + _ADDRESSES * _RUN, np.int64)
    later = pointer(scratch + _RAW * _RUN, np.int64)
    weights = pointer(scratch, like)
    address, kind, _, walk, rows_at = source
    item = kind & ITEM_SIZE
    begin, row_size = address + column * item, offset_at(1, walk) * item
    pending = 0
    for at in range(first, last):
        ahead = _row_of(_place_of(min(at + _AHEAD, end - 1), places_at), rows_at)
        later[at - first] = begin + ahead * row_size
        place = _place_of(at, places_at)
        row = _row_of(place, rows_at)
        terms[pending] = begin + row * row_size
        weights[pending] = pointer(factor[1], like)[place] if factor[0] == TIMES else np.float32(1)
        pending += row >= 0
    if kind != item:
        _add_bfloat16(total, terms, later, weights, pending, count, True, like)
    elif factor[0] == TIMES:
        _add_weighted(total, terms, later, weights, pending, count, True, like)
    else:
        _add_terms(total, terms, later, pending, count, True, like)


@jit
def _add_chosen(first, last, end, places_at, terms, chosen, count, total, stored, like):
    """Sum the terms ``first`` to ``last``, each in the columns that chose its place, one after another.

    ``terms`` is (address, row size in elements, address of the rows); ``chosen`` is (address of the chosen
    places, row size).
    """
    (terms_at, row_size, rows_at), (chosen_at, chosen_size) = terms, chosen
    sums = pointer(total, like)
    for i in range(count):
        sums[i] = zero(like)
    for at in range(first, last):
        ahead = _row_of(_place_of(min(at + _AHEAD, end - 1), places_at), rows_at)
        prefetch_address(terms_at + ahead * row_size * size_of(stored))
        prefetch_address(chosen_at + ahead * chosen_size * 4)
        place = _place_of(at, places_at)
        row = _row_of(place, rows_at)
        if row >= 0:
            values = pointer(terms_at + row * row_size * size_of(stored), stored)
            found = pointer(chosen_at + row * chosen_size * 4, np.int32)
            for i in range(count):
                sums[i] += real(values, i) if found[i] == np.int32(place) else zero(like)


@on_demand
def _sum_chosen(
    first, last, end, places_at, terms_at, row_size, rows_at, chosen_at, chosen_size, count, total, like
):
    """``_sum_chunk`` for contiguous terms of the compute type, of the columns that chose their places."""
    terms, chosen = (terms_at, row_size, rows_at), (chosen_at, chosen_size)
    _add_chosen(first, last, end, places_at, terms, chosen, count, total, like, like)


@on_demand
def _sum_chosen_bfloat16(
    first, last, end, places_at, terms_at, row_size, rows_at, chosen_at, chosen_size, count, total, like
):
    """``_sum_chosen`` for terms of bfloat16."""
    terms, chosen = (terms_at, row_size, rows_at), (chosen_at, chosen_size)
    _add_chosen(first, last, end, places_at, terms, chosen, count, total, np.uint16(0), like)


@jit
def _sum_chunk(first, last, end, places_at, source, factor, column, count, total, scratch, like):
    """Sum the sorted terms ``first`` to ``last`` one after another; prefetch up to term ``end``."""
    outlined()
    address, kind, step, walk, rows_at = source
    walk_loops = walk[1]
    direct = kind <= ITEM_SIZE or kind == BFLOAT16
    if direct and step == 1 and walk_loops == 1 and factor[0] != CHOSEN:
        _sum_rows(first, last, end, places_at, source, factor, column, count, total, scratch, like)
        return
    if direct and step == 1 and walk_loops == 1:
        row_size, chosen = offset_at(1, walk), factor[1] + column * 4
        begin = address + column * (kind & ITEM_SIZE)
        if kind == BFLOAT16:
            _sum_chosen_bfloat16(
                first, last, end, places_at, begin, row_size, rows_at, chosen, factor[2], count, total, like
            )
        else:
            _sum_chosen(
                first, last, end, places_at, begin, row_size, rows_at, chosen, factor[2], count, total, like
            )
        return
    terms = pointer(scratch + _ADDRESSES * _RUN, np.int64)
    pending, fresh = np.int64(0), True
    for at in range(first, last):
        number = _place_of(at, places_at)
        run = _load_term(number, pending, source, factor, column, count, scratch, like)
        if run != 0:
            terms[pending] = run
            pending += 1
        if pending == 4:
            _add_terms(total, terms, terms, pending, count, fresh, like)
            pending, fresh = np.int64(0), False
    if fresh or pending > 0:
        _add_terms(total, terms, terms, pending, count, fresh, like)


@jit
def sum_row(first, last, end, places_at, source, factor, column, count, total, scratch, like):
    """The ordered sum of the sorted terms ``first`` to ``last``; prefetch up to term ``end``.

    A level with 32 chunk sums is added to the next level. At the end every level is added to the next, full
    or not: a sum is never -0.0, so adding the +0.0 of an empty level changes no bit.
    """
    if last - first <= CHUNK:
        _sum_chunk(first, last, end, places_at, source, factor, column, count, total, scratch, like)
        return
    levels = scratch + _LEVEL * _RUN
    for level in range(LEVELS):
        _clear(levels + level * _RUN, count, like)
    for begin in range(first, last, CHUNK):
        done = min(begin + CHUNK, last)
        _sum_chunk(begin, done, end, places_at, source, factor, column, count, total, scratch, like)
        _add(levels, total, count, False, like)
        full, level = (begin - first) // CHUNK + 1, 0
        while full % CHUNK == 0:
            _add(levels + (level + 1) * _RUN, levels + level * _RUN, count, False, like)
            _clear(levels + level * _RUN, count, like)
            full //= CHUNK
            level += 1
    for level in range(LEVELS - 1):
        _add(levels + (level + 1) * _RUN, levels + level * _RUN, count, False, like)
    _add(total, levels + (LEVELS - 1) * _RUN, count, True, like)


@jit
def _row_at(share, starts, rows):
    """The first row with at least ``share`` rows and terms, counted together, before it."""
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        if middle + starts[middle] < share:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def _clear_rows(row, end, starts, output, column, count, rows, columns):
    """Clear the rows without terms from ``row`` on. Returns the first row with terms, or ``end``.

    +0 has no bits set in any dtype.
    """
    outlined()
    out_at, out_kind, walk, _ = output
    item, first = out_kind & ITEM_SIZE, row
    while row < end and starts[row + 1] == starts[row]:
        row += 1
    if walk[1] == 1 and offset_at(1, walk) == columns and count == columns:
        size = (row - first) * columns * item
        target = out_at + first * columns * item
        if size >= _STREAMED_ZEROS and rows * columns * item >= _STREAMED_OUTPUT:
            stream_zeros(target, size)
        else:
            clear(target, size)
    else:
        for each in range(first, row):
            clear(out_at + (offset_at(each, walk) + column) * item, count * item)
    return row


@jit
def _copy_rows(row, end, starts, output, base, column, count, columns):
    """Copy the rows without terms from ``row`` on from the base. Returns as ``_clear_rows``.

    The columns of both are contiguous.
    """
    outlined()
    out_at, out_kind, walk, _ = output
    base_at, base_walk, _, _ = base
    item, first = out_kind & ITEM_SIZE, row
    while row < end and starts[row + 1] == starts[row]:
        row += 1
    whole_rows = walk[1] == 1 and base_walk[1] == 1 and count == columns
    if whole_rows and offset_at(1, walk) == columns and offset_at(1, base_walk) == columns:
        done = first * columns * item
        copy(out_at + done, base_at + done, (row - first) * columns * item)
    else:
        for each in range(first, row):
            target, old = offset_at(each, walk) + column, offset_at(each, base_walk) + column
            copy(out_at + target * item, base_at + old * item, count * item)
    return row


@jit
def _sum_short_row(low, high, places_at, source_at, stride, target, old, count, stored, like):
    """The sum of at most ``CHUNK`` terms of few columns, four at a time. If ``old`` is not 0, it is added.

    Terms and rows are contiguous. ``stored`` is a value of their type: the compute type, or bits of bfloat16.
    """
    terms, sums, kept = pointer(source_at, stored), pointer(target, stored), pointer(old, stored)
    whole = count - count % 4
    for column in range(0, whole, 4):
        a = b = c = d = zero(like)
        for at in range(low, high):
            term = _place_of(at, places_at) * stride + column
            a, b = a + real(terms, term), b + real(terms, term + 1)
            c, d = c + real(terms, term + 2), d + real(terms, term + 3)
        if old != 0:
            a, b = real(kept, column) + a, real(kept, column + 1) + b
            c, d = real(kept, column + 2) + c, real(kept, column + 3) + d
        store_real(sums, column, a)
        store_real(sums, column + 1, b)
        store_real(sums, column + 2, c)
        store_real(sums, column + 3, d)
    for column in range(whole, count):
        a = zero(like)
        for at in range(low, high):
            a += real(terms, _place_of(at, places_at) * stride + column)
        store_real(sums, column, real(kept, column) + a if old != 0 else a)


@jit
def _copy_row(target, step, source, source_step, count, item):
    """Copy a row without terms from the base, or set it to zeros if its address is 0. It may be strided."""
    outlined()
    if source == 0:
        for i in range(count):
            for b in range(item):
                pointer(target + i * step * item, np.uint8)[b] = 0
    else:
        move(source, source_step, count, target, step, item)


@jit
def _sum_unit(
    row, end, terms_range, column, count, ordering, source, factor, output, base, by_count, alpha, scratch
):  # fmt: skip
    """Sum ``count`` columns from ``column`` of the rows ``row`` to ``end``; see ``sum_segments``.

    Rows whose number of terms is not in ``terms_range`` (minimum, maximum) are left out.
    """
    outlined()
    like = alpha
    starts_at, places_at, names_at, rows, columns = ordering
    min_terms, max_terms = terms_range
    out_at, out_kind, out_walk, step = output
    base_at, base_walk, base_step, role = base
    starts, item = pointer(starts_at, np.int32), out_kind & ITEM_SIZE
    in_place = out_kind == item and step == 1 and base_at != out_at
    source_at, source_kind, source_step, source_walk, rows_at = source
    contiguous = step == 1 and base_step == 1 and source_step == 1 and source_walk[1] == 1 and rows_at == 0
    one_kind = source_kind == out_kind and (out_kind == item or out_kind == BFLOAT16)
    plain = factor[0] == PLAIN and by_count == 0 and alpha == 1
    short = np.int64(0)
    if contiguous and one_kind and plain and count <= _FEW_COLUMNS:
        short = np.int64(CHUNK if out_kind == item else _FEW_BFLOAT16)
    stride, source_at = offset_at(1, source_walk), source_at + column * item
    terms_end = np.int64(starts[rows])
    while row < end:
        low, high = np.int64(starts[row]), np.int64(starts[row + 1])
        if high == low and step == 1 and min_terms == 0 and base_at == 0:
            row = _clear_rows(row, end, starts, output, column, count, rows, columns)
            continue
        if high == low and step == 1 and base_step == 1 and min_terms == 0 and names_at == 0:
            row = _copy_rows(row, end, starts, output, base, column, count, columns)
            continue
        if high - low < min_terms or high - low > max_terms:
            row += 1
            continue
        name = _row_of(row, names_at)
        target = out_at + (offset_at(name, out_walk) + column * step) * item
        old_at = np.int64(0)
        if base_at != 0:
            old_at = base_at + (offset_at(name, base_walk) + column * base_step) * item
        row += 1
        if high == low:
            _copy_row(target, step, old_at, base_step, count, item)
            continue
        if high - low <= short:
            added = old_at if role != KEPT else np.int64(0)
            short_row = (low, high, places_at, source_at, stride, target, added, count)
            if out_kind == item:
                _sum_short_row(*short_row, like, like)
            else:
                _sum_short_row(*short_row, np.uint16(0), like)
            continue
        total = target if in_place else scratch + _SUM * _RUN
        sum_row(low, high, terms_end, places_at, source, factor, column, count, total, scratch, like)
        sums = pointer(total, like)
        terms = np.int32(high - low)
        if by_count > 1:
            terms = pointer(by_count, np.int32)[row - 1]
        if alpha != 1:
            for i in range(count):
                sums[i] = alpha * sums[i]
        if by_count != 0 and terms > 0 and role != JOINED:
            amount = as_real(terms, like)
            for i in range(count):
                sums[i] = sums[i] / amount
        if old_at != 0 and role != KEPT:
            raw, wide = scratch + _RAW * _RUN, scratch
            old = pointer(load_run(old_at, out_kind, base_step, count, raw, wide, like), like)
            for i in range(count):
                sums[i] = old[i] + sums[i]
        if by_count != 0 and role == JOINED:
            amount = as_real(terms + 1, like)
            for i in range(count):
                sums[i] = sums[i] / amount
        store_run(total, count, target, out_kind, step, scratch + _RAW * _RUN, like)


@team_kernel(_NUMBERS)
def sum_segments(task):
    """Take units and sum their rows, until no unit is left.

    The first units are ``long_parts`` parts of ``long_columns`` columns of the rows with more than
    ``most_terms`` terms. The others are ``parts`` parts of ``part`` columns, each with ``shares`` shares of
    the other rows; rows of less than ``least_terms`` terms are left out.

    There is scratch memory for ``threads`` threads; more do nothing. ``places`` is the address of the places,
    or 0 if the terms are sorted. ``rows_of`` is the address of the row of the source of each place, or 0 if
    the row is the place. ``how`` is PLAIN, TIMES or CHOSEN; ``weights`` is the address of the weights or of
    the chosen places, which have ``chosen_columns`` columns.
    ``base`` is 0 for none; its elements are of the kind of the output, and ``role`` is KEPT, ADDED or JOINED.
    ``by_count`` is 0 for no division, 1 to divide each sum by its number of terms, or the address of the
    divisor of each row. ``alpha`` multiplies each sum. ``names`` is the address of the number of each row in
    the output, or 0 if all rows are there.

    ``item`` is 0 if the places are sorted. A thread that is alone may sort them first, as ``counting_sort``,
    by the ``count`` indices of ``item`` bytes at the address ``indices``.
    """
    (
        _, _, threads, scratch, starts_at, places, out, source, rows_of, weights, base, indices, by_count,
        most_terms, shares, long_parts, long_columns, names, rows, columns, part, parts, least_terms,
        source_kind, source_step, source_table, source_loops, how, chosen_columns, out_kind, out_step,
        out_table, out_loops, base_step, base_table, base_loops, role, count, item, index_table,
        index_loops, padding, alpha,
    ) = task[0]  # fmt: skip
    if item != 0:
        walk = (index_table, index_loops)
        _sort_places(indices, item, walk, count, rows, padding, starts_at, places)
    starts = pointer(starts_at, np.int32)
    work, all_terms = rows + np.int64(starts[rows]), np.int64(starts[rows])
    thread = take(numbers_of(task), _THREAD, 1)
    if thread >= threads:
        return
    scratch += thread * _SCRATCH_BYTES
    terms = (source, source_kind, source_step, (source_table, source_loops), rows_of)
    output = (out, out_kind, (out_table, out_loops), out_step)
    added = (base, (base_table, base_loops), base_step, role)
    while True:
        unit = take(numbers_of(task), _NEXT, 1)
        if unit >= long_parts + parts * shares:
            break
        if unit < long_parts:
            row, end, column, width = np.int64(0), rows, unit * long_columns, long_columns
            terms_range = (most_terms + 1, all_terms)
        else:
            share = (unit - long_parts) % shares
            column, width = (unit - long_parts) // shares * part, part
            row = _row_at(work * share // shares, starts, rows)
            end = rows if share == shares - 1 else _row_at(work * (share + 1) // shares, starts, rows)
            terms_range = (least_terms, most_terms)
        _sum_unit(
            row, end, terms_range, column, min(width, columns - column),
            (starts_at, places, names, rows, columns), terms, (how, weights, chosen_columns), output, added,
            by_count, alpha, scratch,
        )  # fmt: skip
    fence()


class Ordering(NamedTuple):
    """Terms sorted by row: addresses of ``starts`` and ``places``; ``longest`` is the most terms of a row.

    ``names`` is the address of the numbers of ``rows`` rows that have terms, or 0 if all rows have starts.
    """

    starts: int
    places: int
    longest: int
    names: int = 0
    rows: int = 0


class Rows(NamedTuple):
    """The rows of a matrix: kind of the elements, table of the loops over rows, column stride."""

    kind: int
    table: Table
    step: int

    @classmethod
    def of(cls, matrix: torch.Tensor, compute: Float) -> Rows:
        """The layout of a matrix of two axes."""
        table = table_of(matrix.shape[:1], matrix.stride()[:1])
        return cls(kind(matrix.dtype, compute.torch), table, matrix.stride(1))

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Column stride, address of the table and number of loops. The table must be kept."""
        return self.step, *walk_of(self.table)


class RowSums:
    """``sum_segments`` for operands of one layout: ``terms`` terms to ``rows`` rows of ``columns`` columns.

    ``base`` is the layout of the base, which has a ``role``. Rows of less than ``least_terms`` terms are left
    out. ``how`` and ``alpha`` are as in ``sum_segments``; chosen places have as many columns as the rows.
    """

    def __init__(
        self,
        compute: Float,
        sizes: tuple[int, int, int],
        source: Rows,
        out: Rows,
        base: Rows | None = None,
        role: int = ADDED,
        *,
        how: int = PLAIN,
        alpha: float = 1,
        least_terms: int = 0,
    ) -> None:
        self._rows, self._columns, self._terms = sizes
        self._elements = (self._rows + self._terms) * self._columns
        self._kept = source, out, base  # their tables are in use
        part = _whole_lines(max(self._columns, 1), -(-max(self._columns, 1) // COLUMNS))
        self._parts = -(-self._columns // part)
        one = type(number(compute))(alpha)
        self._kernel = sum_segments.compiled(one)
        constants = (
            self._columns, part, self._parts, least_terms, source.kind, *source.numbers, how,
            self._columns, out.kind, *out.numbers, *(base or out).numbers, role,
        )  # fmt: skip
        self._template = np.array([*[0] * _VARIABLES, *constants, *[0] * 6], np.int64)
        self._template[-1:].view(one.dtype)[0] = one
        self._constants = self._template.tobytes()

    def run(
        self,
        ordering: Ordering,
        out: int,
        source: int,
        *,
        rows_of: int = 0,
        weights: int = 0,
        base: int = 0,
        by_count: int = 0,
    ) -> None:
        """Sum terms at these addresses on torch's number of threads."""
        threads = threads_together(self._elements)
        rows = ordering.rows if ordering.names else self._rows
        most_terms = (rows + self._terms) // threads
        long_parts = long_columns = 0
        if ordering.longest > most_terms:
            parts = max(self._parts, min(threads, -(-self._columns // 64)))
            long_columns = _whole_lines(self._columns, parts)
            long_parts = -(-self._columns // long_columns)
        shares = max(min(_SHARES * threads, rows), 1) if threads > 1 else 1
        scratch = _SCRATCH.of_team(threads)
        task = _Task.from_buffer_copy(self._constants)
        task[:_VARIABLES] = (
            0, 0, threads, scratch, ordering.starts, ordering.places, out, source, rows_of, weights, base, 0,
            by_count, most_terms, shares, long_parts, long_columns, ordering.names, rows,
        )  # fmt: skip
        run_together(self._kernel, task, self._elements)

    def after(self, sort: RowSort, starts: int, places: int, by_count: int = 0) -> Callable[..., None]:
        """``sort.run``, then ``run``; ``starts`` and ``places`` are offsets in the workspace.

        The function takes the addresses of the workspace and the indices, then those of ``run``.
        """
        kernel, elements = self._kernel, self._elements
        numbers = self._template.copy()
        numbers[_PLACED.stop : _VARIABLES] = (
            by_count, self._rows + self._terms, 1, 0, 0, 0, self._rows
        )  # fmt: skip
        numbers[2], numbers[_SORT:_NUMBERS] = 1, sort.numbers
        of_one_thread = numbers.tobytes()

        def run(
            workspace: int, indices: int, out: int, source: int, rows_of: int = 0, weights: int = 0,
            base: int = 0,
        ) -> None:  # fmt: skip
            starts_at, places_at = workspace + starts, workspace + places
            if threads_together(elements) > 1:
                self.run(
                    sort.run(indices, starts_at, places_at), out, source, rows_of=rows_of, weights=weights,
                    base=base, by_count=by_count,
                )  # fmt: skip
                return
            task = _Task.from_buffer_copy(of_one_thread)
            task[_PLACED] = (
                _SCRATCH.of_thread(), starts_at, places_at, out, source, rows_of, weights, base, indices,
            )  # fmt: skip
            kernel.call(task)

        return run


def _whole_lines(columns: int, parts: int) -> int:
    """Columns of a part, in whole cache lines."""
    return -(-columns // (parts * 16)) * 16


@cache
def compile_for(compute: Float) -> None:
    """Compile the kernels for a compute type."""
    table = table_of((1,), (1,))
    compile_kernel(counting_sort, 0, 8, walk_of(table), 0, -2, -1, 0, 0)
    sum_segments.compiled(number(compute))


class SegmentSum(IndexedKernel[IndexedDescriptor]):
    """``counting_sort``, then ``sum_segments``, for every plan that sums terms by row."""

    def __init__(self, desc: IndexedDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        self.few = None
        if is_tall(desc.rows, desc.columns, desc.count, desc.dtype.itemsize):
            self.few = FewTerms(layout, desc.count, desc.rows)
        else:
            self.starts = layout.take(desc.rows + 2, torch.int32)
            self.places = layout.take(desc.count, torch.int32)
        self.set_workspace(layout)

    def compile(self) -> None:
        compile_for(self.desc.compute)

    def prepare(self, args: SummingArgs) -> Launch[SummingArgs]:
        desc = self.desc
        self.compile()
        out, terms, indices = args.operands()
        walk = loops(desc.shape, indices.stride(), terms.stride())
        accumulate = args.accumulate
        source = Rows(kind(terms.dtype, desc.compute.torch), _table(walk, 1), terms.stride(-1))
        sums = RowSums(
            desc.compute, (desc.rows, desc.columns, desc.count), source, Rows.of(out, desc.compute),
            least_terms=int(accumulate),
        )  # fmt: skip
        sum_terms = self.few_sum(args, sums, walk) if self.few else self.sum_by_row(args, sums, walk)

        def run(stream: int, workspace: int, out: int, terms: int, indices: int) -> None:
            """Sum terms at these addresses, in a workspace at an aligned address."""
            sum_terms(workspace, indices, out, terms, base=out if accumulate else 0)

        def launch(stream: Stream, workspace: Workspace, args: SummingArgs, addresses: Sequence[int]) -> None:
            run(0, first_address(workspace), *addresses)

        if self.workspace_size <= BOUND_BYTES:
            launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch

    def sum_by_row(self, args: SummingArgs, sums: RowSums, walk: Space) -> Callable[..., None]:
        """The sum of all rows, at the addresses of the workspace, the indices, the output and the terms."""
        sort = RowSort.of(args.operands()[2], walk, self.desc)
        return sums.after(sort, self.starts.offset, self.places.offset, int(self.desc.by_count))

    def few_sum(self, args: SummingArgs, sums: RowSums, walk: Space) -> Callable[..., None]:
        """As ``sum_by_row``, for few terms."""
        desc, (out, _, indices) = self.desc, args.operands()
        assert self.few is not None
        sort = self.few.sort(indices.element_size(), _table(walk, 0), desc.padding)
        by_count = int(desc.by_count)
        row_table = table_of(out.shape[:1], out.stride()[:1])
        filling = Filling(out, None, lambda tensor: row_table, (desc.columns, out.stride(1), 0))

        def run(workspace: int, indices: int, out: int, terms: int, base: int) -> None:
            ordering = Ordering(*sort(workspace, indices))
            if not base:
                filling.run(out, 0)
            sums.run(ordering, out, terms, base=base, by_count=by_count)

        return run


def _table(walk: Space, operand: int) -> Table:
    return table_of(walk.sizes, walk.strides[operand])


def raise_outside(indices: torch.Tensor, table: Table, rows: int) -> None:
    """Raise if an index is out of range. ``table`` holds the loops over the indices."""
    at, item = indices.data_ptr(), indices.element_size()
    place = first_outside(at, item, table, indices.numel(), rows)
    if place >= 0:
        raise BadIndex(rows).error(place, int(indices.reshape(-1)[place].item()))


class RowSort:
    """``counting_sort`` of ``count`` indices of ``item`` bytes, which have this table of loops."""

    def __init__(self, item: int, table: Table, count: int, rows: int, padding: int = -1) -> None:
        self.count, self.rows, self._table = count, rows, table  # the table is in use
        #: What the task of ``sum_segments`` holds of this.
        self.numbers = count, item, *walk_of(table), padding
        self._layout = item, walk_of(table), count, rows, padding

    @classmethod
    def of(cls, indices: torch.Tensor, walk: Space, desc: IndexedDescriptor) -> RowSort:
        """The sort of indices like these. ``walk`` has their strides first."""
        return cls(indices.element_size(), _table(walk, 0), desc.count, desc.rows, desc.padding)

    def run(self, indices: int, starts: int, places: int) -> Ordering:
        """Sort the places of the indices at this address by row."""
        return Ordering(starts, places, counting_sort(indices, *self._layout, starts, places))
