"""embedding_bag on the CPU.

One pass over the indices finds the row and the bag of each. Forward sums bags as segments whose terms are
rows of the table. The gradient of the table is a segment sum whose terms are rows of ``dout``, selected by
bag. The gradient of a mean is divided once per bag, before the sum.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, jit, kernel, outlined, pointer
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import BOUND_BYTES, Region, WorkspaceLayout, first_address
from holdfast.numerics.cpu import ITEM_SIZE, as_real, kind, zero
from holdfast.numerics.cpu_walk import load_run, number, offset_of, store_run, table_of
from holdfast.ops.embedding_bag.cpu_dots import MOST_COLUMNS, compile_dots, dot_rows
from holdfast.ops.embedding_bag.cpu_max import MAXIMA, compile_max, max_bags
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
    Rows,
    RowSort,
    RowSums,
    compile_for,
    load_index,
    raise_outside,
)
from holdfast.ops.segment_sum.indexed import IndexedKernel, loops

CHUNK = indexed.CHUNK
# Scratch runs: stored elements, two rows in the compute type, levels of a sum; then their number.
_RAW, _ROW, _OTHER, _LEVEL, _RUNS = range(5)
_RUN = step_of(RUN_BYTES)
_SCRATCH = Scratch("embedding_bag", Runs(_RUNS, RUN_BYTES))


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


@kernel
def divide_rows(first, last, counts_at, rows, columns, out_at, item, scratch, like):
    """Divide the rows ``first`` to ``last`` by their counts; store them contiguous in the compute type.

    ``rows`` is (address, kind, row stride, column stride); ``item`` is the item size of the compute type.
    """
    address, row_kind, row_step, step = rows
    counts = pointer(counts_at, np.int32)
    for row in range(first, last):
        amount = as_real(max(counts[row], np.int32(1)), like)
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
    levels = pointer(scratch + _LEVEL * _RUN, like)
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


#: (kind, row stride, column stride) of a matrix.
Matrix = tuple[int, int, int]


def _matrix(tensor: torch.Tensor, compute: Float) -> Matrix:
    return kind(tensor.dtype, compute.torch), tensor.stride(0), tensor.stride(1)


class Found(NamedTuple):
    """Addresses of the results of ``find_bags``, the longest bag, and whether all indices are in range."""

    starts: int
    kept: int
    bags: int
    counts: int
    longest: int
    in_range: bool


class Bags:
    """Workspace regions for ``find_bags``; ``by_index``: with the bag of each index."""

    def __init__(self, layout: WorkspaceLayout, desc: BagDescriptor, *, by_index: bool) -> None:
        self.desc = desc
        self.starts = layout.take(desc.bags + 1, torch.int32)
        self.kept = layout.take(desc.count, torch.int32)
        self.counts = layout.take(desc.bags, torch.int32)
        self.bags = layout.take(desc.count, torch.int32) if by_index else None


class BagFinder:
    """``check_offsets`` and ``find_bags`` for tensors like ``indices`` and ``offsets``."""

    def __init__(self, bags: Bags, indices: torch.Tensor, offsets: torch.Tensor | None) -> None:
        self._bags, self._desc = bags, bags.desc
        walk = loops(self._desc.shape, indices.stride())
        self.table, self._item = table_of(walk.sizes, walk.strides[0]), indices.element_size()
        self._layout = (
            (8, 1, 0) if offsets is None else (offsets.element_size(), offsets.stride(0), len(offsets))
        )

    def run(self, first: int, indices: int, offsets: int) -> Found | None:
        """Find the bags in a workspace at an aligned address; None if an offset is wrong."""
        desc, regions, longest = self._desc, self._bags, self._desc.length
        given = (offsets, *self._layout)
        if given[3]:
            wrong, longest = check_offsets(given, desc.count)
            if wrong >= 0:
                return None
        starts = first + regions.starts.offset
        kept, counts = first + regions.kept.offset, first + regions.counts.offset
        bags = 0 if regions.bags is None else first + regions.bags.offset
        index_operand, in_range = (indices, self._item, desc.count), True

        def find(first: int, last: int) -> None:
            nonlocal in_range
            if not find_bags(
                first, last, index_operand, self.table, given, desc.bags, desc.length, desc.rows,
                desc.padding, starts, kept, bags, counts,
            ):  # fmt: skip
                in_range = False

        parallel(find, desc.bags, desc.count)
        return Found(starts, kept, bags, counts, longest, in_range)


def _raise_wrong_offset(desc: BagDescriptor, offsets: torch.Tensor | None) -> NoReturn:
    """Raise the error for the first wrong offset."""
    assert offsets is not None
    layout = (offsets.element_size(), offsets.stride(0), offsets.numel())
    wrong, _ = check_offsets((offsets.data_ptr(), *layout), desc.count)
    raise BadOffset(desc.count).error(wrong, int(offsets[wrong].item()))


def _is_read_in_place(weights: torch.Tensor | None, compute: Float) -> bool:
    """Whether weights are contiguous in the compute type, or there are none."""
    return weights is None or (weights.dtype == compute.torch and weights.is_contiguous())


def _widened(
    region: Region | None, workspace: Workspace, weights: torch.Tensor | None, shape: tuple[int, ...]
) -> int:
    """The address of a contiguous copy of the weights in the dtype of the region."""
    assert region is not None and weights is not None
    wide = region.tensor(workspace)
    wide.view(shape).copy_(weights.detach())
    return wide.data_ptr()


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
            compile_max(self.desc.compute)
        else:
            compile_for(self.desc.compute)

    def one_pass(self, args: EmbeddingBagArgs) -> OnePass | None:
        """The sum in one pass over tensors like ``args``; None if it does not serve their layout."""
        desc, weights = self.desc, args.per_sample_weights
        kinds = types_of(desc, widened=weights is not None and not weights.is_contiguous())
        in_order = args.indices.is_contiguous() and args.weight.stride(1) == args.out.stride(1) == 1
        if kinds is None or not in_order or desc.bags == 0:
            return None
        return OnePass(desc, args, kinds)

    def prepare(self, args: EmbeddingBagArgs) -> Launch[EmbeddingBagArgs]:
        one_pass, weights = self.one_pass(args), args.per_sample_weights
        in_place, shape = weights is None or weights.is_contiguous(), self.desc.shape
        general: list[Launch[EmbeddingBagArgs]] = []

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingBagArgs, addresses: Sequence[int]
        ) -> None:
            if one_pass is not None:
                out_at, weight_at, indices_at, offsets_at, weights = addresses
                if not in_place:
                    weights = _widened(self.weights, workspace, args.per_sample_weights, shape)
                if one_pass.run(out_at, weight_at, indices_at, offsets_at, weights):
                    return
            if not general:
                general.append(self.prepare_general(args))
            general[0](stream, workspace, args, addresses)

        if one_pass is not None and in_place:
            launch.bound = lambda args: one_pass.run_at_once  # type: ignore[attr-defined]
            launch.bound_uses_workspace = False  # type: ignore[attr-defined]
        return launch

    def prepare_general(self, args: EmbeddingBagArgs) -> Launch[EmbeddingBagArgs]:
        """The launch that serves every descriptor and layout."""
        desc, compute, sample_weights = self.desc, self.desc.compute, args.per_sample_weights
        self.compile_general()
        finder = BagFinder(self.bags, args.indices, args.offsets)
        in_place = _is_read_in_place(sample_weights, compute)
        of_weight, of_out = _matrix(args.weight, compute), _matrix(args.out, compute)
        rows = Rows(of_weight[0], table_of((desc.rows,), (of_weight[1],)), of_weight[2])
        sums = None
        if desc.mode != "max":
            sums = RowSums(
                compute, (desc.bags, desc.columns, desc.count), rows, Rows.of(args.out, compute),
                how=PLAIN if sample_weights is None else TIMES,
            )  # fmt: skip

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingBagArgs, addresses: Sequence[int]
        ) -> None:
            out, weight, indices, offsets, weights = addresses
            found = finder.run(first_address(workspace), indices, offsets)
            if found is None:
                _raise_wrong_offset(desc, args.offsets)
            if desc.bad_index == "raise" and not found.in_range:
                raise_outside(args.indices, finder.table, desc.rows)
            if sums is None:

                def part(first: int, last: int) -> None:
                    max_bags(
                        first, last, found.starts, found.kept, (weight, *of_weight), desc.rows, desc.columns,
                        (out, *of_out), 0, MAXIMA.of_thread(), number(compute),
                    )  # fmt: skip

                parallel(part, desc.bags, desc.count * desc.columns)
                return
            if not in_place:
                weights = _widened(self.weights, workspace, args.per_sample_weights, desc.shape)
            by_count = found.counts if desc.mode == "mean" else 0
            ordering = Ordering(found.starts, 0, found.longest)
            sums.run(ordering, out, weight, rows_of=found.kept, weights=weights, by_count=by_count)

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
            compile_max(compute)
        if self.divided is not None:
            _compile(divide_rows, compute)
        if self.desc.dper_sample_weights and self.stored is not None:
            compile_dots(self.stored, number(compute))
        elif self.desc.dper_sample_weights:
            _compile(weight_gradients, compute)

    def prepare(self, args: EmbeddingBagBackwardArgs) -> Launch[EmbeddingBagBackwardArgs]:
        desc = self.desc
        self.compile()
        finder = BagFinder(self.bags, args.indices, args.offsets)
        in_place = not desc.sums or _is_read_in_place(args.per_sample_weights, desc.compute)
        sum_rows = self.sums(args) if desc.sums else None
        sum_columns = self.dots(args) if desc.dper_sample_weights else None

        def run(
            stream: int, first: int, dweight: int, dsamples: int, dout: int, indices: int, offsets: int,
            weights: int, table: int,
        ) -> bool:  # fmt: skip
            """Differentiate tensors at these addresses, in a workspace at an aligned address.

            Returns False, and has written nothing, if an offset is wrong.
            """
            found = finder.run(first, indices, offsets)
            if found is None:
                return False
            if sum_rows is not None:
                sum_rows(first, found, dweight, dout, indices, weights, table)
            if sum_columns is not None:
                sum_columns(found, dsamples, dout, table)
            return True

        def launch(
            stream: Stream, workspace: Workspace, args: EmbeddingBagBackwardArgs, addresses: Sequence[int]
        ) -> None:
            dweight, dsamples, dout, indices, offsets, weights, table = addresses
            if not in_place:
                weights = _widened(self.weights, workspace, args.per_sample_weights, desc.shape)
            first = first_address(workspace)
            if not run(0, first, dweight, dsamples, dout, indices, offsets, weights, table):
                _raise_wrong_offset(desc, args.offsets)

        if in_place and self.workspace_size <= BOUND_BYTES:
            launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch

    def sums(self, args: EmbeddingBagBackwardArgs) -> Callable[..., None]:
        """A function that computes the gradient of the table."""
        desc, compute, columns = self.desc, self.desc.compute, self.desc.columns
        assert args.dweight is not None and self.starts is not None and self.places is not None
        starts, places = self.starts.offset, self.places.offset
        sort = RowSort.of(args.indices, loops(desc.shape, args.indices.stride()), desc)
        of_dout, bags, accumulate = _matrix(args.dout, compute), max(desc.bags, 1), args.accumulate
        how = CHOSEN if self.chosen else PLAIN if args.per_sample_weights is None else TIMES
        if self.divided is None:
            source = Rows(of_dout[0], table_of((bags,), (of_dout[1],)), of_dout[2])
        else:
            source = Rows(kind(compute.torch, compute.torch), table_of((bags,), (columns,)), 1)
        sums = RowSums(
            compute, (desc.rows, columns, desc.count), source, Rows.of(args.dweight, compute), how=how,
            least_terms=int(accumulate),
        )  # fmt: skip
        sum_rows = sums.after(sort, starts, places, int(desc.by_count))
        of_table = (0, 0, 0) if args.weight is None else _matrix(args.weight, compute)

        def run(
            first: int, found: Found, dweight: int, dout: int, indices: int, weights: int, table: int
        ) -> None:
            if self.divided is not None:
                divided = first + self.divided.offset
                self.divide((dout, *of_dout), found, divided)
                dout = divided
            if self.chosen is not None:
                weights = first + self.chosen.offset
                self.choose((table, *of_table), found, weights)
            base = dweight if accumulate else 0
            sum_rows(first, indices, dweight, dout, found.bags, weights, base)

        return run

    def divide(self, dout: tuple[int, ...], found: Found, divided: int) -> None:
        """Divide the gradients of a mean by the counts of the bags."""
        desc, item, like = self.desc, self.desc.compute.torch.itemsize, number(self.desc.compute)

        def part(first: int, last: int) -> None:
            divide_rows(
                first, last, found.counts, dout, desc.columns, divided, item, _SCRATCH.of_thread(), like
            )

        parallel(part, desc.bags, desc.bags * desc.columns)

    def choose(self, table: tuple[int, ...], found: Found, chosen: int) -> None:
        """Find the positions of the maxima of each bag."""
        desc, like = self.desc, number(self.desc.compute)

        def part(first: int, last: int) -> None:
            max_bags(
                first, last, found.starts, found.kept, table, desc.rows, desc.columns, table, chosen,
                MAXIMA.of_thread(), like,
            )  # fmt: skip

        parallel(part, desc.bags, desc.count * desc.columns if desc.bags else 0)

    def dots(self, args: EmbeddingBagBackwardArgs) -> Callable[..., None]:
        """A function that computes the gradient of the weights of samples."""
        desc, compute, out = self.desc, self.desc.compute, args.dper_sample_weights
        assert out is not None and args.weight is not None
        like, accumulate = number(compute), args.accumulate
        of_table, of_dout = _matrix(args.weight, compute), _matrix(args.dout, compute)
        contiguous = of_table[2] == of_dout[2] == 1 and out.is_contiguous()
        stored = self.stored if contiguous and not accumulate else None
        if stored is None:
            _compile(weight_gradients, compute)
        walk, code, item = (
            loops(desc.shape, out.stride()),
            kind(out.dtype, compute.torch),
            desc.dtype.itemsize,
        )
        out_table = table_of(walk.sizes, walk.strides[0])

        def run(found: Found, dsamples: int, dout: int, table: int) -> None:
            def part(first: int, last: int) -> None:
                if stored is not None:
                    dot_rows(
                        first, last, desc.count, found.kept, found.bags, (table, of_table[1] * item),
                        (dout, of_dout[1] * item), desc.columns, dsamples, _SCRATCH.of_thread(), stored, like,
                    )  # fmt: skip
                else:
                    weight_gradients(
                        first, last, found.kept, found.bags, (table, *of_table), (dout, *of_dout),
                        desc.columns, (dsamples, code, out_table), accumulate, _SCRATCH.of_thread(), like,
                    )  # fmt: skip

            parallel(part, desc.count, desc.count * desc.columns)

        return run
