"""quantize on the CPU: codes are computed as floats, which hold them exactly, and stored as what they are."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.backends.cpu import BLOCK, jit, kernel, pointer, prefetch
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.numerics.cpu import rint, zero
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import flush, in_range_of, load, store, stores_bytes, streamed_item
from holdfast.ops.affine.plan import AffineKernel, affine_space
from holdfast.ops.quantize.plan import (
    QuantizeArgs,
    QuantizeBackwardArgs,
    QuantizeBackwardDescriptor,
    QuantizeDescriptor,
)


@jit
def code(x, s, z, q_min, q_max):
    """clamp(rint(x / s), lo, hi) + z. The bounds are integers, so that it is the same to clamp first."""
    lo, hi = q_min - z, q_max - z
    t = x / s
    t = zero(t) if np.isnan(t) else t
    return rint(min(hi, max(lo, t))) + z


@jit
def gradient(dy, x, s, z, q_min, q_max):
    """dy / s where rint(x / s) is in range, +0 elsewhere."""
    r = rint(x / s)
    return dy / s if (r >= q_min - z) & (r <= q_max - z) else zero(dy)


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
            elif shared:
                for i in range(begin, end):
                    q[i] = code(x[i], s, z, q_min, q_max)
            else:
                for i in range(begin, end):
                    q[i] = code(x[i], scale[i], zero_point[i], q_min, q_max)
        store(walk, tile, q_min)


@kernel
def _quantize_backward(first, last, walk, shared, q_min, q_max, accumulate):
    item = streamed_item(walk)
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 2, accumulate, q_min)
        dy, x = pointer(runs[1], q_min), pointer(runs[2], q_min)
        scale, zero_point = pointer(runs[3], q_min), pointer(runs[4], q_min)
        s, z = scale[0], zero_point[0]
        least, greatest = in_range_of(s, z, q_min, q_max) if shared else (zero(s), zero(s))
        for begin in range(0, count, BLOCK):
            end = min(begin + BLOCK, count)
            dx = pointer(walk[2] - begin * item if item > 0 else runs[0], q_min)
            if item == 0:
                prefetch(x, begin)
                prefetch(dy, begin)
            if accumulate:
                if shared:
                    for i in range(begin, end):
                        dx[i] += dy[i] / s if (x[i] >= least) & (x[i] <= greatest) else zero(s)
                else:
                    for i in range(begin, end):
                        dx[i] += gradient(dy[i], x[i], scale[i], zero_point[i], q_min, q_max)
            elif shared:
                for i in range(begin, end):
                    dx[i] = dy[i] / s if (x[i] >= least) & (x[i] <= greatest) else zero(s)
            else:
                for i in range(begin, end):
                    dx[i] = gradient(dy[i], x[i], scale[i], zero_point[i], q_min, q_max)
            flush(walk, runs, (runs[1], runs[2]), begin, end)
        store(walk, tile, q_min)


class Quantize(AffineKernel[QuantizeDescriptor]):
    """``_quantize`` as a kernel."""

    def compile(self) -> None:
        affine.compile_for(_quantize, self.desc.real.compute)

    def prepare(self, args: QuantizeArgs) -> Launch[QuantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        packed = 0 if desc.per_byte > 1 else None
        space = affine_space(desc, (args.q, args.x), (args.scale, args.zero_point), packed=packed)
        bounds = affine.numbers(compute, *desc.code_range)

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
    """``_quantize_backward`` as a kernel."""

    def compile(self) -> None:
        affine.compile_for(_quantize_backward, self.desc.real.compute, False)

    def prepare(self, args: QuantizeBackwardArgs) -> Launch[QuantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        space = affine_space(desc, (args.dx, args.dy, args.x), (args.scale, args.zero_point))
        bounds = affine.numbers(compute, *desc.code_range)

        def launch(
            stream: Stream, workspace: Workspace, args: QuantizeBackwardArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                _quantize_backward,
                (args.dx, args.dy, args.x, *affine.shared_tensors(args, compute)),
                *bounds,
                args.accumulate,
                space=space,
                inputs=2,
                compute=compute,
                streamed=not args.accumulate,
            )

        return launch
