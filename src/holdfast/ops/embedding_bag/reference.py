"""embedding_bag and its gradients in NumPy, the definition."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.numerics import reference as numerics
from holdfast.numerics.reference import Array
from holdfast.ops.embedding_bag import plan as plans
from holdfast.ops.segment_sum.reference import ordered_sum, raise_outside, sources_of, store_rows


def begins_of(desc: plans.BagDescriptor, offsets: torch.Tensor | None) -> Array:
    """The begin of each bag, then the end of the last bag."""
    if offsets is None:
        return np.arange(desc.bags + 1) * desc.length
    begins = offsets.numpy().astype(np.int64)
    before = np.concatenate([begins[:1] * 0, begins[:-1]])
    wrong = np.flatnonzero(
        (begins < before) | (begins > desc.count) | ((np.arange(len(begins)) == 0) & (begins != 0))
    )
    if len(wrong):
        raise plans.BadOffset(desc.count).error(int(wrong[0]), int(begins[wrong[0]]))
    return begins if desc.include_last_offset else np.append(begins, desc.count)


def kept_indices(indices: torch.Tensor, rows: int, padding: int) -> Array:
    """Row of each index; -1 if the index is padding or out of range."""
    flat = indices.numpy().reshape(-1).astype(np.int64)
    return np.where((flat >= 0) & (flat < rows) & (flat != padding), flat, -1)


def gathered(weight: Array, kept: Array) -> Array:
    """The rows of the indices; +0.0, which does not change a sum, for skipped indices."""
    rows = weight[kept] if len(weight) else np.zeros((len(kept), weight.shape[1]), weight.dtype)
    return np.where(kept[:, None] >= 0, rows, weight.dtype.type(0))


def weighted(terms: Array, weights: Array, kept: Array) -> Array:
    """Each term times its weight; a skipped term stays +0.0 whatever its weight."""
    with np.errstate(all="ignore"):
        return np.where(kept[:, None] >= 0, terms * weights[:, None], terms.dtype.type(0))


def counted_indices(kept: Array) -> int:
    """Number of indices of a bag that its mean counts."""
    return int((kept >= 0).sum())


def divided_by(terms: Array, amount: int) -> Array:
    """``terms`` divided by ``amount``, correctly rounded; unchanged if ``amount`` is 0."""
    with np.errstate(all="ignore"):
        divided: Array = terms / terms.dtype.type(max(amount, 1))
        return divided


def chosen_places(rows: Array, kept: Array) -> Array:
    """Position in the bag of each column's maximum: the first NaN, or the first of equals; -1 for none."""
    chosen = np.full(rows.shape[1], -1)
    best = np.zeros(rows.shape[1], rows.dtype)
    with np.errstate(all="ignore"):
        for place in np.flatnonzero(kept >= 0):
            row = rows[place]
            better = (chosen < 0) | (row > best) | (np.isnan(row) & ~np.isnan(best))
            chosen, best = np.where(better, place, chosen), np.where(better, row, best)
    return chosen


class EmbeddingBag(numerics.ReferenceKernel[plans.EmbeddingBagDescriptor]):
    """Sum, mean or maximum of each bag."""

    def run(self, args: plans.EmbeddingBagArgs) -> None:
        desc = self.desc
        begins = begins_of(desc, args.offsets)
        if desc.bad_index == "raise":
            raise_outside(args.indices, desc.rows)
        kept = kept_indices(args.indices, desc.rows, desc.padding)
        rows = gathered(numerics.widen(args.weight, desc.compute), kept)
        if args.per_sample_weights is not None:
            rows = weighted(rows, numerics.widen(args.per_sample_weights, desc.compute).reshape(-1), kept)
        for bag in range(desc.bags):
            places = slice(begins[bag], begins[bag + 1])
            numerics.store(args.out[bag], self.reduced(rows[places], kept[places]))

    def reduced(self, rows: Array, kept: Array) -> Array:
        """Reduce the rows of one bag. Skipped rows keep their position in the chunks of 32."""
        if self.desc.mode == "max":
            chosen = chosen_places(rows, kept)
            columns = np.arange(len(chosen))
            return np.where(chosen >= 0, rows[chosen, columns], 0) if len(rows) else 0.0 * columns
        total = ordered_sum(rows)
        return divided_by(total, counted_indices(kept)) if self.desc.mode == "mean" else total


