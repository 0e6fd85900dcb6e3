"""dequantize in NumPy: the definition of its result."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.plan import Launch
from holdfast.numerics.reference import Array, accumulated, compute_type, decode, saturated, store, widen
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.affine.reference import scale_array, unpack, zero_point_array
from holdfast.ops.dequantize.plan import (
    DequantizeArgs,
    DequantizeBackwardArgs,
    DequantizeBackwardDescriptor,
    DequantizeDescriptor,
)


def dequantize(codes: Array, scale: Array, zero_point: Array) -> Array:
    """(code - zero_point) * scale. For integer codes the difference is exact, so only the product rounds."""
    z = saturated(zero_point)
    with np.errstate(all="ignore"):
        if codes.dtype.kind == "f":
            difference: Array = codes - z.astype(codes.dtype)
        else:
            difference = (codes - z).astype(scale.dtype)
        return difference * scale


def dequantize_backward(dy: Array, scale: Array) -> Array:
    """The gradient with respect to the codes."""
    with np.errstate(all="ignore"):
        return dy * scale


class Dequantize(AffineKernel[DequantizeDescriptor]):
    """``dequantize`` as a kernel."""

    def prepare(self, args: DequantizeArgs) -> Launch[DequantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute

        def launch(stream: object, workspace: object, args: DequantizeArgs, addresses: object) -> None:
            scale = scale_array(args.scale, desc.granularity, desc.shape, compute)
            zero_point = zero_point_array(args.zero_point, desc.granularity, desc.shape)
            if desc.codes.carried:
                codes = widen(args.q, compute)
            elif desc.codes.is_float:
                codes = decode(args.q.view(torch.uint8).numpy(), desc.codes, compute)
            elif desc.per_byte > 1:
                codes = unpack(args.q.numpy(), desc.codes.bits, desc.codes.signed, desc.shape[-1])
            else:
                codes = args.q.numpy().astype(np.int64)
            store(args.y, dequantize(codes, scale, zero_point))

        return launch


class DequantizeBackward(AffineKernel[DequantizeBackwardDescriptor]):
    """``dequantize_backward`` as a kernel."""

    def prepare(self, args: DequantizeBackwardArgs) -> Launch[DequantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        kind = compute_type(compute)

        def launch(
            stream: object, workspace: object, args: DequantizeBackwardArgs, addresses: object
        ) -> None:
            scale = scale_array(args.scale, desc.granularity, desc.shape, compute)
            dq = dequantize_backward(widen(args.dy, compute), scale).astype(kind)
            store(args.dq, accumulated(args.dq, dq, compute) if args.accumulate else dq)

        return launch
