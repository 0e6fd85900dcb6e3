"""dynamic_fake_quantize in Numba.

If every row is a segment, one kernel computes the scale and the result of each row and reads it from memory
once. Other layouts take two passes: the kernels of choose_scale and of fake_quantize. The backward is that of
fake_quantize. If the scale covers the data, it need not read x.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.backends.cpu import BLOCK, jit, pointer, prefetch, team_kernel
from holdfast.numerics.cpu import zero
from holdfast.numerics.cpu_walk import size_of
from holdfast.ops.affine.cpu import (
    NUMBERS,
    finish,
    flush,
    is_by_row,
    load,
    over_tiles,
    row_columns,
    store,
    streamed_item,
    window,
)
from holdfast.ops.choose_scale.cpu_rows import RowKernel, row_rule, row_scale
from holdfast.ops.dynamic_fake_quantize.plan import (
    DynamicFakeQuantizeBackwardDescriptor,
    DynamicFakeQuantizeDescriptor,
)
from holdfast.ops.fake_quantize.cpu import (
    FakeQuantize,
    FakeQuantizeBackward,
    rounded_to_code,
    rounded_to_e4m3fn,
)
from holdfast.ops.fake_quantize.plan import FakeQuantizeArgs


def _rounding_of_rows(name: str, rounded: Any) -> Any:
    """``over_tiles`` of scales and results of rows, as the function ``name``."""

    def tiles(first, last, walk, shared, scalars, accumulate):
        q_min, q_max, rule = scalars[0], scalars[1], row_rule(walk, scalars)
        item, streams = size_of(q_min), streamed_item(walk) > 0
        for tile in range(first, last):
            count, runs = load(walk, tile, tile == first, shared, 1, False, q_min)
            row, _, rows, columns = window(walk[0], tile)
            x, y = pointer(runs[1], q_min), pointer(walk[2] if streams else runs[0], q_min)
            for r in range(rows):
                begin = r * columns
                at = runs[1] + begin * item
                s, z = row_scale(at, columns, row + r, rule)
                for i in range(begin, begin + columns):
                    y[i] = rounded(x[i], s, z, q_min, q_max)
            flush(walk, runs, (runs[1] + count * item,), 0, count)
            store(walk, tile, q_min)
        finish(walk)

    return over_tiles(tiles, name)


_to_integers = _rounding_of_rows("rows_to_integers", rounded_to_code)
_to_e4m3fn = _rounding_of_rows("rows_to_e4m3fn", rounded_to_e4m3fn)


@team_kernel(NUMBERS)
def _dynamic_fake_quantize(task):
    _to_integers(task)


@team_kernel(NUMBERS)
def _dynamic_fake_quantize_e4m3fn(task):
    _to_e4m3fn(task)


@jit
def covered(dy, x, s):
    """dy where the scale is finite, or the scale is infinite and x is finite."""
    infinite = np.float32(np.inf)
    return dy if (abs(s) < infinite) | ((s == s) & (abs(x) < infinite)) else zero(dy)


@over_tiles
def _covered_tiles(first, last, walk, shared, scalars, accumulate):
    """dx = dy where the scale is finite. Only if a scale of a tile is not finite, the tile reads x."""
    item, like = streamed_item(walk), scalars[0]
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 2, accumulate, like)
        dy, x, scale = pointer(runs[1], like), pointer(runs[2], like), pointer(runs[3], like)
        columns = row_columns(walk, 2, count) if shared or is_by_row(walk, 2) else 1
        infinite_scales = 0
        for i in range(count // columns):
            infinite_scales += 0 if abs(scale[i]) < np.float32(np.inf) else 1
        for begin in range(0, count, BLOCK):
            end = min(begin + BLOCK, count)
            dx = pointer(walk[2] - begin * item if item > 0 else runs[0], like)
            if item == 0:
                prefetch(dy, begin)
            if infinite_scales > 0:
                for i in range(begin, end):
                    passed = covered(dy[i], x[i], scale[i // columns])
                    dx[i] = dx[i] + passed if accumulate else passed
            elif accumulate:
                for i in range(begin, end):
                    dx[i] += dy[i]
            else:
                for i in range(begin, end):
                    dx[i] = dy[i]
            flush(walk, runs, (runs[1],), begin, end)
        store(walk, tile, like)
    finish(walk)


@team_kernel(NUMBERS)
def _covered_backward(task):
    _covered_tiles(task)


class DynamicFakeQuantize(RowKernel[DynamicFakeQuantizeDescriptor]):
    """``_dynamic_fake_quantize``, or the kernels of choose_scale and fake_quantize in sequence."""

    output, second, second_args, streamed = "y", FakeQuantize, FakeQuantizeArgs, True

    @property
    def entry(self) -> Any:
        return _dynamic_fake_quantize_e4m3fn if self.desc.codes.is_float else _dynamic_fake_quantize


class DynamicFakeQuantizeBackward(FakeQuantizeBackward):
    """``_covered_backward``, or the kernel of fake_quantize's backward."""

    desc: DynamicFakeQuantizeBackwardDescriptor

    @property
    def entry(self) -> Any:
        return _covered_backward if self.desc.covers_data else super().entry
