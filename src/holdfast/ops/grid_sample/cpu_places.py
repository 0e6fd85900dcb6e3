"""Places of samples on the CPU: where the corners of a run of samples are in an image, and their values.

A run has tables: the offset of every place, indexed [place, sample], and the weight of every corner,
indexed [corner, sample]. The corners of a place have consecutive numbers. ``cpu_coordinates`` explains places
and columns.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from holdfast.backends.cpu import jit, outlined, pointer
from holdfast.numerics.cpu import ITEM_SIZE, widen, zero
from holdfast.numerics.cpu_walk import RUN, size_of
from holdfast.ops.grid_sample.cpu_coordinates import (
    find_offsets,
    find_pair_offsets,
    find_pair_weights,
    find_taps,
    find_weights,
    whole,
)


@jit
def locate(grid, problem, steps, begin, count, tables, rows_at, raw, like, columns):
    """Fill the tables of ``count`` samples from ``begin``, and of those after them, up to a ``whole`` number.

    ``problem`` is (form, sizes, numbers) as in ``find_taps``. ``tables`` are the addresses of the offsets and
    of the weights.
    """
    outlined()
    form, sizes, numbers = problem
    axes, taps = form[0], form[1]
    corners = taps * taps * (taps if axes == 3 else 1)
    offsets_at, weights_at = tables
    find_taps(grid, form, sizes, numbers, 0, begin, count, rows_at, raw, like, columns)
    count = whole(count)
    if taps == 2:
        find_pair_weights(rows_at, axes, count, weights_at, like)
    else:
        for corner in range(corners):
            find_weights(rows_at, corner, axes, taps, count, weights_at + corner * RUN * size_of(like), like)
    find_places(problem, steps, count, offsets_at, rows_at, columns)


@jit
def find_places(problem, steps, count, offsets_at, rows_at, columns):
    """Fill the table of offsets of located samples, for a memory with these strides."""
    axes, taps = problem[0][0], problem[0][1]
    if len(columns) == 2 and steps[3]:
        find_pair_offsets(rows_at, axes, steps, count, offsets_at)
    else:
        for place in range(taps * taps * (taps if axes == 3 else 1) // len(columns)):
            target = offsets_at + place * RUN * 8
            find_offsets(rows_at, place * len(columns), axes, taps, steps, count, target)


@jit
def _gather(source, item, offsets_at, count, target, element, columns):
    """Copy the columns of each offset. Two are loaded before either is stored: LLVM makes it one copy."""
    offsets, result = pointer(offsets_at, np.int64), pointer(target, element)
    if len(columns) == 2:
        for i in range(count):
            values = pointer(source + offsets[i] * item, element)
            left, right = values[0], values[1]
            result[2 * i], result[2 * i + 1] = left, right
    else:
        for i in range(count):
            result[i] = pointer(source + offsets[i] * item, element)[0]


@jit
def gather_places(source, kind, offsets_at, count, target, raw, like, columns):
    """Load the columns of a place of every sample, in the compute type, indexed [sample, column]."""
    outlined()
    item = kind & ITEM_SIZE
    to = target if kind == item else raw
    if item == 4:
        _gather(source, item, offsets_at, count, to, np.uint32, columns)
    elif item == 8:
        _gather(source, item, offsets_at, count, to, np.uint64, columns)
    else:
        _gather(source, item, offsets_at, count, to, np.uint16, columns)
    if kind != item:
        widen(raw, kind, 0, count * len(columns), target, like)


@jit
def add_weighted(values_at, weights_at, count, fresh, target, like, columns):
    """Add weight times value, column by column, where the corner is in the image; ``fresh``: from +0.0."""
    values, result = pointer(values_at, like), pointer(target, like)
    if fresh:
        for i in range(count):
            result[i] = zero(like)
    weights = pointer(weights_at, like)
    for i in range(count):
        total = result[i]
        for k in range(len(columns)):
            weight = weights[k * RUN + i]
            more = total + weight * values[i * len(columns) + k]
            total = more if weight == weight else total
        result[i] = total


@jit
def pick(values_at, weights_at, count, target, like):
    """The value of the only corner, or +0.0 outside the image: for mode nearest."""
    values, weights, result = pointer(values_at, like), pointer(weights_at, like), pointer(target, like)
    for i in range(count):
        result[i] = values[i] if weights[i] == weights[i] else zero(like)
