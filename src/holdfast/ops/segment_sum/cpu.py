"""The ordered sum on the CPU.

A stable counting sort brings the places of each segment's terms together: ``starts[row]`` to
``starts[row + 1]`` in ``places``. Then each row is summed by one thread, a few columns at a time, into a run
of the compute type. Rows are dealt out so that every thread has as much to read and write as any other; a row
that is more than a thread's share is cut by its columns. Neither changes the order of an addition.
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
    compile_kernel,
    counted_loop,
    emit,
    jit,
    kernel,
    on_demand,
    outlined,
    pointer,
    prefetch_line,
    stack_slot,
)
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.core.workspace_layout import WorkspaceLayout, first_address
from holdfast.numerics.cpu import ITEM_SIZE, kind, zero
from holdfast.numerics.cpu_walk import load_run, number, offset_of, store_run, table_of
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.indexed import BadIndex, IndexedDescriptor, IndexedKernel, SummingArgs, loops

CHUNK = indexed.CHUNK
#: Columns that are worked on at a time, so that the runs of a row stay near the core.
COLUMNS = 2048
#: Into how many parts of equal work the rows are cut at most, to be dealt out to threads.
UNITS = 1024
#: Levels of chunk sums: enough for as many terms as there can be.
LEVELS = 7
#: Bytes of a scratch run, and from one to the next: room for the widest type.
RUN_BYTES = COLUMNS * 8
_RUN = step_of(RUN_BYTES)
# Scratch runs: four terms in the compute type, elements as they are stored, the sum, the addresses of terms
# that wait to be added, the levels.
_RAW, _SUM, _HELD, _LEVEL = 4, 5, 6, 7
_SCRATCH = Scratch("segment_sum", Runs(_LEVEL + LEVELS, RUN_BYTES))
#: Elements of a vector, and vectors of a sum that registers hold together.
_LANES, _VECTORS = 8, 8
#: How many terms before it is added a term is asked for.
_AHEAD = 16

# What becomes of a term before it is added.
PLAIN, TIMES, CHOSEN = 0, 1, 2


@jit
def load_index(address, item, number, table):
    """Index ``number``, in 64 bits."""
    offset = offset_of(number, table)
    if item == 4:
        return np.int64(pointer(address, np.int32)[offset])
    return pointer(address, np.int64)[offset]


@kernel
def first_outside(address, item, table, count, rows):
    """Which index is the first that names no row; -1 if none is."""
    for n in range(count):
        index = load_index(address, item, n, table)
        if index < 0 or index >= rows:
            return n
    return -1


@kernel
def order(address, item, table, count, rows, padding, starts_at, places_at):
    """The places of the indices by row, in ascending order within each; and the most that a row has."""
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
    # Now starts[row + 1] is where the row begins; filling it makes it where the next one does.
    for n in range(count):
        index = load_index(address, item, n, table)
        if index >= 0 and index < rows and index != padding:
            places[starts[index + 1]] = n
            starts[index + 1] += 1
    return most


@on_demand
def _scaled(run, how, address, number, place, count, result, like):
    """A term times its weight, or kept only where it was chosen: ``place`` counts the chosen from 0."""
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
    """The address of a term's elements in the compute type; 0 if the term is left out."""
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
    """Add a term to a sum; to +0 if it is ``fresh``."""
    sums, a = pointer(total, like), pointer(term, like)
    if fresh:
        for i in range(count):
            sums[i] = zero(like) + a[i]
    else:
        for i in range(count):
            sums[i] += a[i]


