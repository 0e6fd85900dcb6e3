"""The sums over channels of dgrid on the CPU: one for every corner of a sample, indexed [corner, sample].

They are ordered sums: a level of chunk sums, when full, is added to the next.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from holdfast.backends.cpu import jit, pointer
from holdfast.numerics.cpu import zero
from holdfast.numerics.cpu_walk import RUN, size_of
from holdfast.ops.segment_sum import indexed

CHUNK = indexed.CHUNK


@jit
def add_products(dout_at, values_at, count, fresh, sums_at, like, columns):
    """Add dout times value to the sums of the corners of a place; ``fresh``: from +0.0.

    The sum of a corner outside the image is arbitrary.
    """
    dout, values, sums = pointer(dout_at, like), pointer(values_at, like), pointer(sums_at, like)
    if fresh:
        for i in range(count):
            for k in range(len(columns)):
                sums[k * RUN + i] = zero(like) + dout[i] * values[i * len(columns) + k]
    else:
        for i in range(count):
            for k in range(len(columns)):
                sums[k * RUN + i] += dout[i] * values[i * len(columns) + k]


@jit
def _add_level(target_at, source_at, count, like):
    target, source = pointer(target_at, like), pointer(source_at, like)
    for i in range(count):
        target[i] = target[i] + source[i]


@jit
def clear(target_at, count, like):
    target = pointer(target_at, like)
    for i in range(count):
        target[i] = zero(like)


@jit
def add_levels(sums_at, size, levels, done, channels, like):
    """Add full levels of the sums over channels to the next level, after ``done`` channels.

    ``add_products`` restarts the first level for each chunk of channels. After the last channel every level
    is added to the next, full or not.
    """
    if levels == 1 or (done % CHUNK != 0 and done != channels):
        return
    step = size * size_of(like)
    _add_level(sums_at + step, sums_at, size, like)
    full, level = done // CHUNK, 1
    while done % CHUNK == 0 and full % CHUNK == 0 and level + 1 < levels:
        _add_level(sums_at + (level + 1) * step, sums_at + level * step, size, like)
        clear(sums_at + level * step, size, like)
        full //= CHUNK
        level += 1
    if done == channels:
        for last in range(1, levels - 1):
            _add_level(sums_at + (last + 1) * step, sums_at + last * step, size, like)
