"""embedding_bag on the CPU.

One pass over the indices finds the row and the bag of each. Forward sums bags as segments whose terms are
rows of the table. The gradient of the table is a segment sum whose terms are rows of ``dout``, selected by
bag. The gradient of a mean is divided once per bag, before the sum.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, jit, kernel, outlined, pointer
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import Region, WorkspaceLayout, first_address
from holdfast.numerics.cpu import ITEM_SIZE, kind, zero
from holdfast.numerics.cpu_walk import load_run, number, offset_of, store_run, table_of
from holdfast.ops.embedding_bag.cpu_dots import MOST_COLUMNS, compile_dots, dot_rows
from holdfast.ops.embedding_bag.cpu_sums import (
    OnePass,
    begin_of,
    check_offsets,
    compile_sums,
    element_of,
    types_of,
)
from holdfast.ops.embedding_bag.plan import (
    BadOffset,
    BagDescriptor,
    EmbeddingBagArgs,
    EmbeddingBagBackwardArgs,
    EmbeddingBagBackwardDescriptor,
    EmbeddingBagDescriptor,
)
from holdfast.ops.segment_sum import indexed
from holdfast.ops.segment_sum.cpu import (
    CHOSEN,
    COLUMNS,
    LEVELS,
    PLAIN,
    RUN_BYTES,
    TIMES,
    Ordering,
    compile_for,
    launch_sums,
    load_index,
    raise_outside,
    sort_by_row,
)
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops

CHUNK = indexed.CHUNK
# Scratch runs: stored elements, two rows in the compute type, the maxima, their positions; then their number.
_RAW, _ROW, _OTHER, _BEST, _FOUND, _RUNS = 0, 1, 2, 3, 4, 5
_RUN = step_of(RUN_BYTES)
_SCRATCH = Scratch("embedding_bag", Runs(_RUNS, RUN_BYTES))

#: Offsets as an operand of kernels: (address, item size, stride, count).
Offsets = tuple[int, int, int, int]


@jit
def _find_rows(first, last, bag, indices, table, rows, padding, kept_at, bags_at):
    """Store the row of the indices ``first`` to ``last``, or -1 if skipped, and their bag.

    Returns how many are not skipped, and whether all are in range.
    """
    address, item, _ = indices
    kept, bag_of = pointer(kept_at, np.int32), pointer(bags_at, np.int32)
    in_range = counted = 0
    if item == 8 and table.shape[1] == 1 and table[1, 0] == 1:  # this loop vectorises
        contiguous = pointer(address, np.int64)
        for n in range(first, last):
            index = contiguous[n]
            valid = (index >= 0) & (index < rows)
            counts = valid & (index != padding)
            kept[n] = np.int32(index) if counts else np.int32(-1)
            in_range += valid
            counted += counts
    else:
        for n in range(first, last):
            index = load_index(address, item, n, table)
            valid = index >= 0 and index < rows
            counts = valid and index != padding
            kept[n] = np.int32(index) if counts else np.int32(-1)
            in_range += valid
            counted += counts
    if bags_at != 0:
        for n in range(first, last):
            bag_of[n] = bag
    return counted, in_range == last - first


@kernel
def find_bags(
    first, last, indices, table, offsets, bags, length, rows, padding, starts_at, kept_at, bags_at, counts_at
):
    """For the bags ``first`` to ``last``: store their begin and count, and the row and bag of each index.

    ``indices`` is (address, item size, count); ``offsets`` is (address, item size, stride, count). A skipped
    index has row -1; an index in no bag has bag -1. ``bags_at`` is 0 if the bag of each index is not needed.
    Returns whether all indices are in range.
    """
    starts, counts = pointer(starts_at, np.int32), pointer(counts_at, np.int32)
    all_valid = True
    for bag in range(first, last):
        begin, end = (
            begin_of(bag, offsets, length, indices[2]),
            begin_of(bag + 1, offsets, length, indices[2]),
        )
        starts[bag] = begin
        counts[bag], valid = _find_rows(begin, end, bag, indices, table, rows, padding, kept_at, bags_at)
        all_valid &= valid
    if last == bags:
        end = begin_of(bags, offsets, length, indices[2])
        starts[bags] = end
        _, valid = _find_rows(end, indices[2], np.int64(-1), indices, table, rows, padding, kept_at, bags_at)
        all_valid &= valid
    return all_valid


@jit
def _keep_best(row_at, place, count, best_at, found_at, like):
    outlined()
    row, best, found = pointer(row_at, like), pointer(best_at, like), pointer(found_at, np.int32)
    for i in range(count):
        value, most = row[i], best[i]
        better = found[i] < 0 or value > most or (value != value and most == most)
        best[i] = value if better else most
        found[i] = np.int32(place) if better else found[i]


@kernel
def max_bags(first, last, starts_at, kept_at, weight, columns, output, chosen_at, scratch, like):
    """Maximum of each column in the bags ``first`` to ``last``; with ``chosen_at``, its position instead.

    ``weight`` and ``output`` are (address, kind, row stride, column stride).
    """
    weight_at, weight_kind, weight_row, weight_step = weight
    out_at, out_kind, out_row, out_step = output
    starts, kept = pointer(starts_at, np.int32), pointer(kept_at, np.int32)
    raw, wide = scratch + _RAW * _RUN, scratch + _ROW * _RUN
    best_at, found_at = scratch + _BEST * _RUN, scratch + _FOUND * _RUN
    best, found = pointer(best_at, like), pointer(found_at, np.int32)
    for bag in range(first, last):
        for column in range(0, columns, COLUMNS):
            count = min(COLUMNS, columns - column)
            for i in range(count):
                best[i] = zero(like)
                found[i] = -1
            for n in range(starts[bag], starts[bag + 1]):
                if kept[n] >= 0:
                    offset = np.int64(kept[n]) * weight_row + column * weight_step
                    row = load_run(
                        weight_at + offset * (weight_kind & ITEM_SIZE), weight_kind, weight_step, count, raw,
                        wide, like,
                    )  # fmt: skip
                    _keep_best(row, n, count, best_at, found_at, like)
            if chosen_at != 0:
                chosen = pointer(chosen_at + (bag * columns + column) * 4, np.int32)
                for i in range(count):
                    chosen[i] = found[i]
            else:
                target = out_at + (bag * out_row + column * out_step) * (out_kind & ITEM_SIZE)
                store_run(best_at, count, target, out_kind, out_step, raw, like)


@kernel
def divide_rows(first, last, counts_at, rows, columns, out_at, item, scratch, like):
    """Divide the rows ``first`` to ``last`` by their counts; store them contiguous in the compute type.

    ``rows`` is (address, kind, row stride, column stride); ``item`` is the item size of the compute type.
    """
    address, row_kind, row_step, step = rows
    counts = pointer(counts_at, np.int32)
    for row in range(first, last):
        amount = max(counts[row], np.int32(1)) + zero(like)
        for column in range(0, columns, COLUMNS):
            count = min(COLUMNS, columns - column)
            offset = row * row_step + column * step
            run = load_run(
                address + offset * (row_kind & ITEM_SIZE), row_kind, step, count, scratch + _RAW * _RUN,
                scratch + _ROW * _RUN, like,
            )  # fmt: skip
            values, divided = pointer(run, like), pointer(out_at + (row * columns + column) * item, like)
            for i in range(count):
                divided[i] = values[i] / amount


@jit
def _sum_products(a_at, b_at, count, chunks, levels, like):
    """Add the products of two runs, chunk by chunk, to the ``levels`` of a sum. Returns the chunks so far."""
    outlined()
    a, b = pointer(a_at, like), pointer(b_at, like)
    for begin in range(0, count, CHUNK):
        total = zero(like)
        for i in range(begin, min(begin + CHUNK, count)):
            total += a[i] * b[i]
        levels[0] += total
        chunks += 1
        full, level = chunks, 0
        while full % CHUNK == 0:
            levels[level + 1] += levels[level]
            levels[level] = zero(like)
            full //= CHUNK
            level += 1
    return chunks


@kernel
def weight_gradients(first, last, kept_at, bags_at, weight, dout, columns, output, accumulate, scratch, like):
    """Gradients of the per-sample weights ``first`` to ``last``: ordered sums over columns.

    ``weight`` and ``dout`` are (address, kind, row stride, column stride); ``output`` is (address, kind,
    table of loops).
    """
    weight_at, weight_kind, weight_row, weight_step = weight
    dout_at, dout_kind, dout_row, dout_step = dout
    out_at, out_kind, table = output
    kept, bags = pointer(kept_at, np.int32), pointer(bags_at, np.int32)
    raw, row_at, other_at = scratch + _RAW * _RUN, scratch + _ROW * _RUN, scratch + _OTHER * _RUN
    levels = pointer(scratch + _BEST * _RUN, like)
    for n in range(first, last):
        counts = kept[n] >= 0 and bags[n] >= 0
        if accumulate and not counts:
            continue
        for level in range(LEVELS):
            levels[level] = zero(like)
        chunks = 0
        if counts:
            row = weight_at + np.int64(kept[n]) * weight_row * (weight_kind & ITEM_SIZE)
            other = dout_at + np.int64(bags[n]) * dout_row * (dout_kind & ITEM_SIZE)
            for column in range(0, columns, COLUMNS):
                count = min(COLUMNS, columns - column)
                at = row + column * weight_step * (weight_kind & ITEM_SIZE)
                a = load_run(at, weight_kind, weight_step, count, raw, row_at, like)
                at = other + column * dout_step * (dout_kind & ITEM_SIZE)
                b = load_run(at, dout_kind, dout_step, count, raw, other_at, like)
                chunks = _sum_products(a, b, count, chunks, levels, like)
            for level in range(LEVELS - 1):
                levels[level + 1] += levels[level]
        total = pointer(row_at, like)
        total[0] = levels[LEVELS - 1]
        target = out_at + offset_of(n, table) * (out_kind & ITEM_SIZE)
        if accumulate:
            old = pointer(load_run(target, out_kind, 1, 1, raw, other_at, like), like)
            total[0] = old[0] + total[0]
        store_run(row_at, 1, target, out_kind, 1, raw, like)


@cache
def _compile(entry: Any, compute: Float) -> None:
    """Compile a kernel for a compute type."""
    like, table, runs = number(compute), table_of((1,), (1,)), _SCRATCH.of_thread()
    starts, rows = runs, (0, like.itemsize, 1, 1)
    empty: dict[Any, tuple[Any, ...]] = {
        max_bags: (0, 0, starts, starts, rows, 1, rows, 0, runs, like),
        divide_rows: (0, 0, starts, rows, 1, 0, like.itemsize, runs, like),
        weight_gradients: (
            0, 0, starts, starts, rows, rows, 1, (0, like.itemsize, table), False, runs, like,
        ),
    }  # fmt: skip
    compile_kernel(entry, *empty[entry])


@cache
def _compile_finding() -> None:
    table, starts = table_of((1,), (1,)), _SCRATCH.of_thread()
    compile_kernel(check_offsets, (0, 8, 1, 0), 0)
    compile_kernel(
        find_bags, 0, 0, (0, 8, 0), table, (0, 8, 1, 0), 0, 0, 0, -1, starts, starts, starts, starts
    )


def _rows(tensor: torch.Tensor, compute: Float) -> tuple[int, ...]:
    """(address, kind, row stride, column stride) of a matrix."""
    return tensor.data_ptr(), kind(tensor.dtype, compute.torch), *tensor.stride()


class Found(NamedTuple):
    """Addresses of the results of ``find_bags``, and the length of the longest bag."""

    starts: int
    kept: int
    bags: int
    counts: int
    longest: int


def checked_offsets(desc: BagDescriptor, offsets: torch.Tensor | None) -> tuple[Offsets, int]:
    """Offsets as an operand of kernels, and the length of the longest bag. Raises if an offset is wrong."""
    if offsets is None:
        return (0, 8, 1, 0), desc.length
    given = (offsets.data_ptr(), offsets.element_size(), offsets.stride(0), offsets.numel())
    wrong, longest = check_offsets(given, desc.count)
    if wrong >= 0:
        raise BadOffset(desc.count).error(wrong, int(offsets[wrong].item()))
    return given, longest


class Bags:
    """Workspace regions for ``find_bags``; ``by_index``: with the bag of each index."""

    def __init__(self, layout: WorkspaceLayout, desc: BagDescriptor, *, by_index: bool) -> None:
        self.desc = desc
        self.starts = layout.take(desc.bags + 1, torch.int32)
        self.kept = layout.take(desc.count, torch.int32)
        self.counts = layout.take(desc.bags, torch.int32)
        self.bags = layout.take(desc.count, torch.int32) if by_index else None

    def find(
        self,
        first: int,
        indices: torch.Tensor,
        table: np.ndarray[Any, Any],
        offsets: Offsets,
        longest: int,
        raises: bool,
    ) -> Found:
        """Find the bags; with ``raises``, check the indices. ``first`` is the workspace's address."""
        desc = self.desc
        starts, kept, counts = (first + region.offset for region in (self.starts, self.kept, self.counts))
        bags = 0 if self.bags is None else first + self.bags.offset
        index_operand = (indices.data_ptr(), indices.element_size(), desc.count)
        invalid: list[int] = []

        def find(first: int, last: int) -> None:
            if not find_bags(
                first, last, index_operand, table, offsets, desc.bags, desc.length, desc.rows, desc.padding,
                starts, kept, bags, counts,
            ):  # fmt: skip
                invalid.append(first)

        parallel(find, desc.bags, desc.count)
        if raises and invalid:
            raise_outside(indices, table, desc.rows)
        return Found(starts, kept, bags, counts, longest)


