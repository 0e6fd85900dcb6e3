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
#: Prefetch distance in bytes of columns, and its range in terms. A longer distance costs more than it gains:
#: each row is in another page, and processors keep 64 or 72 addresses of pages at hand.
_AHEAD, _TERMS_AHEAD = 2**13, (16, 24)
#: Minimum bytes of a table whose rows are prefetched. Wide columns of a larger table are prefetched to the
#: second level of the caches only.
_PREFETCHED_FROM, _FAR_FROM, _FAR_COLUMNS = 2**20, 2**24, 256
#: Bags whose columns are summed before the next columns.
BATCH = 64
#: Ranges of bags per thread. A thread that ends a range takes the next one.
_RANGES = 4
#: Minimum bytes of an output that is written with streaming stores: it does not stay in the caches anyway.
_STREAMED_FROM = 2**24

# A task of ``sum_bags``: 23 numbers, of which the first 10 differ between calls. Then come values whose types
# are those of the elements of the table and the output (int16 for bits of float16, uint16 for bits of
# bfloat16), of the indices, of the weights (int8 for no weights), and of the sums.
_NUMBERS, _VARIABLES, _NEXT, _SIMPLE, _STEPS = 23, 10, 0, 1, 2
#: What ``sum_bags`` does with each batch of bags.
_CHECKS, _SUMS = 1, 2
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
            is_prefetched = builder.icmp_unsigned(">=", table_bytes, count(_PREFETCHED_FROM))
            is_far = builder.icmp_unsigned(">=", table_bytes, count(_FAR_FROM))
            distance = count(min(max(_AHEAD // (columns * size), _TERMS_AHEAD[0]), _TERMS_AHEAD[1]))
            final = builder.sub(indices_count, count(1))

            def prefetch_after(place):
                """Prefetch the row of a later term, or of the last one, unless the table is small."""
                with builder.if_then(is_prefetched):
                    ahead = builder.add(place, distance)
                    ahead = builder.select(builder.icmp_signed("<", ahead, final), ahead, final)
                    row = row_of(index_at(ahead))
                    if columns * size < _FAR_COLUMNS:
                        prefetch_columns(row, 1)
                        return
                    with builder.if_else(is_far) as (far, near):
                        with far:
                            prefetch_columns(row, 2)
                        with near:
                            prefetch_columns(row, 1)

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
        """Sum the columns from ``column`` on of the bags ``first`` to ``last``, as ``_sum_batch``."""
        outlined()
        offsets, length, count, _ = bags
        address, step, mean, streamed = out
        begin = begin_of(first, offsets, length, count)
        for bag in range(first, last):
            end = begin_of(bag + 1, offsets, length, count)
            target = (pointer(address + bag * step, stored), mean, streamed)
            sum_columns(rows, places, (begin, end, count), factors, target, column, like)
            begin = end

    return jit(sum_batch, name=f"sum_batch_{columns}")


_sum_128, _sum_64, _sum_32, _sum_16, _sum_8, _sum_4, _sum_1 = map(_batch_sums, (128, 64, 32, 16, 8, 4, 1))


@jit
def _sizes_of(first, last, bags):
    """The smallest and the largest size of the bags ``first`` to ``last``; negative if offsets descend."""
    offsets, length, count, _ = bags
    address, item, step, given = offsets
    least, most = np.int64(MOST_TERMS), np.int64(0)
    if item == 8 and step == 1 and last < given:  # this loop vectorises
        contiguous = pointer(address, np.int64)
        for bag in range(first, last):
            size = contiguous[bag + 1] - contiguous[bag]
            least, most = min(least, size), max(most, size)
        return least, most
    begin = begin_of(first, offsets, length, count)
    for bag in range(first, last):
        end = begin_of(bag + 1, offsets, length, count)
        least, most = min(least, end - begin), max(most, end - begin)
        begin = end
    return least, most


@kernel
def check_offsets(offsets, count):
    """Position of the first wrong offset, -1 if there is none; and the length of the longest bag."""
    given = offsets[3]
    if given > 0:
        last = load_offset(offsets, given - 1)
        least, longest = _sizes_of(0, given - 1, (offsets, np.int64(0), count, given))
        # A longest bag of more indices than there are may be a difference that overflowed.
        if least >= 0 and longest <= count and load_offset(offsets, 0) == 0 and last <= count:
            return -1, max(longest, count - last)
    before, longest = 0, 0
    for entry in range(given):
        offset = load_offset(offsets, entry)
        if offset < before or offset > count or (entry == 0 and offset != 0):
            return entry, longest
        longest = max(longest, offset - before)
        before = offset
    return -1, max(longest, count - before)


@jit
def _is_simple(first, last, places, bags, rows, raises):
    """Whether the bags ``first`` to ``last`` can be summed by ``_sum_batch``, with ``bags`` as for it.

    They can if their offsets are right, no bag is too long and, with ``raises``, all indices are in range.
    With the last bag come the indices behind it, which are in no bag.
    """
    outlined()
    offsets, length, count, number = bags
    begin, end = begin_of(first, offsets, length, count), begin_of(last, offsets, length, count)
    least, most = _sizes_of(first, last, bags)
    if least < 0 or most > MOST_TERMS or begin < 0 or end > count or (first == 0 and begin != 0):
        return False
    end = count if last == number else end
    if raises == 0 or begin == end:
        return True
    largest = np.uint64(0)
    for n in range(begin, end):  # this loop vectorises; negative indices are large unsigned numbers
        largest = max(largest, np.uint64(np.int64(places[n])))
    return largest < np.uint64(rows)


@jit
def _sum_batch(first, last, rows, columns, places, bags, factors, out, types_of):
    """Sum the bags ``first`` to ``last``.

    ``rows`` is (pointer to the table, row stride, rows, padding). ``bags`` is (offsets, length of a bag
    without offsets, number of indices, number of bags) with ``offsets`` as in ``load_offset``. ``places`` and
    ``factors`` are pointers to all indices and weights. ``out`` is (address, row stride in bytes, 1 for the
    mean, 1 for streaming stores). ``types_of`` has a value of the type of the elements and of the sums.
    """
    stored, like = types_of
    column = 0
    while column < columns:
        width = _width_of(columns - column, columns)
        column = min(column, columns - width)  # some columns are summed twice, with equal results
        if width == 128:
            _sum_128(first, last, rows, places, bags, factors, out, column, stored, like)
        elif width == 64:
            _sum_64(first, last, rows, places, bags, factors, out, column, stored, like)
        elif width == 32:
            _sum_32(first, last, rows, places, bags, factors, out, column, stored, like)
        elif width == 16:
            _sum_16(first, last, rows, places, bags, factors, out, column, stored, like)
        elif width == 8:
            _sum_8(first, last, rows, places, bags, factors, out, column, stored, like)
        elif width == 4:
            _sum_4(first, last, rows, places, bags, factors, out, column, stored, like)
        else:
            _sum_1(first, last, rows, places, bags, factors, out, column, stored, like)
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
    """Take ranges of bags, check and sum them in batches, until no range is left.

    If a batch cannot be summed, the number ``simple`` of the task becomes 0, and the batch is left out.
    """
    (
        _, _, steps, out, table, indices, offsets, weights, streamed, share, number, row_step, rows, padding,
        columns, count, item, step, given, length, out_step, mean, raises, stored, index, weight, like,
    ) = task[0]  # fmt: skip
    numbers = numbers_of(task)
    of_table = (pointer(table, stored), row_step, rows, padding)
    places, factors = pointer(indices, index), pointer(weights, weight)
    bags = ((offsets, item, step, given), length, count, number)
    while True:
        first = take(numbers, _NEXT, share)
        if first >= number:
            break
        last = min(first + share, number)
        for batch in range(first, last, BATCH):
            end = min(batch + BATCH, last)
            if steps & _CHECKS and not _is_simple(batch, end, places, bags, rows, raises):
                numbers[_SIMPLE] = 0
            elif steps & _SUMS:
                _sum_batch(
                    batch, end, of_table, columns, places, bags, factors, (out, out_step, mean, streamed),
                    (stored, like),
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


def compile_sums(kinds: tuple[Any, ...]) -> TaskFunction:
    """``sum_bags``, compiled for these types."""
    return sum_bags.compiled(*kinds)


class OnePass:
    """``sum_bags`` for tensors like ``args``; ``kinds`` is found by ``types_of``."""

    def __init__(self, desc: EmbeddingBagDescriptor, args: EmbeddingBagArgs, kinds: tuple[Any, ...]) -> None:
        self._sum = compile_sums(kinds)
        self._bags, self._elements = desc.bags, desc.count * desc.columns
        self._count = desc.count
        offsets, out_step = args.offsets, args.out.stride(0) * args.out.element_size()
        layout = (8, 1, 0) if offsets is None else (offsets.element_size(), offsets.stride(0), len(offsets))
        self._constants = task_bytes(
            *[0] * _VARIABLES, desc.bags, args.weight.stride(0), desc.rows, desc.padding, desc.columns,
            desc.count, *layout, desc.length, out_step, desc.mode == "mean", desc.bad_index == "raise",
            *[0] * len(kinds),
        )  # fmt: skip
        aligned = out_step % LINE == 0 and desc.columns * desc.dtype.itemsize % LINE == 0
        self._large = aligned and args.out.nbytes >= _STREAMED_FROM

    def run(self, *addresses: int) -> bool:
        """Sum the bags of tensors at these addresses. Returns False, and writes nothing, if it cannot."""
        return self._run(_CHECKS, self._count, *addresses) and self._run(_SUMS, self._elements, *addresses)

    def run_at_once(self, stream: int, workspace: int, *addresses: int) -> bool:
        """``run`` in one pass over the indices. If it returns False, some bags may have been written."""
        return self._run(_CHECKS | _SUMS, self._elements, *addresses)

    def _run(
        self, steps: int, work: int, out: int, table: int, indices: int, offsets: int, weights: int
    ) -> bool:
        share = max(1, -(-self._bags // (_RANGES * torch.get_num_threads())))
        streamed = self._large and out % LINE == 0
        task = _Task.from_buffer_copy(self._constants)
        task[_SIMPLE:_VARIABLES] = (1, steps, out, table, indices, offsets, weights, streamed, share)
        run_together(self._sum, task, work)
        return bool(task[_SIMPLE])
