"""Sums and means of bags on the CPU, in one pass over the indices.

The sum of some columns of a bag stays in vector registers while the rows of the table are added to it. Rows
of later indices are prefetched. The order of additions is that of ``segment_sum``: chunks of CHUNK terms,
then the sums of the chunks. Longer bags than MOST_TERMS need more levels and are left to ``segment_sum``.
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
    pointer,
    prefetch_line,
    splat,
    stack_slot,
)
from holdfast.numerics.cpu import load_real_lanes, store_real_lanes
from holdfast.ops.segment_sum import indexed

CHUNK = indexed.CHUNK
#: Most terms of a bag.
MOST_TERMS = CHUNK * CHUNK
#: Columns of a vector.
_LANES = 16
#: Prefetch distance in terms.
_AHEAD = 32
#: Bags whose columns are summed before the next columns.
BATCH = 64


def _column_sums(vectors: int, lanes: int) -> Any:
    """Make an intrinsic that sums ``vectors * lanes`` columns of the rows of a bag, and stores the sum."""

    @emit
    def sum_columns(typingctx, table, indices, terms, weights, out, column, like):
        """``table`` is (pointer, row stride, rows, padding); ``indices`` is a pointer to all indices.

        ``terms`` is (first, last, distance of the index to prefetch); ``weights`` is a pointer to the weights
        of all indices, or to integers for none; ``out`` is (pointer to the row of the bag, 1 for the mean).
        """

        def build(context, builder, signature, args):
            table, indices, terms, weights, out, column, _ = args
            (table, row_step, rows, padding), (first, last, distance), (out, mean) = (
                [builder.extract_value(operand, i) for i in range(len(operand.type))]
                for operand in (table, terms, out)
            )
            table, out = (builder.gep(elements, [column]) for elements in (table, out))
            count, real = column.type, args[-1].type
            size = context.get_abi_sizeof(table.type.pointee)
            vector = ir.VectorType(real, lanes)
            sums, chunk_sums = ([stack_slot(builder, vector) for _ in range(vectors)] for _ in range(2))
            skipped = stack_slot(builder, count)
            builder.store(count(0), skipped)

            def index_at(place):
                return builder.sext(builder.load(builder.gep(indices, [place])), count)

            def row_of(index):
                return builder.gep(table, [builder.mul(index, row_step)])

            def prefetch(row):
                for at in range(0, vectors * lanes, LINE // size):
                    prefetch_line(builder, builder.gep(row, [count(at)]), level=2)

            def add_to(slots, terms):
                for slot, term in zip(slots, terms, strict=True):
                    builder.store(builder.fadd(builder.load(slot), term), slot)

            def add_row(slots, place, index):
                row = row_of(index)
                terms = [load_real_lanes(builder, row, count(i * lanes), lanes, real) for i in range(vectors)]
                if weights.type.pointee == real:
                    weight = splat(builder, builder.load(builder.gep(weights, [place])), lanes)
                    terms = [builder.fmul(term, weight) for term in terms]
                add_to(slots, terms)

            def skip():
                builder.store(builder.add(builder.load(skipped), count(1)), skipped)

            def sum_chunk(begin, slots):
                rest = builder.sub(last, begin)
                whole = builder.icmp_signed(">", rest, count(CHUNK))
                for slot in slots:
                    builder.store(ir.Constant(vector, [0.0] * lanes), slot)
                with counted_loop(builder, builder.select(whole, count(CHUNK), rest)) as position:
                    place = builder.add(begin, position)
                    prefetch(row_of(index_at(builder.add(place, distance))))
                    index = index_at(place)
                    valid = builder.icmp_unsigned("<", index, rows)
                    with builder.if_else(valid, likely=True) as (inside, outside):
                        with inside:
                            is_padding = builder.icmp_signed("==", index, padding)
                            with builder.if_else(is_padding, likely=False) as (padded, kept):
                                with padded:
                                    skip()
                                with kept:
                                    add_row(slots, place, index)
                        with outside:
                            skip()
                return builder.add(begin, count(CHUNK))

            after_first = sum_chunk(first, sums)
            more = builder.sub(builder.add(last, count(CHUNK - 1)), after_first)
            with counted_loop(builder, builder.ashr(more, count(CHUNK.bit_length() - 1))) as chunk:
                sum_chunk(builder.add(after_first, builder.mul(chunk, count(CHUNK))), chunk_sums)
                add_to(sums, [builder.load(slot) for slot in chunk_sums])
            with builder.if_then(builder.icmp_signed("!=", mean, count(0))):
                terms = builder.sub(builder.sub(last, first), builder.load(skipped))
                amount = builder.select(builder.icmp_signed(">", terms, count(1)), terms, count(1))
                amount = splat(builder, builder.sitofp(amount, real), lanes)
                for slot in sums:
                    builder.store(builder.fdiv(builder.load(slot), amount), slot)
            for i, slot in enumerate(sums):
                store_real_lanes(builder, builder.load(slot), out, count(i * lanes))
            return context.get_dummy_value()

        return types.none(table, indices, terms, weights, out, column, like), build

    return sum_columns


_sum_8, _sum_4, _sum_2, _sum_1 = (_column_sums(vectors, _LANES) for vectors in (8, 4, 2, 1))
_sum_column = _column_sums(1, 1)


@jit
def load_offset(offsets, entry):
    """An offset as int64. ``offsets`` is (address, item size, stride, count)."""
    address, item, step, _ = offsets
    if item == 4:
        return np.int64(pointer(address, np.int32)[entry * step])
    return pointer(address, np.int64)[entry * step]


@jit
def begin_of(bag, offsets, length, count):
    """Begin of a bag, which is the end of the bag before. With no offsets, bags have ``length`` indices."""
    if offsets[3] == 0:
        return bag * length
    return load_offset(offsets, bag) if bag < offsets[3] else count


@kernel
def sum_bags(first, last, table, columns, indices, offsets, length, weights, out, mean, scratch, types_of):
    """Sum the bags ``first`` to ``last``.

    ``table`` is (address, row stride, rows, padding); ``indices`` is (address, count); ``offsets`` is
    (address, item size, stride, count); ``weights`` is an address; ``out`` is (address, row stride in bytes).
    ``scratch`` has room for ``BATCH + 1`` integers. ``types_of`` has a value of each type: of the elements of
    the table and the output, of the indices, of the weights (an integer for no weights), and of the sums.
    """
    stored, index, weight, like = types_of
    address, count = indices
    rows = (pointer(table[0], stored), table[1], table[2], table[3])
    places, factors, begins = pointer(address, index), pointer(weights, weight), pointer(scratch, np.int64)
    for batch in range(first, last, BATCH):
        size = min(BATCH, last - batch)
        for i in range(size + 1):
            begins[i] = begin_of(batch + i, offsets, length, count)
        distance = _AHEAD if begins[size] + _AHEAD <= count else 0
        column = 0
        while column < columns:
            rest = columns - column
            if rest < _LANES < columns:  # some columns are summed twice, with equal results
                column, rest = columns - _LANES, _LANES
            for i in range(size):
                terms = (begins[i], begins[i + 1], distance)
                target = (pointer(out[0] + (batch + i) * out[1], stored), mean)
                if rest >= 8 * _LANES:
                    _sum_8(rows, places, terms, factors, target, column, like)
                elif rest >= 4 * _LANES:
                    _sum_4(rows, places, terms, factors, target, column, like)
                elif rest >= 2 * _LANES:
                    _sum_2(rows, places, terms, factors, target, column, like)
                elif rest >= _LANES:
                    _sum_1(rows, places, terms, factors, target, column, like)
                else:
                    _sum_column(rows, places, terms, factors, target, column, like)
            for lanes in (8 * _LANES, 4 * _LANES, 2 * _LANES, _LANES, 1):
                if rest >= lanes:
                    column += lanes
                    break


@cache
def compile_sums(types_of: tuple[Any, ...]) -> None:
    """Compile ``sum_bags`` for these types."""
    empty = (0, 0, (0, 1, 0, -1), 1, (0, 0), (0, 8, 1, 0), 1, 0, (0, 1), 0, 0)
    compile_kernel(sum_bags, *empty, types_of)
