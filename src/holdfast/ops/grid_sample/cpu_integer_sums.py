"""The integer sums of dinput on the CPU.

A plane, one image and one channel, has a buffer of int64 sums: one word per pixel in float32, two in float64.
In float32, several channels can share a buffer (``cpu_lanes``). A word has a magnitude below 2**61. A pixel
with terms that are not finite is marked at the end: its first word becomes less than any sum.

A row of the image may be followed by unused places, because the sums of rows that are a power of two apart
would share few sets of the caches. ``rows`` is (pixels of a row, unused places after it).
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=operator

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from holdfast.backends.cpu import jit, outlined, pointer
from holdfast.numerics.cpu import as_real, reinterpret, zero
from holdfast.numerics.cpu_walk import RUN, size_of, span_of

#: A marked pixel holds _MARK plus 1 for a term of inf, 2 for -inf, or both; 3 also for NaN.
_MARK = np.int64(-(2**63))
_LEAST = np.int64(-(2**62))


def magnitude(value):
    """The bits of |value| as an integer of its size; they are ordered as the magnitudes are."""
    raise NotImplementedError("called from kernels only")


def power_of_two(exponent, like):
    """2**exponent in the type of ``like``; it is a normal number."""
    raise NotImplementedError("called from kernels only")


@overload(magnitude)
def _magnitude(value):
    if value == types.float32:
        return lambda value: np.int32(reinterpret(value, np.int32) & np.int32(0x7FFFFFFF))
    return lambda value: reinterpret(value, np.int64) & np.int64(0x7FFFFFFFFFFFFFFF)


@overload(power_of_two)
def _power_of_two(exponent, like):
    number: Any = np.float32 if like == types.float32 else np.float64
    bits: Any = np.int32 if like == types.float32 else np.int64
    bias, fraction = (127, 23) if like == types.float32 else (1023, 52)
    return lambda exponent, like: reinterpret(bits((exponent + bias) << fraction), number)


@jit
def is_finite(magnitude_bits, like):
    """Whether a magnitude, as bits, is finite."""
    return magnitude_bits < magnitude(power_of_two(0, like) / zero(like))


@jit
def find_largest(address, kind, walk, begin, end, row_at, raw, like):
    """The largest finite magnitude of elements ``begin`` to ``end`` of a walk, and the largest of all."""
    outlined()
    infinite, none = magnitude(power_of_two(0, like) / zero(like)), magnitude(zero(like))
    largest = seen = none
    for first in range(begin, end, RUN):
        last = min(first + RUN, end)
        values = pointer(span_of(address, kind, walk, first, last, raw, row_at, like), like)
        for i in range(last - first):
            here = magnitude(values[i])
            seen = max(seen, here)
            largest = max(largest, here if here < infinite else none)
    return np.int64(largest), np.int64(seen)


@jit
def shift_of(largest, bits, like):
    """``plane_shift`` of a plane of dout with this largest finite magnitude."""
    fraction = 23 if size_of(like) == 4 else 52
    exponent = max(largest >> fraction, 1) - (126 if fraction == 23 else 1022)
    return bits - exponent


@jit
def _factors(shift, like):
    """Two powers of two whose product is 2**shift, which may be too large or too small for one number."""
    half = shift // 2
    return power_of_two(half, like), power_of_two(shift - half, like)


@jit
def scale(values_at, count, shift, target, like):
    """Multiply by 2**shift, in two multiplications."""
    values, result, (first, second) = pointer(values_at, like), pointer(target, like), _factors(shift, like)
    for i in range(count):
        result[i] = (values[i] * first) * second


@jit
def clear_infinite(values_at, count, like):
    """Replace values that are not finite by +0.0."""
    values, infinite = pointer(values_at, like), power_of_two(0, like) / zero(like)
    for i in range(count):
        values[i] = values[i] if abs(values[i]) < infinite else zero(like)


@jit
def add_terms(change_at, weights_at, offsets_at, count, bits, terms_at, sums_at, like, columns):
    """Add weight times change, as integers, to the columns of a place of every sample.

    ``change`` is finite. A corner outside the image adds 0.
    """
    outlined()
    words = size_of(like) // 4
    wide = len(columns) * words
    change, weights = pointer(change_at, like), pointer(weights_at, like)
    terms, offsets = pointer(terms_at, np.int64), pointer(offsets_at, np.int64)
    unit = power_of_two(bits, like)
    for i in range(count):
        for k in range(len(columns)):
            term = weights[k * RUN + i] * change[i]
            term = term if term == term else zero(like)
            whole = np.int64(term)
            terms[k * words * RUN + i] = whole
            if words == 2:
                terms[(k * words + 1) * RUN + i] = np.int64((term - as_real(whole, like)) * unit)
    # Column by column: a sum that the previous sample has just stored would be waited for.
    sums = pointer(sums_at, np.int64)
    for k in range(wide):
        for i in range(count):
            sums[offsets[i] * words + k] += terms[k * RUN + i]


@jit
def mark_infinite(dout_at, weights_at, offsets_at, count, sums_at, pixel, like, columns):
    """Mark the pixels with terms that are not finite. All finite terms were added.

    ``pixel`` is the number of bytes from a pixel to the next.
    """
    outlined()
    infinite = power_of_two(0, like) / zero(like)
    dout, weights, offsets = (
        pointer(dout_at, like),
        pointer(weights_at, like),
        pointer(offsets_at, np.int64),
    )
    for i in range(count):
        if abs(dout[i]) < infinite:
            continue
        for k in range(len(columns)):
            weight = weights[k * RUN + i]
            if weight == weight:
                term = weight * dout[i]
                mark = 1 if term == infinite else 2 if term == -infinite else 3
                sums = pointer(sums_at + (offsets[i] + k) * pixel, np.int64)
                sums[0] = (sums[0] if sums[0] < _LEAST else _MARK) | mark


@jit
def place_of(pixel, rows):
    """The place of a pixel among the sums."""
    return pixel + pixel // rows[0] * rows[1] if rows[1] > 0 else pixel


@jit
def pixel_of(place, rows):
    """The inverse of ``place_of``."""
    return place - place // (rows[0] + rows[1]) * rows[1] if rows[1] > 0 else place


@jit
def run_of(at, end, rows):
    """Number of pixels from ``at`` to ``end``, at most ``RUN``, whose sums are side by side."""
    count = min(RUN, end - at)
    return min(count, rows[0] - at % rows[0]) if rows[1] > 0 else count


@jit
def clear_sums(sums_at, count):
    sums = pointer(sums_at, np.int64)
    for i in range(count):
        sums[i] = 0


@jit
def add_sums(sums_at, others_at, count):
    """Add the words of another buffer, neither of them marked."""
    sums, others = pointer(sums_at, np.int64), pointer(others_at, np.int64)
    for i in range(count):
        sums[i] += others[i]


@jit
def add_marked_sums(sums_at, others_at, count, words):
    """``add_sums`` of buffers with marked pixels."""
    outlined()
    sums, others = pointer(sums_at, np.int64), pointer(others_at, np.int64)
    for i in range(0, count, words):
        first, second = sums[i], others[i]
        if first < _LEAST or second < _LEAST:
            sums[i] = (first if first < _LEAST else _MARK) | (second if second < _LEAST else _MARK)
        else:
            for k in range(i, i + words):
                sums[k] += others[k]


@jit
def convert_sums(sums_at, count, bits, shift, target, like):
    """Sums of one channel as values. ``shift`` is that of ``scale``."""
    sums, values, words = pointer(sums_at, np.int64), pointer(target, like), size_of(like) // 4
    unit, (first, second) = power_of_two(-bits, like), _factors(-shift, like)
    for i in range(count):
        value = as_real(sums[i * words], like)
        value = value + as_real(sums[i * words + 1], like) * unit if words == 2 else value
        values[i] = (value * first) * second


@jit
def replace_marked(sums_at, pixel, count, values_at, like):
    """Replace the values of marked pixels, whose sums are ``pixel`` bytes apart."""
    outlined()
    values, infinite = pointer(values_at, like), power_of_two(0, like) / zero(like)
    for i in range(count):
        mark = pointer(sums_at + i * pixel, np.int64)[0]
        if mark < _LEAST:
            mark &= 3
            values[i] = infinite if mark == 1 else -infinite if mark == 2 else infinite - infinite
