"""The gradients of a learned scale and zero point in NumPy: the definition of the results."""

from __future__ import annotations

import numpy as np

from holdfast.core.dtypes import Float
from holdfast.numerics import reference as numerics
from holdfast.numerics.reference import Array
from holdfast.ops.affine.reference import scale_and_zero_point
from holdfast.ops.fake_quantize.reference import fake_quantize_backward
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardDescriptor,
)
from holdfast.ops.tree_sum.reference import by_segment, tree_sum


def scale_terms(
    dy: Array, x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, compute: Float
) -> Array:
    """The term of each element in the gradient of its scale."""
    _, lo, hi = numerics.bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        t = x / scale
        r = np.rint(t)
        step = np.where(r < lo, lo, np.where(r > hi, hi, r - t))
        return np.where(np.isnan(t), numerics.compute_type(compute)(0), dy * step)


def zero_point_terms(
    dy: Array, x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, compute: Float
) -> Array:
    """The term of each element in the gradient of its zero point."""
    _, lo, hi = numerics.bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        r = np.rint(x / scale)
        return np.where((r < lo) | (r > hi), -(dy * scale), numerics.compute_type(compute)(0))


class FakeQuantizeLearnedBackward(numerics.ReferenceKernel[FakeQuantizeLearnedBackwardDescriptor]):
    """dx, dscale and dzero_point as a kernel."""

    def run(self, args: FakeQuantizeLearnedBackwardArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        factor = numerics.compute_type(compute)(desc.grad_factor)
        scale, zero_point = scale_and_zero_point(args, desc)
        dy, x = numerics.widen(args.dy, compute), numerics.widen(args.x, compute)
        given = scale, zero_point, *desc.code_range
        dx = fake_quantize_backward(dy, x, *given, desc.ste, compute)
        numerics.store_gradient(args.dx, dx, args.accumulate, compute)
        for out, terms in ((args.dscale, scale_terms), (args.dzero_point, zero_point_terms)):
            if out is not None:
                total = tree_sum(by_segment(terms(dy, x, *given, compute), desc.view))
                with np.errstate(all="ignore"):
                    gradient = (total * factor).reshape(out.shape)
                numerics.store_gradient(out, gradient, args.accumulate, compute)