class EmbeddingBagBackward(numerics.ReferenceKernel[plans.EmbeddingBagBackwardDescriptor]):
    """``ordered_sum`` of the terms of each row, and of the products of each weight."""

    def run(self, args: plans.EmbeddingBagBackwardArgs) -> None:
        begins = begins_of(self.desc, args.offsets)
        if args.dweight is not None:
            self.run_rows(args, args.dweight, begins)
        if args.dper_sample_weights is not None:
            self.run_weights(args, args.dper_sample_weights, begins)

    def run_rows(self, args: plans.EmbeddingBagBackwardArgs, dweight: torch.Tensor, begins: Array) -> None:
        desc = self.desc
        kept = kept_indices(args.indices, desc.rows, desc.padding)
        terms = self.terms(args, kept, begins)
        sums = {}
        for row, places in sources_of(kept, desc.rows).items():
            sums[row] = ordered_sum(terms[places])
            if desc.scale_grad_by_freq:
                sums[row] = divided_by(sums[row], len(places))
        store_rows(dweight, sums, args.accumulate, desc.compute)

    def terms(self, args: plans.EmbeddingBagBackwardArgs, kept: Array, begins: Array) -> Array:
        """The term that each index adds to its row; zeros if the index is in no bag."""
        desc = self.desc
        dout = numerics.widen(args.dout, desc.compute)
        terms = np.zeros((desc.count, desc.columns), numerics.compute_type(desc.compute))
        for bag in range(desc.bags):
            places = slice(begins[bag], begins[bag + 1])
            if desc.mode == "mean":
                terms[places] = divided_by(dout[bag], counted_indices(kept[places]))
            elif desc.mode == "max":
                assert args.weight is not None
                rows = gathered(numerics.widen(args.weight, desc.compute), kept[places])
                mine = chosen_places(rows, kept[places]) == np.arange(len(rows))[:, None]
                terms[places] = np.where(mine, dout[bag], 0)
            else:
                terms[places] = dout[bag]
        if args.per_sample_weights is None:
            return terms
        end = begins[-1] if desc.bags else 0
        bagged = np.where(np.arange(desc.count) < end, kept, -1)  # only weights of indices in a bag
        return weighted(terms, numerics.widen(args.per_sample_weights, desc.compute).reshape(-1), bagged)

    def run_weights(self, args: plans.EmbeddingBagBackwardArgs, out: torch.Tensor, begins: Array) -> None:
        """Gradient of each weight: the ordered sum over the columns."""
        desc = self.desc
        assert args.weight is not None
        kept = kept_indices(args.indices, desc.rows, desc.padding)
        rows = gathered(numerics.widen(args.weight, desc.compute), kept)
        dout = numerics.widen(args.dout, desc.compute)
        sums = np.zeros(desc.count, numerics.compute_type(desc.compute))
        counts = np.zeros(desc.count, bool)
        for bag in range(desc.bags):
            places = slice(begins[bag], begins[bag + 1])
            with np.errstate(all="ignore"):
                products = rows[places] * dout[bag]
            counts[places] = kept[places] >= 0
            sums[places] = np.where(counts[places], ordered_sum(products.T), 0)
        if args.accumulate:
            old = numerics.accumulated(out, sums.reshape(desc.shape), desc.compute).reshape(-1)
            sums = np.where(counts, old, numerics.widen(out, desc.compute).reshape(-1))
        numerics.store(out, sums.reshape(desc.shape))
