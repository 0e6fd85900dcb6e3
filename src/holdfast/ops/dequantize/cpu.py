"""dequantize in Numba. An integer code minus a zero point is exact, so only the product rounds."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

from holdfast.backends.cpu import kernel, pointer
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import load, store
from holdfast.ops.affine.plan import AffineKernel, affine_space
from holdfast.ops.dequantize.plan import (
    DequantizeArgs,
    DequantizeBackwardArgs,
    DequantizeBackwardDescriptor,
    DequantizeDescriptor,
)


@kernel
def _dequantize(first, last, walk, shared, like):
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, False, like)
        y, q = pointer(runs[0], like), pointer(runs[1], like)
        scale, zero_point = pointer(runs[2], like), pointer(runs[3], like)
        s, z = scale[0], zero_point[0]
        if shared:
            for i in range(count):
                y[i] = (q[i] - z) * s
        else:
            for i in range(count):
                y[i] = (q[i] - zero_point[i]) * scale[i]
        store(walk, tile, like)


@kernel
def _dequantize_backward(first, last, walk, shared, like, accumulate):
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, accumulate, like)
        dq, dy, scale = pointer(runs[0], like), pointer(runs[1], like), pointer(runs[2], like)
        s = scale[0]
        if accumulate:
            if shared:
                for i in range(count):
                    dq[i] += dy[i] * s
            else:
                for i in range(count):
                    dq[i] += dy[i] * scale[i]
        elif shared:
            for i in range(count):
                dq[i] = dy[i] * s
        else:
            for i in range(count):
                dq[i] = dy[i] * scale[i]
        store(walk, tile, like)


class Dequantize(AffineKernel[DequantizeDescriptor]):
    """``_dequantize`` as a kernel."""

    def compile(self) -> None:
        affine.compile_for(_dequantize, self.desc.real.compute)

    def prepare(self, args: DequantizeArgs) -> Launch[DequantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        packed = 1 if desc.per_byte > 1 else None
        space = affine_space(desc, (args.y, args.q), (args.scale, args.zero_point), packed=packed)
        like = affine.compute_scalars(compute, 0)

        def launch(
            stream: Stream, workspace: Workspace, args: DequantizeArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                _dequantize,
                (args.y, args.q, *affine.shared_tensors(args, compute)),
                *like,
                space=space,
                inputs=1,
                compute=compute,
                packed=1,
                per_byte=desc.per_byte,
                signed=desc.codes.signed,
            )

        return launch


class DequantizeBackward(AffineKernel[DequantizeBackwardDescriptor]):
    """``_dequantize_backward`` as a kernel."""

    def compile(self) -> None:
        affine.compile_for(_dequantize_backward, self.desc.real.compute, False)

    def prepare(self, args: DequantizeBackwardArgs) -> Launch[DequantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        space = affine_space(desc, (args.dq, args.dy), (args.scale,))
        like = affine.compute_scalars(compute, 0)

        def launch(
            stream: Stream, workspace: Workspace, args: DequantizeBackwardArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                _dequantize_backward,
                (args.dq, args.dy, affine.scale_tensor(args.scale, compute)),
                *like,
                args.accumulate,
                space=space,
                inputs=1,
                compute=compute,
            )

        return launch
