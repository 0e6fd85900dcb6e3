"""dynamic_quantize in Numba.

If every row is a segment, one kernel computes the scale and the codes of each row and reads it from memory
once. Other layouts, and float formats, take two passes: the kernels of choose_scale and of quantize.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.backends.cpu import jit, outlined, pointer, team_kernel
from holdfast.numerics.cpu_walk import size_of
from holdfast.ops.affine.cpu import NUMBERS, load, over_tiles, store, stores_bytes, window
from holdfast.ops.choose_scale.cpu_rows import RowKernel, row_rule, row_scale
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizeDescriptor
from holdfast.ops.quantize.cpu import Quantize, code
from holdfast.ops.quantize.plan import QuantizeArgs


@jit
def code_row(x, q, columns, bytewise, s, z, q_min, q_max):
    """The codes of a row, as bytes or in the compute type."""
    outlined()
    values = pointer(x, q_min)
    if bytewise:
        codes = pointer(q, np.int8)
        for i in range(columns):
            codes[i] = np.int32(code(values[i], s, z, q_min, q_max))
    else:
        wide = pointer(q, q_min)
        for i in range(columns):
            wide[i] = code(values[i], s, z, q_min, q_max)


@over_tiles
def _row_tiles(first, last, walk, shared, scalars, accumulate):
    """Scales and codes of rows that are segments. A tile has whole rows."""
    q_min, q_max, rule = scalars[0], scalars[1], row_rule(walk, scalars)
    item, bytewise = size_of(q_min), stores_bytes(walk)
    size = 1 if bytewise else item
    for tile in range(first, last):
        _, runs = load(walk, tile, tile == first, shared, 1, False, q_min)
        row, _, rows, columns = window(walk[0], tile)
        for r in range(rows):
            x, q = runs[1] + r * columns * item, runs[0] + r * columns * size
            s, z = row_scale(x, columns, row + r, rule)
            code_row(x, q, columns, bytewise, s, z, q_min, q_max)
        store(walk, tile, q_min)


@team_kernel(NUMBERS)
def _dynamic_quantize(task):
    _row_tiles(task)


class DynamicQuantize(RowKernel[DynamicQuantizeDescriptor]):
    """``_dynamic_quantize``, or the kernels of choose_scale and quantize in sequence."""

    output, second, second_args = "q", Quantize, QuantizeArgs

    @property
    def entry(self) -> Any:
        return None if self.desc.codes.is_float else _dynamic_quantize
