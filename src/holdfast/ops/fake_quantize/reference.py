"""fake_quantize and its gradient estimators in NumPy: the definition of their results."""

from __future__ import annotations

import numpy as np

from holdfast.core.dtypes import Float
from holdfast.core.formats import Format
from holdfast.numerics import reference as numerics
from holdfast.numerics.reference import Array, decode
from holdfast.ops.affine.reference import scale_and_zero_point
from holdfast.ops.dequantize.reference import dequantize
from holdfast.ops.fake_quantize import plan as plans
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.quantize.reference import quantize, quantize_to_float, rounded_to_float


def fake_quantize(x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, compute: Float) -> Array:
    """The real values of the codes of ``x``, except that NaN stays NaN."""
    codes = quantize(x, scale, zero_point, q_min, q_max, compute)
    return np.where(np.isnan(x), x, dequantize(codes, scale, zero_point))


def fake_quantize_to_float(x: Array, scale: Array, codes: Format, compute: Float) -> Array:
    """The real values of the codes of ``x`` in a float format, which has a code for NaN."""
    return dequantize(decode(quantize_to_float(x, scale, codes), codes, compute), scale, np.asarray(0))


def fake_quantize_backward(
    dy: Array, x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, ste: SteKind, compute: Float
) -> Array:
    """dx by the estimator ``ste``. Where the estimator passes no gradient, dx is +0.0."""
    if ste is SteKind.IDENTITY:
        return dy
    kind = numerics.compute_type(compute)
    none, one, two = kind(0), kind(1), kind(2)
    _, lo, hi = numerics.bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        if ste is SteKind.IN_RANGE:
            r = numerics.rounded_quotient(x, scale)
            return np.where((lo <= r) & (r <= hi), dy, none)
        lo_x, hi_x = lo * scale, hi * scale
        if ste is SteKind.CLIPPED_IDENTITY:
            return np.where((lo_x <= x) & (x <= hi_x), dy, none)
        mid = (lo_x + hi_x) / two
        if ste is SteKind.TANH:
            t = (x - mid) / scale
            return np.where(np.isnan(t), none, dy * numerics.tanh_slope(t, compute))
        half = (hi_x - lo_x) / two
        t = np.abs((x - mid) / half)
        return np.where(t < one, dy * (one - t), none)


def fake_quantize_to_float_backward(
    dy: Array, x: Array, scale: Array, codes: Format, ste: SteKind, compute: Float
) -> Array:
    """dx for a float format. Only IN_RANGE depends on how x is rounded."""
    if ste is SteKind.IN_RANGE:
        with np.errstate(all="ignore"):
            kept = np.abs(rounded_to_float(x, scale, codes)) <= codes.code_range[1]
        return np.where(kept, dy, dy.dtype.type(0))
    return fake_quantize_backward(dy, x, scale, np.asarray(0), *codes.code_range, ste, compute)


class FakeQuantize(numerics.ReferenceKernel[plans.FakeQuantizeDescriptor]):
    def run(self, args: plans.FakeQuantizeArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        scale, zero_point = scale_and_zero_point(args, desc)
        x = numerics.widen(args.x, compute)
        if desc.codes.is_float:
            y = fake_quantize_to_float(x, scale, desc.codes, compute)
        else:
            y = fake_quantize(x, scale, zero_point, *desc.code_range, compute)
        numerics.store(args.y, y)


class FakeQuantizeBackward(numerics.ReferenceKernel[plans.FakeQuantizeBackwardDescriptor]):
    def run(self, args: plans.FakeQuantizeBackwardArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        scale, zero_point = scale_and_zero_point(args, desc)
        dy, x = numerics.widen(args.dy, compute), numerics.widen(args.x, compute)
        if desc.codes.is_float:
            dx = fake_quantize_to_float_backward(dy, x, scale, desc.codes, desc.ste, compute)
        else:
            dx = fake_quantize_backward(dy, x, scale, zero_point, *desc.code_range, desc.ste, compute)
        numerics.store_gradient(args.dx, dx, args.accumulate, compute)
