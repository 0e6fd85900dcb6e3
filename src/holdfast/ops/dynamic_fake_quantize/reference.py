"""dynamic_fake_quantize in NumPy: choose_scale, then fake_quantize."""

from __future__ import annotations

import numpy as np

from holdfast.numerics.reference import Array, ReferenceKernel, store, store_gradient, widen
from holdfast.ops.affine.reference import scale_and_zero_point, scale_array, zero_point_array
from holdfast.ops.choose_scale.reference import observe_range, scale_of_range, zero_point_of_range
from holdfast.ops.dynamic_fake_quantize import plan as plans
from holdfast.ops.fake_quantize.reference import (
    fake_quantize,
    fake_quantize_backward,
    fake_quantize_to_float,
    fake_quantize_to_float_backward,
)


def covered_backward(dy: Array, x: Array, scale: Array) -> Array:
    """dx by IN_RANGE if the scale covers all finite x. Where x / scale is NaN, dx is +0.0."""
    passes = np.isfinite(scale) | (np.isinf(scale) & np.isfinite(x))
    return np.where(passes, dy, dy.dtype.type(0))


class DynamicFakeQuantize(ReferenceKernel[plans.DynamicFakeQuantizeDescriptor]):
    """choose_scale and fake_quantize as a kernel. The result is that of the stored scale."""

    def run(self, args: plans.DynamicFakeQuantizeArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        ends = desc.ends(*desc.code_range)
        x = widen(args.x, compute)
        low, high = observe_range(x, desc.granularity)
        scale = scale_of_range(low, high, *ends, desc.symmetric)
        store(args.scale, scale)
        if args.zero_point is not None:
            store(args.zero_point, zero_point_of_range(low, scale, *ends))
        if not x.size:  # a tensor without elements may have a scale
            return
        s = scale_array(args.scale, desc.granularity, desc.shape, compute)
        z = zero_point_array(args.zero_point, desc.granularity, desc.shape)
        if desc.codes.is_float:
            store(args.y, fake_quantize_to_float(x, s, desc.codes, compute))
        else:
            store(args.y, fake_quantize(x, s, z, *desc.code_range, compute))


class DynamicFakeQuantizeBackward(ReferenceKernel[plans.DynamicFakeQuantizeBackwardDescriptor]):
    """``covered_backward``, or the gradient of fake_quantize, as a kernel."""

    def run(self, args: plans.DynamicFakeQuantizeBackwardArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        s, z = scale_and_zero_point(args, desc)
        dy, x = widen(args.dy, compute), widen(args.x, compute)
        if desc.covers_data:
            dx = covered_backward(dy, x, s)
        elif desc.codes.is_float:
            dx = fake_quantize_to_float_backward(dy, x, s, desc.codes, desc.ste, compute)
        else:
            dx = fake_quantize_backward(dy, x, s, z, *desc.code_range, desc.ste, compute)
        store_gradient(args.dx, dx, args.accumulate, compute)
