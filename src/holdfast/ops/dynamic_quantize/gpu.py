"""dynamic_quantize in Triton: one pass if a tile can hold whole segments, else two passes.

In one pass, a program loads its segments once, computes their extremes as ``choose_scale`` does, and
quantizes the values that are still in registers.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import columns_inside, row_offsets
from holdfast.backends.steps import Steps
from holdfast.core.plan import Launch
from holdfast.core.segments import Segments, segments_by_memory
from holdfast.core.strided import contiguous_strides
from holdfast.numerics.gpu import INTERPRETED, MAGIC_BITS, code, narrow, widen
from holdfast.ops.affine.gpu import code_limits, meta_tensor
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.choose_scale.gpu import (
    MAGIC,
    Observer,
    Tile,
    ends_of_range,
    integers,
    magnitudes,
    maxima,
    negated_bits,
    power_of_2,
    real,
    result_of,
    scale_of_magnitude,
    scale_of_range,
    walk_parameters,
    zero_point_of_range,
)
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizeArgs, DynamicQuantizeDescriptor
from holdfast.ops.quantize.gpu import Quantize, packed_bytes

#: Elements per thread (half as many for float64), most warps, and usual warps.
PER_THREAD = 32
MOST_WARPS = 32
WARPS = 4
#: Fewest and most columns of a tile if each column is a segment.
FEWEST_COLUMNS, MOST_COLUMNS = 16, 256
#: The bits of 2^100 in float32. For scales up to 2^100 every step of ``ordinary_codes`` is a normal number.
LARGEST_ORDINARY = tl.constexpr(0x71800000)


@triton.jit
def ordinary_codes(x, s, q_min, q_max, z, SYMMETRIC: tl.constexpr):
    """clamp(rint(x / s), q_min - z, q_max - z) + z for a scale up to 2^100 that was chosen for a finite x.

    rs + rl approximates 1 / s, so q is within an ulp of x / s and its remainder x - q s is exact. By
    Markstein's theorem q + remainder * rs, rounded once, is the correctly rounded quotient. A quotient below
    0.25 need not be correctly rounded: its code is that of 0. Adding 1.5 * 2^23 rounds to an integer, half to
    even, in the low bits of the sum. With a symmetric scale no clamp is needed: the rounding of the scale
    moves a quotient by less than half a code.
    """
    rs = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    rl = tl.fma(-s, rs, 1.0) * rs
    q = tl.fma(x, rs, x * rl)
    t = tl.fma(tl.fma(q, -s, x), rs, q)
    if not SYMMETRIC:
        t = tl.minimum(tl.maximum(t, (q_min - z).to(tl.float32)), (q_max - z).to(tl.float32))
    return (t + MAGIC).to(tl.int32, bitcast=True) + (z - MAGIC_BITS)


@triton.jit(do_not_specialize=["lowest", "highest", "q_min", "q_max", "segments", "rows"])
def dynamic_quantize(
    q, scale, zero_point, x,
    lowest, highest, q_min, q_max,
    segments, rows, columns, column_tiles, byte_columns,
    steps, over_sizes, q_over, scale_strides, zero_strides, x_over, within_sizes, q_within, x_within,
    RESULT: tl.constexpr, COMPUTE: tl.constexpr, PER_BYTE: tl.constexpr, RAGGED: tl.constexpr,
    COLUMNS_WITHIN: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scales and codes of SEGMENTS whole segments, or of SEGMENTS rows whose columns are segments."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = COLUMNS // PER_BYTE
    program = tl.program_id(0).to(tl.int64)
    tile = program // column_tiles
    first = program % column_tiles
    start = first * COLUMNS
    segment = tile * SEGMENTS + tl.arange(0, SEGMENTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, None, :].to(tl.int64)
    known = (segment < segments)[None, :, None]
    here = columns_inside(start, columns, COLUMNS)[None, :, :]
    exists = known & (row < rows)[:, None, None]
    inside = exists & here
    begin = (
        row_offsets(segment, over_sizes, x_over)[None, :, None]
        + row_offsets(row, within_sizes, x_within)[:, None, None]
    )
    values = tl.load(x + (begin + start * steps[3]) + column * steps[3], mask=inside, other=0.0)

    z = tl.zeros([1, 1, 1], tl.int32)
    if RESULT == "magnitude":
        s = scale_of_magnitude(real(maxima(magnitudes(values), COLUMNS_WITHIN), DTYPE, COMPUTE), highest)
    else:
        bits = integers(values)
        below = maxima(tl.maximum(negated_bits(bits, DTYPE.primitive_bitwidth), 0), COLUMNS_WITHIN)
        low, high = ends_of_range(below, maxima(tl.maximum(bits, 0), COLUMNS_WITHIN), DTYPE, COMPUTE)
        s = scale_of_range(low, high, lowest, highest, RESULT == "symmetric")
        if RESULT == "affine":
            z = zero_point_of_range(low, s, lowest, highest)
    at_scale = row_offsets(segment, over_sizes, scale_strides)[None, :, None]
    at_zero = row_offsets(segment, over_sizes, zero_strides)[None, :, None]
    scale_mask = known
    if not COLUMNS_WITHIN:
        at_scale += (start + column) * steps[1]
        at_zero += (start + column) * steps[2]
        scale_mask = known & here
    tl.store(scale + at_scale, s, mask=scale_mask)
    if RESULT == "affine":
        tl.store(zero_point + at_zero, z, mask=scale_mask)

    wide = widen(values, COMPUTE)
    if INTERPRETED or COMPUTE == tl.float64:
        codes = code(wide, s, q_min, q_max, z)
    else:
        divisor = s
        if tl.max(integers(s)) > LARGEST_ORDINARY:
            # Multiply x and a huge scale by 2^-64. If the scale is not finite, every code is that of 0.
            finite = s < float("inf")
            unit = tl.where(s > 2.0**100, 2.0**-64, 1.0)
            wide = tl.where(finite, wide * unit, 0.0)
            divisor = tl.where(finite, s * unit, 1.0)
        codes = ordinary_codes(wide, divisor, q_min, q_max, z, RESULT != "affine")

    begin = (
        row_offsets(segment, over_sizes, q_over)[None, :, None]
        + row_offsets(row, within_sizes, q_within)[:, None, None]
    )
    if PER_BYTE > 1:
        if RAGGED:
            codes = tl.where(inside, codes, 0)
        bytes = packed_bytes(
            tl.reshape(codes, (ROWS * SEGMENTS, COLUMNS)), ROWS * SEGMENTS, COLUMNS, PER_BYTE
        )
        bytes = tl.reshape(bytes, (ROWS, SEGMENTS, WIDTH)).to(tl.uint8)
        out = q + (begin + first * WIDTH) + tl.arange(0, WIDTH)[None, None, :]
        tl.store(out, bytes, mask=exists & columns_inside(first * WIDTH, byte_columns, WIDTH)[None, :, :])
    else:
        out = q + (begin + start * steps[0]) + column * steps[0]
        if q.dtype.element_ty.is_floating():
            tl.store(out, narrow(codes.to(COMPUTE), q.dtype.element_ty), mask=inside)
        else:
            tl.store(out, codes.to(q.dtype.element_ty), mask=inside)


def whole_tile(walk: Segments, per_thread: int, per_byte: int) -> Tile | None:
    """A tile of whole segments, or None if they do not fit in the registers of a program."""
    usual, most = per_thread * 32 * WARPS, per_thread * 32 * MOST_WARPS
    rows, columns = power_of_2(walk.within.rows), power_of_2(max(walk.columns, per_byte))
    if not walk.columns_within:
        columns = min(columns, MOST_COLUMNS, max(FEWEST_COLUMNS, usual // rows))
    if rows * columns > most:
        return None
    return Tile(rows, min(power_of_2(walk.over.rows), max(1, usual // (rows * columns))), columns)


class DynamicQuantize(AffineKernel[DynamicQuantizeDescriptor]):
    """``dynamic_quantize``, or the kernels of choose_scale and quantize in sequence."""

    def __init__(self, desc: DynamicQuantizeDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.ends = desc.ends(*desc.code_range)
        self.result = result_of(desc.symmetric, self.ends)
        self.per_thread = PER_THREAD // 2 if desc.input_dtype == torch.float64 else PER_THREAD
        # If one pass is enough for contiguous tensors, the plan has no workspace for any layout.
        twice = not desc.empty and self._tile(self._walk(contiguous_strides(desc.shape), None)) is None
        self.observer = Observer(desc, device, self.result, self.ends, in_pieces=twice)
        self.set_workspace(self.observer.layout)

    def _walk(self, x: Sequence[int], q: Sequence[int] | None, *results: torch.Tensor | None) -> Segments:
        """The segments of x and q with these strides. Without ``q``, its strides are those of x."""
        per_byte = self.desc.per_byte
        codes = x
        if q is not None:
            codes = (*(step * per_byte for step in q[:-1]), 1) if per_byte > 1 else q
        return segments_by_memory(self.desc.view, [x, codes], results, packed=per_byte > 1)

    def _tile(self, walk: Segments) -> Tile | None:
        if self.desc.codes.is_float:
            return None
        return whole_tile(walk, self.per_thread, self.desc.per_byte)

    def compile(self) -> None:
        names = ("x", "q", "scale") if self.desc.symmetric else ("x", "q", "scale", "zero_point")
        self.prepare(DynamicQuantizeArgs(**{name: meta_tensor(*self.desc.expected(name)) for name in names}))

    def prepare(self, args: DynamicQuantizeArgs) -> Launch[DynamicQuantizeArgs]:
        walk = self._walk(args.x.stride(), args.q.stride(), args.scale, args.zero_point)
        tile, steps = self._tile(walk), Steps(self.device, args)
        if tile is None:
            self._in_two_passes(steps, args)
        else:
            self._in_one_pass(steps, args, walk, tile)
        return steps.launch

    def _in_one_pass(self, steps: Steps, args: DynamicQuantizeArgs, walk: Segments, tile: Tile) -> None:
        desc, per_byte = self.desc, self.desc.per_byte
        over, within = walk.over.strides, walk.within.strides
        across = 1 if walk.columns_within else -(-walk.columns // tile.columns)
        steps.add(
            dynamic_quantize, -(-walk.over.rows // tile.segments) * across,
            walk_parameters(walk, tile), code_limits(desc.code_range),
            lowest=self.ends[0], highest=self.ends[1],
            column_tiles=across, byte_columns=-(-walk.columns // per_byte),
            steps=(over[1][-1] + within[1][-1], over[2][-1], over[3][-1], over[0][-1] + within[0][-1]),
            q_over=_in_bytes(over[1], per_byte), q_within=_in_bytes(within[1], per_byte),
            scale_strides=over[2], zero_strides=over[3],
            RESULT=self.result, COMPUTE=tl.float64 if args.x.dtype == torch.float64 else tl.float32,
            PER_BYTE=per_byte, RAGGED=per_byte > 1 and desc.shape[-1] % per_byte > 0,
            num_warps=max(1, min(MOST_WARPS, tile.size // (self.per_thread * 32))),
        )  # fmt: skip

    def _in_two_passes(self, steps: Steps, args: DynamicQuantizeArgs) -> None:
        self.observer.add_steps(steps, args, "scale", "zero_point")
        Quantize(self.desc, self.device).add_steps(steps, args)


def _in_bytes(strides: Sequence[int], per_byte: int) -> tuple[int, ...]:
    return tuple(step // per_byte for step in strides)
