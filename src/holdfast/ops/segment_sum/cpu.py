"""The ordered sum on the CPU.

A stable counting sort groups the places (positions in the flattened indices) of each row's terms:
``places[starts[row]]`` to ``places[starts[row + 1] - 1]``. Then one thread sums each row, up to COLUMNS
columns at a time, in a run of the compute type. The rows are partitioned into units of equal work (rows plus
terms); a row with more terms than a thread's share is split by columns. Neither changes the order of
additions.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
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
    on_demand,
    outlined,
    pointer,
    prefetch_line,
    splat,
    stack_slot,
    store_lanes,
    stream_zeros,
)
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout, first_address
from holdfast.numerics.cpu import BFLOAT16, ITEM_SIZE, kind, load_real_lanes, zero
from holdfast.numerics.cpu_walk import load_run, move, number, offset_of, store_run, table_of
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.indexed import BadIndex, IndexedDescriptor, IndexedKernel, SummingArgs, loops

CHUNK = indexed.CHUNK
#: Columns summed at a time, few enough that the scratch runs stay in the cache.
COLUMNS = 2048
#: Maximum number of units of equal work.
UNITS = 1024
#: Levels of chunk sums, enough for 2**31 terms.
LEVELS = 7
#: Bytes of a scratch run (COLUMNS elements of the widest type), and the distance between runs.
RUN_BYTES = COLUMNS * 8
_RUN = step_of(RUN_BYTES)
# Scratch runs: four terms in the compute type, stored elements, the sum, the addresses of loaded terms, and
# the levels of chunk sums.
_RAW, _SUM, _ADDRESSES, _LEVEL = 4, 5, 6, 7
_SCRATCH = Scratch("segment_sum", Runs(_LEVEL + LEVELS, RUN_BYTES))
#: Elements of a vector, and vectors of a sum that are kept in registers together.
_LANES, _VECTORS = 8, 8
#: Prefetch distance in terms.
_AHEAD = 16
#: Minimum bytes that are cleared by non-temporal stores, and minimum bytes of such an output. A smaller
#: output may stay in a cache for its next reader.
_STREAMED_ZEROS, _STREAMED_OUTPUT = 2**12, 2**25

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


@kernel
def counting_sort(address, item, table, count, rows, padding, starts_at, places_at):
    """Stable counting sort of the places by row. Returns the maximum number of places of a row."""
    starts, places = pointer(starts_at, np.int32), pointer(places_at, np.int32)
    for row in range(rows + 2):
        starts[row] = 0
    for n in range(count):
        index = load_index(address, item, n, table)
        if index >= 0 and index < rows and index != padding:
            starts[index + 2] += 1
    most = 0
    for row in range(2, rows + 2):
        most = max(most, starts[row])
        starts[row] += starts[row - 1]
    # Now starts[row + 1] is the begin of the row. Each place of the row increments it, up to the row's end.
    for n in range(count):
        index = load_index(address, item, n, table)
        if index >= 0 and index < rows and index != padding:
            places[starts[index + 1]] = n
            starts[index + 1] += 1
    return most


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
    address, kind, step, table, rows_at = source
    row = np.int64(number)
    if rows_at != 0:
        row = np.int64(pointer(rows_at, np.int32)[number])
        if row < 0:
            return 0
    begin = address + (offset_of(row, table) + column * step) * (kind & ITEM_SIZE)
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
    address, kind, _, table, rows_at = source
    item = kind & ITEM_SIZE
    begin, row_size = address + column * item, table[1, 0] * item
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
def _sum_chunk(first, last, end, places_at, source, factor, column, count, total, scratch, like):
    """Sum the sorted terms ``first`` to ``last`` one after another; prefetch up to term ``end``."""
    outlined()
    _, kind, step, table, _ = source
    direct = kind <= ITEM_SIZE or kind == BFLOAT16
    if direct and step == 1 and factor[0] != CHOSEN and table.shape[1] == 1:
        _sum_rows(first, last, end, places_at, source, factor, column, count, total, scratch, like)
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
    out_at, out_kind, table, _ = output
    item, first = out_kind & ITEM_SIZE, row
    while row < end and starts[row + 1] == starts[row]:
        row += 1
    if table.shape[1] == 1 and table[1, 0] == columns and count == columns:
        size = (row - first) * columns * item
        target = out_at + first * columns * item
        if size >= _STREAMED_ZEROS and rows * columns * item >= _STREAMED_OUTPUT:
            stream_zeros(target, size)
        else:
            clear(target, size)
    else:
        for each in range(first, row):
            clear(out_at + (offset_of(each, table) + column) * item, count * item)
    return row


@jit
def _copy_row(target, step, source, source_step, count, item):
    """Copy a row without terms from the base, or set it to zeros if its address is 0."""
    outlined()
    if source == 0:
        for i in range(count):
            for b in range(item):
                pointer(target + i * step * item, np.uint8)[b] = 0
    elif step == 1 and source_step == 1:
        copy(target, source, count * item)
    else:
        move(source, source_step, count, target, step, item)


@kernel
def sum_segments(
    first, last, ordering, units, source, factor, output, base, by_count, alpha, scratch, like
):  # fmt: skip
    """Sum the rows of the units ``first`` to ``last``.

    ``ordering`` is (address of starts, address of places or 0 if the terms are sorted, rows, columns).
    ``units`` is (units per part of the columns, columns per part, minimum and maximum number of terms of the
    rows to sum). ``source`` is (address, kind, column stride, table of loops, address of the row of each
    place or 0 if the row is the place). ``factor`` is (PLAIN, TIMES or CHOSEN, address of the weights or of
    the chosen places, columns of the chosen places). ``output`` is (address, kind, table of the loops over
    rows, column stride). ``base`` is (address or 0 for none, table of the loops over rows, column stride,
    KEPT, ADDED or JOINED); its elements are of the kind of the output. ``by_count`` is 0 for no division, 1
    to divide each sum by its number of terms, or the address of the divisor of each row. ``alpha`` multiplies
    each sum.
    """
    starts_at, places_at, rows, columns = ordering
    per_part, part, min_terms, max_terms = units
    out_at, out_kind, out_table, step = output
    base_at, base_table, base_step, role = base
    starts, item = pointer(starts_at, np.int32), out_kind & ITEM_SIZE
    in_place = out_kind == item and step == 1 and base_at != out_at
    terms_end = np.int64(starts[rows])
    work, end = rows + terms_end, 0
    for unit in range(first, last):
        column = unit // per_part * part
        count = min(part, columns - column)
        share = unit % per_part
        row = end if unit > first and share > 0 else _row_at(work * share // per_part, starts, rows)
        end = rows if share == per_part - 1 else _row_at(work * (share + 1) // per_part, starts, rows)
        while row < end:
            low, high = np.int64(starts[row]), np.int64(starts[row + 1])
            if high == low and step == 1 and min_terms == 0 and base_at == 0:
                row = _clear_rows(row, end, starts, output, column, count, rows, columns)
                continue
            if high - low < min_terms or high - low > max_terms:
                row += 1
                continue
            target = out_at + (offset_of(row, out_table) + column * step) * item
            old_at = np.int64(0)
            if base_at != 0:
                old_at = base_at + (offset_of(row, base_table) + column * base_step) * item
            row += 1
            if high == low:
                _copy_row(target, step, old_at, base_step, count, item)
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
                amount = terms + zero(like)
                for i in range(count):
                    sums[i] = sums[i] / amount
            if old_at != 0 and role != KEPT:
                raw, wide = scratch + _RAW * _RUN, scratch
                old = pointer(load_run(old_at, out_kind, base_step, count, raw, wide, like), like)
                for i in range(count):
                    sums[i] = old[i] + sums[i]
            if by_count != 0 and role == JOINED:
                amount = np.int32(terms + 1) + zero(like)
                for i in range(count):
                    sums[i] = sums[i] / amount
            store_run(total, count, target, out_kind, step, scratch + _RAW * _RUN, like)
    fence()


class Ordering(NamedTuple):
    """Terms sorted by row: addresses of ``starts`` and ``places``; ``longest`` is the most terms of a row."""

    starts: int
    places: int
    rows: int
    terms: int
    longest: int


class Base(NamedTuple):
    """A base of the sums: its address, the table of the loops over its rows, its column stride, its role."""

    address: int
    table: np.ndarray[Any, Any]
    step: int
    role: int


def launch_sums(
    out: torch.Tensor,
    ordering: Ordering,
    source: tuple[Any, ...],
    compute: Float,
    *,
    factor: tuple[int, int, int] = (PLAIN, 0, 0),
    accumulate: bool = False,
    by_count: int = 0,
) -> None:
    """Run ``sum_segments`` for every row of the matrix ``out``; ``accumulate`` adds the sums to it."""
    table = table_of(out.shape[:1], out.stride()[:1])
    base = Base(out.data_ptr() if accumulate else 0, table, out.stride(1), ADDED)
    output = (out.data_ptr(), kind(out.dtype, compute.torch), table, out.stride(1))
    columns, like = out.shape[1], number(compute)
    in_units(
        ordering, columns, source, factor, output, base, by_count, type(like)(1), compute, int(accumulate)
    )


def in_units(
    ordering: Ordering,
    columns: int,
    source: tuple[Any, ...],
    factor: tuple[int, int, int],
    output: tuple[Any, ...],
    base: Base,
    by_count: int,
    alpha: np.floating[Any],
    compute: Float,
    least_terms: int = 0,
) -> None:
    """Run ``sum_segments`` for all rows of at least ``least_terms`` terms on torch's number of threads."""
    rows, like = ordering.rows, number(compute)
    order_of = (ordering.starts, ordering.places, rows, columns)

    def launch(units: int, parts: int, min_terms: int, max_terms: int, terms: int) -> None:
        part = -(-columns // (parts * 16)) * 16  # whole cache lines
        partition = (units, part, min_terms, max_terms)

        def work(first: int, last: int) -> None:
            sum_segments(
                first, last, order_of, partition, source, factor, output, tuple(base), int(by_count), alpha,
                _SCRATCH.of_thread(), like,
            )  # fmt: skip

        parallel(work, units * -(-columns // part), terms * columns)

    threads, parts = torch.get_num_threads(), -(-columns // COLUMNS)
    share = (rows + ordering.terms) // threads
    launch(min(UNITS, rows), parts, least_terms, share, rows + ordering.terms)
    if ordering.longest > share:
        launch(1, max(parts, min(threads, -(-columns // 64))), share + 1, ordering.terms, ordering.terms)


@cache
def compile_for(compute: Float) -> None:
    """Compile the kernels for a compute type."""
    table, like = table_of((1,), (1,)), number(compute)
    compile_kernel(counting_sort, 0, 8, table, 0, -2, -1, 0, 0)
    source, output = (0, like.itemsize, 1, table, 0), (0, like.itemsize, table, 1)
    compile_kernel(
        sum_segments, 0, 0, (0, 0, 0, 1), (1, 1, 0, 0), source, (PLAIN, 0, 0), output, (0, table, 1, ADDED),
        0, like, _SCRATCH.of_thread(), like,
    )  # fmt: skip


class SegmentSum(IndexedKernel[IndexedDescriptor]):
    """``counting_sort``, then ``sum_segments``, for every plan that sums terms by row."""

    def __init__(self, desc: IndexedDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        self.starts = layout.take(desc.rows + 2, torch.int32)
        self.places = layout.take(desc.count, torch.int32)
        self.set_workspace(layout)

    def compile(self) -> None:
        compile_for(self.desc.compute)

    def prepare(self, args: SummingArgs) -> Launch[SummingArgs]:
        desc = self.desc
        self.compile()
        _, terms, indices = args.operands()
        walk = loops(desc.shape, indices.stride(), terms.stride())

        def launch(stream: Stream, workspace: Workspace, args: SummingArgs, addresses: Sequence[int]) -> None:
            out, terms, indices = args.operands()
            first = first_address(workspace)
            starts, places = first + self.starts.offset, first + self.places.offset
            ordering = sort_by_row(indices, walk, desc.rows, starts, places, desc.padding)
            source = term_rows(terms, walk, desc.compute)
            launch_sums(
                out, ordering, source, desc.compute, accumulate=args.accumulate, by_count=desc.by_count
            )

        return launch


def raise_outside(indices: torch.Tensor, table: np.ndarray[Any, Any], rows: int) -> None:
    """Raise if an index is out of range. ``table`` holds the loops over the indices."""
    at, item = indices.data_ptr(), indices.element_size()
    place = first_outside(at, item, table, indices.numel(), rows)
    if place >= 0:
        raise BadIndex(rows).error(place, int(indices.reshape(-1)[place].item()))


def sort_by_row(
    indices: torch.Tensor, walk: Space, rows: int, starts: int, places: int, padding: int = -1
) -> Ordering:
    """Sort the places of ``indices`` by row. ``walk`` has the strides of the indices first."""
    table = table_of(walk.sizes, walk.strides[0])
    count, item = indices.numel(), indices.element_size()
    longest = counting_sort(indices.data_ptr(), item, table, count, rows, padding, starts, places)
    return Ordering(starts, places, rows, count, longest)


def term_rows(terms: torch.Tensor, walk: Space, compute: Float, rows_at: int = 0) -> tuple[Any, ...]:
    """``source`` of ``sum_segments`` for the rows of ``terms``. ``walk`` has their strides second."""
    table = table_of(walk.sizes, walk.strides[1])
    return terms.data_ptr(), kind(terms.dtype, compute.torch), terms.stride(-1), table, rows_at
