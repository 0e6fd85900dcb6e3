"""interpolate of small planes on the CPU. A unit of work is a plane: one channel of one image.

A plane is summed over x, then over y, then over z, with all elements of the plane in one loop for each axis.
Rows of small planes are so short that a call for each of them takes longer than its sums.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from math import prod

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
from holdfast.ops.interpolate.cpu_task import (
    COUNT,
    FIRST,
    SHARED,
    START,
    table_at,
)

#: Maximum number of elements of a plane, before and after the sums over each axis.
_ELEMENTS = 4096
#: Maximum width of a plane. Longer rows are faster one by one.
_WIDTH = 48
_BYTES = 8 * _ELEMENTS
SCRATCH = Scratch("interpolate planes", Runs(5, _BYTES))
_STEP = step_of(_BYTES)


def serves(out: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the planes of these tensors are small and contiguous."""
    if not all(tensor[0, 0].is_contiguous() for tensor in (out, source) if tensor.numel()):
        return False
    new, old = sizes_of(out), sizes_of(source)
    between = (*old[:2], new[2]), (old[0], *new[1:])
    small = max(map(prod, (new, old, *between))) <= _ELEMENTS
    return small and max(new[2], old[2]) <= _WIDTH


def sizes_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """D, H, W of a tensor; 1 for axes that it does not have."""
    depth, height, width = (1, 1, *tensor.shape[2:])[-3:]
    return depth, height, width


@jit
def _sum_columns(lines, columns, spans, weights, width, values, sums, like):
    """Sums over x: of ``lines`` rows of ``columns`` values, for ``width`` elements each."""
    outlined()
    for i in range(width):
        first, taps, start = spans[FIRST][i], spans[COUNT][i], spans[START][i]
        if taps == 1:
            u = weights[start]
            for line in range(lines):
                sums[line * width + i] = u * values[line * columns + first]
            continue
        if taps == 2:
            u, v = weights[start], weights[start + 1]
            for line in range(lines):
                at = line * columns + first
                sums[line * width + i] = u * values[at] + v * values[at + 1]
            continue
        for line in range(lines):
            at, total = line * columns + first, like
            for tap in range(taps):
                product = weights[start + tap] * values[at + tap]
                total = product if tap == 0 else total + product
            sums[line * width + i] = total


@jit
def _sum_lines(planes, lines, spans, weights, begin, height, count, values_at, sums_at, like):
    """Sums over y or z: ``height`` runs of ``count`` elements for ``lines`` runs, in each of ``planes``.

    ``begin`` is the column of the table of the first run.
    """
    outlined()
    size = size_of(like)
    for number in range(planes * height):
        plane, of_line = number // height, begin + number % height
        taps, start = spans[COUNT][of_line], spans[START][of_line]
        target_at = sums_at + number * count * size
        target = pointer(target_at, like)
        first = values_at + (plane * lines + spans[FIRST][of_line]) * count * size
        if taps == 0:
            clear(target_at, count * size)
            continue
        weight, values = weights[start], pointer(first, like)
        if taps == 1:
            for i in range(count):
                target[i] = weight * values[i]
            continue
        second, below = weights[start + 1], pointer(first + count * size, like)
        for i in range(count):
            target[i] = weight * values[i] + second * below[i]
        for tap in range(2, taps):
            other, row = weights[start + tap], pointer(first + tap * count * size, like)
            for i in range(count):
                target[i] = target[i] + other * row[i]


@jit
def _resample(first, last, sizes, spans, weights, out, source, accumulate, scratch, like):
    """Planes ``first`` to ``last``. ``sizes`` are C and D, H, W of the output, then D, H, W of the input.

    A tensor is (address, kind, strides of n and c); its planes are contiguous. The table has the columns of
    x, then of y, then of z.
    """
    channels, depth, height, width, layers, rows, columns = sizes
    kind = out[1]
    item, count = kind & ITEM_SIZE, depth * height * width
    raw, wide, old_at = scratch, scratch + _STEP, scratch + 2 * _STEP
    over_x_at, over_y_at = scratch + 3 * _STEP, scratch + 4 * _STEP
    flat = layers == 1 and depth == 1 and spans[COUNT][width + height] == 1
    flat = flat and weights[spans[START][width + height]] == 1
    for plane in range(first, last):
        n, c = plane // channels, plane % channels
        target = out[0] + (n * out[2] + c * out[3]) * item
        given = source[0] + (n * source[2] + c * source[3]) * item
        values = pointer(load_run(given, kind, 1, layers * rows * columns, raw, wide, like), like)
        _sum_columns(layers * rows, columns, spans, weights, width, values, pointer(over_x_at, like), like)
        _sum_lines(layers, rows, spans, weights, width, height, width, over_x_at, over_y_at, like)
        total_at = over_y_at
        if not flat:
            total_at = over_x_at
            _sum_lines(
                1, layers, spans, weights, width + height, depth, height * width, over_y_at, total_at, like
            )  # fmt: skip
        if accumulate:
            total = pointer(total_at, like)
            old = pointer(load_run(target, kind, 1, count, raw, old_at, like), like)
            for i in range(count):
                total[i] = old[i] + total[i]
        store_run(total_at, count, target, kind, 1, raw, like)


@team_kernel(SHARED + 11)
def resample_planes(task):
    """Take ranges of planes, until none is left. The numbers of its own are sizes and strides."""
    (
        _, _, threads, scratch, share, out, source, step, units, spans_at, weights_at, columns, kind,
        accumulate, channels, depth, height, width, layers, rows, old_width, out_n, out_c, source_n, source_c,
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
            first, last, (channels, depth, height, width, layers, rows, old_width), spans, weights,
            (out, kind, out_n, out_c), (source, kind, source_n, source_c), accumulate != 0, scratch, like,
        )  # fmt: skip
    fence()
