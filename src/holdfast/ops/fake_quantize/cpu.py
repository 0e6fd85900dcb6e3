"""fake_quantize in Numba. A code minus its zero point stays a float, which represents it exactly.

Each estimator is a function of one element. The loop over tiles is compiled once for each estimator.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import BLOCK, jit, pointer, prefetch, team_kernel
from holdfast.core.plan import Launch
from holdfast.numerics.cpu import fits_e4m3fn, rint, saturated_e4m3fn, tanh_slope, zero
from holdfast.numerics.cpu_walk import number
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import (
    NUMBERS,
    finish,
    flush,
    in_range_bounds,
    is_by_row,
    load,
    over_tiles,
    row_columns,
    store,
    straight_through,
    streamed_item,
)
from holdfast.ops.affine.plan import AffineKernel, affine_space
from holdfast.ops.fake_quantize.plan import (
    EstimatedDescriptor,
    FakeQuantizeArgs,
    FakeQuantizeBackwardArgs,
    FakeQuantizeDescriptor,
    SteKind,
)


@jit
def rounded_to_code(x, s, z, q_min, q_max):
    """clamp(rint(x / s), lo, hi) * s. A rounded 0 is +0, as an integer code would be; NaN stays NaN."""
    lo, hi = q_min - z, q_max - z
    t = x / s
    t = zero(t) if np.isnan(t) else t
    y = (rint(min(hi, max(lo, t))) + zero(t)) * s
    return x if np.isnan(x) else y


@jit
def rounded_to_e4m3fn(x, s, z, q_min, q_max):
    """x / s rounded to float8_e4m3fn, times s. NaN stays NaN; a zero keeps its sign."""
    return saturated_e4m3fn(x / s) * s


def _rounding(name: str, rounded: Any) -> Any:
    """``over_tiles`` of the rounding of elements to codes, as the function ``name``."""

    def tiles(first, last, walk, shared, scalars, accumulate):
        q_min, q_max, item = scalars[0], scalars[1], streamed_item(walk)
        by_row = shared or is_by_row(walk, 1)
        for tile in range(first, last):
            count, runs = load(walk, tile, tile == first, shared, 1, False, q_min)
            x, scale, zero_point = pointer(runs[1], q_min), pointer(runs[2], q_min), pointer(runs[3], q_min)
            columns = row_columns(walk, 1, count)
            row, row_end = np.int64(-1), np.int64(0)
            for begin in range(0, count, BLOCK):
                end = min(begin + BLOCK, count)
                y = pointer(walk[2] - begin * item if item > 0 else runs[0], q_min)
                if item == 0:
                    prefetch(x, begin)
                part = begin if by_row else end
                while part < end:
                    if part == row_end:
                        row, row_end = row + 1, row_end + columns
                    stop, s, z = min(end, row_end), scale[row], zero_point[row]
                    for i in range(part, stop):
                        y[i] = rounded(x[i], s, z, q_min, q_max)
                    part = stop
                if not by_row:
                    for i in range(begin, end):
                        y[i] = rounded(x[i], scale[i], zero_point[i], q_min, q_max)
                flush(walk, runs, (runs[1],), begin, end)
            store(walk, tile, q_min)
        finish(walk)

    return over_tiles(tiles, name)


_to_integers = _rounding("fake_quantize_to_integers", rounded_to_code)
_to_e4m3fn = _rounding("fake_quantize_to_e4m3fn", rounded_to_e4m3fn)


@team_kernel(NUMBERS)
def _fake_quantize(task):
    _to_integers(task)


@team_kernel(NUMBERS)
def _fake_quantize_e4m3fn(task):
    _to_e4m3fn(task)


@jit
def identity(dy, x, s, z, q_min, q_max):
    """dy."""
    return dy


@jit
def in_range(dy, x, s, z, q_min, q_max):
    """dy where lo <= rint(x / s) <= hi."""
    r = rint(x / s)
    return dy if (r >= q_min - z) & (r <= q_max - z) else zero(dy)


@jit
def in_range_e4m3fn(dy, x, s, z, q_min, q_max):
    """dy where x / s, rounded to float8_e4m3fn, is in the range of that format."""
    return dy if fits_e4m3fn(x / s) else zero(dy)


@jit
def between(dy, x, s, z, least, greatest):
    """dy where least <= x <= greatest."""
    return dy if (x >= least) & (x <= greatest) else zero(dy)


@jit
def clipped_identity(dy, x, s, z, q_min, q_max):
    """dy where lo * s <= x <= hi * s."""
    return dy if (x >= (q_min - z) * s) & (x <= (q_max - z) * s) else zero(dy)


@jit
def tanh(dy, x, s, z, q_min, q_max):
    """dy * (1 - tanh((x - mid) / s)**2), and 0 where (x - mid) / s is NaN."""
    mid = ((q_min - z) * s + (q_max - z) * s) * np.float32(0.5)
    t = (x - mid) / s
    return zero(dy) if np.isnan(t) else dy * tanh_slope(t)


@jit
def hard_tanh(dy, x, s, z, q_min, q_max):
    """dy * (1 - |x - mid| / half) where that is positive."""
    lo_x, hi_x = (q_min - z) * s, (q_max - z) * s
    mid, half = (lo_x + hi_x) * np.float32(0.5), (hi_x - lo_x) * np.float32(0.5)
    t = abs((x - mid) / half)
    return dy * (np.float32(1) - t) if t < np.float32(1) else zero(dy)


@over_tiles
def _identity_tiles(first, last, walk, shared, scalars, accumulate):
    """dx = dy. It reads neither x nor the scale."""
    item, like = streamed_item(walk), scalars[0]
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, accumulate, like)
        dy = pointer(runs[1], like)
        for begin in range(0, count, BLOCK):
            end = min(begin + BLOCK, count)
            dx = pointer(walk[2] - begin * item if item > 0 else runs[0], like)
            if item == 0:
                prefetch(dy, begin)
            if accumulate:
                for i in range(begin, end):
                    dx[i] += dy[i]
            else:
                for i in range(begin, end):
                    dx[i] = dy[i]
            flush(walk, runs, (runs[1],), begin, end)
        store(walk, tile, like)
    finish(walk)


_clipped_identity_tiles = straight_through("clipped_identity_tiles", clipped_identity, clipped_identity)
_tanh_tiles = straight_through("tanh_tiles", tanh, tanh)
_hard_tanh_tiles = straight_through("hard_tanh_tiles", hard_tanh, hard_tanh)
_in_range_tiles = straight_through("in_range_tiles", in_range, between, in_range_bounds)
_in_range_e4m3fn_tiles = straight_through("in_range_e4m3fn_tiles", in_range_e4m3fn, in_range_e4m3fn)


@team_kernel(NUMBERS)
def _identity(task):
    _identity_tiles(task)


@team_kernel(NUMBERS)
def _clipped_identity(task):
    _clipped_identity_tiles(task)


@team_kernel(NUMBERS)
def _tanh(task):
    _tanh_tiles(task)


@team_kernel(NUMBERS)
def _hard_tanh(task):
    _hard_tanh_tiles(task)


@team_kernel(NUMBERS)
def _in_range_e4m3fn(task):
    _in_range_e4m3fn_tiles(task)


@team_kernel(NUMBERS)
def _in_range(task):
    _in_range_tiles(task)


_BACKWARD = {
    SteKind.IDENTITY: _identity,
    SteKind.CLIPPED_IDENTITY: _clipped_identity,
    SteKind.TANH: _tanh,
    SteKind.HARD_TANH: _hard_tanh,
    SteKind.IN_RANGE: _in_range,
}


class FakeQuantize(AffineKernel[FakeQuantizeDescriptor]):
    """``_fake_quantize`` or ``_fake_quantize_e4m3fn`` as a kernel."""

    @property
    def entry(self) -> Any:
        return _fake_quantize_e4m3fn if self.desc.codes.is_float else _fake_quantize

    def compile(self) -> None:
        self.entry.compiled(number(self.desc.real.compute))

    def prepare(self, args: FakeQuantizeArgs) -> Launch[FakeQuantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        space = affine_space(desc, (args.y, args.x), (args.scale, args.zero_point))
        walk = affine.Walk(
            self.entry,
            (args.y, args.x, *affine.shared_tensors(args, compute)),
            desc.code_range,
            space=space,
            inputs=1,
            compute=compute,
            streamed=True,
            by_row=True,
        )
        return affine.launch_of(walk, compute)


class FakeQuantizeBackward(AffineKernel[EstimatedDescriptor]):
    """The gradient by the descriptor's estimator, as a kernel."""

    @property
    def entry(self) -> Any:
        """The kernel of the estimator. Only IN_RANGE depends on how codes are rounded."""
        ste = self.desc.ste
        return _in_range_e4m3fn if self.desc.codes.is_float and ste is SteKind.IN_RANGE else _BACKWARD[ste]

    def compile(self) -> None:
        self.entry.compiled(number(self.desc.real.compute))

    def prepare(self, args: FakeQuantizeBackwardArgs) -> Launch[FakeQuantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        operands: tuple[torch.Tensor, ...] = (args.dx, args.dy)
        if desc.ste is SteKind.IDENTITY:
            space = affine_space(desc, operands, ())
        else:
            space = affine_space(desc, (*operands, args.x), (args.scale, args.zero_point))
            operands = (*operands, args.x, *affine.shared_tensors(args, compute))
        walk = affine.Walk(
            self.entry,
            operands,
            desc.code_range,
            space=space,
            inputs=len(operands[1:3]),
            compute=compute,
            streamed=True,
            accumulate=args.accumulate,
            by_row=True,
        )
        return affine.launch_of(walk, compute)
