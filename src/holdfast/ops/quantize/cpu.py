"""quantize in Numba.

Integer codes are computed as floats, which represent them exactly, and converted when they are stored. For a
float format the kernel computes the quotient, and ``store`` rounds it.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import (
    BLOCK,
    jit,
    outlined,
    pointer,
    prefetch,
    team_kernel,
)
from holdfast.core.plan import Launch
from holdfast.numerics.cpu import fits_e4m3fn, real, rint, zero
from holdfast.numerics.cpu_walk import number
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import (
    NUMBERS,
    ROW_BLOCK,
    elements_of,
    finish,
    flush_alone,
    in_range_bounds,
    is_by_row,
    load,
    over_tiles,
    reads_bfloat16,
    row_columns,
    store,
    stores_bytes,
    stores_floating_codes,
    straight_through,
    streamed_item,
)
from holdfast.ops.affine.plan import AffineKernel, affine_space
from holdfast.ops.quantize.cpu_codes import (
    SPAN,
    codes_by_division,
    codes_by_reciprocal,
    is_ordinary,
    most_codes_by_estimate,
)
from holdfast.ops.quantize.plan import (
    QuantizeArgs,
    QuantizeBackwardArgs,
    QuantizeBackwardDescriptor,
    QuantizeDescriptor,
)


@jit
def code(x, s, z, q_min, q_max):
    """clamp(rint(x / s), lo, hi) + z. The bounds are integers, so clamping before rint gives the same."""
    lo, hi = q_min - z, q_max - z
    t = x / s
    t = zero(t) if np.isnan(t) else t
    return rint(min(hi, max(lo, t))) + z


@jit
def gradient(dy, x, s, z, q_min, q_max):
    """dy / s where rint(x / s) is in range, +0 elsewhere."""
    r = rint(x / s)
    return dy / s if (r >= q_min - z) & (r <= q_max - z) else zero(dy)


@jit
def gradient_between(dy, x, s, z, least, greatest):
    """dy / s where least <= x <= greatest, +0 elsewhere."""
    return dy / s if (x >= least) & (x <= greatest) else zero(dy)


@jit
def gradient_e4m3fn(dy, x, s, z, q_min, q_max):
    """dy / s where x / s, rounded to float8_e4m3fn, is in the range of that format; +0 elsewhere."""
    return dy / s if fits_e4m3fn(x / s) else zero(dy)


_integer_gradients = straight_through("quantize_integers", gradient, gradient_between, in_range_bounds)
_e4m3fn_gradients = straight_through("quantize_e4m3fn", gradient_e4m3fn, gradient_e4m3fn)


@jit
def _quantize_rows(walk, runs, x, count, q_min, q_max):
    """The codes of a tile as bytes, if the tile or each of its rows has one scale and one zero point."""
    outlined()
    scale, zero_point = pointer(runs[2], q_min), pointer(runs[3], q_min)
    item, columns = streamed_item(walk), row_columns(walk, 1, count)
    row, row_end, size = 0, columns, BLOCK if item > 0 else count
    for begin in range(0, count, size):
        end = min(begin + size, count)
        codes = pointer(walk[2] - begin if item > 0 else runs[0], np.int8)
        part = begin
        while part < end:
            if part == row_end:
                row, row_end = row + 1, row_end + columns
            stop, s, z = min(end, row_end), scale[row], zero_point[row]
            blocks = stop - (stop - part) % ROW_BLOCK
            if blocks == part:
                for i in range(part, stop):
                    codes[i] = np.int32(code(real(x, i), s, z, q_min, q_max))
            # These branches are not a function of their own: its call takes as long as 16 elements.
            elif is_ordinary(s, z, q_min, q_max):
                if blocks - part >= SPAN:
                    elements = elements_of(walk)
                    part = most_codes_by_estimate(x, codes, part, blocks, elements, s, z, q_min, q_max)
                codes_by_reciprocal(x, codes, part, blocks, s, z, q_min, q_max)
                if blocks < stop:  # the last block again, with equal results
                    codes_by_reciprocal(x, codes, stop - ROW_BLOCK, stop, s, z, q_min, q_max)
            else:
                codes_by_division(x, codes, part, blocks, s, z, q_min, q_max)
                for i in range(blocks, stop):
                    codes[i] = np.int32(code(real(x, i), s, z, q_min, q_max))
            part = stop
        flush_alone(walk, runs, begin, end)


@over_tiles
def _quantize_tiles(first, last, walk, shared, scalars, accumulate):
    q_min, q_max = scalars[0], scalars[1]
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, False, q_min)
        q, codes, x = pointer(runs[0], q_min), pointer(runs[0], np.int8), pointer(runs[1], q_min)
        scale, zero_point = pointer(runs[2], q_min), pointer(runs[3], q_min)
        s, z = scale[0], zero_point[0]
        if reads_bfloat16(walk):
            _quantize_rows(walk, runs, pointer(runs[1], np.uint16), count, q_min, q_max)
        elif stores_bytes(walk) and (shared or is_by_row(walk, 1)):
            _quantize_rows(walk, runs, x, count, q_min, q_max)
        else:
            for begin in range(0, count, BLOCK):
                end = min(begin + BLOCK, count)
                prefetch(x, begin)
                if stores_bytes(walk):
                    for i in range(begin, end):
                        codes[i] = np.int32(code(x[i], scale[i], zero_point[i], q_min, q_max))
                elif stores_floating_codes(walk):
                    if shared:
                        for i in range(begin, end):
                            q[i] = x[i] / s
                    else:
                        for i in range(begin, end):
                            q[i] = x[i] / scale[i]
                elif shared:
                    for i in range(begin, end):
                        q[i] = code(x[i], s, z, q_min, q_max)
                else:
                    for i in range(begin, end):
                        q[i] = code(x[i], scale[i], zero_point[i], q_min, q_max)
        store(walk, tile, q_min)
    finish(walk)


@team_kernel(NUMBERS)
def _quantize(task):
    _quantize_tiles(task)


@team_kernel(NUMBERS)
def _quantize_backward(task):
    _integer_gradients(task)


@team_kernel(NUMBERS)
def _quantize_backward_e4m3fn(task):
    _e4m3fn_gradients(task)


class Quantize(AffineKernel[QuantizeDescriptor]):
    """``_quantize`` as a kernel."""

    def compile(self) -> None:
        _quantize.compiled(number(self.desc.real.compute))

    def prepare(self, args: QuantizeArgs) -> Launch[QuantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        packed = 0 if desc.per_byte > 1 else None
        space = affine_space(desc, (args.q, args.x), (args.scale, args.zero_point), packed=packed)
        in_bytes = args.q.dtype in (torch.int8, torch.uint8)
        walk = affine.Walk(
            _quantize,
            (args.q, args.x, *affine.shared_tensors(args, compute)),
            desc.code_range,
            space=space,
            inputs=1,
            compute=compute,
            packed=0,
            per_byte=desc.per_byte,
            streamed=in_bytes,
            by_row=in_bytes,
            raw={1: torch.bfloat16} if in_bytes else {},
        )
        return affine.launch_of(walk, compute)


class QuantizeBackward(AffineKernel[QuantizeBackwardDescriptor]):
    """``_quantize_backward`` or ``_quantize_backward_e4m3fn`` as a kernel."""

    @property
    def entry(self) -> Any:
        return _quantize_backward_e4m3fn if self.desc.codes.is_float else _quantize_backward

    def compile(self) -> None:
        self.entry.compiled(number(self.desc.real.compute))

    def prepare(self, args: QuantizeBackwardArgs) -> Launch[QuantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        space = affine_space(desc, (args.dx, args.dy, args.x), (args.scale, args.zero_point))
        walk = affine.Walk(
            self.entry,
            (args.dx, args.dy, args.x, *affine.shared_tensors(args, compute)),
            desc.code_range,
            space=space,
            inputs=2,
            compute=compute,
            streamed=True,
            accumulate=args.accumulate,
            by_row=True,
        )
        return affine.launch_of(walk, compute)