def _factor(
    region: Region | None, workspace: Workspace, weights: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[int, int, int]:
    """``factor`` of ``sum_segments``: the weights, contiguous in the compute type, or none."""
    if region is None or weights is None:
        return PLAIN, 0, 0
    if weights.dtype == region.dtype and weights.is_contiguous():
        return TIMES, weights.data_ptr(), 0
    wide = region.tensor(workspace)
    wide.view(shape).copy_(weights.detach())
    return TIMES, wide.data_ptr(), 0


class EmbeddingBag(IndexedKernel[EmbeddingBagDescriptor]):
    """``sum_bags``; or ``find_bags``, then the sum or the maximum of each bag."""

    def __init__(self, desc: EmbeddingBagDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        self.bags = Bags(layout, desc, by_index=False)
        self.weights = layout.take(desc.count, desc.compute.torch) if desc.per_sample_weights else None
        self.set_workspace(layout)

    def compile(self) -> None:
        kinds = types_of(self.desc)
        if kinds is not None:
            compile_sums(kinds)
        else:
            self.compile_general()

    def compile_general(self) -> None:
        """Compile what serves every descriptor and layout."""
        _compile_finding()
        if self.desc.mode == "max":
            _compile(max_bags, self.desc.compute)
        else:
            compile_for(self.desc.compute)

    def one_pass(self, args: EmbeddingBagArgs) -> OnePass | None:
        """The sum in one pass over tensors like ``args``; None if it does not serve their layout."""
        desc, weights = self.desc, args.per_sample_weights
        kinds = types_of(desc, widened=weights is not None and not weights.is_contiguous())
        in_order = args.indices.is_contiguous() and args.weight.stride(1) == args.out.stride(1) == 1
        return None if kinds is None or not in_order else OnePass(desc, args, kinds)

    def prepare(self, args: EmbeddingBagArgs) -> Launch[EmbeddingBagArgs]:
        desc, compute = self.desc, self.desc.compute
        walk = loops(desc.shape, args.indices.stride())
        table = table_of(walk.sizes, walk.strides[0])
        weight_table = table_of((desc.rows,), (args.weight.stride(0),))
        one_pass = self.one_pass(args)
        in_place = args.per_sample_weights is None or args.per_sample_weights.is_contiguous()

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingBagArgs, addresses: Sequence[int]
        ) -> None:
            if one_pass is not None:
                out_at, weight_at, indices_at, offsets_at, weights = addresses
                if not in_place:
                    _, weights, _ = _factor(self.weights, workspace, args.per_sample_weights, desc.shape)
                if one_pass.run(0, 0, out_at, weight_at, indices_at, offsets_at, weights):
                    return
            self.compile_general()
            first = first_address(workspace)
            raises = desc.bad_index == "raise"
            offsets, longest = checked_offsets(desc, args.offsets)
            found = self.bags.find(first, args.indices, table, offsets, longest, raises)
            weight, out = _rows(args.weight, compute), _rows(args.out, compute)
            if desc.mode == "max":

                def part(first: int, last: int) -> None:
                    max_bags(
                        first, last, found.starts, found.kept, weight, desc.columns, out, 0,
                        _SCRATCH.of_thread(), number(compute),
                    )  # fmt: skip

                parallel(part, desc.bags, desc.count * desc.columns)
            else:
                launch_sums(
                    args.out,
                    Ordering(found.starts, 0, desc.bags, desc.count, found.longest),
                    (weight[0], weight[1], weight[3], weight_table, found.kept),
                    compute,
                    factor=_factor(self.weights, workspace, args.per_sample_weights, desc.shape),
                    by_count=found.counts if desc.mode == "mean" else 0,
                )

        if one_pass is not None and in_place:
            launch.bound = lambda args: one_pass.run  # type: ignore[attr-defined]
            launch.bound_uses_workspace = False  # type: ignore[attr-defined]
        return launch


class EmbeddingBagBackward(IndexedKernel[EmbeddingBagBackwardDescriptor]):
    """``find_bags``, then the segment sum for the table, then the gradients of the weights."""

    def __init__(self, desc: EmbeddingBagBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        self.bags = Bags(layout, desc, by_index=True)
        wide, elements = desc.compute.torch, desc.bags * desc.columns
        self.starts = self.places = self.weights = self.divided = self.chosen = None
        if desc.sums:
            self.starts = layout.take(desc.rows + 2, torch.int32)
            self.places = layout.take(desc.count, torch.int32)
            self.weights = layout.take(desc.count, wide) if desc.per_sample_weights else None
            self.divided = layout.take(elements, wide) if desc.mode == "mean" else None
            self.chosen = layout.take(elements, torch.int32) if desc.mode == "max" else None
        self.set_workspace(layout)
        #: A value of the type of the elements for ``dot_rows``; None if it does not serve the descriptor.
        self.stored: Any = None
        if desc.rows > 0 and desc.bags > 0 and desc.columns <= MOST_COLUMNS:
            self.stored = element_of(desc)

    def compile(self) -> None:
        compute = self.desc.compute
        _compile_finding()
        if self.desc.sums:
            compile_for(compute)
        if self.chosen is not None:
            _compile(max_bags, compute)
        if self.divided is not None:
            _compile(divide_rows, compute)
        if self.desc.dper_sample_weights and self.stored is not None:
            compile_dots(self.stored, number(compute))
        elif self.desc.dper_sample_weights:
            _compile(weight_gradients, compute)

    def prepare(self, args: EmbeddingBagBackwardArgs) -> Launch[EmbeddingBagBackwardArgs]:
        desc = self.desc
        self.compile()
        walk = loops(desc.shape, args.indices.stride())
        table = table_of(walk.sizes, walk.strides[0])

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingBagBackwardArgs, addresses: Sequence[int]
        ) -> None:
            first = first_address(workspace)
            offsets, longest = checked_offsets(desc, args.offsets)
            found = self.bags.find(first, args.indices, table, offsets, longest, False)
            if desc.sums:
                assert args.dweight is not None and self.starts is not None and self.places is not None
                source, factor = self.terms(args, workspace, first, found)
                starts, places = first + self.starts.offset, first + self.places.offset
                launch_sums(
                    args.dweight,
                    sort_by_row(args.indices, walk, desc.rows, starts, places, desc.padding),
                    source,
                    desc.compute,
                    factor=factor,
                    accumulate=args.accumulate,
                    by_count=int(desc.by_count),
                )
            if desc.dper_sample_weights:
                self.differentiate_weights(args, found)

        return launch

    def terms(
        self, args: EmbeddingBagBackwardArgs, workspace: Workspace, first: int, found: Found
    ) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
        """``source`` and ``factor`` of ``sum_segments`` for the gradient of the table."""
        desc, compute, columns = self.desc, self.desc.compute, self.desc.columns
        dout, like = _rows(args.dout, compute), number(compute)
        elements = desc.count * columns if desc.bags else 0
        table = table_of((max(desc.bags, 1),), (dout[2],))
        source = (dout[0], dout[1], dout[3], table, found.bags)
        if self.divided is not None:
            divided, item = first + self.divided.offset, compute.torch.itemsize

            def divide(first: int, last: int) -> None:
                divide_rows(
                    first, last, found.counts, dout, columns, divided, item, _SCRATCH.of_thread(), like
                )

            parallel(divide, desc.bags, desc.bags * columns)
            table = table_of((max(desc.bags, 1),), (columns,))
            source = (divided, kind(compute.torch, compute.torch), 1, table, found.bags)
        if self.chosen is not None:
            assert args.weight is not None
            chosen, weight = first + self.chosen.offset, _rows(args.weight, compute)

            def choose(first: int, last: int) -> None:
                max_bags(
                    first, last, found.starts, found.kept, weight, columns, weight, chosen,
                    _SCRATCH.of_thread(), like,
                )  # fmt: skip

            parallel(choose, desc.bags, elements)
            return source, (CHOSEN, chosen, columns)
        return source, _factor(self.weights, workspace, args.per_sample_weights, desc.shape)

    def differentiate_weights(self, args: EmbeddingBagBackwardArgs, found: Found) -> None:
        desc, compute = self.desc, self.desc.compute
        out = args.dper_sample_weights
        assert out is not None and args.weight is not None
        in_place = args.weight.stride(1) == args.dout.stride(1) == 1 and out.is_contiguous()
        if self.stored is not None and in_place and not args.accumulate:
            self.dot_rows(args.weight, args.dout, out, found)
            return
        _compile(weight_gradients, compute)
        walk = loops(desc.shape, out.stride())
        table = table_of(walk.sizes, walk.strides[0])
        weight, dout = _rows(args.weight, compute), _rows(args.dout, compute)
        output = (out.data_ptr(), kind(out.dtype, compute.torch), table)

        def part(first: int, last: int) -> None:
            weight_gradients(
                first, last, found.kept, found.bags, weight, dout, desc.columns, output, args.accumulate,
                _SCRATCH.of_thread(), number(compute),
            )  # fmt: skip

        parallel(part, desc.count, desc.count * desc.columns)

    def dot_rows(self, weight: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, found: Found) -> None:
        desc, item, like = self.desc, self.desc.dtype.itemsize, number(self.desc.compute)
        table, rows = ((rows.data_ptr(), rows.stride(0) * item) for rows in (weight, dout))

        def part(first: int, last: int) -> None:
            dot_rows(
                first, last, desc.count, found.kept, found.bags, table, rows, desc.columns, out.data_ptr(),
                _SCRATCH.of_thread(), self.stored, like,
            )  # fmt: skip

        parallel(part, desc.count, desc.count * desc.columns)
