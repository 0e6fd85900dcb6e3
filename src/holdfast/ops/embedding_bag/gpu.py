"""embedding_bag, in Triton.

One program sums each short bag, in the order of the indices. Other programs of the same launch check indices
and offsets, report errors, and store where bags begin and the bag of every 32nd place (a position in the
flattened indices). A second launch sums longer bags as segments whose terms are rows of the table; it ends at
once if there are none.

The gradient of the table is a segment sum whose terms are rows of ``dout``, selected by bag. The gradient of
a mean is divided once per bag, before the sum. Offsets are clamped wherever they are used, so wrong offsets
access no foreign memory; the result of their bags is undefined until the error is raised.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.gpu_tiles import common_step, row_offsets, stepped
from holdfast.backends.steps import Steps
from holdfast.core.plan import Launch
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.embedding_bag.gpu_bags import (
    TUNING,
    Bags,
    Walks,
    bag_places,
    compute_of,
    find_bags,
    load_kept,
)
from holdfast.ops.embedding_bag.gpu_max import BagMaxima, FewBags
from holdfast.ops.embedding_bag.plan import (
    EmbeddingBagArgs,
    EmbeddingBagBackwardArgs,
    EmbeddingBagBackwardDescriptor,
    EmbeddingBagDescriptor,
)
from holdfast.ops.segment_sum.gpu import (
    CHUNK,
    Bounds,
    SegmentSumSteps,
    Target,
    Terms,
    Walk,
    add_terms,
    finish,
    places_of,
)
from holdfast.ops.segment_sum.gpu import TUNING as SUM_TUNING
from holdfast.ops.segment_sum.gpu_index import power_below
from holdfast.ops.segment_sum.gpu_merge_sort import MergeSort
from holdfast.ops.segment_sum.indexed import IndexedKernel


@triton.jit
def table_term(
    weight, indices, unused, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Term ``number`` is the row of the table at index ``number``, if it is kept."""
    index, kept = load_kept(indices, number, here, numbers[0], numbers[1], sizes, place_strides)
    at = weight + (index.to(tl.int64) * strides[0])[:, None] + column * strides[1]
    # Few rows are read twice, so keep other data in the cache.
    value = tl.load(at, mask=kept[:, None] & inside, other=0.0, eviction_policy="evict_first")
    return widen(value, COMPUTE), kept.to(tl.int32)


