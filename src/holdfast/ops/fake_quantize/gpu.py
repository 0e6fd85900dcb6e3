"""fake_quantize and its backward in Triton. One kernel each covers every granularity, dtype and layout."""
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
    EVICT_LAST,
    TiledKernel,
    code_limits,
    load_scale,
    load_zero_point,
    same_strides_by_column,
)
from holdfast.ops.fake_quantize import plan as plans
from holdfast.ops.fake_quantize.plan import SteKind

#: Registers per thread for the slope of tanh, by bits of a number. The compiler's own choice is up to a tenth
#: slower: with too few registers it delays loads, with too many fewer threads run.
TANH_REGISTERS = {16: 80, 32: 128}


@triton.jit
def estimated_gradient(
    dy, x, s, q_min, q_max, z,
    STE: tl.constexpr, QUICK: tl.constexpr, EXPONENT: tl.constexpr = 0, MANTISSA: tl.constexpr = 0,
):  # fmt: skip
    """dx by the estimator STE, a value of ``SteKind``; +0 where it passes no gradient.

    Quotients need not be correctly rounded below 2^-126: such a quotient passes the whole gradient. QUICK
    selects how reciprocals are computed, as in ``inverse``.
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

    EXPONENT > 0 is a float format of EXPONENT and MANTISSA bits: x / scale is rounded and saturated to it.
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
    values = tl.load(x + to_x, mask=inside, eviction_policy=EVICT_LAST)
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
    ACCUMULATE: tl.constexpr, SAME_STRIDES: tl.constexpr, PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """dx by the estimator STE, over one tile."""
    # With tanh and 16-bit numbers, arithmetic limits the speed, not memory: a cache hint would cost time.
    HINT: tl.constexpr = "" if STE == "tanh" and x.dtype.element_ty.primitive_bitwidth == 16 else EVICT_LAST
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID)
    start = tile_start(columns, COLUMNS, GRID)
    inside = (row < rows)[:, None] & columns_inside(start, columns, COLUMNS)
    to_dy = tile_offsets(row, start, sizes, dy_strides, COLUMNS)
    upstream = tl.load(dy + to_dy, mask=inside, eviction_policy=HINT)
    gradient = widen(upstream, COMPUTE)
    if STE != "identity":
        s = load_scale(
            scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
            BY_ROW, BY_COLUMN, COLUMNS,
        )  # fmt: skip
        z = load_zero_point(
            zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
        )
        to_x = to_dy if SAME_STRIDES else tile_offsets(row, start, sizes, x_strides, COLUMNS)
        values = tl.load(x + to_x, mask=inside, eviction_policy=HINT)
        gradient = estimated_gradient(
            gradient, widen(values, COMPUTE), s, q_min, q_max, z, STE, BY_COLUMN, EXPONENT, MANTISSA
        )
    out = dx + (to_dy if SAME_STRIDES else tile_offsets(row, start, sizes, dx_strides, COLUMNS))
    if ACCUMULATE:
        gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient
    tl.store(out, narrow(gradient, dx.dtype.element_ty), mask=inside)


class FakeQuantize(TiledKernel[plans.FakeQuantizeDescriptor]):
    kernel, args = fake_quantize, plans.FakeQuantizeArgs

    def parameters(self, args: plans.FakeQuantizeArgs, space: Space) -> dict[str, Any]:
        return {
            **code_limits(self.desc.code_range),
            "tile": self.tuning.tile // 2 if self.desc.real.bits == 16 else self.tuning.tile // 4,
            "scaled_tile": self.tuning.tile // 2,
            "EXPONENT": self.desc.codes.exponent_bits,
            "MANTISSA": self.desc.codes.mantissa_bits,
        }


class FakeQuantizeBackward(TiledKernel[plans.EstimatedDescriptor]):
    kernel, args, tensors = fake_quantize_backward, plans.FakeQuantizeBackwardArgs, 3

    def parameters(self, args: plans.FakeQuantizeBackwardArgs, space: Space) -> dict[str, Any]:
        registers = None
        if self.desc.ste is SteKind.TANH and space.columns % 16 == 0:  # else a thread has many rows
            registers = TANH_REGISTERS.get(self.desc.real.bits)
        return {
            **code_limits(self.desc.code_range),
            "tile": self.tuning.tile // (1 if registers else 2),  # tanh computes long enough to hide loads
            "registers": registers,
            "STE": self.desc.ste.value,
            "EXPONENT": self.desc.codes.exponent_bits,
            "MANTISSA": self.desc.codes.mantissa_bits,
            "ACCUMULATE": args.accumulate,
            "SAME_STRIDES": same_strides_by_column(space, self.tensors),
        }
