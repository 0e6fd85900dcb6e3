"""Triton: whole segments in registers, for kernels that compute scales and use them in one pass.

A tile is [rows within a segment, segments, columns]. A program loads its tile once, computes the extremes of
each segment as ``choose_scale`` does, and uses the scale on the values that are still in registers.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import row_offsets
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.plan import Args, Launch
from holdfast.core.segments import Segments, segments_by_memory
from holdfast.core.strided import contiguous_strides
from holdfast.ops.affine.gpu import code_limits, meta_tensor
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.choose_scale.gpu import (
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
from holdfast.ops.choose_scale.plan import FromDataDescriptor

#: The bits of 2^100 in float32. For scales up to it, every step of ``ordinary_quotient`` is a normal number.
LARGEST_ORDINARY = tl.constexpr(0x71800000)


@triton.jit
def tile_place(segments, rows, column_tiles, ROWS: tl.constexpr, SEGMENTS: tl.constexpr):
    """The segments and rows of a program's tile, its place across the columns, and two masks.

    The masks are the segments that exist, and the rows of these segments that exist.
    """
    program = tl.program_id(0).to(tl.int64)
    segment = program // column_tiles * SEGMENTS + tl.arange(0, SEGMENTS)
    row = tl.arange(0, ROWS)
    known = (segment < segments)[None, :, None]
    return segment, row, program % column_tiles, known, known & (row < rows)[:, None, None]


@triton.jit
def tile_begin(segment, row, over_sizes, over_strides, within_sizes, within_strides):
    """The offset of the first column of each row of each segment; shape [ROWS, SEGMENTS, 1]."""
    begin = row_offsets(segment, over_sizes, over_strides)[None, :, None]
    return begin + row_offsets(row, within_sizes, within_strides)[:, None, None]


@triton.jit
def segment_scales(
    values, lowest, highest, RESULT: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS_WITHIN: tl.constexpr
):
    """The scale and the zero point of each segment of a tile. Reduced axes have size 1."""
    DTYPE: tl.constexpr = values.dtype
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
    return s, z


@triton.jit
def store_scales(
    scale, zero_point, s, z, segment, column, known, here,
    scale_step, zero_step, over_sizes, scale_strides, zero_strides,
    RESULT: tl.constexpr, COLUMNS_WITHIN: tl.constexpr,
):  # fmt: skip
    """Store the scales of a tile, and the zero points of an "affine" RESULT. ``here`` masks the columns."""
    at_scale = row_offsets(segment, over_sizes, scale_strides)[None, :, None]
    at_zero = row_offsets(segment, over_sizes, zero_strides)[None, :, None]
    inside = known
    if not COLUMNS_WITHIN:
        at_scale += column * scale_step
        at_zero += column * zero_step
        inside = known & here
    tl.store(scale + at_scale, s, mask=inside)
    if RESULT == "affine":
        tl.store(zero_point + at_zero, z, mask=inside)


@triton.jit
def ordinary_quotient(x, s):
    """x / s in float32 for computing a code, for a scale up to 2^100 that was chosen for a finite x.

    rs + rl approximates 1 / s, so q is within an ulp of x / s and its remainder x - q s is exact. By
    Markstein's theorem q + remainder * rs, rounded once, is the correctly rounded quotient. A quotient below
    0.25 need not be correctly rounded: its code is that of 0.
    """
    rs = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    rl = tl.fma(-s, rs, 1.0) * rs
    q = tl.fma(x, rs, x * rl)
    return tl.fma(tl.fma(q, -s, x), rs, q)


@triton.jit
def chosen_quotient(x, s, q_min, q_max, z, SYMMETRIC: tl.constexpr):
    """x / s in float32, clamped to q_min - z and q_max - z, for a scale that was chosen for x.

    It is 0 if the scale is not finite. With a symmetric scale no clamp is needed: the rounding of the scale
    moves a quotient by less than half a code.
    """
    if tl.max(integers(s)) > LARGEST_ORDINARY:
        # Multiply x and a huge scale by 2^-64.
        finite = s < float("inf")
        unit = tl.where(s > 2.0**100, 2.0**-64, 1.0)
        x = tl.where(finite, x * unit, 0.0)
        s = tl.where(finite, s * unit, 1.0)
    t = ordinary_quotient(x, s)
    if not SYMMETRIC:
        t = tl.minimum(tl.maximum(t, (q_min - z).to(tl.float32)), (q_max - z).to(tl.float32))
    return t


@dataclass(frozen=True)
class Tuning:
    """Sizes of the tiles of whole segments."""

    #: Elements per thread (half as many for float64), usual warps, and most warps.
    per_thread: int = 32
    warps: int = 4
    most_warps: int = 32
    #: Fewest and most columns of a tile if each column is a segment.
    fewest_columns: int = 16
    most_columns: int = 256


TUNING = Tuned(gpu=Tuning())


def whole_tile(walk: Segments, tuning: Tuning, per_thread: int, per_byte: int) -> Tile | None:
    """A tile of whole segments, or None if they do not fit in the registers of a program."""
    usual, most = per_thread * 32 * tuning.warps, per_thread * 32 * tuning.most_warps
    rows, columns = power_of_2(walk.within.rows), power_of_2(max(walk.columns, per_byte))
    if not walk.columns_within:
        columns = min(columns, tuning.most_columns, max(tuning.fewest_columns, usual // rows))
    if rows * columns > most:
        return None
    return Tile(rows, min(power_of_2(walk.over.rows), max(1, usual // (rows * columns))), columns)


D = TypeVar("D", bound=FromDataDescriptor)


class SegmentKernel(AffineKernel[D]):
    """Scales and results in one launch if a program can hold whole segments, else in two passes.

    The operands of ``args`` are ``output``, the scale, the zero point and x.
    """

    kernel: Any
    args: type[Args]
    output: str

    def __init__(self, desc: D, device: torch.device) -> None:
        super().__init__(desc, device)
        self.ends = desc.ends(*desc.code_range)
        self.result = result_of(desc.symmetric, self.ends)
        self.tuning = TUNING.on(device)
        self.per_thread = self.tuning.per_thread // (2 if desc.input_dtype == torch.float64 else 1)
        # If one pass is enough for contiguous tensors, the plan has no workspace for any layout.
        twice = not desc.empty and self._tile(self._walk(contiguous_strides(desc.shape), None)) is None
        self.observer = Observer(desc, device, self.result, self.ends, in_pieces=twice)
        self.set_workspace(self.observer.layout)

    def parameters(self, walk: Segments) -> dict[str, Any]:
        """Kernel parameters that are not those of every kernel."""
        raise NotImplementedError

    def add_second_pass(self, steps: Steps, args: Any) -> None:
        """Add the launch that computes the output for the scales that are stored already."""
        raise NotImplementedError

    def _walk(self, x: Sequence[int], out: Sequence[int] | None, *results: torch.Tensor | None) -> Segments:
        """The segments of x and the output with these strides. Without ``out``, both have those of x."""
        per_byte = self.desc.per_byte
        written = x
        if out is not None:
            written = (*(step * per_byte for step in out[:-1]), 1) if per_byte > 1 else out
        return segments_by_memory(self.desc.view, [x, written], results, packed=per_byte > 1)

    def _tile(self, walk: Segments) -> Tile | None:
        return whole_tile(walk, self.tuning, self.per_thread, self.desc.per_byte)

    def compile(self) -> None:
        names = ["x", self.output, "scale"] + ["zero_point"] * (not self.desc.symmetric)
        self.prepare(self.args(**{name: meta_tensor(*self.desc.expected(name)) for name in names}))

    def prepare(self, args: Any) -> Launch[Any]:
        walk = self._walk(args.x.stride(), getattr(args, self.output).stride(), args.scale, args.zero_point)
        tile, steps = self._tile(walk), Steps(self.device, args)
        if tile is None:
            self._in_two_passes(steps, args)
        else:
            self._in_one_pass(steps, args, walk, tile)
        return steps.launch

    def _in_one_pass(self, steps: Steps, args: Any, walk: Segments, tile: Tile) -> None:
        over, within = walk.over.strides, walk.within.strides
        across = 1 if walk.columns_within else -(-walk.columns // tile.columns)
        steps.add(
            self.kernel, -(-walk.over.rows // tile.segments) * across,
            walk_parameters(walk, tile), code_limits(self.desc.code_range),
            out=self.output, lowest=self.ends[0], highest=self.ends[1], column_tiles=across,
            steps=(over[1][-1] + within[1][-1], over[2][-1], over[3][-1], over[0][-1] + within[0][-1]),
            out_over=self._in_bytes(over[1]), out_within=self._in_bytes(within[1]),
            scale_strides=over[2], zero_strides=over[3],
            RESULT=self.result, COMPUTE=tl.float64 if args.x.dtype == torch.float64 else tl.float32,
            num_warps=max(1, min(self.tuning.most_warps, tile.size // (self.per_thread * 32))),
            **self.parameters(walk),
        )  # fmt: skip

    def _in_two_passes(self, steps: Steps, args: Any) -> None:
        self.observer.add_steps(steps, args, "scale", "zero_point")
        if prod(self.desc.shape):
            self.add_second_pass(steps, args)

    def _in_bytes(self, strides: Sequence[int]) -> tuple[int, ...]:
        return tuple(step // self.desc.per_byte for step in strides)
