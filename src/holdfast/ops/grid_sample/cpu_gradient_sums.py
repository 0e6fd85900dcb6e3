"""The sums of the gradients of grid_sample, on the CPU.

dinput is scattered corner by corner, in ascending order of samples. For a pixel of up to 32 terms that is the
order of the ordered sum. A pixel with more terms is a crowd: its terms are not scattered but listed, and
summed from the list. dgrid needs a sum over channels for every corner of a sample.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from holdfast.backends.cpu import jit, outlined, pointer
from holdfast.numerics.cpu import zero
from holdfast.numerics.cpu_walk import size_of
from holdfast.ops.grid_sample.cpu_channel_vectors import add_row, add_weighted_rows, clear_row, copy_row
from holdfast.ops.segment_sum import indexed

CHUNK = indexed.CHUNK
#: Levels of chunk sums, enough for 2**31 terms.
LEVELS = 7


@jit
def count_terms(pixel_at, entries, counts_at, pixels):
    """Count the terms of each pixel, with pixel -1 for terms outside the image. Returns the maximum."""
    outlined()
    counts, pixel = pointer(counts_at, np.int32), pointer(pixel_at, np.int32)
    for i in range(-1, pixels):
        counts[i] = 0
    for entry in range(entries):
        counts[pixel[entry]] += np.int32(1)
    most = np.int32(0)
    for i in range(pixels):
        most = max(most, counts[i])
    return most


@jit
def list_crowds(pixel_at, entries, counts_at, pixels, terms_at, crowds_at):
    """List the terms of every crowd. Returns the number of crowds.

    ``crowds`` holds (pixel, begin, end) of each list in ``terms``. The terms of a crowd are marked in
    ``pixel``: they become -2 - pixel.
    """
    outlined()
    counts, pixel = pointer(counts_at, np.int32), pointer(pixel_at, np.int32)
    terms, crowds = pointer(terms_at, np.int32), pointer(crowds_at, np.int32)
    number, total = 0, np.int64(0)
    counts[-1] = 0
    for i in range(pixels):
        count = np.int64(counts[i])
        counts[i] = 0
        if count > CHUNK:
            crowds[3 * number] = i
            crowds[3 * number + 1] = total
            crowds[3 * number + 2] = total
            number += 1
            counts[i] = number
            total += count
    for entry in range(entries):
        here = pixel[entry]
        crowd = counts[here]
        if crowd > 0:
            pixel[entry] = np.int32(-2 - here)
            place = 3 * (crowd - 1) + 2
            terms[crowds[place]] = entry
            crowds[place] += np.int32(1)
    return number


@jit
def scatter_rows(dout_at, pixel_at, weight_at, corners, samples, dinput_at, pixels, like, lanes):
    """Add each term to its pixel, corner by corner; terms outside the image or of a crowd to pixel -1."""
    outlined()
    row = len(lanes) * size_of(like)
    for i in range(-1, pixels):
        clear_row(dinput_at + i * row, like, lanes)
    for corner in range(corners):
        at = corner * samples
        pixel, weight = pointer(pixel_at + at * 4, np.int32), pointer(weight_at + at * size_of(like), like)
        for i in range(samples):
            here = np.int64(max(pixel[i], np.int32(-1)))
            add_weighted_rows(dinput_at + here * row, (dout_at + i * row,), (weight[i],), lanes)


@jit
def sum_crowds(number, terms_at, crowds_at, dout_at, weight_at, samples, dinput_at, levels_at, like, lanes):
    """The ordered sum of every crowd.

    A full level of chunk sums is added to the next. At the end every level is, full or not: a sum is never
    -0.0, so adding the +0.0 of an empty level changes no bit.
    """
    outlined()
    row, weight = len(lanes) * size_of(like), pointer(weight_at, like)
    terms, crowds = pointer(terms_at, np.int32), pointer(crowds_at, np.int32)
    chunk_at = levels_at + LEVELS * row
    for crowd in range(number):
        first, last = np.int64(crowds[3 * crowd + 1]), np.int64(crowds[3 * crowd + 2])
        for level in range(LEVELS):
            clear_row(levels_at + level * row, like, lanes)
        corner_at = 0
        for begin in range(first, last, CHUNK):
            clear_row(chunk_at, like, lanes)
            end = begin + CHUNK if begin + CHUNK < last else last
            for place in range(begin, end):
                term = np.int64(terms[place])
                while term >= corner_at + samples:
                    corner_at += samples
                add_weighted_rows(chunk_at, (dout_at + (term - corner_at) * row,), (weight[term],), lanes)
            add_row(levels_at, chunk_at, like, lanes)
            full, level = (begin - first) // CHUNK + 1, levels_at
            while full % CHUNK == 0:
                add_row(level + row, level, like, lanes)
                clear_row(level, like, lanes)
                full //= CHUNK
                level += row
        for level in range(LEVELS - 1):
            add_row(levels_at + (level + 1) * row, levels_at + level * row, like, lanes)
        copy_row(dinput_at + np.int64(crowds[3 * crowd]) * row, levels_at + (LEVELS - 1) * row, like, lanes)


@jit
def add_products(dout_at, image_at, pixel_at, corners, samples, begin, count, fresh, sums_at, like, lanes):
    """Add dout times pixel, lane by lane, to the sums of the corners of ``count`` samples from ``begin``.

    The sums are indexed [sample, corner]. The sum of a corner outside the image is arbitrary.
    """
    outlined()
    row = len(lanes)
    values, dout, pixel = pointer(image_at, like), pointer(dout_at, like), pointer(pixel_at, np.int32)
    for first in range(0, corners, 4):
        at = first * samples + begin
        for i in range(count):
            a, b = _unmarked(pixel[at + i]) * row, _unmarked(pixel[at + samples + i]) * row
            c = _unmarked(pixel[at + 2 * samples + i]) * row
            d = _unmarked(pixel[at + 3 * samples + i]) * row
            sums = pointer(sums_at + (i * corners + first) * size_of(like), like)
            p, q, r, s = (zero(like), zero(like), zero(like), zero(like))
            if not fresh:
                p, q, r, s = sums[0], sums[1], sums[2], sums[3]
            for lane in range(row):
                change = dout[(begin + i) * row + lane]
                p += change * values[a + lane]
                q += change * values[b + lane]
                r += change * values[c + lane]
                s += change * values[d + lane]
            sums[0], sums[1], sums[2], sums[3] = p, q, r, s


@jit
def _unmarked(pixel):
    """The pixel without the mark of a crowd."""
    here = np.int64(pixel)
    return here if here >= -1 else -2 - here


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
