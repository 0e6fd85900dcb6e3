"""Both gradients of one image with few channels on several threads of the CPU.

Each thread takes a part of the samples. A pass over their coordinates along the last axis finds the rows of
the image that the part can touch: its band. The sums of a part cover only its band. If the grid is smooth,
all bands together have few more rows than the image, whatever the number of threads. Otherwise they may not
fit in their memory; then nothing is written.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.backends.cpu import jit, numbers_of, outlined, pointer, take, team_kernel
from holdfast.numerics.cpu_walk import RUN, size_of
from holdfast.ops.grid_sample.cpu_coordinates import INDEX, find_taps, row_of
from holdfast.ops.grid_sample.cpu_gradients import first_channel, grid_of, part_of, sum_terms
from holdfast.ops.grid_sample.cpu_integer_sums import (
    add_marked_sums,
    add_sums,
    clear_sums,
    find_largest,
    is_finite,
    place_of,
    run_of,
    shift_of,
)
from holdfast.ops.grid_sample.cpu_task import (
    ACCUMULATE,
    BANDS,
    BASE,
    BITS,
    DGRID,
    DINPUT,
    END,
    FITS,
    GRID,
    IMAGE,
    JOINT,
    LEVELS,
    NEXT,
    NUMBERS,
    OUT,
    OWN_STEPS,
    ROOM,
    SLOTS,
    STEP,
    STEPS,
    Template,
    extent_of,
    problem_of,
    rows_of_sums,
    runs_of,
    steps_of,
    sums_of,
    tensor_of,
)
from holdfast.ops.grid_sample.cpu_units import store_converted

# Steps: find the bands, add the terms, store dinput.
_FIND, _ADD, _STORE = 0, 1, 2
# Facts of a part: the first row of its band and the end; then for each channel the largest finite magnitude
# and the largest of all.
_LOW, _HIGH, _MAGNITUDES = 0, 1, 2


def facts_of(channels: int) -> int:
    """Number of the facts of a part."""
    return _MAGNITUDES + 2 * channels


@jit
def _find_band(begin, end, extent, problem, grid, dout, facts_at, scratch, like, columns):
    """Store the facts of the samples ``begin`` to ``end``."""
    outlined()
    _, _, rows_at, raw, _, _, row_at = scratch
    facts, (form, sizes, numbers) = pointer(facts_at, np.int64), problem
    last_axis, low, high = form[0] - 1, np.int32(2**31 - 1), np.int32(-1)
    for first in range(begin, end, RUN):
        count = min(RUN, end - first)
        find_taps(
            grid_of(grid, 0), form, sizes, numbers, last_axis, first, count, rows_at, raw, like, columns
        )
        for tap in range(form[1]):
            index = pointer(row_of(rows_at, last_axis, INDEX + tap), np.int32)
            for i in range(count):
                low, high = min(low, index[i]), max(high, index[i])
    facts[_LOW], facts[_HIGH] = min(np.int64(low), np.int64(high) + 1), np.int64(high) + 1
    for c in range(extent[0]):
        source = first_channel(dout, 0, c)
        largest, seen = find_largest(source, dout[1], dout[4], begin, end, row_at, raw, like)
        facts[_MAGNITUDES + 2 * c], facts[_MAGNITUDES + 2 * c + 1] = largest, seen


@jit
def _facts(numbers, slot):
    return pointer(sums_of(numbers, slot)[0], np.int64)


@jit
def _find_shifts(numbers, channels, shifts_at, like):
    """Find the shifts of all channels from the facts of all parts. Returns whether dout is finite."""
    shifts, finite = pointer(shifts_at, np.int64), True
    for c in range(channels):
        largest = np.int64(0)
        for slot in range(numbers[SLOTS]):
            facts = _facts(numbers, slot)
            largest = max(largest, facts[_MAGNITUDES + 2 * c])
            finite = finite and is_finite(facts[_MAGNITUDES + 2 * c + 1], like)
        shifts[c] = shift_of(largest, numbers[BITS], like)
    return finite


@jit
def _rows_before(numbers, part):
    """Rows of the bands of the parts before ``part``."""
    rows = np.int64(0)
    for slot in range(part):
        facts = _facts(numbers, slot)
        rows += facts[_HIGH] - facts[_LOW]
    return rows


@jit
def _band_of(numbers, part, channels, row_places, pixel):
    """The sums of a part: first place, end, address and bytes from a channel to the next."""
    facts = _facts(numbers, part)
    first, end = facts[_LOW] * row_places, facts[_HIGH] * row_places
    before = _rows_before(numbers, part) * row_places * channels * pixel
    return first, end, numbers[BASE] + numbers[BANDS] + before, (end - first) * pixel


@jit
def _only_sums(place, end, channel, numbers, channels, row_places, pixel):
    """The address of the sums from ``place`` if one band has all and no other any of them, otherwise 0."""
    only = np.int64(0)
    for part in range(numbers[SLOTS]):
        low, high, sums_at, step = _band_of(numbers, part, channels, row_places, pixel)
        if low <= place and end <= high and only == 0:
            only = sums_at + channel * step + (place - low) * pixel
        elif low < end and place < high:
            return np.int64(0)
    return only


@jit
def _store_pixels(begin, end, numbers, channels, row_places, rows, finite, shifts_at, dinput, scratch, like):
    """Store the pixels ``begin`` to ``end`` of all channels: the total of all bands."""
    outlined()
    total_at = scratch[5]
    shifts, words = pointer(shifts_at, np.int64), size_of(like) // 4
    pixel, accumulate = words * 8, numbers[ACCUMULATE] != 0
    at = begin
    while at < end:
        place, last = place_of(at, rows), at + run_of(at, end, rows)
        for c in range(channels):
            only = _only_sums(place, place + last - at, c, numbers, channels, row_places, pixel)
            sums_at = only if only else total_at
            if not only:
                clear_sums(total_at, (last - at) * words)
            for part in range(0 if only else numbers[SLOTS]):
                low, high, source, step = _band_of(numbers, part, channels, row_places, pixel)
                first = max(place, low)
                count = min(place + last - at, high) - first
                target = total_at + (first - place) * pixel
                source += c * step + (first - low) * pixel
                if count > 0 and finite:
                    add_sums(target, source, count * words)
                elif count > 0:
                    add_marked_sums(target, source, count * words, words)
            target = first_channel(dinput, 0, c)
            store_converted(
                sums_at, pixel, at, last, numbers[BITS], shifts[c], finite, target, dinput, accumulate,
                scratch, like,
            )  # fmt: skip
        at = last


@jit
def _add_band(part, numbers, extent, problem, row_places, finite, scratch, like, columns):
    """Clear the sums of a part and add its terms; store dgrid if it is needed."""
    outlined()
    channels, _, samples, _ = extent
    _, shifts_at, totals_at = sums_of(numbers, part)
    pixel = size_of(like) // 4 * 8
    low, high, sums_at, step = _band_of(numbers, part, channels, row_places, pixel)
    clear_sums(sums_at, channels * (high - low) * pixel // 8)
    begin, end = part_of(samples, part, numbers[SLOTS])
    sum_terms(
        0, 0, channels, begin, end, extent, problem, tensor_of(numbers, GRID), tensor_of(numbers, IMAGE),
        steps_of(numbers, STEPS), steps_of(numbers, OWN_STEPS), tensor_of(numbers, OUT),
        tensor_of(numbers, DGRID), numbers[JOINT] != 0, numbers[BITS], numbers[LEVELS],
        numbers[ACCUMULATE] != 0, False, shifts_at, finite, (sums_at - low * pixel, step, pixel), totals_at,
        scratch, like, columns,
    )  # fmt: skip


@team_kernel(NUMBERS)
def differentiate_bands(task):
    """A step. A thread takes a part of the samples or of the pixels, of which there is one per slot.

    If the bands have more rows than there is room, ``_ADD`` sets the number ``FITS`` to 0 and does nothing.
    """
    numbers, like, columns = numbers_of(task), task[0][-2], task[0][-1]
    extent, problem, slots = extent_of(numbers), problem_of(numbers, like), numbers[SLOTS]
    rows = rows_of_sums(problem, steps_of(numbers, OWN_STEPS))
    row_places = place_of(extent[1], rows) // problem[1][problem[0][0] - 1]
    while True:
        part = take(numbers, NEXT, 1)
        if part >= numbers[END]:
            break
        facts_at, shifts_at, _ = sums_of(numbers, part)
        scratch = runs_of(numbers, part)
        if numbers[STEP] == _FIND:
            begin, end = part_of(extent[2], part, slots)
            _find_band(
                begin, end, extent, problem, tensor_of(numbers, GRID), tensor_of(numbers, OUT), facts_at,
                scratch, like, columns,
            )  # fmt: skip
            continue
        if numbers[STEP] == _ADD and _rows_before(numbers, slots) > numbers[ROOM]:
            numbers[FITS] = 0
            break
        finite = _find_shifts(numbers, extent[0], shifts_at, like)
        if numbers[STEP] == _ADD:
            _add_band(part, numbers, extent, problem, row_places, finite, scratch, like, columns)
        else:
            begin, end = part_of(extent[1], part, slots)
            _store_pixels(
                begin, end, numbers, extent[0], row_places, rows, finite, shifts_at,
                tensor_of(numbers, DINPUT), scratch, like,
            )  # fmt: skip


def run_bands(template: Template, task: Any, parts: int) -> bool:
    """Differentiate by bands. Returns False, and has written nothing, if they do not fit."""
    task[FITS] = 1
    template.run(task, parts, 1, _FIND)
    template.run(task, parts, 1, _ADD)
    if task[FITS]:
        template.run(task, parts, 1, _STORE)
    return bool(task[FITS])
