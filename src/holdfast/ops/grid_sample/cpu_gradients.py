"""Gradients of a run of samples on the CPU: the terms of dinput, and dgrid.

An operand is (address, kind, image stride, stride of the channels or of the grid's axes, walk over samples or
pixels).
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from holdfast.backends.cpu import jit, outlined, pointer
from holdfast.numerics.cpu import ITEM_SIZE
from holdfast.numerics.cpu_walk import RUN, load_span, size_of, span_of
from holdfast.ops.grid_sample.cpu_channel_sums import CHUNK, add_levels, add_products, clear
from holdfast.ops.grid_sample.cpu_coordinates import MODES, find_gradients, store_gradients
from holdfast.ops.grid_sample.cpu_integer_sums import add_terms, clear_infinite, mark_infinite, scale
from holdfast.ops.grid_sample.cpu_lanes import LANES, SUMS, add_terms_in_lanes, rows_to_lanes
from holdfast.ops.grid_sample.cpu_pairs import (
    PAIRED,
    add_pair_products,
    add_pair_terms,
    are_apart,
    in_pairs,
    prefetch_places,
)
from holdfast.ops.grid_sample.cpu_places import find_places, gather_places, locate
from holdfast.ops.grid_sample.plan import Mode

_NEAREST = MODES[Mode.NEAREST]


@jit
def first_channel(operand, n, channel):
    """Address of the first element of a channel of image ``n``."""
    address, kind, image_step, channel_step, _ = operand
    return address + (n * image_step + channel * channel_step) * (kind & ITEM_SIZE)


@jit
def grid_of(grid, n):
    """The grid of image ``n``, for ``find_taps``."""
    return first_channel(grid, n, 0), grid[1], grid[4], grid[3]


@jit
def part_of(count, part, parts):
    """Range of a part of ``count`` elements."""
    return count * part // parts, count * (part + 1) // parts


@jit
def sum_terms(
    n, channel, width, begin, end, extent, problem, grid, image, steps, own_steps, dout, dgrid, joint, bits,
    levels, accumulate, sparse, shifts_at, all_finite, sums, totals_at, scratch, like, columns,
):  # fmt: skip
    """Add the terms of samples ``begin`` to ``end`` to the sums of ``width`` channels from ``channel``.

    ``steps`` are the strides of the image, ``own_steps`` those of the sums. ``joint``: also store dgrid of
    these samples; ``width`` is the number of channels. ``all_finite``: all values of dout are finite.
    ``sums`` is (address, bytes from a channel to the next, from a place to the next). Returns if ``sparse``
    the first place that was touched and the end of those that were.
    """
    outlined()
    low, high, corners = np.int64(2**62), np.int64(0), extent[3]
    offsets_at, weights_at, rows_at, raw, _, terms_at, row_at = scratch
    shifts, (sums_at, step, pixel) = pointer(shifts_at, np.int64), sums
    together = pixel == SUMS
    for marking in range(1 if all_finite else 2):
        for first in range(begin, end, RUN):
            count, tables = min(RUN, end - first), (offsets_at, weights_at)
            with_dgrid = joint and marking == 0
            loaded = with_dgrid and problem[0][2] != _NEAREST  # by ``store_dgrid``
            read = steps if with_dgrid else own_steps
            locate(grid_of(grid, n), problem, read, first, count, tables, rows_at, raw, like, columns)
            if with_dgrid:
                store_dgrid(
                    n, first, count, extent, problem, image, dout, dgrid, levels, accumulate, totals_at,
                    scratch, like, columns,
                )  # fmt: skip
                if steps != own_steps:
                    find_places(problem, own_steps, count, offsets_at, rows_at, columns)
            if sparse and marking == 0:
                for place in range(corners // len(columns)):
                    offsets = pointer(offsets_at + place * RUN * 8, np.int64)
                    for i in range(count):
                        low, high = min(low, offsets[i]), max(high, offsets[i])
            apart = 0  # a bit for each place
            if len(columns) == 2 and pixel == 8 and marking == 0:
                for place in range(corners // 2):
                    offsets = offsets_at + place * RUN * 8
                    prefetch_places(sums_at, step, width, offsets, count, pixel)
                    apart |= are_apart(offsets, count) << place
            for c in range(width):
                source, channel_sums = first_channel(dout, n, channel + c), sums_at + c * step
                row = row_at + c * RUN * size_of(like) if together or loaded else row_at
                change = row
                if not loaded:
                    change = span_of(source, dout[1], dout[4], first, first + count, raw, row, like)
                if marking == 0:
                    scale(change, count, shifts[c], row, like)
                    if not all_finite:
                        clear_infinite(row, count, like)
                for corner in range(0, 0 if together and marking == 0 else corners, len(columns)):
                    offsets = offsets_at + corner // len(columns) * RUN * 8
                    weights = weights_at + corner * RUN * size_of(like)
                    if apart >> (corner // 2) & 1:
                        add_pair_terms(row, weights, offsets, count, terms_at, channel_sums, like)
                    elif marking == 0:
                        add_terms(row, weights, offsets, count, bits, terms_at, channel_sums, like, columns)
                    else:
                        mark_infinite(change, weights, offsets, count, channel_sums, pixel, like, columns)
            if together and marking == 0:
                rows_to_lanes(row_at, count, terms_at)
            for corner in range(0, corners if together and marking == 0 else 0, len(columns)):
                offsets = offsets_at + corner // len(columns) * RUN * 8
                weights = weights_at + corner * RUN * size_of(like)
                add_terms_in_lanes(terms_at, weights, offsets, count, sums_at, like, columns)
    return low, high + len(columns)


@jit
def store_dgrid(
    n, begin, count, extent, problem, image, dout, dgrid, levels, accumulate, totals_at, scratch, like,
    columns,
):  # fmt: skip
    """dgrid of ``count`` samples from ``begin`` of an image. They are located.

    Leaves dout of up to ``LANES`` channels in the rows of the scratch, unless the mode is nearest.
    """
    outlined()
    channels, _, _, corners = extent
    offsets_at, _, rows_at, raw, old, values_at, row_at = scratch
    size = size_of(like)
    level_size = corners * RUN * size
    if problem[0][2] != _NEAREST:
        clear(totals_at, levels * corners * RUN if levels > 1 or channels == 0 else 0, like)
        channel, pairs = 0, in_pairs(image, like, columns)
        if pairs:
            source, lower = first_channel(image, n, 0), offsets_at + RUN * 8
            prefetch_places(source, image[3] * size, channels, lower, count, size)
        while channel < channels:
            source, fresh = first_channel(image, n, channel), channel % CHUNK == 0
            width = min(PAIRED, channels - channel) if pairs else 1
            changes = row_at + channel % LANES * RUN * size
            for c in range(width):
                gradient, row = first_channel(dout, n, channel + c), changes + c * RUN * size
                load_span(gradient, dout[1], dout[4], begin, begin + count, raw, row, like)
            if pairs:
                for corner in range(0, corners, 4):
                    offsets, sums = offsets_at + corner // 2 * RUN * 8, totals_at + corner * RUN * size
                    add_pair_products(
                        source, image[3] * size, width, offsets, changes, count, fresh, sums, like
                    )
            else:
                for corner in range(0, corners, len(columns)):
                    offsets = offsets_at + corner // len(columns) * RUN * 8
                    sums = totals_at + corner * RUN * size
                    gather_places(source, image[1], offsets, count, values_at, raw, like, columns)
                    add_products(changes, values_at, count, fresh, sums, like, columns)
            channel += width
            add_levels(totals_at, corners * RUN, levels, channel, channels, like)
    find_gradients(rows_at, problem[0], count, totals_at + (levels - 1) * level_size, like)
    store_gradients(rows_at, grid_of(dgrid, n), problem[0][0], begin, count, accumulate, raw, old, like)
