"""dynamic_quantize in Triton: one pass if a program can hold whole segments, else two passes."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import columns_inside
from holdfast.backends.steps import Steps
from holdfast.core.segments import Segments
from holdfast.numerics.gpu import INTERPRETED, MAGIC_BITS, code, narrow, widen
from holdfast.ops.choose_scale.gpu import MAGIC, Tile
from holdfast.ops.choose_scale.gpu_segments import (
    SegmentKernel,
    chosen_quotient,
    segment_scales,
    store_scales,
    tile_begin,
    tile_place,
)
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizeArgs, DynamicQuantizeDescriptor
from holdfast.ops.quantize.gpu import Quantize, packed_bytes


@triton.jit(do_not_specialize=["lowest", "highest", "q_min", "q_max", "segments", "rows"])
def dynamic_quantize(
    out, scale, zero_point, x,
    lowest, highest, q_min, q_max,
    segments, rows, columns, column_tiles, byte_columns,
    steps, over_sizes, out_over, scale_strides, zero_strides, x_over, within_sizes, out_within, x_within,
    RESULT: tl.constexpr, COMPUTE: tl.constexpr, PER_BYTE: tl.constexpr, RAGGED: tl.constexpr,
    COLUMNS_WITHIN: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scales and codes of SEGMENTS whole segments, or of SEGMENTS rows whose columns are segments."""
    WIDTH: tl.constexpr = COLUMNS // PER_BYTE
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
    if INTERPRETED or COMPUTE == tl.float64:
        codes = code(wide, s, q_min, q_max, z)
    else:
        # Adding 1.5 * 2^23 rounds to an integer, half to even, in the low bits of the sum.
        near = chosen_quotient(wide, s, q_min, q_max, z, RESULT != "affine") + MAGIC
        codes = near.to(tl.int32, bitcast=True) + (z - MAGIC_BITS)

    begin = tile_begin(segment, row, over_sizes, out_over, within_sizes, out_within)
    if PER_BYTE > 1:
        if RAGGED:
            codes = tl.where(inside, codes, 0)
        bytes = packed_bytes(
            tl.reshape(codes, (ROWS * SEGMENTS, COLUMNS)), ROWS * SEGMENTS, COLUMNS, PER_BYTE
        )
        bytes = tl.reshape(bytes, (ROWS, SEGMENTS, WIDTH)).to(tl.uint8)
        written = out + (begin + first * WIDTH) + tl.arange(0, WIDTH)[None, None, :]
        tl.store(written, bytes, mask=exists & columns_inside(first * WIDTH, byte_columns, WIDTH)[None, :, :])
    elif out.dtype.element_ty.is_floating():
        codes = narrow(codes.to(COMPUTE), out.dtype.element_ty)
        tl.store(out + begin + column * steps[0], codes, mask=inside)
    else:
        tl.store(out + begin + column * steps[0], codes.to(out.dtype.element_ty), mask=inside)


class DynamicQuantize(SegmentKernel[DynamicQuantizeDescriptor]):
    """``dynamic_quantize``, or the kernels of choose_scale and quantize in sequence."""

    kernel, args, output = dynamic_quantize, DynamicQuantizeArgs, "q"

    def parameters(self, walk: Segments) -> dict[str, Any]:
        per_byte = self.desc.per_byte
        return {
            "byte_columns": -(-walk.columns // per_byte),
            "PER_BYTE": per_byte,
            "RAGGED": per_byte > 1 and self.desc.shape[-1] % per_byte > 0,
        }

    def _tile(self, walk: Segments) -> Tile | None:
        return None if self.desc.codes.is_float else super()._tile(walk)

    def add_second_pass(self, steps: Steps, args: DynamicQuantizeArgs) -> None:
        Quantize(self.desc, self.device).add_steps(steps, args)
