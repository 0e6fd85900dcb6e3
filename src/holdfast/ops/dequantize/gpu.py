"""dequantize and its backward in Triton. One kernel each covers every granularity, dtype and layout."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import byte_offsets, columns_inside, tile_offsets, tile_rows, tile_start
from holdfast.core.strided import Space
from holdfast.numerics.gpu import float_value, narrow, widen
from holdfast.ops.affine.gpu import EVICT_LAST, TiledKernel, load_scale, load_zero_point
from holdfast.ops.dequantize import plan as plans


@triton.jit
def unpacked_codes(
    packed, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr, SIGNED: tl.constexpr
):
    """Unpack a tile of bytes, low bits first. SIGNED codes are sign-extended."""
    BITS: tl.constexpr = 8 // PER_BYTE
    packed = packed.to(tl.int32)
    if PER_BYTE == 4:
        packed = tl.reshape(tl.join(packed, packed >> 4), (ROWS, COLUMNS // 2))
    codes = tl.reshape(tl.join(packed, packed >> BITS), (ROWS, COLUMNS))
    if SIGNED:
        return (codes << (32 - BITS)) >> (32 - BITS)
    else:
        return codes & (2**BITS - 1)


@triton.jit(do_not_specialize=["scale_bits", "zero_value", "rows"])
def dequantize(
    y, q, scale, zero_point,
    scale_bits, zero_value,
    rows, byte_columns, sizes, y_strides, q_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr, PER_BYTE: tl.constexpr,
    SIGNED: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, HIGHEST: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """y = (q - z) * scale over one tile. EXPONENT > 0 is a float format, without a zero point."""
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
    if PER_BYTE > 1:
        first = start // COLUMNS * WIDTH
        exists = (row < rows)[:, None] & columns_inside(first, byte_columns, WIDTH)
        to_bytes = byte_offsets(row, first, sizes, q_strides, WIDTH)
        packed = tl.load(q + to_bytes, mask=exists, eviction_policy=EVICT_LAST)
        codes = unpacked_codes(packed, ROWS, COLUMNS, PER_BYTE, SIGNED)
    else:
        to_q = tile_offsets(row, start, sizes, q_strides, COLUMNS)
        codes = tl.load(q + to_q, mask=inside, eviction_policy=EVICT_LAST)
    if EXPONENT > 0:
        difference = float_value(codes, EXPONENT, MANTISSA, HIGHEST).to(COMPUTE)
    elif codes.dtype.is_floating():
        difference = widen(codes, COMPUTE) - z.to(COMPUTE)
    else:
        difference = (codes.to(tl.int32) - z).to(COMPUTE)
    out = y + tile_offsets(row, start, sizes, y_strides, COLUMNS)
    tl.store(out, narrow(difference * s, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_bits", "rows"])
def dequantize_backward(
    dq, dy, scale,
    scale_bits,
    rows, byte_columns, sizes, dq_strides, dy_strides, scale_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ACCUMULATE: tl.constexpr,
    PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """dq = dy * scale over one tile."""
    columns = sizes[len(sizes) - 1]
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID)
    start = tile_start(columns, COLUMNS, GRID)
    here = columns_inside(start, columns, COLUMNS)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    inside = (row < rows)[:, None] & here
    to_dy = tile_offsets(row, start, sizes, dy_strides, COLUMNS)
    upstream = tl.load(dy + to_dy, mask=inside, eviction_policy=EVICT_LAST)
    gradient = widen(upstream, COMPUTE) * s
    out = dq + tile_offsets(row, start, sizes, dq_strides, COLUMNS)
    if ACCUMULATE:
        gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient
    tl.store(out, narrow(gradient, dq.dtype.element_ty), mask=inside)


class Dequantize(TiledKernel[plans.DequantizeDescriptor]):
    kernel, args, packed = dequantize, plans.DequantizeArgs, 1

    def parameters(self, args: plans.DequantizeArgs, space: Space) -> dict[str, Any]:
        codes = self.desc.codes
        tile, scaled_tile = self._tiles()
        return {
            "tile": tile, "scaled_tile": scaled_tile, "SIGNED": codes.signed, "EXPONENT": codes.exponent_bits,
            "MANTISSA": codes.mantissa_bits, "HIGHEST": codes.highest_code,
        }  # fmt: skip

    def _tiles(self) -> tuple[int, int]:
        """Elements per tile, and elements per tile if each column has a scale."""
        bits, one_scale, tile = self.desc.real.bits, self.desc.view.scale_count == 1, self.tuning.tile
        if bits == 16:
            return tile // 2, tile
        if bits == 32 and self.desc.per_byte == 1 and self.desc.code_storage.itemsize == 1:
            return tile // 4, tile // 4  # one load and two stores per thread
        return tile // 4 if one_scale else tile, tile // 2


class DequantizeBackward(TiledKernel[plans.DequantizeBackwardDescriptor]):
    kernel, args = dequantize_backward, plans.DequantizeBackwardArgs

    def parameters(self, args: plans.DequantizeBackwardArgs, space: Space) -> dict[str, Any]:
        return {"ACCUMULATE": args.accumulate}
