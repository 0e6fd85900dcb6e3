"""What quantize means, in NumPy."""

from __future__ import annotations

import numpy as np

from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.numerics.reference import Array, accumulated, bounds, rounded_quotient, store, widen
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.affine.reference import pack, scale_array, zero_point_array
from holdfast.ops.quantize.plan import (
    QuantizeArgs,
    QuantizeBackwardArgs,
    QuantizeBackwardDescriptor,
    QuantizeDescriptor,
)


def quantize(x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, compute: Float) -> Array:
    """The codes of ``x``. Infinities saturate, NaN takes the code of 0.0."""
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, scale)
    r = np.where(np.isnan(r), 0, r)
    return np.clip(r, lo, hi).astype(np.int64) + z


def quantize_backward(
    dy: Array, x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, compute: Float
) -> Array:
    """The straight-through gradient: dy / scale where the code was in range, 0 elsewhere and at NaN."""
    _, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, scale)
    with np.errstate(all="ignore"):
        return np.where((lo <= r) & (r <= hi), dy / scale, dy.dtype.type(0))


class Quantize(AffineKernel[QuantizeDescriptor]):
    """``quantize`` as a kernel."""

    def prepare(self, args: QuantizeArgs) -> Launch[QuantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute

        def launch(stream: object, workspace: object, args: QuantizeArgs, addresses: object) -> None:
            scale = scale_array(args.scale, desc.granularity, desc.shape, compute)
            zero_point = zero_point_array(args.zero_point, desc.granularity, desc.shape)
            codes = quantize(widen(args.x, compute), scale, zero_point, *desc.code_range, compute)
            if desc.per_byte > 1:
                codes = pack(codes, desc.codes.bits)
            store(args.q, codes)

        return launch


class QuantizeBackward(AffineKernel[QuantizeBackwardDescriptor]):
    """``quantize_backward`` as a kernel."""

    def prepare(self, args: QuantizeBackwardArgs) -> Launch[QuantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute

        def launch(stream: object, workspace: object, args: QuantizeBackwardArgs, addresses: object) -> None:
            scale = scale_array(args.scale, desc.granularity, desc.shape, compute)
            zero_point = zero_point_array(args.zero_point, desc.granularity, desc.shape)
            dy, x = widen(args.dy, compute), widen(args.x, compute)
            dx = quantize_backward(dy, x, scale, zero_point, *desc.code_range, compute)
            store(args.dx, accumulated(args.dx, dx, compute) if args.accumulate else dx)

        return launch
