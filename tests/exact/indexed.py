"""Exact ordered sums: segment_sum, the gradient of embedding, embedding_bag and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
import torch

from exact.element import Element, as_given, sampled, summed
from exact.numbers import Array, Exact, lost_below
from holdfast.numerics.reference import compute_type
from holdfast.ops.embedding_bag.reference import begins_of, chosen_places, gathered, kept_indices
from holdfast.ops.scatter.reference import destinations


def numbers(tensor: torch.Tensor) -> Array:
    """The values of a tensor in float64, which is exact."""
    return tensor.detach().double().numpy()


def _finite(*values: Array) -> bool:
    return all(bool(np.isfinite(each).all()) for each in values)


def by_row(desc: Any, output: str, rows: Array, terms: torch.Tensor) -> Iterator[Element]:
    """Sums of the terms of each row. Negative rows are skipped."""
    values = numbers(terms).reshape(desc.count, desc.columns)
    for place in sampled(desc.rows * desc.columns):
        row, column = divmod(place, desc.columns)
        own = values[rows == row, column]
        if _finite(own):
            times = Fraction(1, len(own)) if desc.by_count and len(own) else Fraction(1)
            yield summed(output, place, Exact.of(own), times)


def segment_sum(desc: Any, args: Any) -> Iterator[Element]:
    yield from by_row(desc, "out", args.destinations.numpy().reshape(-1), args.terms)


def scatter(desc: Any, args: Any) -> Iterator[Element]:
    rows = destinations(args.index.numpy(), desc)
    values = numbers(args.src).reshape(desc.count, desc.columns)
    inputs = None if args.input is None else numbers(args.input).reshape(desc.rows, desc.columns)
    alpha = float(compute_type(desc.compute)(desc.alpha))
    for place in sampled(desc.rows * desc.columns):
        row, column = divmod(place, desc.columns)
        own = values[rows == row, column]
        given = np.zeros(0) if inputs is None else inputs[row, column][None]
        if not _finite(own, given):
            continue
        if not len(own):
            yield as_given("out", place, float(given[0]) if len(given) else 0.0)
            continue
        factors = np.full(len(own), alpha)
        if desc.base == "added":
            own, factors = np.append(own, given), np.append(factors, 1.0)
        times = Fraction(1, len(own)) if desc.by_count else Fraction(1)
        yield summed("out", place, Exact.of(own) * Exact.of(factors), times)


def gather(desc: Any, args: Any) -> Iterator[Element]:
    index, rows = args.index.numpy().reshape(-1), destinations(args.index.numpy(), desc)
    values = numbers(args.input).reshape(desc.rows, desc.columns)
    for place in sampled(desc.count * desc.columns):
        position, column = divmod(place, desc.columns)
        known = 0 <= index[position] < desc.extent
        value = values[rows[position], column] if known else 0.0
        if np.isfinite(value):
            yield as_given("out", place, float(value))


def embedding_backward(desc: Any, args: Any) -> Iterator[Element]:
    indices = args.indices.numpy().reshape(-1)
    yield from by_row(desc, "dweight", np.where(indices == desc.padding, -1, indices), args.dout)


def embedding(desc: Any, args: Any) -> Iterator[Element]:
    indices, weight = args.indices.numpy().reshape(-1), numbers(args.weight)
    for place in sampled(desc.count * desc.columns):
        row, column = indices[place // desc.columns], place % desc.columns
        value = weight[row, column] if 0 <= row < desc.rows else 0.0
        if np.isfinite(value):
            yield as_given("out", place, float(value))


def embedding_bag(desc: Any, args: Any) -> Iterator[Element]:
    begins = begins_of(desc, args.offsets)
    kept = kept_indices(args.indices, desc.rows, desc.padding)
    weight, per_sample = numbers(args.weight), args.per_sample_weights
    weights = None if per_sample is None else numbers(per_sample).reshape(-1)
    for place in sampled(desc.bags * desc.columns):
        bag, column = divmod(place, desc.columns)
        places = np.arange(begins[bag], begins[bag + 1])
        places = places[kept[places] >= 0]
        rows = weight[kept[places], column]
        if not _finite(rows, *([] if weights is None else [weights[places]])):
            continue
        if desc.mode == "max":
            yield as_given("out", place, float(rows.max()) if len(rows) else 0.0)
            continue
        terms = Exact.of(rows) if weights is None else Exact.of(rows) * Exact.of(weights[places])
        times = Fraction(1, max(len(rows), 1)) if desc.mode == "mean" else Fraction(1)
        yield summed("out", place, terms, times, terms.lost(desc.compute))


def embedding_bag_backward(desc: Any, args: Any) -> Iterator[Element]:
    begins = begins_of(desc, args.offsets)
    kept = kept_indices(args.indices, desc.rows, desc.padding)
    bag_of = np.full(desc.count, -1)
    bag_of[begins[0] : begins[-1]] = np.repeat(np.arange(desc.bags), np.diff(begins))
    if desc.dweight:
        yield from _rows(desc, args, begins, kept, bag_of)
    if desc.dper_sample_weights:
        yield from _weights(desc, args, kept, bag_of)


def _rows(desc: Any, args: Any, begins: Array, kept: Array, bag_of: Array) -> Iterator[Element]:
    dout, per_sample = numbers(args.dout), args.per_sample_weights
    sizes = np.bincount(bag_of[(kept >= 0) & (bag_of >= 0)], minlength=desc.bags)
    for place in sampled(desc.rows * desc.columns):
        row, column = divmod(place, desc.columns)
        read = np.flatnonzero(kept == row)
        places = read[bag_of[read] >= 0]
        if desc.mode == "max":
            places = _chosen(desc, args, begins, kept, bag_of, places, column)
        values = dout[bag_of[places], column]
        weights = None if per_sample is None else numbers(per_sample).reshape(-1)[places]
        if not _finite(values, *([] if weights is None else [weights])):
            continue
        terms = Exact.of(values) if weights is None else Exact.of(values) * Exact.of(weights)
        times = Fraction(1, max(len(read), 1)) if desc.scale_grad_by_freq else Fraction(1)
        lost = terms.lost(desc.compute)
        if desc.mode == "mean":  # quotients with one denominator
            counts = sizes[bag_of[places]]
            common = lcm(*set(counts.tolist()))
            terms = terms * Exact.whole_numbers(common // counts)
            lost = common * lost_below(values / counts, desc.compute)
            times /= common
        yield summed("dweight", place, terms, times, lost)


def _chosen(
    desc: Any, args: Any, begins: Array, kept: Array, bag_of: Array, places: Array, column: int
) -> Array:
    """The positions among ``places`` that hold the maximum of their bag."""
    weight = numbers(args.weight)[:, column : column + 1]
    found = []
    for bag in np.unique(bag_of[places]):
        own = kept[begins[bag] : begins[bag + 1]]
        found.append(begins[bag] + chosen_places(gathered(weight, own), own)[0])
    return np.intersect1d(places, np.array(found, int))


def _weights(desc: Any, args: Any, kept: Array, bag_of: Array) -> Iterator[Element]:
    weight, dout = numbers(args.weight), numbers(args.dout)
    for place in sampled(desc.count):
        if kept[place] < 0 or bag_of[place] < 0:
            yield as_given("dper_sample_weights", place, 0.0)
            continue
        row, gradient = weight[kept[place]], dout[bag_of[place]]
        if _finite(row, gradient):
            terms = Exact.of(row) * Exact.of(gradient)
            yield summed("dper_sample_weights", place, terms, lost=terms.lost(desc.compute))
