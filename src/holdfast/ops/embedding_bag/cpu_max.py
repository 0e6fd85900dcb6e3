"""Maxima of bags on the CPU: the largest number of each column, or the position of its row.

The maxima of some columns stay in vector registers while the rows of a bag are compared with them, if the
rows of the table are contiguous. Otherwise each row is loaded to a scratch run.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import (
    LINE,
    compile_kernel,
    counted_loop,
    emit,
    jit,
    kernel,
    outlined,
    pointer,
    prefetch_line,
    splat,
    stack_slot,
    store_lanes,
)
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.core.dtypes import Float
from holdfast.numerics.cpu import BFLOAT16, ITEM_SIZE, load_real_lanes, zero
from holdfast.numerics.cpu_walk import load_run, number, size_of, store_run
from holdfast.ops.segment_sum.cpu import COLUMNS, RUN_BYTES

# Scratch runs: stored elements, a row in the compute type, the maxima, their positions; then their number.
_RAW, _ROW, _BEST, _FOUND, _RUNS = range(5)
_RUN = step_of(RUN_BYTES)
MAXIMA = Scratch("maxima", Runs(_RUNS, RUN_BYTES))
#: Prefetch distance in terms.
_AHEAD = 16


def _column_maxima(lanes: int) -> Any:
    """Make an intrinsic that stores the maxima of ``lanes`` columns of a bag, and their positions."""

    @emit
    def find(typingctx, table, row_step, kept, terms, best, found, column):
        """``table`` is a pointer to the rows; ``terms`` is (first, last, last of all bags)."""

        def build(context, builder, signature, args):
            table, row_step, kept, terms, best, found, column = args
            first, last, end = (builder.extract_value(terms, i) for i in range(3))
            count, real, place = column.type, best.type.pointee, found.type.pointee
            size = context.get_abi_sizeof(table.type.pointee)
            most, position = (stack_slot(builder, ir.VectorType(kind, lanes)) for kind in (real, place))
            builder.store(ir.Constant(most.type.pointee, [0.0] * lanes), most)
            builder.store(ir.Constant(position.type.pointee, [-1] * lanes), position)
            none = ir.Constant(position.type.pointee, [0] * lanes)
            final = builder.sub(end, count(1))

            def row_of(at):
                """Whether the row of a term counts, and a pointer to its columns."""
                row = builder.load(builder.gep(kept, [at]))
                counts = builder.icmp_signed(">=", row, place(0))
                row = builder.sext(builder.select(counts, row, place(0)), count)
                return counts, builder.gep(table, [builder.add(builder.mul(row, row_step), column)])

            with counted_loop(builder, builder.sub(last, first)) as term:
                at = builder.add(first, term)
                ahead = builder.add(at, count(_AHEAD))
                ahead = builder.select(builder.icmp_signed("<", ahead, final), ahead, final)
                later = row_of(ahead)[1]
                for part in range(0, lanes, LINE // size):
                    prefetch_line(builder, builder.gep(later, [count(part)]))
                counts, row = row_of(at)
                value, known = load_real_lanes(builder, row, count(0), lanes, real), builder.load(most)
                where = builder.load(position)
                is_first_nan = builder.and_(
                    builder.fcmp_unordered("uno", value, value), builder.fcmp_ordered("ord", known, known)
                )
                better = builder.or_(builder.fcmp_ordered(">", value, known), is_first_nan)
                better = builder.or_(better, builder.icmp_signed("<", where, none))
                better = builder.and_(better, splat(builder, counts, lanes))
                builder.store(builder.select(better, value, known), most)
                here = splat(builder, builder.trunc(at, place), lanes)
                builder.store(builder.select(better, here, where), position)
            store_lanes(builder, builder.load(most), best, column)
            store_lanes(builder, builder.load(position), found, column)
            return context.get_dummy_value()

        return types.none(table, row_step, kept, terms, best, found, column), build

    return find


_of_32_columns, _of_8_columns, _of_one_column = map(_column_maxima, (32, 8, 1))


@jit
def _maxima_of_rows(table, row_step, kept, terms, count, best, found):
    """The maxima of ``count`` columns of contiguous rows, and their positions."""
    outlined()
    column = 0
    while column + 32 <= count:
        _of_32_columns(table, row_step, kept, terms, best, found, column)
        column += 32
    while column + 8 <= count:
        _of_8_columns(table, row_step, kept, terms, best, found, column)
        column += 8
    while column < count:
        _of_one_column(table, row_step, kept, terms, best, found, column)
        column += 1


@jit
def _keep_best(row_at, place, count, best_at, found_at, like):
    outlined()
    row, best, found = pointer(row_at, like), pointer(best_at, like), pointer(found_at, np.int32)
    for i in range(count):
        value, most = row[i], best[i]
        better = found[i] < 0 or value > most or (value != value and most == most)
        best[i] = value if better else most
        found[i] = np.int32(place) if better else found[i]


@jit
def _maxima_of_bag(begin, end, kept, weight, column, count, scratch, like):
    """The maxima of ``count`` columns of rows with any layout, and their positions."""
    address, kind, row_step, step = weight
    best_at, found_at = scratch + _BEST * _RUN, scratch + _FOUND * _RUN
    best, found = pointer(best_at, like), pointer(found_at, np.int32)
    for i in range(count):
        best[i] = zero(like)
        found[i] = -1
    for n in range(begin, end):
        if kept[n] >= 0:
            offset = np.int64(kept[n]) * row_step + column * step
            row = load_run(
                address + offset * (kind & ITEM_SIZE), kind, step, count, scratch + _RAW * _RUN,
                scratch + _ROW * _RUN, like,
            )  # fmt: skip
            _keep_best(row, n, count, best_at, found_at, like)


@kernel
def max_bags(first, last, starts_at, kept_at, weight, rows, columns, output, chosen_at, scratch, like):
    """Maximum of each column in the bags ``first`` to ``last``; with ``chosen_at``, its position instead.

    ``weight`` and ``output`` are (address, kind, row stride, column stride). The table has ``rows`` rows.
    """
    weight_at, kind, row_step, step = weight
    out_at, out_kind, out_row, out_step = output
    starts, kept = pointer(starts_at, np.int32), pointer(kept_at, np.int32)
    best_at, found_at = scratch + _BEST * _RUN, scratch + _FOUND * _RUN
    best, found = pointer(best_at, like), pointer(found_at, np.int32)
    for bag in range(first, last):
        terms = np.int64(starts[bag]), np.int64(starts[bag + 1]), np.int64(starts[last])
        for column in range(0, columns, COLUMNS):
            count = min(COLUMNS, columns - column)
            begin = weight_at + column * (kind & ITEM_SIZE)
            if rows == 0:  # the vector kernels read row 0 for terms that are left out
                _maxima_of_bag(terms[0], terms[1], kept, weight, column, count, scratch, like)
            elif step == 1 and kind == size_of(like):
                _maxima_of_rows(pointer(begin, like), row_step, kept, terms, count, best, found)
            elif step == 1 and kind == BFLOAT16:
                _maxima_of_rows(pointer(begin, np.uint16), row_step, kept, terms, count, best, found)
            else:
                _maxima_of_bag(terms[0], terms[1], kept, weight, column, count, scratch, like)
            if chosen_at != 0:
                chosen = pointer(chosen_at + (bag * columns + column) * 4, np.int32)
                for i in range(count):
                    chosen[i] = found[i]
            else:
                target = out_at + (bag * out_row + column * out_step) * (out_kind & ITEM_SIZE)
                store_run(best_at, count, target, out_kind, out_step, scratch + _RAW * _RUN, like)


@cache
def compile_max(compute: Float) -> None:
    """Compile ``max_bags`` for a compute type."""
    rows = (0, 8, 0, 1)
    compile_kernel(max_bags, 0, 0, 0, 0, rows, 1, 1, rows, 0, MAXIMA.of_thread(), number(compute))