def _adding(vectors: int) -> Any:
    """A function of kernels that adds terms, one after another, to ``vectors`` vectors of a sum.

    They stay in registers until all terms are added; a loop over the columns for each term would load and
    store them every time. ``terms`` points to the addresses of the terms, ``later`` to those of as many that
    will be wanted soon, and are asked for meanwhile.
    """

    @emit
    def add(typingctx, total, terms, later, how_many, column, fresh):
        def build(context, builder, signature, args):
            total, terms, later, how_many, column, fresh = args
            vector = ir.VectorType(total.type.pointee, _LANES)
            item = context.get_abi_sizeof(total.type.pointee)

            def run(addresses, number):
                address = builder.load(builder.gep(addresses, [number]))
                return builder.inttoptr(address, total.type)

            def places(run):
                begin = builder.bitcast(builder.gep(run, [column]), vector.as_pointer())
                return [builder.gep(begin, [ir.IntType(32)(number)]) for number in range(vectors)]

            sums = [stack_slot(builder, vector) for _ in range(vectors)]
            for kept in sums:
                builder.store(ir.Constant(vector, [0.0] * _LANES), kept)
            with builder.if_then(builder.not_(fresh)):
                for kept, place in zip(sums, places(total), strict=True):
                    builder.store(builder.load(place, align=item), kept)
            with counted_loop(builder, how_many) as index:
                for place in places(run(later, index))[:: max(1, LINE // (_LANES * item))]:
                    prefetch_line(builder, place)
                for kept, place in zip(sums, places(run(terms, index)), strict=True):
                    builder.store(builder.fadd(builder.load(kept), builder.load(place, align=item)), kept)
            for kept, place in zip(sums, places(total), strict=True):
                builder.store(builder.load(kept), place, align=item)
            return context.get_dummy_value()

        return types.none(total, terms, later, how_many, column, fresh), build

    return add


_add_to_vectors, _add_to_vector = _adding(_VECTORS), _adding(1)


@on_demand
def _add_terms(total, terms, later, how_many, count, fresh, like):
    """Add terms to a sum one after another; to +0 if it is ``fresh``."""
    sums, done, fresh = pointer(total, like), 0, fresh != 0
    terms, later = pointer(terms, np.int64), pointer(later, np.int64)
    while done + _VECTORS * _LANES <= count:
        _add_to_vectors(sums, terms, later, how_many, done, fresh)
        done += _VECTORS * _LANES
    while done + _LANES <= count:
        _add_to_vector(sums, terms, later, how_many, done, fresh)
        done += _LANES
    for i in range(done, count):
        value = zero(like) if fresh else sums[i]
        for k in range(how_many):
            value += pointer(terms[k], like)[i]
        sums[i] = value


@on_demand
def _clear(total, count, like):
    sums = pointer(total, like)
    for i in range(count):
        sums[i] = zero(like)


@jit
def _row_of(at, places_at, rows_at):
    """Which row of the source is the term ``at``; -1 if it is left out."""
    number = np.int64(pointer(places_at, np.int32)[at]) if places_at != 0 else np.int64(at)
    return np.int64(pointer(rows_at, np.int32)[number]) if rows_at != 0 else number


@jit
def _sum_rows(first, last, end, places_at, source, column, count, total, scratch, like):
    """``_sum_chunk`` where terms are added as they lie in memory: they need only be found."""
    outlined()
    held, later = pointer(scratch + _HELD * _RUN, np.int64), pointer(scratch + _RAW * _RUN, np.int64)
    address, item, _, table, rows_at = source
    begin, row_size = address + column * item, table[1, 0] * item
    waiting = 0
    for at in range(first, last):
        soon = _row_of(min(at + _AHEAD, end - 1), places_at, rows_at)
        later[at - first] = begin + soon * row_size
        row = _row_of(at, places_at, rows_at)
        held[waiting] = begin + row * row_size
        waiting += row >= 0
    _add_terms(total, held, later, waiting, count, True, like)


@jit
def _sum_chunk(first, last, end, places_at, source, factor, column, count, total, scratch, like):
    """The sum of the terms ``first`` to ``last`` of all up to ``end``, one after another."""
    outlined()
    _, kind, step, table, _ = source
    if kind <= ITEM_SIZE and step == 1 and factor[0] == PLAIN and table.shape[1] == 1:
        _sum_rows(first, last, end, places_at, source, column, count, total, scratch, like)
        return
    held = pointer(scratch + _HELD * _RUN, np.int64)
    waiting, fresh = np.int64(0), True
    for at in range(first, last):
        number = np.int64(pointer(places_at, np.int32)[at]) if places_at != 0 else np.int64(at)
        run = _load_term(number, waiting, source, factor, column, count, scratch, like)
        if run != 0:
            held[waiting] = run
            waiting += 1
        if waiting == 4:
            _add_terms(total, held, held, waiting, count, fresh, like)
            waiting, fresh = np.int64(0), False
    if fresh or waiting > 0:
        _add_terms(total, held, held, waiting, count, fresh, like)


@jit
def sum_row(first, last, end, places_at, source, factor, column, count, total, scratch, like):
    """The ordered sum of the terms ``first`` to ``last``, of all up to ``end``.

    A level that is full is added to the one above it. At the end all that is left is added upwards, full or
    not: a sum is never -0.0, so that +0.0 more changes no bit.
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
    """The first row by which ``share`` rows and terms, counted together, have gone by."""
    low, high = 0, rows
    while low < high:
        middle = (low + high) // 2
        if middle + starts[middle] < share:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def sum_segments(first, last, ordering, dealing, source, factor, output, accumulate, by_count, scratch, like):
    """Sum the rows in the units ``first`` to ``last``.

    ``ordering`` is (address of the starts, address of the places or 0 where terms lie in order, rows,
    columns). ``dealing`` is (units for each part of the columns, columns of a part, the fewest and the most
    terms that a row of these units has). ``source`` is (address, kind, step from column to column, table of
    loops, address of each term's row or 0 where it is the term's own number). ``output`` is (address, kind,
    step from row to row, step from column to column). A sum is divided by the number of its terms if
    ``by_count`` is 1; or it is the address of what each is divided by, and 0 for nothing.
    """
    starts_at, places_at, rows, columns = ordering
    units, part, fewest, most = dealing
    out_at, out_kind, row_step, step = output
    starts, item = pointer(starts_at, np.int32), out_kind & ITEM_SIZE
    in_place = out_kind == item and step == 1 and not accumulate
    terms_end = np.int64(starts[rows])
    work, end = rows + terms_end, 0
    for unit in range(first, last):
        column = unit // units * part
        count = min(part, columns - column)
        share = unit % units
        begin = end if unit > first and share > 0 else _row_at(work * share // units, starts, rows)
        end = rows if share == units - 1 else _row_at(work * (share + 1) // units, starts, rows)
        for row in range(begin, end):
            low, high = np.int64(starts[row]), np.int64(starts[row + 1])
            if high - low < fewest or high - low > most:
                continue
            target = out_at + (row * row_step + column * step) * item
            total = target if in_place else scratch + _SUM * _RUN
            sum_row(low, high, terms_end, places_at, source, factor, column, count, total, scratch, like)
            sums = pointer(total, like)
            terms = np.int32(high - low)
            if by_count > 1:
                terms = pointer(by_count, np.int32)[row]
            if by_count != 0 and terms > 0:
                amount = terms + zero(like)
                for i in range(count):
                    sums[i] = sums[i] / amount
            if accumulate:
                raw, wide = scratch + _RAW * _RUN, scratch
                old = pointer(load_run(target, out_kind, step, count, raw, wide, like), like)
                for i in range(count):
                    sums[i] = old[i] + sums[i]
            store_run(total, count, target, out_kind, step, scratch + _RAW * _RUN, like)


class Ordering(NamedTuple):
    """Where the terms of each row are. ``heaviest`` is the most that a row has."""

    starts: int
    places: int
    rows: int
    terms: int
    heaviest: int


def add_up(
    out: torch.Tensor,
    ordering: Ordering,
    source: tuple[Any, ...],
    compute: Float,
    *,
    factor: tuple[int, int, int] = (PLAIN, 0, 0),
    accumulate: bool = False,
    by_count: int = 0,
) -> None:
    """Sum every row of ``out``, on as many threads as torch; ``by_count`` is that of ``sum_segments``."""
    rows, columns = out.shape
    order_of = (ordering.starts, ordering.places, rows, columns)
    output = (out.data_ptr(), kind(out.dtype, compute.torch), *out.stride())
    like = number(compute)

    def deal(units: int, parts: int, fewest: int, most: int, terms: int) -> None:
        part = -(-columns // (parts * 16)) * 16  # whole lines of the cache
        dealing = (units, part, fewest, most)

        def work(first: int, last: int) -> None:
            sum_segments(
                first, last, order_of, dealing, source, factor, output, accumulate, int(by_count),
                _SCRATCH.of_thread(), like,
            )  # fmt: skip

        parallel(work, units * -(-columns // part), terms * columns)

    threads, parts = torch.get_num_threads(), -(-columns // COLUMNS)
    share = (rows + ordering.terms) // threads
    deal(min(UNITS, rows), parts, int(accumulate), share, rows + ordering.terms)
    if ordering.heaviest > share:
        deal(1, max(parts, min(threads, -(-columns // 64))), share + 1, ordering.terms, ordering.terms)


@cache
def compile_for(compute: Float) -> None:
    """Compile the kernels for a compute type, by launches of nothing."""
    table, like = table_of((1,), (1,)), number(compute)
    compile_kernel(order, 0, 8, table, 0, -2, -1, 0, 0)
    source, output = (0, like.itemsize, 1, table, 0), (0, like.itemsize, 1, 1)
    compile_kernel(
        sum_segments,
        0,
        0,
        (0, 0, 0, 1),
        (1, 1, 0, 0),
        source,
        (PLAIN, 0, 0),
        output,
        False,
        0,
        _SCRATCH.of_thread(),
        like,
    )


class SegmentSum(IndexedKernel[IndexedDescriptor]):
    """``order``, then ``sum_segments``; for every plan that sums its terms by row."""

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
            ordering = ordered(indices, walk, desc.rows, starts, places, desc.padding)
            source = term_rows(terms, walk, desc.compute)
            add_up(out, ordering, source, desc.compute, accumulate=args.accumulate, by_count=desc.by_count)

        return launch


def raise_outside(indices: torch.Tensor, table: np.ndarray[Any, Any], rows: int) -> None:
    """Raise if an index names no row; ``table`` has the loops over the indices."""
    at, item = indices.data_ptr(), indices.element_size()
    place = first_outside(at, item, table, indices.numel(), rows)
    if place >= 0:
        raise BadIndex(rows).error(place, int(indices.reshape(-1)[place].item()))


def ordered(
    indices: torch.Tensor, walk: Space, rows: int, starts: int, places: int, padding: int = -1
) -> Ordering:
    """The places of ``indices`` by row; ``walk`` has their strides first."""
    table = table_of(walk.sizes, walk.strides[0])
    count, item = indices.numel(), indices.element_size()
    heaviest = order(indices.data_ptr(), item, table, count, rows, padding, starts, places)
    return Ordering(starts, places, rows, count, heaviest)


def term_rows(terms: torch.Tensor, walk: Space, compute: Float, rows_at: int = 0) -> tuple[Any, ...]:
    """The rows of ``terms`` as ``sum_segments`` takes them; ``walk`` has their strides second."""
    table = table_of(walk.sizes, walk.strides[1])
    return terms.data_ptr(), kind(terms.dtype, compute.torch), terms.stride(-1), table, rows_at
