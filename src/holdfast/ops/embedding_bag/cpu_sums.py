"""Sums and means of bags on the CPU, in one pass over the indices.

The sum of some columns of a bag stays in vector registers while the rows of the table are added to it. Rows
of later indices are prefetched. The order of additions is that of ``segment_sum``: chunks of CHUNK terms,
then the sums of the chunks. Longer bags than MOST_TERMS need more levels and are left to ``segment_sum``.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import (
    LINE,
    counted_loop,
    emit,
    fence,
    jit,
    kernel,
    numbers_of,
    outlined,
    pointer,
    prefetch_line,
    splat,
    stack_slot,
    take,
    team_kernel,
)
from holdfast.backends.private import TaskFunction, task_bytes, task_of
from holdfast.backends.threads import run_together
from holdfast.numerics.cpu import column_vectors, converts_float16, load_columns, store_columns
from holdfast.numerics.cpu_walk import number
from holdfast.ops.embedding_bag.plan import BagDescriptor, EmbeddingBagArgs, EmbeddingBagDescriptor
from holdfast.ops.segment_sum import indexed

CHUNK = indexed.CHUNK
#: Most terms of a bag.
MOST_TERMS = CHUNK * CHUNK
#: Prefetch distance in elements and its range in terms, and the level of the cache. Rows of a table that does
#: not fit into the caches take longer; more of them can be on the way to the second level.
_AHEAD, _TERMS_AHEAD, _LEVEL = 1024, (16, 64), 1
_FAR_AHEAD, _FAR_TERMS_AHEAD, _FAR_LEVEL = 4096, (32, 128), 2
#: Minimum bytes of a table whose rows are prefetched, and of a table that does not fit into the caches.
_NEAR_FROM, _FAR_FROM = 2**24, 2**26
#: Bags whose columns are summed before the next columns.
BATCH = 64
#: Ranges of bags per thread. A thread that ends a range takes the next one.
_RANGES = 4
#: Indices that a thread checks before it takes the next ones.
_CHECKED = 2**14
#: Minimum bytes of an output that is written with streaming stores: it does not stay in the caches anyway.
_STREAMED_FROM = 2**24

# A task of ``check_bags`` and ``sum_bags``: 22 numbers, of which the first 9 differ between calls. Then come
# values whose types are those of the elements of the table and the output (int16 for bits of float16, uint16
# for bits of bfloat16), of the indices, of the weights (int8 for no weights), and of the sums.
_NUMBERS, _VARIABLES, _NEXT, _SIMPLE = 22, 9, 0, 1
_Task = task_of(_NUMBERS + 4)


def _column_sums(columns: int) -> Any:
    """Make an intrinsic that sums ``columns`` columns of the rows of a bag, and stores the sum."""

    @emit
    def sum_columns(typingctx, table, indices, terms, weights, out, column, like):
        """``table`` is (pointer, row stride, rows, padding); ``indices`` is a pointer to all indices.

        ``terms`` is (first, last, number of all indices); ``weights`` is a pointer to the weights of all
        indices, or to int8 for none; ``out`` is (pointer to the row of the bag, 1 for the mean, 1 for
        streaming stores).
        """

        def build(context, builder, signature, args):
            table, indices, terms, weights, out, column, _ = args
            (table, row_step, rows, padding), (first, last, indices_count), (out, mean, streamed) = (
                [builder.extract_value(operand, i) for i in range(len(operand.type))]
                for operand in (table, terms, out)
            )
            size = context.get_abi_sizeof(table.type.pointee)
            if signature.args[0][0].dtype == types.int16:
                table, out, weights = (
                    builder.bitcast(elements, ir.HalfType().as_pointer())
                    if elements.type.pointee == ir.IntType(16)
                    else elements
                    for elements in (table, out, weights)
                )
            table, out = (builder.gep(elements, [column]) for elements in (table, out))
            count, real = column.type, args[-1].type
            zeros = [ir.Constant(kind, [0.0] * kind.count) for kind in column_vectors(table, columns, real)]
            lanes = zeros[0].type.count
            sums, chunk_sums = ([stack_slot(builder, zero.type) for zero in zeros] for _ in range(2))
            is_weighted = weights.type.pointee != ir.IntType(8)
            skipped = stack_slot(builder, count)
            builder.store(count(0), skipped)

            def index_at(place):
                return builder.sext(builder.load(builder.gep(indices, [place])), count)

            def row_of(index):
                return builder.gep(table, [builder.mul(index, row_step)])

            def is_kept(index):
                is_padding = builder.icmp_signed("==", index, padding)
                return builder.and_(builder.icmp_unsigned("<", index, rows), builder.not_(is_padding))

            row_bytes = builder.mul(row_step, count(size))
            either = builder.or_(builder.ptrtoint(table, count), row_bytes)
            is_ragged = builder.icmp_signed("!=", builder.and_(either, count(LINE - 1)), count(0))

            table_bytes = builder.mul(rows, row_bytes)
            is_near = builder.icmp_unsigned(">=", table_bytes, count(_NEAR_FROM))
            is_far = builder.icmp_unsigned(">=", table_bytes, count(_FAR_FROM))
            final = builder.sub(indices_count, count(1))

            def prefetch_after(place):
                """Prefetch the row of a later term, or of the last one, unless the table is small."""
                with builder.if_then(is_near):
                    prefetch_ahead(place)

            def prefetch_ahead(place):
                near = count(min(max(_AHEAD // columns, _TERMS_AHEAD[0]), _TERMS_AHEAD[1]))
                far = count(min(max(_FAR_AHEAD // columns, _FAR_TERMS_AHEAD[0]), _FAR_TERMS_AHEAD[1]))
                ahead = builder.add(place, builder.select(is_far, far, near))
                ahead = builder.select(builder.icmp_signed("<", ahead, final), ahead, final)
                row = row_of(index_at(ahead))
                with builder.if_else(is_far) as (far, near):
                    with far:
                        prefetch_columns(row, _FAR_LEVEL)
                    with near:
                        prefetch_columns(row, _LEVEL)

            def prefetch_columns(row, level):
                for at in range(0, columns, LINE // size):
                    prefetch_line(builder, builder.gep(row, [count(at)]), level)
                with builder.if_then(is_ragged):  # the columns end in one more cache line
                    prefetch_line(builder, builder.gep(row, [count(columns - 1)]), level)

            def add_to(slots, terms):
                for slot, term in zip(slots, terms, strict=True):
                    builder.store(builder.fadd(builder.load(slot), term), slot)

            def add_row(slots, place, index):
                terms = load_columns(builder, row_of(index), columns, real)
                if is_weighted:
                    (weight,) = load_columns(builder, builder.gep(weights, [place]), 1, real)
                    weight = splat(builder, builder.extract_element(weight, count(0)), lanes)
                    terms = [builder.fmul(term, weight) for term in terms]
                add_to(slots, terms)

            def clear(slots):
                for slot, zero in zip(slots, zeros, strict=True):
                    builder.store(zero, slot)

            def sum_chunk(begin, slots):
                rest = builder.sub(last, begin)
                whole = builder.icmp_signed(">", rest, count(CHUNK))
                clear(slots)
                with counted_loop(builder, builder.select(whole, count(CHUNK), rest)) as position:
                    place = builder.add(begin, position)
                    prefetch_after(place)
                    index = index_at(place)
                    with builder.if_else(is_kept(index), likely=True) as (kept, left_out):
                        with kept:
                            add_row(slots, place, index)
                        with left_out:
                            builder.store(builder.add(builder.load(skipped), count(1)), skipped)
                return builder.add(begin, count(CHUNK))

            def sum_all():
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
                store([builder.load(slot) for slot in sums])

            def store(totals, exact=False):
                with builder.if_else(builder.icmp_signed("!=", streamed, count(0))) as (streaming, storing):
                    with streaming:
                        store_columns(builder, totals, out, streamed=True, exact=exact)
                    with storing:
                        store_columns(builder, totals, out, exact=exact)

            if is_weighted:
                sum_all()
                return context.get_dummy_value()
            is_single = builder.icmp_signed("==", builder.sub(last, first), count(1))
            with builder.if_else(is_single) as (single, several):
                with single:  # its sum is exact, and so is its mean
                    prefetch_after(first)
                    index = index_at(first)
                    clear(sums)
                    with builder.if_then(is_kept(index), likely=True):
                        add_row(sums, first, index)
                    store([builder.load(slot) for slot in sums], exact=True)
                with several:
                    sum_all()
            return context.get_dummy_value()

        return types.none(table, indices, terms, weights, out, column, like), build

    return sum_columns


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


def _batch_sums(columns: int) -> Any:
    """Make a function that sums ``columns`` columns of a batch of bags."""
    sum_columns = _column_sums(columns)

    def sum_batch(first, last, rows, places, bags, factors, out, column, stored, like):
        """Sum the columns from ``column`` on of the bags ``first`` to ``last``, as ``_sum_range``.

        ``rows``, ``places`` and ``factors`` are ``table``, ``indices`` and ``weights`` of ``sum_columns``.
        """
        outlined()
        offsets, length, count = bags
        address, step, mean, streamed = out
        begin = begin_of(first, offsets, length, count)
        for bag in range(first, last):
            end = begin_of(bag + 1, offsets, length, count)
            target = (pointer(address + bag * step, stored), mean, streamed)
            sum_columns(rows, places, (begin, end, count), factors, target, column, like)
            begin = end

    return jit(sum_batch, name=f"sum_batch_{columns}")


_sum_128, _sum_64, _sum_32, _sum_16, _sum_8, _sum_4, _sum_1 = map(_batch_sums, (128, 64, 32, 16, 8, 4, 1))


@kernel
def check_offsets(offsets, count):
    """Position of the first wrong offset, -1 if there is none; and the length of the longest bag."""
    address, item, step, given = offsets
    if given > 0 and item == 8 and step == 1:  # this loop vectorises
        contiguous = pointer(address, np.int64)
        longest, least = count - contiguous[given - 1], np.int64(0)
        for entry in range(1, given):
            size = contiguous[entry] - contiguous[entry - 1]
            longest, least = max(longest, size), min(least, size)
        if least >= 0 and contiguous[0] == 0 and contiguous[given - 1] <= count:
            return -1, longest
    before, longest = 0, 0
    for entry in range(given):
        offset = load_offset(offsets, entry)
        if offset < before or offset > count or (entry == 0 and offset != 0):
            return entry, longest
        longest = max(longest, offset - before)
        before = offset
    return -1, max(longest, count - before)


@team_kernel(_NUMBERS)
def check_bags(task):
    """Set the number ``simple`` of the task to 0 if ``sum_bags`` cannot sum the bags.

    It can if the offsets are right, no bag is too long, and, with ``raises``, all indices are in range. The
    threads take ranges of indices; the thread that takes the first one also checks the offsets.
    """
    (
        _, _, _, _, indices, offsets, _, _, _, _, _, rows, _, _, count, item, step, given, length, _, _,
        raises, index,
    ) = task[0]  # fmt: skip
    numbers, places = numbers_of(task), pointer(indices, index)
    while True:
        first = take(numbers, _NEXT, _CHECKED)
        if first >= max(count, 1):
            break
        wrong, longest = -1, length
        if first == 0 and given > 0:
            wrong, longest = check_offsets((offsets, item, step, given), count)
        checked = min(_CHECKED, count - first) if raises != 0 else 0
        valid = 0
        for n in range(first, first + checked):
            valid += (places[n] >= 0) & (places[n] < rows)
        if wrong >= 0 or longest > MOST_TERMS or valid < checked:
            numbers[_SIMPLE] = 0
            break


@jit
def _sum_range(first, last, table, columns, indices, bags, weights, out, types_of):
    """Sum the bags ``first`` to ``last``.

    ``table`` is (address, row stride, rows, padding); ``bags`` is (offsets, length of a bag without offsets,
    number of indices) with ``offsets`` as in ``load_offset``; ``indices`` and ``weights`` are addresses;
    ``out`` is (address, row stride in bytes, 1 for the mean, 1 for streaming stores); ``types_of`` has a
    value of each type.
    """
    stored, index, weight, like = types_of
    rows = (pointer(table[0], stored), table[1], table[2], table[3])
    places, factors = pointer(indices, index), pointer(weights, weight)
    for batch in range(first, last, BATCH):
        end, column = min(batch + BATCH, last), 0
        while column < columns:
            width = _width_of(columns - column, columns)
            column = min(column, columns - width)  # some columns are summed twice, with equal results
            if width == 128:
                _sum_128(batch, end, rows, places, bags, factors, out, column, stored, like)
            elif width == 64:
                _sum_64(batch, end, rows, places, bags, factors, out, column, stored, like)
            elif width == 32:
                _sum_32(batch, end, rows, places, bags, factors, out, column, stored, like)
            elif width == 16:
                _sum_16(batch, end, rows, places, bags, factors, out, column, stored, like)
            elif width == 8:
                _sum_8(batch, end, rows, places, bags, factors, out, column, stored, like)
            elif width == 4:
                _sum_4(batch, end, rows, places, bags, factors, out, column, stored, like)
            else:
                _sum_1(batch, end, rows, places, bags, factors, out, column, stored, like)
            column += width


@jit
def _width_of(rest, columns):
    """How many of ``columns`` columns are summed next, if ``rest`` are left.

    The fewest that cover the rest, if there are so many columns; else the most there are.
    """
    width = 128
    for smaller in (64, 32, 16, 8, 4):
        if width > columns or smaller >= rest:
            width = smaller
    return width if width <= columns else 1


@team_kernel(_NUMBERS)
def sum_bags(task):
    """Take ranges of bags and sum them, until no range is left."""
    (
        _, _, out, table, indices, offsets, weights, streamed, share, bags, row_step, rows, padding, columns,
        count, item, step, given, length, out_step, mean, _, stored, index, weight, like,
    ) = task[0]  # fmt: skip
    while True:
        first = take(numbers_of(task), _NEXT, share)
        if first >= bags:
            break
        _sum_range(
            first, min(first + share, bags), (table, row_step, rows, padding), columns, indices,
            ((offsets, item, step, given), length, count), weights, (out, out_step, mean, streamed),
            (stored, index, weight, like),
        )  # fmt: skip
    fence()


def element_of(desc: BagDescriptor) -> Any:
    """A value of the type in which kernels read elements in place, bits for bfloat16; None if they cannot."""
    if desc.dtype == desc.compute.torch:
        return number(desc.compute)
    return np.uint16(0) if desc.dtype == torch.bfloat16 else None


def types_of(desc: EmbeddingBagDescriptor, *, widened: bool = False) -> tuple[Any, ...] | None:
    """Values of the types that ``sum_bags`` works with; None if it does not serve this descriptor.

    ``widened``: the weights of samples are in the compute type.
    """
    stored, like = element_of(desc), number(desc.compute)
    if desc.dtype == torch.float16 and converts_float16():
        stored = np.int16(0)
    if desc.mode == "max" or stored is None:
        return None
    index = np.int32(0) if desc.index_dtype == torch.int32 else np.int64(0)
    weight = (like if widened else stored) if desc.per_sample_weights else np.int8(0)
    return stored, index, weight, like


def compile_sums(kinds: tuple[Any, ...]) -> tuple[TaskFunction, TaskFunction]:
    """``check_bags`` and ``sum_bags``, compiled for these types."""
    return check_bags.compiled(kinds[1]), sum_bags.compiled(*kinds)


class OnePass:
    """``check_bags`` and ``sum_bags`` for tensors like ``args``; ``kinds`` is found by ``types_of``."""

    def __init__(self, desc: EmbeddingBagDescriptor, args: EmbeddingBagArgs, kinds: tuple[Any, ...]) -> None:
        self._check, self._sum = compile_sums(kinds)
        self._bags, self._elements = desc.bags, desc.count * desc.columns
        self._checked = desc.count if desc.bad_index == "raise" else 0
        offsets, out_step = args.offsets, args.out.stride(0) * args.out.element_size()
        layout = (8, 1, 0) if offsets is None else (offsets.element_size(), offsets.stride(0), len(offsets))
        self._constants = task_bytes(
            *[0] * _VARIABLES, desc.bags, args.weight.stride(0), desc.rows, desc.padding, desc.columns,
            desc.count, *layout, desc.length, out_step, desc.mode == "mean", desc.bad_index == "raise",
            *[0] * len(kinds),
        )  # fmt: skip
        aligned = out_step % LINE == 0 and desc.columns * desc.dtype.itemsize % LINE == 0
        self._large = aligned and args.out.nbytes >= _STREAMED_FROM

    def run(
        self, stream: int, workspace: int, out: int, table: int, indices: int, offsets: int, weights: int
    ) -> bool:
        """Sum the bags of tensors at these addresses. Returns False, and writes nothing, if it cannot."""
        share = max(1, -(-self._bags // (_RANGES * torch.get_num_threads())))
        streamed = self._large and out % LINE == 0
        task = _Task.from_buffer_copy(self._constants)
        task[_SIMPLE:_VARIABLES] = (1, out, table, indices, offsets, weights, streamed, share)
        run_together(self._check, task, self._checked)
        if task[_SIMPLE]:
            task[_NEXT] = 0
            run_together(self._sum, task, self._elements)
        return bool(task[_SIMPLE])
