"""dynamic_fake_quantize in Triton: one pass if a program can hold whole segments, else two passes.

The backward is that of fake_quantize. If the scale covers the data, it need not read x.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import columns_inside, tile_offsets, tile_rows, tile_start
from holdfast.backends.steps import Steps
from holdfast.core.segments import Segments
from holdfast.core.strided import Space
from holdfast.numerics.gpu import (
    INTERPRETED,
    code_quotient,
    narrow,
    rounded_to_code,
    rounded_to_float,
    widen,
)
from holdfast.ops.affine.gpu import EVICT_LAST, load_scale, same_strides_by_column
from holdfast.ops.choose_scale.gpu import MAGIC
from holdfast.ops.choose_scale.gpu_segments import (
    SegmentKernel,
    chosen_quotient,
    segment_scales,
    store_scales,
    tile_begin,
    tile_place,
)
from holdfast.ops.dynamic_fake_quantize.plan import (
    DynamicFakeQuantizeArgs,
    DynamicFakeQuantizeBackwardArgs,
    DynamicFakeQuantizeBackwardDescriptor,
    DynamicFakeQuantizeDescriptor,
)
from holdfast.ops.fake_quantize.gpu import FakeQuantize, FakeQuantizeBackward


@triton.jit(do_not_specialize=["lowest", "highest", "q_min", "q_max", "segments", "rows"])
def dynamic_fake_quantize(
    out, scale, zero_point, x,
    lowest, highest, q_min, q_max,
    segments, rows, columns, column_tiles,
    steps, over_sizes, out_over, scale_strides, zero_strides, x_over, within_sizes, out_within, x_within,
    RESULT: tl.constexpr, COMPUTE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    COLUMNS_WITHIN: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales and results of SEGMENTS whole segments, or of SEGMENTS rows whose columns are segments.

    EXPONENT > 0 is a float format of EXPONENT and MANTISSA bits: x / scale is rounded and saturated to it.
    """
    segment, row, first, known, exists = tile_place(segments, rows, column_tiles, ROWS, SEGMENTS)
    start = first * COLUMNS
    column = start + tl.arange(0, COLUMNS)[None, None, :].to(tl.int64)
    here = columns_inside(start, columns, COLUMNS)[None, :, :]
    inside = exists & here
    begin = tile_begin(segment, row, over_sizes, x_over, within_sizes, x_within)
    values = tl.load(x + begin + column * steps[3], mask=inside, other=0.0)
    s, z = segment_scales(values, lowest, highest, RESULT, COMPUTE, COLUMNS_WITHIN)
    store_scales(
        scale, zero_point, s, z, segment, column, known, here, steps[1], steps[2],
        over_sizes, scale_strides, zero_strides, RESULT, COLUMNS_WITHIN,
    )  # fmt: skip

    wide = widen(values, COMPUTE)
    if EXPONENT > 0:
        t = code_quotient(wide, s, True)
        result = rounded_to_float(t, q_max, EXPONENT, MANTISSA).to(COMPUTE) * s
    elif INTERPRETED or COMPUTE == tl.float64:
        result = rounded_to_code(wide, s, q_min, q_max, z)
    else:
        # Adding and subtracting 1.5 * 2^23 rounds to an integer, half to even. A zero becomes +0, as the code
        # of an integer is. If the scale is not finite, the product is NaN.
        t = chosen_quotient(wide, s, q_min, q_max, z, RESULT != "affine")
        result = ((t + MAGIC) - MAGIC) * s
    begin = tile_begin(segment, row, over_sizes, out_over, within_sizes, out_within)
    tl.store(out + begin + column * steps[0], narrow(result, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_bits", "rows"])
def covered_backward(
    dx, dy, x, scale,
    scale_bits, rows, columns, sizes, dx_strides, dy_strides, x_strides, scale_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ACCUMULATE: tl.constexpr, SAME_STRIDES: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """dx = dy if the scale is finite, over one tile. Only if a scale is not finite, the tile reads x."""
    row = tile_rows(rows, columns, ROWS, COLUMNS, GRID)
    start = tile_start(columns, COLUMNS, GRID)
    inside = (row < rows)[:, None] & columns_inside(start, columns, COLUMNS)
    to_dy = tile_offsets(row, start, sizes, dy_strides, COLUMNS)
    gradient = widen(tl.load(dy + to_dy, mask=inside, eviction_policy=EVICT_LAST), COMPUTE)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    finite = tl.abs(s) < float("inf")
    if tl.min(finite.to(tl.int32)) == 0:
        to_x = tile_offsets(row, start, sizes, x_strides, COLUMNS)
        values = widen(tl.load(x + to_x, mask=inside, other=0.0), COMPUTE)
        passes = finite | ((s == s) & (tl.abs(values) < float("inf")))
        gradient = tl.where(passes, gradient, 0.0)
    written = dx + (to_dy if SAME_STRIDES else tile_offsets(row, start, sizes, dx_strides, COLUMNS))
    if ACCUMULATE:
        gradient = widen(tl.load(written, mask=inside), COMPUTE) + gradient
    tl.store(written, narrow(gradient, dx.dtype.element_ty), mask=inside)


class DynamicFakeQuantize(SegmentKernel[DynamicFakeQuantizeDescriptor]):
    """``dynamic_fake_quantize``, or the kernels of choose_scale and fake_quantize in sequence."""

    kernel, args, output = dynamic_fake_quantize, DynamicFakeQuantizeArgs, "y"

    def parameters(self, walk: Segments) -> dict[str, Any]:
        codes = self.desc.codes
        return {"EXPONENT": codes.exponent_bits, "MANTISSA": codes.mantissa_bits}

    def add_second_pass(self, steps: Steps, args: DynamicFakeQuantizeArgs) -> None:
        FakeQuantize(self.desc, self.device).add_steps(steps, args)  # type: ignore[arg-type]


class DynamicFakeQuantizeBackward(FakeQuantizeBackward):
    """``covered_backward``, or the kernel of fake_quantize's backward."""

    desc: DynamicFakeQuantizeBackwardDescriptor
    args = DynamicFakeQuantizeBackwardArgs

    def __init__(self, desc: DynamicFakeQuantizeBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        if desc.covers_data:
            self.kernel = covered_backward

    def parameters(self, args: Any, space: Space) -> dict[str, Any]:
        if not self.desc.covers_data:
            return super().parameters(args, space)
        return {
            "tile": self.tuning.tile // 2,
            "ACCUMULATE": args.accumulate,
            "SAME_STRIDES": same_strides_by_column(space, self.tensors),
        }
