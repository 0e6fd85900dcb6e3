"""quantize in Numba.

Integer codes are computed as floats, which represent them exactly, and converted when they are stored. For a
float format the kernel computes the quotient, and ``store`` rounds it.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.backends.cpu import BLOCK, jit, kernel, pointer, prefetch
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.numerics.cpu import fits_e4m3fn, rint, zero
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import (
    code_bounds,
    in_range_bounds,
    load,
    store,
    stores_bytes,
    stores_floating_codes,
    straight_through_backward,
)
from holdfast.ops.affine.plan import AffineKernel, affine_space
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


#: By kind of codes, the three functions that ``straight_through_backward`` takes.
ESTIMATORS = {
    "integer": (gradient, in_range_bounds, gradient_between),
    "float8_e4m3fn": (gradient_e4m3fn, code_bounds, gradient_e4m3fn),
}
_backward_tiles = straight_through_backward(ESTIMATORS)


@kernel
def _quantize(first, last, walk, shared, q_min, q_max):
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, False, q_min)
        q, codes, x = pointer(runs[0], q_min), pointer(runs[0], np.int8), pointer(runs[1], q_min)
        scale, zero_point = pointer(runs[2], q_min), pointer(runs[3], q_min)
        s, z = scale[0], zero_point[0]
        for begin in range(0, count, BLOCK):
            end = min(begin + BLOCK, count)
            prefetch(x, begin)
            if stores_bytes(walk):
                if shared:
                    for i in range(begin, end):
                        codes[i] = np.int32(code(x[i], s, z, q_min, q_max))
                else:
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


@kernel
def _quantize_backward(first, last, walk, shared, q_min, q_max, accumulate):
    _backward_tiles("integer", first, last, walk, shared, q_min, q_max, accumulate)


@kernel
def _quantize_backward_e4m3fn(first, last, walk, shared, q_min, q_max, accumulate):
    _backward_tiles("float8_e4m3fn", first, last, walk, shared, q_min, q_max, accumulate)


class Quantize(AffineKernel[QuantizeDescriptor]):
    """``_quantize`` as a kernel."""

    def compile(self) -> None:
        affine.compile_for(_quantize, self.desc.real.compute)

    def prepare(self, args: QuantizeArgs) -> Launch[QuantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        packed = 0 if desc.per_byte > 1 else None
        space = affine_space(desc, (args.q, args.x), (args.scale, args.zero_point), packed=packed)
        bounds = affine.compute_scalars(compute, *desc.code_range)

        def launch(
            stream: Stream, workspace: Workspace, args: QuantizeArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                _quantize,
                (args.q, args.x, *affine.shared_tensors(args, compute)),
                *bounds,
                space=space,
                inputs=1,
                compute=compute,
                packed=0,
                per_byte=desc.per_byte,
            )

        return launch


class QuantizeBackward(AffineKernel[QuantizeBackwardDescriptor]):
    """``_quantize_backward`` or ``_quantize_backward_e4m3fn`` as a kernel."""

    @property
    def entry(self) -> Any:
        return _quantize_backward_e4m3fn if self.desc.codes.is_float else _quantize_backward

    def compile(self) -> None:
        affine.compile_for(self.entry, self.desc.real.compute, False)

    def prepare(self, args: QuantizeBackwardArgs) -> Launch[QuantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        space = affine_space(desc, (args.dx, args.dy, args.x), (args.scale, args.zero_point))
        entry, bounds = self.entry, affine.compute_scalars(compute, *desc.code_range)

        def launch(
            stream: Stream, workspace: Workspace, args: QuantizeBackwardArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                entry,
                (args.dx, args.dy, args.x, *affine.shared_tensors(args, compute)),
                *bounds,
                args.accumulate,
                space=space,
                inputs=2,
                compute=compute,
                streamed=not args.accumulate,
            )

        return launch
