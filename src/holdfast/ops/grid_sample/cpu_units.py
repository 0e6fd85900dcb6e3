"""Units of dinput on the CPU: several channels of one image, each with a buffer of integer sums."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from holdfast.backends.cpu import clear as clear_bytes
from holdfast.backends.cpu import jit, outlined, pointer
from holdfast.numerics.cpu import ITEM_SIZE
from holdfast.numerics.cpu_walk import RUN, in_one_run, size_of, store_span
from holdfast.ops.grid_sample.cpu_channel_sums import clear
from holdfast.ops.grid_sample.cpu_gradients import first_channel
from holdfast.ops.grid_sample.cpu_integer_sums import (
    add_marked_sums,
    add_sums,
    clear_sums,
    convert_sums,
    find_largest,
    is_finite,
    place_of,
    replace_marked,
    run_of,
    scale,
    shift_of,
)
from holdfast.ops.grid_sample.cpu_lanes import LANES, SUMS, convert_lanes, lanes_to_rows


@jit
def steps_of_sums(width, places, like):
    """Bytes from a channel to the next in the sums of a unit, and from a place to the next."""
    words = size_of(like) // 4
    return (8, SUMS) if width == LANES and words == 1 else (places * words * 8, words * 8)


@jit
def find_shifts(n, channel, width, samples, dout, bits, shifts_at, scratch, like):
    """Find the shifts of the channels of a unit. Returns whether all values of dout are finite."""
    shifts, all_finite = pointer(shifts_at, np.int64), True
    for c in range(width):
        source = first_channel(dout, n, channel + c)
        row_at, raw = scratch[6], scratch[3]
        largest, seen = find_largest(source, dout[1], dout[4], 0, samples, row_at, raw, like)
        shifts[c] = shift_of(largest, bits, like)
        all_finite = all_finite and is_finite(seen, like)
    return all_finite


@jit
def clear_places(width, low, high, places, sums_at, like):
    """Clear the sums of the places ``low`` to ``high`` of a unit."""
    step, pixel = steps_of_sums(width, places, like)
    for c in range(1 if pixel == SUMS else width):
        clear_sums(sums_at + c * step + low * pixel, (high - low) * pixel // 8)


@jit
def store_zeros(n, channel, width, begin, end, dinput, accumulate, scratch, like):
    """Store zeros in the pixels ``begin`` to ``end`` of the channels of a unit, or add them."""
    outlined()
    _, _, _, raw, old, _, row = scratch
    item, direct = dinput[1] & ITEM_SIZE, in_one_run(dinput[4]) and not accumulate
    clear(row, RUN, like)
    for c in range(width):
        target = first_channel(dinput, n, channel + c)
        if direct:
            clear_bytes(target + begin * item, (end - begin) * item)
            continue
        for at in range(begin, end, RUN):
            last = min(at + RUN, end)
            if accumulate:  # the last sums are in the row
                clear(row, last - at, like)
            store_span(row, target, dinput[1], dinput[4], at, last, accumulate, raw, old, like)


@jit
def store_converted(
    sums_at, pixel, begin, end, bits, shift, finite, target, dinput, accumulate, scratch, like
):  # fmt: skip
    """Store the pixels ``begin`` to ``end`` of a channel at ``target``, whose sums are side by side."""
    _, _, _, raw, old, _, row_at = scratch
    direct = dinput[1] == size_of(like) and in_one_run(dinput[4]) and not accumulate
    values = target + begin * dinput[1] if direct else row_at
    convert_sums(sums_at, end - begin, bits, shift, values, like)
    if not finite:
        replace_marked(sums_at, pixel, end - begin, values, like)
    if not direct:
        store_span(row_at, target, dinput[1], dinput[4], begin, end, accumulate, raw, old, like)


@jit
def store_sums(
    n, channel, width, begin, end, places, rows, bits, shifts_at, all_finite, sums_at, dinput, accumulate,
    scratch, like,
):  # fmt: skip
    """Store pixels ``begin`` to ``end`` of the channels of a unit."""
    outlined()
    _, _, _, raw, old, values_at, row_at = scratch
    shifts, (step, pixel) = pointer(shifts_at, np.int64), steps_of_sums(width, places, like)
    at = begin
    while at < end:
        count, place = run_of(at, end, rows), place_of(at, rows)
        if pixel == SUMS:
            convert_lanes(sums_at + place * pixel, count, values_at)
            lanes_to_rows(values_at, count, row_at)
        for c in range(width):
            sums, target = sums_at + c * step + place * pixel, first_channel(dinput, n, channel + c)
            if pixel != SUMS:
                store_converted(
                    sums, pixel, at, at + count, bits, shifts[c], all_finite, target, dinput, accumulate,
                    scratch, like,
                )  # fmt: skip
                continue
            row = row_at + c * RUN * size_of(like)
            scale(row, count, -shifts[c], row, like)
            if not all_finite:
                replace_marked(sums, pixel, count, row, like)
            store_span(row, target, dinput[1], dinput[4], at, at + count, accumulate, raw, old, like)
        at += count


@jit
def add_threads(begin, end, width, places, others, sums_at, finite, like):
    """Add the sums of the other threads to those of the first, for the places ``begin`` to ``end``."""
    words, (step, pixel) = size_of(like) // 4, steps_of_sums(width, places, like)
    for other in range(1, others[0]):
        for c in range(1 if pixel == SUMS else width):
            target = sums_at + c * step + begin * pixel
            source, count = target + other * others[1], (end - begin) * pixel // 8
            if finite:
                add_sums(target, source, count)
            else:
                add_marked_sums(target, source, count, words)
