"""quantize and its backward in Triton. One kernel each covers every granularity, dtype and layout.

``quantize_pairs`` is a faster kernel for 16-bit numbers and packed 4-bit codes.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import byte_offsets, columns_inside, tile_offsets, tile_rows, tile_start
from holdfast.backends.steps import Steps
from holdfast.core.strided import Space
from holdfast.numerics.gpu import (
    INTERPRETED,
    code,
    code_quotient,
    exact_quotient,
    float_code,
    float_in_range,
    in_range,
    narrow,
    open_range,
    quotient,
    reciprocal,
    short_code,
    widen,
    widen_pair,
)
from holdfast.ops.affine.gpu import (
    EVICT_LAST,
    Layout,
    TiledKernel,
    add_tiles,
    code_limits,
    in_pairs,
    load_scale,
    load_zero_point,
    same_strides_by_column,
)
from holdfast.ops.quantize import plan as plans

#: Pipeline stages of a program's loop over tiles.
STAGES = tl.constexpr(3)


@triton.jit
def packed_bytes(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr):
    """Pack PER_BYTE neighbouring codes into a byte, low bits first."""
    codes = codes & (2 ** (8 // PER_BYTE) - 1)
    even, odd = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
    codes = even | (odd << (8 // PER_BYTE))
    if PER_BYTE == 4:
        even, odd = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 4, 2)))
        codes = even | (odd << 4)
    return codes


@triton.jit(do_not_specialize=["scale_bits", "zero_value", "q_min", "q_max", "rows"])
def quantize(
    q, x, scale, zero_point,
    scale_bits, zero_value, q_min, q_max,
    rows, byte_columns, sizes, q_strides, x_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, NAN: tl.constexpr,
    RAGGED: tl.constexpr, PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """q = clamp(rint(x / scale), q_min - z, q_max - z) + z, over one tile.

    EXPONENT > 0 is a float format of EXPONENT and MANTISSA bits: x / scale is rounded and saturated to it.
    RAGGED: the last byte of a row is not full.
    """
    WIDTH: tl.constexpr = COLUMNS // PER_BYTE
    columns = sizes[len(sizes) - 1]
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID)
    start = tile_start(columns, COLUMNS, GRID)
    here = columns_inside(start, columns, COLUMNS)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    z = load_zero_point(
        zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
    )
    inside = (row < rows)[:, None] & here
    to_x = tile_offsets(row, start, sizes, x_strides, COLUMNS)
    values = tl.load(x + to_x, mask=inside, eviction_policy=EVICT_LAST)
    if EXPONENT > 0:
        t = code_quotient(widen(values, COMPUTE), s, True)
        codes = float_code(t, q_max, EXPONENT, MANTISSA, NAN)
    else:
        codes = code(widen(values, COMPUTE), s, q_min, q_max, z)
    if PER_BYTE > 1:
        if RAGGED:
            codes = tl.where(inside, codes, 0)
        first = start // COLUMNS * WIDTH
        out = q + byte_offsets(row, first, sizes, q_strides, WIDTH)
        exists = (row < rows)[:, None] & columns_inside(first, byte_columns, WIDTH)
        tl.store(out, packed_bytes(codes, ROWS, COLUMNS, PER_BYTE).to(tl.uint8), mask=exists)
    else:
        out = q + tile_offsets(row, start, sizes, q_strides, COLUMNS)
        if q.dtype.element_ty.is_floating():
            tl.store(out, narrow(codes.to(COMPUTE), q.dtype.element_ty), mask=inside)
        else:
            tl.store(out, codes.to(q.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_bits", "zero_value", "q_min", "q_max", "rows"])
def quantize_pairs(
    q, x, scale, zero_point,
    scale_bits, zero_value, q_min, q_max,
    rows, columns, steps, sizes, q_strides, x_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr,
    PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """``quantize`` of 16-bit numbers to packed 4-bit codes.

    A column is two numbers, read as one 32-bit word, and one byte of codes. A program processes ``steps``
    tiles, one below the other, and prepares the scales once. ``steps`` is 1 unless scales differ by column
    only.
    """
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID, steps)
    start = tile_start(columns, COLUMNS, GRID)
    here = columns_inside(start, columns, COLUMNS)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    z = load_zero_point(
        zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
    )
    next_s = load_scale(
        scale + scale_strides[len(scale_strides) - 1] // 2, scale_bits, row, start, rows, sizes,
        scale_strides, COMPUTE, SCALE_ON_HOST, BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    next_z = load_zero_point(
        zero_point + zero_strides[len(zero_strides) - 1] // 2, zero_value, row, start, rows, sizes,
        zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    if INTERPRETED or (BY_COLUMN and ZERO != "none"):
        short = False
    elif ZERO == "none":
        short = True
    else:
        short = tl.max(tl.maximum(tl.abs(z), tl.abs(next_z))) <= 2**13
    words = x.to(tl.pointer_type(tl.int32))
    for _ in tl.range(steps, num_stages=STAGES):
        inside = (row < rows)[:, None] & here
        to_word = tile_offsets(row, start, sizes, x_strides, COLUMNS)
        word = tl.load(words + to_word, mask=inside, eviction_policy=EVICT_LAST)
        value, next_value = widen_pair(word, x.dtype.element_ty)
        if short:
            low = short_code(value, s, q_min, q_max, z)
            high = short_code(next_value, next_s, q_min, q_max, next_z)
        else:
            low = code(value, s, q_min, q_max, z)
            high = code(next_value, next_s, q_min, q_max, next_z)
        out = q + tile_offsets(row, start, sizes, q_strides, COLUMNS)
        tl.store(out, ((low & 15) | (high << 4)).to(tl.uint8), mask=inside)
        row += ROWS


@triton.jit(do_not_specialize=["scale_bits", "zero_value", "q_min", "q_max", "rows"])
def quantize_backward(
    dx, dy, x, scale, zero_point,
    scale_bits, zero_value, q_min, q_max,
    rows, byte_columns, sizes, dx_strides, dy_strides, x_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr, ACCUMULATE: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SAME_STRIDES: tl.constexpr,
    PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """dx = dy / scale where the code is in range, else 0, over one tile.

    If scales differ by column only, everything that depends on a scale is computed once per column. That
    includes the range of x.
    """
    columns = sizes[len(sizes) - 1]
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID)
    start = tile_start(columns, COLUMNS, GRID)
    here = columns_inside(start, columns, COLUMNS)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    z = load_zero_point(
        zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
    )
    inside = (row < rows)[:, None] & here
    to_x = tile_offsets(row, start, sizes, x_strides, COLUMNS)
    to_dy = to_x if SAME_STRIDES else tile_offsets(row, start, sizes, dy_strides, COLUMNS)
    values = widen(tl.load(x + to_x, mask=inside, eviction_policy=EVICT_LAST), COMPUTE)
    upstream = widen(tl.load(dy + to_dy, mask=inside, eviction_policy=EVICT_LAST), COMPUTE)
    if EXPONENT > 0:
        kept = float_in_range(code_quotient(values, s, BY_COLUMN), q_max, EXPONENT, MANTISSA)
    elif BY_COLUMN and not BY_ROW and COMPUTE == tl.float32:
        below, above = open_range(s, q_min, q_max, z)
        kept = (below < values) & (values < above)
    else:
        kept = in_range(values, s, q_min, q_max, z, BY_COLUMN)
    if BY_COLUMN:
        most, rest = reciprocal(s)
        gradient = exact_quotient(upstream, s, most, rest)
    else:
        gradient = quotient(upstream, s)
    gradient = tl.where(kept, gradient, 0.0)
    out = dx + (to_x if SAME_STRIDES else tile_offsets(row, start, sizes, dx_strides, COLUMNS))
    if ACCUMULATE:
        gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient
    tl.store(out, narrow(gradient, dx.dtype.element_ty), mask=inside)


class Quantize(TiledKernel[plans.QuantizeDescriptor]):
    kernel, args, packed = quantize, plans.QuantizeArgs, 0

    def parameters(self, args: plans.QuantizeArgs, space: Space) -> dict[str, Any]:
        per_byte = self.desc.per_byte
        return {
            **code_limits(self.desc.code_range),
            "tile": self.tuning.tile // 2 if per_byte == 1 else self.tuning.tile,
            "EXPONENT": self.desc.codes.exponent_bits, "MANTISSA": self.desc.codes.mantissa_bits,
            "NAN": self.desc.codes.nan or 0, "RAGGED": per_byte > 1 and self.desc.shape[-1] % per_byte > 0,
        }  # fmt: skip

    def add_step(self, steps: Steps, args: plans.QuantizeArgs, layout: Layout, per_byte: int) -> None:
        if not self._in_pairs(args.x, layout.space):
            super().add_step(steps, args, layout, per_byte)
            return
        add_tiles(
            steps, quantize_pairs, replace(layout, space=in_pairs(layout.space)), per_column=2,
            scaled_tile=self.tuning.tile // 2, **code_limits(self.desc.code_range),
        )  # fmt: skip

    def _in_pairs(self, x: torch.Tensor, space: Space) -> bool:
        """Whether ``quantize_pairs`` can be used: pairs of ``x`` are aligned words, each for one byte."""
        *rows, column = space.strides[1]
        return (
            self.desc.per_byte == 2
            and self.desc.real.bits == 16
            and self.desc.shape[-1] % 2 == 0
            and column == 1
            and not any(step % 2 for step in (*rows, *space.strides[0][:-1]))
            and x.data_ptr() % 4 == 0
        )


class QuantizeBackward(TiledKernel[plans.QuantizeBackwardDescriptor]):
    kernel, args, tensors = quantize_backward, plans.QuantizeBackwardArgs, 3

    def parameters(self, args: plans.QuantizeBackwardArgs, space: Space) -> dict[str, Any]:
        return {
            **code_limits(self.desc.code_range), "tile": self.tuning.tile // 2,
            "EXPONENT": self.desc.codes.exponent_bits, "MANTISSA": self.desc.codes.mantissa_bits,
            "ACCUMULATE": args.accumulate, "SAME_STRIDES": same_strides_by_column(space, self.tensors),
        }  # fmt: skip
