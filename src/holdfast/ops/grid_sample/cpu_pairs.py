"""Samples whose linear taps along x are side by side in memory, on the CPU.

A place with two columns is loaded as one vector of two elements. The places of several samples are joined in
registers, and used for two channels at a time: the offsets and weights are loaded once for both. Gather
instructions are slower than these loads. In the same way the integer sums of a place are one vector.

The offsets and weights of a run are as in ``cpu_places``, of elements that have the compute type.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import emit, jit, load_lanes, outlined, pointer, prefetch_address, store_lanes
from holdfast.numerics.cpu_walk import RUN, size_of

#: Bytes of a vector, and of the part of it within which a shuffle is fast.
_VECTOR, _LANE = 32, 16

#: Maximum number of channels that are processed at once.
PAIRED = 2
#: Maximum number of channels that ``prefetch_places`` prefetches, and samples that often share a cache line.
_AHEAD, _NEAR = 4, 4
#: Samples whose sums are stored between those of two neighbours. Of this many samples, one may still meet a
#: neighbour.
_APART, _FEW = 16, 16

_INT64 = ir.IntType(64)


def _shuffled(builder: Any, first: Any, second: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(
        first, second, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    )


def _joined(builder: Any, vectors: list[Any]) -> Any:
    """The elements of several vectors in one."""
    while len(vectors) > 1:
        order = list(range(2 * vectors[0].type.count))
        vectors = [
            _shuffled(builder, one, other, order)
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _columns(builder: Any, source: Any, offsets: list[Any], real: Any) -> list[Any]:
    """Emit the load of the places at these offsets. Returns the vectors of left and of right columns.

    The pairs are joined in an order in which each column is a shuffle within parts of the vectors.
    """
    pair, lanes = ir.VectorType(real, 2).as_pointer(), len(offsets)
    size = _VECTOR // lanes
    part = _LANE // size
    at = builder.inttoptr(source, real.as_pointer())
    pairs = [builder.load(builder.bitcast(builder.gep(at, [offset]), pair), align=size) for offset in offsets]
    first = _joined(builder, [pairs[k] for k in range(lanes) if k % part < part // 2])
    second = _joined(builder, [pairs[k] for k in range(lanes) if k % part >= part // 2])
    left = [
        vector + begin + k
        for begin in range(0, lanes, part)
        for vector in (0, lanes)
        for k in range(0, part, 2)
    ]
    return [_shuffled(builder, first, second, [k + column for k in left]) for column in range(2)]


def _lanes_of(real: Any) -> int:
    return _VECTOR // (4 if real == ir.FloatType() else 8)


def _offsets(builder: Any, offsets: Any, first: Any, lanes: int) -> list[Any]:
    return [builder.load(builder.gep(offsets, [builder.add(first, _INT64(k))])) for k in range(lanes)]


def _rows(builder: Any, first: Any) -> list[Any]:
    """Positions of the same sample in four rows."""
    return [builder.add(first, _INT64(row * RUN)) for row in range(4)]


@emit
def _add_weighted(typingctx, source, step, offsets, weights, first, fresh, result, channels):
    """``add_weighted_pairs`` of one vector of samples. ``channels`` is a tuple with an element for each."""

    def build(context, builder, signature, args):
        source, step, offsets, weights, first, fresh, result, _ = args
        real = weights.type.pointee
        lanes = _lanes_of(real)
        zeros, rows = ir.Constant(ir.VectorType(real, lanes), [0.0] * lanes), _rows(builder, first)
        totals = [
            builder.select(fresh, zeros, load_lanes(builder, result, row, lanes))
            for row in rows[: len(channels)]
        ]
        for place in range(2):
            at = _offsets(builder, offsets, rows[place], lanes)
            known = [load_lanes(builder, weights, row, lanes) for row in rows[2 * place : 2 * place + 2]]
            inside = [builder.fcmp_ordered("ord", weight, weight) for weight in known]
            image = source
            for channel in range(len(channels)):
                values = _columns(builder, image, at, real)
                for weight, value, counts in zip(known, values, inside, strict=True):
                    more = builder.fadd(totals[channel], builder.fmul(weight, value))
                    totals[channel] = builder.select(counts, more, totals[channel])
                image = builder.add(image, step)
        for row, total in zip(rows[: len(channels)], totals, strict=True):
            store_lanes(builder, total, result, row)
        return context.get_dummy_value()

    taken = (types.int64, types.int64, offsets, weights, types.int64, types.boolean, result, channels)
    return types.none(*taken), build


@emit
def _add_products(typingctx, source, step, offsets, dout, first, fresh, sums, channels):
    """``add_pair_products`` of one vector of samples. ``channels`` is a tuple with an element for each."""

    def build(context, builder, signature, args):
        source, step, offsets, dout, first, fresh, sums, _ = args
        real = sums.type.pointee
        lanes = _lanes_of(real)
        zeros, rows = ir.Constant(ir.VectorType(real, lanes), [0.0] * lanes), _rows(builder, first)
        changes = [load_lanes(builder, dout, row, lanes) for row in rows[: len(channels)]]
        for place in range(2):
            at, own = _offsets(builder, offsets, rows[place], lanes), rows[2 * place : 2 * place + 2]
            totals = [builder.select(fresh, zeros, load_lanes(builder, sums, row, lanes)) for row in own]
            image = source
            for change in changes:
                values = _columns(builder, image, at, real)
                totals = [
                    builder.fadd(total, builder.fmul(change, value))
                    for total, value in zip(totals, values, strict=True)
                ]
                image = builder.add(image, step)
            for row, total in zip(own, totals, strict=True):
                store_lanes(builder, total, sums, row)
        return context.get_dummy_value()

    taken = (types.int64, types.int64, offsets, dout, types.int64, types.boolean, sums, channels)
    return types.none(*taken), build


@emit
def _join_terms(typingctx, change, weights, first, terms):
    """Weight times change of one vector of samples as integers, indexed [sample, column]. NaN is 0."""

    def build(context, builder, signature, args):
        change, weights, first, terms = args
        lanes = _lanes_of(change.type.pointee)
        values, columns = load_lanes(builder, change, first, lanes), []
        for row in _rows(builder, first)[:2]:
            term = builder.fmul(load_lanes(builder, weights, row, lanes), values)
            zeros = ir.Constant(term.type, [0.0] * lanes)
            term = builder.select(builder.fcmp_ordered("ord", term, term), term, zeros)
            columns.append(builder.fptosi(term, ir.VectorType(_INT64, lanes)))
        order = [k + column for k in range(lanes) for column in (0, lanes)]
        for half in (0, lanes):
            at = builder.add(builder.mul(first, _INT64(2)), _INT64(half))
            joined = _shuffled(builder, columns[0], columns[1], order[half : half + lanes])
            store_lanes(builder, joined, terms, at)
        return context.get_dummy_value()

    return types.none(change, weights, types.int64, terms), build


@emit
def _add_pair(typingctx, terms, sample, sums, place):
    """Add the terms of a sample to the sums of its place."""

    def build(context, builder, signature, args):
        terms, sample, sums, place = args
        more = load_lanes(builder, terms, builder.mul(sample, _INT64(2)), 2)
        store_lanes(builder, builder.add(load_lanes(builder, sums, place, 2), more), sums, place)
        return context.get_dummy_value()

    return types.none(terms, types.int64, sums, types.int64), build


@jit
def in_pairs(image, like, columns):
    """Whether the places of an image have two columns of the compute type."""
    return len(columns) == 2 and image[1] == size_of(like)


@jit
def prefetch_places(source, step, channels, offsets_at, count, item):
    """Prefetch places of the first channels, ``step`` bytes apart: one of ``_NEAR`` samples."""
    offsets = pointer(offsets_at, np.int64)
    for channel in range(min(channels, _AHEAD)):
        for i in range(0, count, _NEAR):
            prefetch_address(source + channel * step + offsets[i] * item)


@jit
def add_weighted_pairs(source, step, channels, offsets_at, weights_at, count, fresh, target, like):
    """``add_weighted`` of two places with two columns, for one or two channels, ``step`` bytes apart.

    The results of the channels are in rows. Samples after the last, up to a whole vector, are processed too.
    """
    outlined()
    offsets, weights, result = pointer(offsets_at, np.int64), pointer(weights_at, like), pointer(target, like)
    if channels == 1:
        for i in range(0, count, _VECTOR // size_of(like)):
            _add_weighted(source, step, offsets, weights, i, fresh, result, (0,))
    else:
        for i in range(0, count, _VECTOR // size_of(like)):
            _add_weighted(source, step, offsets, weights, i, fresh, result, (0, 0))


@jit
def add_pair_products(source, step, channels, offsets_at, dout_at, count, fresh, sums_at, like):
    """``add_products`` of two places with two columns, for one or two channels, ``step`` bytes apart."""
    outlined()
    offsets, dout, sums = pointer(offsets_at, np.int64), pointer(dout_at, like), pointer(sums_at, like)
    if channels == 1:
        for i in range(0, count, _VECTOR // size_of(like)):
            _add_products(source, step, offsets, dout, i, fresh, sums, (0,))
    else:
        for i in range(0, count, _VECTOR // size_of(like)):
            _add_products(source, step, offsets, dout, i, fresh, sums, (0, 0))


@jit
def are_apart(offsets_at, count):
    """Whether ``add_pair_terms`` of these places is faster than ``add_terms``.

    A processor waits for a stored vector if the next load overlaps a part of it: for a place that is next to
    one stored shortly before. So samples are added ``count // _APART`` after each other, and this is only
    slow if such samples are neighbours in the image.
    """
    offsets, step, near = pointer(offsets_at, np.int64), count // _APART, 0
    for i in range(count - step):
        near += abs(offsets[i + step] - offsets[i]) == 1
    return step > 1 and near * _FEW < count


@jit
def add_pair_terms(change_at, weights_at, offsets_at, count, terms_at, sums_at, like):
    """``add_terms`` in float32 of a place with two columns, whose sums are side by side."""
    outlined()
    change, weights = pointer(change_at, like), pointer(weights_at, like)
    terms, offsets = pointer(terms_at, np.int64), pointer(offsets_at, np.int64)
    for i in range(0, count, _VECTOR // size_of(like)):
        _join_terms(change, weights, i, terms)
    sums, step = pointer(sums_at, np.int64), count // _APART
    for first in range(step):
        for i in range(first, count, step):
            _add_pair(terms, i, sums, offsets[i])
