"""Several channels at once on the CPU: ``LANES`` float32 channels in one vector.

A buffer indexed [sample or pixel, channel] has the channels of one element side by side. Rows, indexed
[channel, element], are ``RUN`` elements long.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import emit, jit, outlined, pointer
from holdfast.numerics.cpu import zero
from holdfast.numerics.cpu_walk import RUN

#: Channels of a vector.
LANES = 8
#: Bytes of the channels of one element, as floats and as integer sums.
REALS, SUMS = LANES * 4, LANES * 8

_REAL, _WHOLE = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(64), LANES)
_MASK = ir.VectorType(ir.IntType(32), LANES)


def _place(builder, address, vector):
    return builder.inttoptr(address, vector.as_pointer())


def _splat(builder, value):
    """A vector with ``value`` in every lane."""
    first = builder.insert_element(ir.Constant(_REAL, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(_MASK, [0] * LANES))


@emit
def _transpose_square(typingctx, source, source_step, target, target_step):
    """Transpose ``LANES`` vectors, ``source_step`` bytes apart."""

    def build(context, builder, signature, args):
        def address(base, step, k):
            return _place(builder, builder.add(base, builder.mul(step, step.type(k))), _REAL)

        rows = [builder.load(address(args[0], args[1], k), align=4) for k in range(LANES)]
        for d in (4, 2, 1):
            low = ir.Constant(_MASK, [LANES + j - d if j & d else j for j in range(LANES)])
            high = ir.Constant(_MASK, [LANES + j if j & d else j + d for j in range(LANES)])
            for k in range(LANES):
                if not k & d:
                    a, b = rows[k], rows[k + d]
                    rows[k], rows[k + d] = (builder.shuffle_vector(a, b, mask) for mask in (low, high))
        for k in range(LANES):
            builder.store(rows[k], address(args[2], args[3], k), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), build


@emit
def _add_terms(typingctx, change, weight, sums):
    """Add weight times change, as integers, to the sums at an address."""

    def build(context, builder, signature, args):
        change = builder.load(_place(builder, args[0], _REAL), align=4)
        terms = builder.fptosi(builder.fmul(_splat(builder, args[1]), change), _WHOLE)
        place = _place(builder, args[2], _WHOLE)
        builder.store(builder.add(builder.load(place, align=8), terms), place, align=8)
        return context.get_dummy_value()

    return types.none(types.int64, types.float32, types.int64), build


@emit
def _add_product(typingctx, value, weight, target):
    """Add weight times value to the floats at an address."""

    def build(context, builder, signature, args):
        value = builder.load(_place(builder, args[0], _REAL), align=4)
        place = _place(builder, args[2], _REAL)
        more = builder.fmul(_splat(builder, args[1]), value)
        builder.store(builder.fadd(builder.load(place, align=4), more), place, align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.float32, types.int64), build


@emit
def _convert(typingctx, sums, target):
    """Round integer sums to floats."""

    def build(context, builder, signature, args):
        value = builder.sitofp(builder.load(_place(builder, args[0], _WHOLE), align=8), _REAL)
        builder.store(value, _place(builder, args[1], _REAL), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), build


@jit
def rows_to_lanes(rows_at, count, target):
    """Transpose rows. Up to ``LANES - 1`` elements after the last are written too."""
    outlined()
    for i in range(0, count, LANES):
        _transpose_square(rows_at + i * 4, RUN * 4, target + i * REALS, REALS)


@jit
def lanes_to_rows(source, count, rows_at):
    """Transpose to rows; the inverse of ``rows_to_lanes``."""
    outlined()
    for i in range(0, count, LANES):
        _transpose_square(source + i * REALS, REALS, rows_at + i * 4, RUN * 4)


@jit
def add_terms_in_lanes(changes_at, weights_at, offsets_at, count, sums_at, like, columns):
    """``add_terms`` for ``LANES`` channels. Changes and sums are indexed [element, channel]."""
    outlined()
    weights, offsets = pointer(weights_at, like), pointer(offsets_at, np.int64)
    for i in range(count):
        for k in range(len(columns)):
            weight = weights[k * RUN + i]
            weight = weight if weight == weight else zero(like)
            _add_terms(changes_at + i * REALS, np.float32(weight), sums_at + (offsets[i] + k) * SUMS)


@jit
def add_weighted_in_lanes(image_at, weights_at, offsets_at, count, fresh, target, like, columns):
    """``add_weighted`` for ``LANES`` channels. The image and the result are indexed [element, channel]."""
    outlined()
    weights, offsets = pointer(weights_at, like), pointer(offsets_at, np.int64)
    result = pointer(target, np.float32)
    for i in range(count * LANES if fresh else 0):
        result[i] = np.float32(0)
    for i in range(count):
        for k in range(len(columns)):
            weight = weights[k * RUN + i]
            if weight == weight:
                _add_product(image_at + (offsets[i] + k) * REALS, np.float32(weight), target + i * REALS)


@jit
def convert_lanes(sums_at, count, target):
    """Round integer sums to floats; both are indexed [pixel, channel]."""
    for i in range(count):
        _convert(sums_at + i * SUMS, target + i * REALS)
