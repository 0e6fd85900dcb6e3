"""dequantize in NumPy: the definition of its result."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.numerics import reference as numerics
from holdfast.numerics.reference import Array, decode
from holdfast.ops.affine.reference import scale_and_zero_point, scale_array, unpack
from holdfast.ops.dequantize import plan as plans


def dequantize(codes: Array, scale: Array, zero_point: Array) -> Array:
    """(code - zero_point) * scale. For integer codes the difference is exact, so only the product rounds."""
    z = numerics.saturated(zero_point)
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


class Dequantize(numerics.ReferenceKernel[plans.DequantizeDescriptor]):
    def run(self, args: plans.DequantizeArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        scale, zero_point = scale_and_zero_point(args, desc)
        if desc.codes.carried:
            codes = numerics.widen(args.q, compute)
        elif desc.codes.is_float:
            codes = decode(args.q.view(torch.uint8).numpy(), desc.codes, compute)
        elif desc.per_byte > 1:
            codes = unpack(args.q.numpy(), desc.codes.bits, desc.codes.signed, desc.shape[-1])
        else:
            codes = args.q.numpy().astype(np.int64)
        numerics.store(args.y, dequantize(codes, scale, zero_point))


class DequantizeBackward(numerics.ReferenceKernel[plans.DequantizeBackwardDescriptor]):
    def run(self, args: plans.DequantizeBackwardArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        scale = scale_array(args.scale, desc.granularity, desc.shape, compute)
        dq = dequantize_backward(numerics.widen(args.dy, compute), scale)
        dq = dq.astype(numerics.compute_type(compute))
        numerics.store_gradient(args.dq, dq, args.accumulate, compute)
