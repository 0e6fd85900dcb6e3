"""Quantize and its backward, in Triton: one kernel each, for every granularity, dtype and layout."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.backends import interpreted
from holdfast.core.plan import Launch
from holdfast.core.strided import Space
from holdfast.numerics.gpu import code, in_range, narrow, quotient, widen, widen_pair
from holdfast.ops.affine.gpu import (
    byte_offsets,
    columns_inside,
    compile_contiguous,
    in_bytes,
    in_pairs,
    launch_over,
    load_scale,
    load_zero_point,
    tile_offsets,
    tile_rows,
    tile_start,
)
from holdfast.ops.affine.plan import AffineKernel, affine_space
from holdfast.ops.quantize.plan import (
    QuantizeArgs,
    QuantizeBackwardArgs,
    QuantizeBackwardDescriptor,
    QuantizeDescriptor,
)


@triton.jit
def packed_bytes(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr):
    """PER_BYTE neighbours in a byte, low bits first."""
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
    FUSED: tl.constexpr, RAGGED: tl.constexpr, PER_BYTE: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """q = clamp(rint(x / scale), q_min - z, q_max - z) + z, over one tile."""
    WIDTH: tl.constexpr = COLUMNS // PER_BYTE
    row = tile_rows(rows, ROWS, ROW_AXIS)
    start = tile_start(COLUMNS, ROW_AXIS)
    here = columns_inside(start, sizes[len(sizes) - 1], COLUMNS)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    z = load_zero_point(
        zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
    )
    inside = (row < rows)[:, None] & here
    values = tl.load(x + tile_offsets(row, start, sizes, x_strides, COLUMNS), mask=inside)
    codes = code(widen(values, COMPUTE), s, q_min, q_max, z, FUSED and not BY_COLUMN)
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
    rows, columns, sizes, q_strides, x_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr,
    FUSED: tl.constexpr, PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """``quantize`` of 16-bit numbers to packed 4-bit codes: a column is two numbers in a word, and a byte."""
    row = tile_rows(rows, ROWS, ROW_AXIS)
    start = tile_start(COLUMNS, ROW_AXIS)
    inside = (row < rows)[:, None] & columns_inside(start, columns, COLUMNS)
    words = x.to(tl.pointer_type(tl.int32))
    word = tl.load(words + tile_offsets(row, start, sizes, x_strides, COLUMNS), mask=inside)
    byte = tl.zeros(word.shape, tl.int32)
    for half in tl.static_range(2):
        value = widen_pair(word, x.dtype.element_ty)[half]
        s = load_scale(
            scale + half * (scale_strides[len(scale_strides) - 1] // 2), scale_bits, row, start,
            rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST, BY_ROW, BY_COLUMN, COLUMNS,
        )  # fmt: skip
        z = load_zero_point(
            zero_point + half * (zero_strides[len(zero_strides) - 1] // 2), zero_value, row, start,
            rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS,
        )  # fmt: skip
        byte = byte | (code(value, s, q_min, q_max, z, FUSED) & 15) << (4 * half)
    out = q + tile_offsets(row, start, sizes, q_strides, COLUMNS)
    tl.store(out, byte.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["scale_bits", "zero_value", "q_min", "q_max", "rows"])
def quantize_backward(
    dx, dy, x, scale, zero_point,
    scale_bits, zero_value, q_min, q_max,
    rows, byte_columns, sizes, dx_strides, dy_strides, x_strides, scale_strides, zero_strides,
    COMPUTE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr, ACCUMULATE: tl.constexpr,
    PER_BYTE: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr,
):  # fmt: skip
    """dx = dy / scale where the code was in range, else 0, over one tile."""
    row = tile_rows(rows, ROWS, ROW_AXIS)
    start = tile_start(COLUMNS, ROW_AXIS)
    here = columns_inside(start, sizes[len(sizes) - 1], COLUMNS)
    s = load_scale(
        scale, scale_bits, row, start, rows, sizes, scale_strides, COMPUTE, SCALE_ON_HOST,
        BY_ROW, BY_COLUMN, COLUMNS,
    )  # fmt: skip
    z = load_zero_point(
        zero_point, zero_value, row, start, rows, sizes, zero_strides, ZERO, BY_ROW, BY_COLUMN, COLUMNS
    )
    inside = (row < rows)[:, None] & here
    values = tl.load(x + tile_offsets(row, start, sizes, x_strides, COLUMNS), mask=inside)
    upstream = tl.load(dy + tile_offsets(row, start, sizes, dy_strides, COLUMNS), mask=inside)
    kept = in_range(widen(values, COMPUTE), s, q_min, q_max, z)
    gradient = tl.where(kept, quotient(widen(upstream, COMPUTE), s), 0.0)
    out = dx + tile_offsets(row, start, sizes, dx_strides, COLUMNS)
    if ACCUMULATE:
        gradient = widen(tl.load(out, mask=inside), COMPUTE) + gradient
    tl.store(out, narrow(gradient, dx.dtype.element_ty), mask=inside)


class Quantize(AffineKernel[QuantizeDescriptor]):
    """``quantize`` as a kernel."""

    def compile(self) -> None:
        compile_contiguous(self, QuantizeArgs)

    def prepare(self, args: QuantizeArgs) -> Launch[QuantizeArgs]:
        desc, z = self.desc, args.zero_point
        tensors, shared = (args.q, args.x), (args.scale, z)
        packed = 0 if desc.per_byte > 1 else None
        space = affine_space(desc, tensors, shared, packed=packed)
        fused = packed is not None and not isinstance(z, torch.Tensor) and not z and not interpreted()
        if self._in_pairs(args.x, space):
            return launch_over(
                quantize_pairs,
                in_pairs(space),
                self.device,
                tensors,
                shared,
                limits=desc.code_range,
                per_column=2,
                FUSED=fused,
            )
        return launch_over(
            quantize,
            in_bytes(space, packed, desc.per_byte),
            self.device,
            tensors,
            shared,
            limits=desc.code_range,
            per_byte=desc.per_byte,
            FUSED=fused,
            RAGGED=packed is not None and desc.shape[-1] % desc.per_byte > 0,
        )

    def _in_pairs(self, x: torch.Tensor, space: Space) -> bool:
        """Whether ``x`` can be read two numbers at a time, each pair for one byte of codes."""
        *rows, column = space.strides[1]
        return (
            self.desc.per_byte == 2
            and self.desc.real.bits == 16
            and self.desc.shape[-1] % 2 == 0
            and column == 1
            and not any(step % 2 for step in (*rows, *space.strides[0][:-1]))
            and x.data_ptr() % 4 == 0
        )


class QuantizeBackward(AffineKernel[QuantizeBackwardDescriptor]):
    """``quantize_backward`` as a kernel."""

    def compile(self) -> None:
        compile_contiguous(self, QuantizeBackwardArgs)

    def prepare(self, args: QuantizeBackwardArgs) -> Launch[QuantizeBackwardArgs]:
        tensors, shared = (args.dx, args.dy, args.x), (args.scale, args.zero_point)
        return launch_over(
            quantize_backward,
            affine_space(self.desc, tensors, shared),
            self.device,
            tensors,
            shared,
            limits=self.desc.code_range,
            ACCUMULATE=args.accumulate,
        )
