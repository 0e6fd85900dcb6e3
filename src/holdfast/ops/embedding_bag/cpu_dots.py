"""Gradients of per-sample weights on the CPU: the dot product of a row of the table and a row of ``dout``.

A dot product is an ordered sum, chunk by chunk, so its additions depend on each other. Those of LANES indices
are computed together: a vector holds the sums of LANES indices, and a square of products, LANES columns of
LANES indices, is transposed before it is added.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import (
    compile_kernel,
    counted_loop,
    emit,
    kernel,
    pointer,
    prefetch_run,
    stack_slot,
    store_lanes,
)
from holdfast.numerics.cpu import load_real_lanes, store_real, zero
from holdfast.numerics.cpu_walk import size_of
from holdfast.ops.segment_sum import indexed

CHUNK = indexed.CHUNK
#: Most columns; more need another level of chunk sums.
MOST_COLUMNS = CHUNK * CHUNK
#: Indices, and columns, that are computed together.
_LANES = 8
#: Prefetch distance in indices.
_AHEAD = 16


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Emit the transposition of a square of vectors: each step interleaves the first half with the second."""
    half = _LANES // 2
    for _ in range(_LANES.bit_length() - 1):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [_interleaved(builder, a, b, part) for a, b in pairs for part in (0, half)]
    return rows


def _interleaved(builder: Any, a: Any, b: Any, first: int) -> Any:
    """Emit a vector of the elements of a and b, by turns, from element ``first`` on."""
    order = [place + part for place in range(first, first + _LANES // 2) for part in (0, _LANES)]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), order))


@emit
def _dot_products(typingctx, a, b, columns, out, stored):
    """Store LANES dot products to ``out``. ``a`` and ``b`` point to the addresses of the rows.

    ``stored`` is a value of the type of their elements: the compute type, or bits of bfloat16.
    """

    def build(context, builder, signature, args):
        a, b, columns, out, stored = args
        number, real = columns.type, out.type.pointee
        vector = ir.VectorType(real, _LANES)
        total, sums = (stack_slot(builder, vector) for _ in range(2))
        rows = [
            [
                builder.inttoptr(builder.load(builder.gep(addresses, [number(k)])), stored.type.as_pointer())
                for k in range(_LANES)
            ]
            for addresses in (a, b)
        ]

        def add(slot, value):
            builder.store(builder.fadd(builder.load(slot), value), slot)

        def products(column, lanes):
            loaded = ([load_real_lanes(builder, row, column, lanes, real) for row in side] for side in rows)
            return [builder.fmul(x, y) for x, y in zip(*loaded, strict=True)]

        builder.store(ir.Constant(vector, [0.0] * _LANES), total)
        chunks = builder.sdiv(builder.add(columns, number(CHUNK - 1)), number(CHUNK))
        with counted_loop(builder, chunks) as chunk:
            begin = builder.mul(chunk, number(CHUNK))
            rest = builder.sub(columns, begin)
            count = builder.select(builder.icmp_signed("<", rest, number(CHUNK)), rest, number(CHUNK))
            squares = builder.sdiv(count, number(_LANES))
            builder.store(ir.Constant(vector, [0.0] * _LANES), sums)
            with counted_loop(builder, squares) as square:
                column = builder.add(begin, builder.mul(square, number(_LANES)))
                for column_products in _transposed(builder, products(column, _LANES)):
                    add(sums, column_products)
            done = builder.mul(squares, number(_LANES))
            with counted_loop(builder, builder.sub(count, done)) as position:
                column = builder.add(builder.add(begin, done), position)
                column_products = ir.Constant(vector, ir.Undefined)
                for k, product in enumerate(products(column, 1)):
                    value = builder.extract_element(product, ir.IntType(32)(0))
                    column_products = builder.insert_element(column_products, value, ir.IntType(32)(k))
                add(sums, column_products)
            add(total, builder.load(sums))
        store_lanes(builder, builder.load(total), out, number(0))
        return context.get_dummy_value()

    return types.none(a, b, columns, out, stored), build


@kernel
def dot_rows(first, last, count, kept_at, bags_at, table, dout, columns, out_at, scratch, stored, like):
    """Gradients of the weights ``first`` to ``last`` of ``count``; +0 if an index is skipped or in no bag.

    ``table`` and ``dout`` are (address, row stride in bytes). ``scratch`` has room for ``3 * LANES`` numbers.
    """
    kept, bags, out = pointer(kept_at, np.int32), pointer(bags_at, np.int32), pointer(out_at, stored)
    a, b = pointer(scratch, np.int64), pointer(scratch + 8 * _LANES, np.int64)
    totals = pointer(scratch + 16 * _LANES, like)
    for begin in range(first, last, _LANES):
        for k in range(_LANES):
            n, later = min(begin + k, count - 1), min(begin + k + _AHEAD, count - 1)
            a[k] = table[0] + np.int64(max(kept[n], np.int32(0))) * table[1]
            b[k] = dout[0] + np.int64(max(bags[n], np.int32(0))) * dout[1]
            prefetch_run(table[0] + np.int64(kept[later]) * table[1], columns * size_of(stored))
        _dot_products(a, b, columns, totals, stored)
        for n in range(begin, min(begin + _LANES, last)):
            counts = kept[n] >= 0 and bags[n] >= 0
            store_real(out, n, totals[n - begin] if counts else zero(like))


@cache
def compile_dots(stored: Any, like: Any) -> None:
    """Compile ``dot_rows`` for a type of stored elements and a compute type."""
    compile_kernel(dot_rows, 0, 0, 0, 0, 0, (0, 0), (0, 0), 1, 0, 0, stored, like)
