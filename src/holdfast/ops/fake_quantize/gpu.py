"""Fake quantization and its backward, in Triton: one kernel each, for every granularity, dtype and layout."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import columns_inside, tile_offsets, tile_rows, tile_start
from holdfast.core.strided import Space
from holdfast.numerics.gpu import (
    code_quotient,
    float_in_range,
    in_range,
    narrow,
    rounded_to_code,
    rounded_to_float,
    tanh_argument,
    tanh_slope,
    widen,
)
from holdfast.ops.affine.gpu import (
    KEPT,
    TiledKernel,
    alike_by_column,
    limits,
    load_scale,
    load_zero_point,
)
from holdfast.ops.fake_quantize.plan import (
    FakeQuantizeArgs,
    FakeQuantizeBackwardArgs,
    FakeQuantizeBackwardDescriptor,
    FakeQuantizeDescriptor,
    SteKind,
)

#: Registers of a thread for the slope of tanh, by the bits of a number. The compiler would take so few that
#: it puts off loads, or so many that fewer threads are at work: either takes up to a tenth longer.
TANH_REGISTERS = {16: 80, 32: 128}


@triton.jit
def estimated(
    dy, x, s, q_min, q_max, z,
    STE: tl.constexpr, QUICK: tl.constexpr, EXPONENT: tl.constexpr = 0, MANTISSA: tl.constexpr = 0,
):  # fmt: skip
    """What the estimator STE, named as in ``SteKind``, lets through of ``dy``; else +0.

    The quotients need to be right only where they count: a quotient below 2^-126 leaves the whole gradient.
    QUICK is how reciprocals are found, as in ``inverse``.
    """
    lo_x = (q_min - z).to(x.dtype) * s
    hi_x = (q_max - z).to(x.dtype) * s
    if STE == "in_range" and EXPONENT > 0:
        t = code_quotient(x, s, QUICK)
        return tl.where(float_in_range(t, q_max, EXPONENT, MANTISSA), dy, 0.0)
    elif STE == "in_range":
        return tl.where(in_range(x, s, q_min, q_max, z, QUICK), dy, 0.0)
    elif STE == "clipped_identity":
        return tl.where((lo_x <= x) & (x <= hi_x), dy, 0.0)
    elif STE == "tanh":
        first, argument = tanh_argument(x, (lo_x + hi_x) * 0.5, s)
        return tl.where(first == first, dy * tanh_slope(argument), 0.0)
    else:
        tl.static_assert(STE == "hard_tanh")
        t = tl.abs(code_quotient(x - (lo_x + hi_x) * 0.5, (hi_x - lo_x) * 0.5, QUICK))
        return tl.where(t < 1.0, dy * (1.0 - t), 0.0)


@triton.jit(do_not_specialize=["scale_bits", "zero_value", "q_min", "q_max", "rows"])
def fake_quantize(
    y, x, scale, zero_point,
    scale_bits, zero_value, q_min, q_max,
    rows, columns, sizes, y_strides, x_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """y = clamp(rint(x / scale), q_min - z, q_max - z) * scale, over one tile.

    With an EXPONENT, x / scale is rounded to a float format and saturated instead.
    """
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID)
    start = tile_start(columns, COLUMNS, GRID)
    inside = (row < rows)[:, None] & columns_inside(start, columns, COLUMNS)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    z = load_zero_point(
        zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
    )
    to_x = tile_offsets(row, start, sizes, x_strides, COLUMNS)
    values = tl.load(x + to_x, mask=inside, eviction_policy=KEPT)
    if EXPONENT > 0:
        t = code_quotient(widen(values, COMPUTE), s, True)
        result = rounded_to_float(t, q_max, EXPONENT, MANTISSA).to(COMPUTE) * s
    else:
        result = rounded_to_code(widen(values, COMPUTE), s, q_min, q_max, z)
    out = y + tile_offsets(row, start, sizes, y_strides, COLUMNS)
    tl.store(out, narrow(result, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_bits", "zero_value", "q_min", "q_max", "rows"])
def fake_quantize_backward(
    dx, dy, x, scale, zero_point,
    scale_bits, zero_value, q_min, q_max,
    rows, columns, sizes, dx_strides, dy_strides, x_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr, STE: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    ACCUMULATE: tl.constexpr, ALIKE: tl.constexpr, PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """dx = dy as far as the estimator lets it through, over one tile."""
    # The slope of tanh takes longer than 16-bit numbers from memory: then this would be one more thing to do.
    IN_CACHE: tl.constexpr = "" if STE == "tanh" and x.dtype.element_ty.primitive_bitwidth == 16 else KEPT
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID)
    start = tile_start(columns, COLUMNS, GRID)
    inside = (row < rows)[:, None] & columns_inside(start, columns, COLUMNS)
    to_dy = tile_offsets(row, start, sizes, dy_strides, COLUMNS)
    upstream = tl.load(dy + to_dy, mask=inside, eviction_policy=IN_CACHE)
    gradient = widen(upstream, COMPUTE)
    if STE != "identity":
        s = load_scale(
            scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
            BY_ROW, BY_COLUMN, COLUMNS,
        )  # fmt: skip
        z = load_zero_point(
            zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
        )
        to_x = to_dy if ALIKE else tile_offsets(row, start, sizes, x_strides, COLUMNS)
        values = tl.load(x + to_x, mask=inside, eviction_policy=IN_CACHE)
        gradient = estimated(
            gradient, widen(values, COMPUTE), s, q_min, q_max, z, STE, BY_COLUMN, EXPONENT, MANTISSA
        )
    out = dx + (to_dy if ALIKE else tile_offsets(row, start, sizes, dx_strides, COLUMNS))
    if ACCUMULATE:
        gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient
    tl.store(out, narrow(gradient, dx.dtype.element_ty), mask=inside)


class FakeQuantize(TiledKernel[FakeQuantizeDescriptor]):
    """``fake_quantize`` as a kernel."""

    kernel, args = fake_quantize, FakeQuantizeArgs

    def parameters(self, args: FakeQuantizeArgs, space: Space) -> dict[str, Any]:
        return {
            **limits(self.desc.code_range),
            "tile": self.tuning.tile // 2 if self.desc.real.bits == 16 else self.tuning.tile // 4,
            "scaled_tile": self.tuning.tile // 2,
            "EXPONENT": self.desc.codes.exponent_bits,
            "MANTISSA": self.desc.codes.mantissa_bits,
        }


class FakeQuantizeBackward(TiledKernel[FakeQuantizeBackwardDescriptor]):
    """``fake_quantize_backward`` as a kernel."""

    kernel, args, tensors = fake_quantize_backward, FakeQuantizeBackwardArgs, 3

    def parameters(self, args: FakeQuantizeBackwardArgs, space: Space) -> dict[str, Any]:
        registers = None
        if self.desc.ste is SteKind.TANH and space.columns % 16 == 0:  # or a thread would see many rows
            registers = TANH_REGISTERS.get(self.desc.real.bits)
        return {
            **limits(self.desc.code_range),
            "tile": self.tuning.tile // (1 if registers else 2),  # it computes long enough to hide more loads
            "registers": registers,
            "STE": self.desc.ste.value,
            "EXPONENT": self.desc.codes.exponent_bits,
            "MANTISSA": self.desc.codes.mantissa_bits,
            "ACCUMULATE": args.accumulate,
            "ALIKE": alike_by_column(space, self.tensors),
        }
