"""interpolate on the CPU of images and volumes whose channels are last.

A unit of work is a part of one output row. A pixel is a run of channels. The sums over x of the pixels of an
input row are made with all channels in one loop. Those of the last rows are kept, since the output rows below
use them again.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from holdfast.backends.cpu import (
    clear,
    fence,
    jit,
    next_range,
    numbers_of,
    outlined,
    pointer,
    scratch_of_next,
    team_kernel,
)
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.numerics.cpu import ITEM_SIZE
from holdfast.numerics.cpu_walk import load_run, size_of, store_run
from holdfast.ops.interpolate.cpu_sums import add, add_all
from holdfast.ops.interpolate.cpu_task import (
    COUNT,
    FIRST,
    SHARED,
    START,
    table_at,
)

#: Minimum number of channels that are worth a loop, and maximum number of elements of a unit.
_CHANNELS, ELEMENTS = 8, 2048
#: Rows whose sums over x are kept, and the number of planes that share them if an output row reads several.
_ROWS, _PLANES = 16, 4
_BYTES = 8 * ELEMENTS
# Scratch runs: stored elements, three of the compute type, the keys of the rows, four addresses, the rows.
_RAW, _WIDE, _TOTAL, _PLANE, _KEYS, _TERMS, _FIRST_ROW = range(7)
SCRATCH = Scratch("interpolate channels", Runs(_FIRST_ROW + _ROWS, _BYTES))
_STEP = step_of(_BYTES)


def serves(out: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the pixels of these images or volumes are dense runs of channels."""
    channels = out.shape[1]
    dense = all(tensor.stride(1) == 1 and tensor.stride(-1) == channels for tensor in (out, source))
    return dense and _CHANNELS <= channels <= ELEMENTS


def strides_of(tensor: torch.Tensor) -> Sequence[int]:
    """Strides of n, z and y."""
    return tensor.stride(0), tensor.stride(2) if tensor.dim() > 4 else 0, tensor.stride(-2)


@jit
def _sum_pixels(line, kind, begin, count, channels, spans, weights, row_at, raw, wide, like):
    """Sums over x of pixels ``begin`` to ``begin + count``, from the input row at ``line``."""
    outlined()
    pixel, size, most = channels * (kind & ITEM_SIZE), size_of(like), ELEMENTS // channels
    for i in range(begin, begin + count):
        at, start = line + spans[FIRST][i] * pixel, spans[START][i]
        taps, sum_at = spans[COUNT][i], row_at + (i - begin) * channels * size
        row = pointer(sum_at, like)
        if taps == 0:
            clear(sum_at, channels * size)
            continue
        if taps <= 2 and kind == size:
            a, u = pointer(at, like), weights[start]
            if taps == 1:
                add(row, u, a, channels, True)
                continue
            b, v = pointer(at + pixel, like), weights[start + 1]
            for c in range(channels):
                row[c] = u * a[c] + v * b[c]
            continue
        for piece in range(0, taps, most):
            pixels = min(taps - piece, most)
            terms_at = load_run(at + piece * pixel, kind, 1, pixels * channels, raw, wide, like)
            for tap in range(piece, piece + pixels):
                terms = pointer(terms_at + (tap - piece) * channels * size, like)
                add(row, weights[start + tap], terms, channels, tap == 0)


@jit
def _resample(first, last, sizes, spans, weights, out, source, accumulate, scratch, like):
    """Units ``first`` to ``last``. ``sizes`` are C, D, H and W of the output, and the pixels of a unit.

    A tensor is (address, kind, strides of n, z and y). The table has the columns of x, then of y, then of z.
    """
    channels, depth, height, width, pixels = sizes
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
        begin, image = line % parts * pixels, line // parts
        z, n = image % depth, image // depth
        count = min(pixels, width - begin)
        elements = count * channels
        target = out[0] + (n * out[2] + z * out[3] + y * out[4] + begin * channels) * out_item
        of_y, of_z = width + y, width + height + z
        from_y, taps_y, start_y = spans[FIRST][of_y], spans[COUNT][of_y], spans[START][of_y]
        from_z, start_z = spans[FIRST][of_z], spans[START][of_z]
        taps_z = spans[COUNT][of_z] if taps_y > 0 else 0
        corner = n * source[2] + from_z * source[3] + from_y * source[4]
        one_plane = taps_z == 1 and weights[start_z] == 1
        rows = _ROWS if one_plane else _ROWS // _PLANES
        sum_at = target if in_place else total_at
        plane_at = sum_at if one_plane else scratch + _PLANE * _STEP
        total, plane = pointer(sum_at, like), pointer(plane_at, like)
        if taps_z == 0:
            clear(sum_at, elements * size_of(like))
        for in_z in range(taps_z):
            first_slot = 0 if one_plane else (from_z + in_z) % _PLANES * rows
            for in_y in range(taps_y):
                at = source[0] + (corner + in_z * source[3] + in_y * source[4]) * source_item
                slot = first_slot + (from_y + in_y) % rows
                row_at = scratch + (_FIRST_ROW + slot) * _STEP
                if keys[2 * slot] != at or keys[2 * slot + 1] != begin:
                    _sum_pixels(
                        at, source[1], begin, count, channels, spans, weights, row_at, raw, wide, like
                    )
                    keys[2 * slot], keys[2 * slot + 1] = at, begin
                if taps_y > 4:
                    add(plane, weights[start_y + in_y], pointer(row_at, like), elements, in_y == 0)
                else:
                    terms[in_y] = row_at
            if taps_y <= 4:
                for empty in range(taps_y, 4):
                    terms[empty] = terms[0]
                add_all(plane, weights, start_y, terms, taps_y, elements, like)
            if not one_plane:
                add(total, weights[start_z + in_z], plane, elements, in_z == 0)
        if accumulate:
            old = pointer(load_run(target, out[1], 1, elements, raw, wide, like), like)
            for i in range(elements):
                total[i] = old[i] + total[i]
        if not in_place:
            store_run(total_at, elements, target, out[1], 1, raw, like)


@team_kernel(SHARED + 11)
def resample_channels(task):
    """Take ranges of units, until none is left. The numbers of its own are sizes and strides."""
    (
        _, _, threads, scratch, share, out, source, step, units, spans_at, weights_at, columns, kind,
        accumulate, channels, depth, height, width, pixels, out_n, out_z, out_y, source_n, source_z, source_y,
        like,
    ) = task[0]  # fmt: skip
    scratch = scratch_of_next(numbers_of(task), threads, scratch, step)
    if scratch == 0:
        return
    spans, weights = table_at(spans_at, columns, weights_at, like)
    while True:
        first, last = next_range(numbers_of(task), share, units)
        if first == last:
            break
        _resample(
            first, last, (channels, depth, height, width, pixels), spans, weights,
            (out, kind, out_n, out_z, out_y), (source, kind, source_n, source_z, source_y), accumulate != 0,
            scratch, like,
        )  # fmt: skip
    fence()