@triton.jit
def weighted_table_term(
    weight, indices, unused, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``table_term`` times its weight. A skipped term is 0 * 0."""
    value, kept = table_term(
        weight, indices, unused, factors, number, here, column, inside, sizes, strides, place_strides,
        factor_strides, numbers, COMPUTE,
    )  # fmt: skip
    at = factors + row_offsets(number, sizes, factor_strides)
    factor = widen(tl.load(at, mask=kept > 0, other=0.0), COMPUTE)
    return value * factor[:, None], kept


@triton.jit
def load_bag(places, bags_of, number, here):
    """Place of term ``number`` in sorted order, and its bag; -1 for none."""
    place = tl.load(places + number, mask=here, other=0).to(tl.int32)
    return place, tl.load(bags_of + place, mask=here, other=-1)


@triton.jit
def load_bag_row(rows, bag, column, inside, strides, COMPUTE: tl.constexpr):
    at = rows + (bag.to(tl.int64) * strides[0])[:, None] + column * strides[1]
    return widen(tl.load(at, mask=(bag >= 0)[:, None] & inside, other=0.0), COMPUTE)


@triton.jit
def bag_term(
    dout, places, bags_of, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Term ``number`` in sorted order is the row of ``dout`` of its bag."""
    _, bag = load_bag(places, bags_of, number, here)
    return load_bag_row(dout, bag, column, inside, strides, COMPUTE), here.to(tl.int32)


@triton.jit
def weighted_bag_term(
    dout, places, bags_of, factors, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``bag_term`` times the weight of the place."""
    place, bag = load_bag(places, bags_of, number, here)
    value = load_bag_row(dout, bag, column, inside, strides, COMPUTE)
    at = factors + row_offsets(place, sizes, factor_strides)
    factor = widen(tl.load(at, mask=bag >= 0, other=0.0), COMPUTE)
    return value * factor[:, None], here.to(tl.int32)


@triton.jit
def chosen_bag_term(
    dout, places, bags_of, chosen, number, here, column, inside, sizes, strides, place_strides,
    factor_strides, numbers, COMPUTE: tl.constexpr,
):  # fmt: skip
    """``bag_term`` in the columns whose maximum came from this place, zeros elsewhere."""
    place, bag = load_bag(places, bags_of, number, here)
    value = load_bag_row(dout, bag, column, inside, strides, COMPUTE)
    at = chosen + (bag.to(tl.int64) * numbers[0])[:, None] + column
    mine = tl.load(at, mask=(bag >= 0)[:, None] & inside, other=-1) == place[:, None]
    return tl.where(mine, value, 0.0), here.to(tl.int32)


@triton.jit
def add_bags(
    weight, indices, factors, begin, size, column, inside,
    sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sums of bags of up to 32 chunks, and the number of terms that are counted.

    A chunk sum is never -0.0, so adding a single one to +0.0 changes no bit.
    """
    total = tl.zeros([ROWS, COLUMNS], COMPUTE)
    counted = tl.zeros([ROWS], tl.int32)
    for at in range(0, tl.max(size, 0), CHUNK):
        if BY_COUNT:
            place = (begin + at)[:, None] + tl.arange(0, CHUNK)[None, :]
            here = (at + tl.arange(0, CHUNK))[None, :] < size[:, None]
            _, kept = load_kept(indices, place, here, numbers[0], numbers[1], sizes, place_strides)
            counted += tl.sum(kept.to(tl.int32), 1)
        chunk, _ = add_terms(
            weight, indices, indices, factors, begin + at, tl.minimum(size - at, CHUNK), column, inside,
            sizes, strides, place_strides, factor_strides, numbers,
            TERM, False, COMPUTE, ROWS, COLUMNS, UNROLL,
        )  # fmt: skip
        total += chunk
    return total, counted


@triton.jit(
    do_not_specialize=[
        "count", "bags", "entries", "length", "step", "bad_index", "bad_offset", "find_programs", "cleared",
    ]
)  # fmt: skip
def sum_short_bags(
    out, weight, indices, factors, offsets, starts, maxima, keys, arrivals, reports,
    count, bags, entries, length, step, bad_index, bad_offset, find_programs, cleared,
    offset_step, columns, tiles,
    out_sizes, out_strides, sizes, strides, place_strides, factor_strides, numbers,
    TERM: tl.constexpr, OFFSETS: tl.constexpr, KEYS: tl.constexpr, RAISE: tl.constexpr, SHORT: tl.constexpr,
    BY_COUNT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``find_bags`` for TILE elements, and zero ``arrivals``; or the sums of ROWS bags that are short.

    Columns and the strides of rows are multiples of STEP.
    """
    follow()
    if tl.program_id(0) < find_programs:
        find_bags(
            starts, maxima, keys, keys, keys, indices, offsets, reports,
            count, numbers[0], numbers[1], bags, entries, length, step, bad_index, bad_offset,
            offset_step, sizes, place_strides,
            OFFSETS, KEYS, False, False, RAISE, TILE,
        )  # fmt: skip
        number = tl.program_id(0) * TILE + tl.arange(0, TILE)
        tl.store(arrivals + number, tl.zeros([TILE], tl.int32), mask=number < cleared)
    else:
        program = tl.program_id(0) - find_programs
        tile = program % tiles
        bag = program // tiles * ROWS + tl.arange(0, ROWS)
        column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
        inside = column < columns // STEP * STEP
        mine = bag < bags
        first, amount = bag_places(offsets, offset_step, bag, mine, count, entries, length, OFFSETS)
        mine = mine & (amount <= SHORT)
        total, counted = add_bags(
            weight, indices, factors, first, tl.where(mine, amount, 0), column, inside,
            sizes, stepped(strides, STEP), place_strides, factor_strides, numbers,
            TERM, BY_COUNT, COMPUTE, ROWS, COLUMNS, UNROLL,
        )  # fmt: skip
        finish(
            out, factors, bag, mine, total, amount, counted, column, inside, out_sizes,
            stepped(out_strides, STEP), factor_strides, numbers, False, BY_COUNT, COMPUTE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["bags", "length"])
def divide_rows(
    divided, dout, starts, skipped, bags, length, columns, tiles, dout_strides,
    BOUNDS: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Divide the gradients of ROWS bags by the number of indices that their means count."""
    follow()
    tile = tl.program_id(0) % tiles
    bag = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = (tile * COLUMNS + tl.arange(0, COLUMNS))[None, :].to(tl.int64)
    mask = (bag < bags)[:, None] & (column < columns)
    _, amount = places_of(starts, bag, bag < bags, length, BOUNDS)
    amount -= tl.load(skipped + bag, mask=bag < bags, other=0)
    at = dout + (bag.to(tl.int64) * dout_strides[0])[:, None] + column * dout_strides[1]
    value = widen(tl.load(at, mask=mask, other=0.0), COMPUTE)
    value = quotient(value, tl.maximum(amount, 1).to(COMPUTE)[:, None])
    tl.store(divided + bag.to(tl.int64)[:, None] * columns + column, value, mask=mask)


@triton.jit
def carry(lower, upper, full):
    """If ``full``, add level ``lower`` to level ``upper`` and restart ``lower`` from zero."""
    return tl.where(full, 0.0, lower), upper + tl.where(full, lower, 0.0)


@triton.jit(do_not_specialize=["count", "rows", "padding"])
def weight_gradients(
    out, dout, weight, indices, bags_of,
    count, rows, padding, columns,
    sizes, strides, out_strides, dout_strides, weight_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of TILE per-sample weights: ordered sums over the columns, loaded four at a time.

    Each lane reads its own row, so neighbouring lanes load from different rows; the cache keeps the lines.
    """
    follow()
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < count
    index, kept = load_kept(indices, place, inside, rows, padding, sizes, strides)
    bag = tl.load(bags_of + place, mask=inside, other=-1)
    kept = kept & (bag >= 0)
    row = weight + (index.to(tl.int64) * weight_strides[0])[:, None]
    other = dout + (bag.to(tl.int64) * dout_strides[0])[:, None]
    one = tl.zeros([TILE], COMPUTE)
    two = tl.zeros([TILE], COMPUTE)
    three = tl.zeros([TILE], COMPUTE)
    four = tl.zeros([TILE], COMPUTE)
    five = tl.zeros([TILE], COMPUTE)
    six = tl.zeros([TILE], COMPUTE)
    chunks = (columns + CHUNK - 1) // CHUNK
    for chunk in range(0, chunks):
        total = tl.zeros([TILE], COMPUTE)
        for begin in range(0, CHUNK, 4):
            column = (tl.arange(0, 4) + (chunk * CHUNK + begin))[None, :].to(tl.int64)
            mask = kept[:, None] & (column < columns)
            a = widen(tl.load(row + column * weight_strides[1], mask=mask, other=0.0), COMPUTE)
            b = widen(tl.load(other + column * dout_strides[1], mask=mask, other=0.0), COMPUTE)
            even, odd = tl.split(tl.reshape(a * b, [TILE, 2, 2]))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            total = (((total + first) + second) + third) + fourth
        one += total
        done = chunk + 1
        one, two = carry(one, two, done % CHUNK == 0)
        two, three = carry(two, three, done % (CHUNK * CHUNK) == 0)
        three, four = carry(three, four, done % (CHUNK * CHUNK * CHUNK) == 0)
        four, five = carry(four, five, done % (CHUNK * CHUNK * CHUNK * CHUNK) == 0)
        five, six = carry(five, six, done % (CHUNK * CHUNK * CHUNK * CHUNK * CHUNK) == 0)
    # Add every level to the next, full or not: a sum is never -0.0, so adding +0.0 changes no bit.
    total = six + (five + (four + (three + (two + one))))
    to = out + row_offsets(place, sizes, out_strides)
    if ACCUMULATE:
        total = widen(tl.load(to, mask=kept, other=0.0), COMPUTE) + total
        inside = kept
    tl.store(to, narrow(total, out.dtype.element_ty), mask=inside)


class EmbeddingBag(IndexedKernel[EmbeddingBagDescriptor]):
    """``sum_short_bags``, then the segment sum of longer bags; or ``max_bags``."""

    def __init__(self, desc: EmbeddingBagDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout, self.tuning = WorkspaceLayout(), TUNING.on(device)
        sums, short = desc.mode != "max", self.tuning.short
        self.bags = Bags(
            layout, desc, device, keys=sums and desc.longest > short, bags=False, counted=False, beside=True
        )
        self.summing = None
        if sums:
            self.summing = SegmentSumSteps(
                layout, device, desc.count, desc.bags, desc.columns, desc.dtype, desc.longest,
                desc.mode == "mean", short,
            )  # fmt: skip
        self.set_workspace(layout)

    def compile(self) -> None:
        self.prepare(EmbeddingBagArgs.described(self.desc))

    def prepare(self, args: EmbeddingBagArgs) -> Launch[EmbeddingBagArgs]:
        desc = self.desc
        weights = args.per_sample_weights
        walks = Walks(desc, args.indices, weights)
        steps = Steps(self.device, args)
        strides = tuple(args.weight.stride())
        if self.summing is None:
            BagMaxima(self.bags).add_steps(
                steps, walks, args.weight, args.offsets, "out", tuple(args.out.stride()),
                raises=desc.bad_index == "raise",
            )  # fmt: skip
            return steps.launch
        out = Target.matrix("out", args.out)
        walk = Walk(walks.sizes, strides, walks.strides[0], walks.strides[1], (desc.rows, desc.padding))
        factors = "indices" if weights is None else "per_sample_weights"
        term = table_term if weights is None else weighted_table_term
        self.sum_short(steps, args, self.summing, out, walk, factors, term)
        if self.summing.windows:
            self.summing.add_steps(
                steps,
                out,
                Terms("weight", "indices", "indices", factors),
                self.bags.bounds,
                walk,
                term=term,
                cleared=True,
                only_long=True,
            )
        return steps.launch

    def sum_short(
        self, steps: Steps, args: EmbeddingBagArgs, summing: SegmentSumSteps, out: Target, walk: Walk,
        factors: str, term: Any,
    ) -> None:  # fmt: skip
        desc, bags, cleared, tuning = self.desc, self.bags, summing.arrivals.count, self.tuning
        raises = desc.bad_index == "raise"
        find_programs = -(-max(bags.work(raises), cleared) // tuning.beside_lanes)
        rows, columns = summing.tuning.tile_of(desc.columns, desc.dtype.itemsize, tuning.bag_bytes)
        tiles = -(-desc.columns // columns)
        rows = min(rows, power_below(desc.bags * tiles // tuning.bag_programs) or 1)
        owned = 0 if bags.even and desc.length > tuning.short else desc.bags
        steps.add(
            sum_short_bags, find_programs + -(-owned // rows) * tiles,
            bags, bags.parameters(args.offsets, raises), out, walk,
            factors=factors, arrivals=summing.arrivals, count=desc.count, bags=desc.bags, length=desc.length,
            find_programs=find_programs, cleared=cleared, columns=desc.columns, tiles=tiles,
            TERM=term, SHORT=tuning.short, BY_COUNT=summing.by_count, COMPUTE=compute_of(desc),
            ROWS=rows, COLUMNS=columns, UNROLL=tuning.bag_unroll, TILE=tuning.beside_lanes,
            STEP=common_step(desc.dtype.itemsize, desc.columns, out.out_strides, walk.strides),
            num_warps=tuning.bag_warps,
        )  # fmt: skip


class EmbeddingBagBackward(IndexedKernel[EmbeddingBagBackwardDescriptor]):
    """``find_bags``, then the segment sum by row, then ``weight_gradients``; or ``FewBags``."""

    def __init__(self, desc: EmbeddingBagBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout = WorkspaceLayout()
        mean = desc.sums and desc.mode == "mean"
        few = FewBags.suits(desc, device)
        self.bags = Bags(layout, desc, device, keys=False, bags=not few, counted=mean, beside=few)
        self.few = FewBags(layout, self.bags) if few else None
        elements = desc.bags * desc.columns
        self.divided = layout.take(elements, desc.compute.torch) if mean else None
        chooses = desc.sums and desc.mode == "max" and not few
        self.chosen = layout.take(elements, torch.int32) if chooses else None
        self.order = self.summing = None
        if desc.sums and not few:
            row_bytes = desc.columns * desc.dtype.itemsize
            tall = SUM_TUNING.on(device).is_tall(desc.rows, desc.count, row_bytes)
            self.order = MergeSort(layout, device, desc.count, desc.rows, tall)
            self.summing = SegmentSumSteps(
                layout, device, desc.count, desc.rows, desc.columns, desc.dtype, desc.count, desc.by_count
            )
        self.set_workspace(layout)

    def compile(self) -> None:
        self.prepare(EmbeddingBagBackwardArgs.described(self.desc))

    def prepare(self, args: EmbeddingBagBackwardArgs) -> Launch[EmbeddingBagBackwardArgs]:
        desc = self.desc
        walks = Walks(desc, args.indices, args.per_sample_weights, args.dper_sample_weights)
        steps = Steps(self.device, args)
        if self.few is not None:
            self.few.add_steps(steps, walks, args)
            return steps.launch
        self.bags.add_steps(steps, walks, args.offsets, False)
        if self.order is not None and self.summing is not None:
            assert args.dweight is not None
            terms, walk, term = self.terms(steps, args, walks)
            self.order.add_steps(steps, "indices", walks.space, desc.padding, self.summing.arrivals)
            self.summing.add_steps(
                steps,
                Target.matrix("dweight", args.dweight),
                terms,
                Bounds.of(self.order),
                walk,
                term=term,
                accumulate=args.accumulate,
                cleared=True,
            )
        if desc.dper_sample_weights and desc.count:
            self.differentiate_weights(steps, args, walks)
        return steps.launch

    def terms(self, steps: Steps, args: EmbeddingBagBackwardArgs, walks: Walks) -> tuple[Terms, Walk, Any]:
        """Operands, walk and term function of the gradient of the table."""
        desc = self.desc
        assert self.order is not None
        places, bags = self.order.places, self.bags.bags_of
        strides = tuple(args.dout.stride())
        walk = Walk(walks.sizes, strides)
        if self.divided is not None and desc.bags:
            tuning = SUM_TUNING.on(self.device)
            rows, columns = tuning.tile_of(desc.columns, desc.compute.torch.itemsize)
            tiles = -(-desc.columns // columns)
            steps.add(
                divide_rows, -(-desc.bags // rows) * tiles, desc,
                divided=self.divided, starts="indices" if self.bags.even else self.bags.starts,
                skipped=self.bags.skipped, tiles=tiles, dout_strides=strides,
                BOUNDS=self.bags.bounds.kind, COMPUTE=compute_of(desc), ROWS=rows, COLUMNS=columns,
                num_warps=tuning.warps,
            )  # fmt: skip
            walk = Walk(walks.sizes, (desc.columns, 1))
            return Terms(self.divided, places, bags, "indices"), walk, bag_term
        if self.chosen is not None and desc.bags:
            assert args.weight is not None
            BagMaxima(self.bags).add_steps(
                steps, walks, args.weight, args.offsets, self.chosen, (desc.columns, 1), raises=None
            )
            walk = walk._replace(numbers=(desc.columns,))
            return Terms("dout", places, bags, self.chosen), walk, chosen_bag_term
        if args.per_sample_weights is not None:
            walk = walk._replace(factor_strides=walks.strides[1])
            return Terms("dout", places, bags, "per_sample_weights"), walk, weighted_bag_term
        return Terms("dout", places, bags, "indices"), walk, bag_term

    def differentiate_weights(self, steps: Steps, args: EmbeddingBagBackwardArgs, walks: Walks) -> None:
        desc, lanes = self.desc, self.bags.tuning.weight_lanes
        assert args.weight is not None
        steps.add(
            weight_gradients, -(-desc.count // lanes), desc,
            out="dper_sample_weights", bags_of=self.bags.bags_of, sizes=walks.sizes,
            strides=walks.strides[0], out_strides=walks.strides[2],
            dout_strides=tuple(args.dout.stride()), weight_strides=tuple(args.weight.stride()),
            ACCUMULATE=args.accumulate, COMPUTE=compute_of(desc), TILE=lanes,
            num_warps=self.bags.tuning.warps,
        )  # fmt: skip
