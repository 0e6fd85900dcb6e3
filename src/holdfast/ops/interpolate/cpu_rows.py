"""interpolate on the CPU: sums over x of several input rows at once, where they have many taps.

The rows are interleaved: a column of them is one vector, with a lane for each row. A sum over x is then a sum
of vectors, and its taps are added in their order.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from numba import types

from holdfast.backends.cpu import (
    clear,
    counted_loop,
    emit,
    jit,
    load_lanes,
    outlined,
    pointer,
    splat,
    stack_slot,
    store_lanes,
)
from holdfast.numerics.cpu import ITEM_SIZE
from holdfast.numerics.cpu_walk import RUN, load_run, size_of
from holdfast.ops.interpolate.cpu_task import COUNT, FIRST, START
from holdfast.ops.interpolate.tables import Table

#: Rows that are summed at once, and the minimum number for which this is faster.
LANES, FEWEST = 8, 3
#: Planes of a volume whose sums over x are kept.
PLANES = 4
#: Maximum number of taps, and minimum number of elements that have as many, that are faster row by row.
_FEW_TAPS, _ALIKE = 4, 8


def serves(of_x: Table, of_y: Table, of_z: Table) -> bool:
    """Whether sums over x have many taps or varying numbers of taps, and all rows of a plane are read.

    Rows are summed before they are read, so the sums of all planes that an output row reads must be kept.
    """
    every_row = (of_y.first[1:] <= (of_y.first + of_y.count)[:-1]).all()
    varies = np.count_nonzero(np.diff(of_x.count)) * _ALIKE > len(of_x.count)
    return bool((of_x.usual > _FEW_TAPS or varies) and every_row and of_z.most <= PLANES)


@emit
def _add_products(typingctx, values, weights, place, start, taps, sums, element, is_first):
    """Add the products of ``taps`` columns and weights to the vector of sums of an element, in order.

    The first column is ``values[place]``, and its weight ``weights[start]``. ``is_first``: the sum starts
    with the first product.
    """

    def build(context, builder, signature, args):
        values, weights, place, start, taps, sums, element, is_first = args
        number, target = taps.type, builder.mul(element, element.type(LANES))

        def product(tap):
            weight = builder.load(builder.gep(weights, [builder.add(start, tap)]))
            column = builder.mul(builder.add(place, tap), number(LANES))
            return builder.fmul(splat(builder, weight, LANES), load_lanes(builder, values, column, LANES))

        first = product(number(0))
        total = stack_slot(builder, first.type)
        before = builder.fadd(load_lanes(builder, sums, target, LANES), first)
        builder.store(builder.select(is_first, first, before), total)
        with counted_loop(builder, builder.sub(taps, number(1))) as tap:
            term = product(builder.add(tap, number(1)))
            builder.store(builder.fadd(builder.load(total), term), total)
        store_lanes(builder, builder.load(total), sums, target)
        return context.get_dummy_value()

    return types.none(values, weights, place, start, taps, sums, element, is_first), build


@jit
def sum_rows(
    line, row_bytes, rows, source, begin, count, spans, weights_at, raw, wide, columns_at, sums_at, like
):
    """Sums over x of elements ``begin`` to ``begin + count`` of ``rows`` rows; the first is at ``line``.

    The sums of an element are a vector of LANES, one for each row. ``columns_at`` is scratch of RUN vectors.
    """
    outlined()
    kind, step, size = source[1], source[6], size_of(like)
    end, origin = begin + count, spans[FIRST][begin]
    last = spans[FIRST][end - 1] + spans[COUNT][end - 1]
    columns, sums, weights = pointer(columns_at, like), pointer(sums_at, like), pointer(weights_at, like)
    clear(sums_at, count * LANES * size)
    low = begin
    for piece in range(origin, last, RUN):
        width = min(RUN, last - piece)
        at = line + piece * step * (kind & ITEM_SIZE)
        for row in range(rows):
            values = pointer(load_run(at + row * row_bytes, kind, step, width, raw, wide, like), like)
            for column in range(width):
                columns[LANES * column + row] = values[column]
        while low < end and spans[FIRST][low] + spans[COUNT][low] <= piece:
            low += 1
        i = low
        while i < end and spans[FIRST][i] < piece + width:
            first = spans[FIRST][i]
            tap = max(first, piece)
            taps = min(first + spans[COUNT][i], piece + width) - tap
            if taps > 0:
                start = spans[START][i] + (tap - first)
                _add_products(columns, weights, tap - piece, start, taps, sums, i - begin, tap == first)
            i += 1


@jit
def take_row(sums_at, row, count, row_at, like):
    """Copy the sums of one row out of those of ``sum_rows``."""
    sums, target = pointer(sums_at, like), pointer(row_at, like)
    for i in range(count):
        target[i] = sums[LANES * i + row]
