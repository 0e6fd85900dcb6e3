"""interpolate on the CPU of images whose channels are last. A unit of work is a part of one output row.

A pixel is a run of channels. The sums over x of the pixels of an input row are made with all channels in one
loop. Those of the last rows are kept, since the output rows below use them again.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from holdfast.backends.cpu import clear, jit, kernel, outlined, pointer
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.numerics.cpu import ITEM_SIZE
from holdfast.numerics.cpu_walk import load_run, size_of, store_run
from holdfast.ops.interpolate.cpu_sums import add, add_all
from holdfast.ops.interpolate.tables import Table

#: Minimum number of channels that are worth a loop, and maximum number of elements of a unit.
_CHANNELS, ELEMENTS = 8, 2048
#: Rows whose sums over x are kept.
_ROWS = 16
_BYTES = 8 * ELEMENTS
# Scratch runs: stored elements, two of the compute type, the keys of the rows, four addresses; then the rows.
_RAW, _WIDE, _TOTAL, _KEYS, _TERMS, _FIRST_ROW = range(6)
SCRATCH = Scratch("interpolate channels", Runs(_FIRST_ROW + _ROWS, _BYTES))
_STEP = step_of(_BYTES)
#: Rows of the table: first tap, number of taps, first weight.
_FIRST, _COUNT, _START = 0, 1, 2


def serves(out: torch.Tensor, source: torch.Tensor, of_z: Table) -> bool:
    """Whether these are images, or volumes of one plane, whose pixels are dense runs of channels."""
    channels = out.shape[1]
    one_plane = len(of_z.count) == 1 and of_z.count[0] == of_z.weights[0] == 1
    for tensor in (out, source):
        depth = tensor.shape[2] if tensor.dim() == 5 else 1
        if depth != 1 or tensor.stride(1) != 1 or tensor.stride(-1) != channels:
            return False
    return bool(one_plane and _CHANNELS <= channels <= ELEMENTS)


def strides_of(tensor: torch.Tensor) -> Sequence[int]:
    """Strides of n and y."""
    return tensor.stride(0), tensor.stride(-2) if tensor.dim() > 3 else 0


@jit
def _sum_pixels(line, kind, begin, count, channels, spans, weights, row_at, raw, wide, like):
    """Sums over x of pixels ``begin`` to ``begin + count``, from the input row at ``line``."""
    outlined()
    pixel = channels * (kind & ITEM_SIZE)
    clear(row_at, count * channels * size_of(like))
    for i in range(begin, begin + count):
        at, start = line + spans[_FIRST, i] * pixel, spans[_START, i]
        taps, row = spans[_COUNT, i], pointer(row_at + (i - begin) * channels * size_of(like), like)
        if taps == 2 and kind == size_of(like):
            a, b = pointer(at, like), pointer(at + pixel, like)
            u, v = weights[start], weights[start + 1]
            for c in range(channels):
                row[c] = u * a[c] + v * b[c]
            continue
        for tap in range(taps):
            terms = pointer(load_run(at + tap * pixel, kind, 1, channels, raw, wide, like), like)
            add(row, weights[start + tap], terms, channels, tap == 0)


@kernel
def resample_channels(first, last, sizes, spans, weights, out, source, accumulate, scratch, like):
    """Units ``first`` to ``last``. ``sizes`` are C, H and W of the output, and the pixels of a unit.

    A tensor is (address, kind, strides of n and y). The table has the columns of x, then of y.
    """
    channels, height, width, pixels = sizes
    out_item, source_item = out[1] & ITEM_SIZE, source[1] & ITEM_SIZE
    raw, wide, total_at = scratch + _RAW * _STEP, scratch + _WIDE * _STEP, scratch + _TOTAL * _STEP
    keys, terms = pointer(scratch + _KEYS * _STEP, np.int64), pointer(scratch + _TERMS * _STEP, np.int64)
    parts = (width + pixels - 1) // pixels
    in_place = out[1] == out_item and not accumulate
    # The input row and the first pixel of each kept sum.
    for slot in range(_ROWS if first < last else 0):
        keys[2 * slot] = 0
    for unit in range(first, last):
        y, line = unit % height, unit // height
        n, begin = line // parts, line % parts * pixels
        count = min(pixels, width - begin)
        elements = count * channels
        target = out[0] + (n * out[2] + y * out[3] + begin * channels) * out_item
        from_y, taps, start = spans[_FIRST, width + y], spans[_COUNT, width + y], spans[_START, width + y]
        corner_at = source[0] + (n * source[2] + from_y * source[3]) * source_item
        sum_at = target if in_place else total_at
        total = pointer(sum_at, like)
        if taps == 0:
            clear(sum_at, elements * size_of(like))
        for in_y in range(taps):
            at, slot = corner_at + in_y * source[3] * source_item, (from_y + in_y) % _ROWS
            row_at = scratch + (_FIRST_ROW + slot) * _STEP
            if keys[2 * slot] != at or keys[2 * slot + 1] != begin:
                _sum_pixels(at, source[1], begin, count, channels, spans, weights, row_at, raw, wide, like)
                keys[2 * slot], keys[2 * slot + 1] = at, begin
            if taps > 4:
                add(total, weights[start + in_y], pointer(row_at, like), elements, in_y == 0)
            else:
                terms[in_y] = row_at
        if 0 < taps <= 4:
            for empty in range(taps, 4):
                terms[empty] = terms[0]
            add_all(total, weights, start, terms, taps, elements, like)
        if accumulate:
            old = pointer(load_run(target, out[1], 1, elements, raw, wide, like), like)
            for i in range(elements):
                total[i] = old[i] + total[i]
        if not in_place:
            store_run(total_at, elements, target, out[1], 1, raw, like)
