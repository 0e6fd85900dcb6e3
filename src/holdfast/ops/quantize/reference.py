"""quantize in NumPy: the definition of its result."""

from __future__ import annotations

import numpy as np

from holdfast.core.dtypes import Float
from holdfast.core.formats import Format
from holdfast.numerics import reference as numerics
from holdfast.numerics.reference import Array
from holdfast.ops.affine.reference import pack, scale_and_zero_point
from holdfast.ops.quantize import plan as plans


def quantize(x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, compute: Float) -> Array:
    """The codes of ``x``. Infinities saturate; the code of NaN is that of 0.0."""
    z, lo, hi = numerics.bounds(zero_point, q_min, q_max, compute)
    r = numerics.rounded_quotient(x, scale)
    r = np.where(np.isnan(r), 0, r)
    return np.clip(r, lo, hi).astype(np.int64) + z


def quantize_backward(
    dy: Array, x: Array, scale: Array, zero_point: Array, q_min: int, q_max: int, compute: Float
) -> Array:
    """The straight-through gradient: dy / scale where the code was in range, 0 elsewhere and at NaN."""
    _, lo, hi = numerics.bounds(zero_point, q_min, q_max, compute)
    r = numerics.rounded_quotient(x, scale)
    with np.errstate(all="ignore"):
        return np.where((lo <= r) & (r <= hi), dy / scale, dy.dtype.type(0))


def rounded_to_float(x: Array, scale: Array, codes: Format) -> Array:
    """x / scale rounded to the mantissa of a float format, not yet saturated to its range."""
    with np.errstate(all="ignore"):
        return numerics.nearest(x / scale, codes)


def quantize_to_float(x: Array, scale: Array, codes: Format) -> Array:
    """The codes of ``x`` in a float format. Infinities saturate; NaN stays NaN; a zero keeps its sign."""
    return numerics.encode(np.clip(rounded_to_float(x, scale, codes), *codes.code_range), codes)


def quantize_to_float_backward(dy: Array, x: Array, scale: Array, codes: Format) -> Array:
    """The straight-through gradient of a float format: dy / scale where x did not saturate, else 0."""
    with np.errstate(all="ignore"):
        kept = np.abs(rounded_to_float(x, scale, codes)) <= codes.code_range[1]
        return np.where(kept, dy / scale, dy.dtype.type(0))


class Quantize(numerics.ReferenceKernel[plans.QuantizeDescriptor]):
    def run(self, args: plans.QuantizeArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        scale, zero_point = scale_and_zero_point(args, desc)
        x = numerics.widen(args.x, compute)
        if desc.codes.is_float:
            codes = quantize_to_float(x, scale, desc.codes)
        else:
            codes = quantize(x, scale, zero_point, *desc.code_range, compute)
        numerics.store(args.q, pack(codes, desc.codes.bits) if desc.per_byte > 1 else codes)


class QuantizeBackward(numerics.ReferenceKernel[plans.QuantizeBackwardDescriptor]):
    def run(self, args: plans.QuantizeBackwardArgs) -> None:
        desc, compute = self.desc, self.desc.real.compute
        scale, zero_point = scale_and_zero_point(args, desc)
        dy, x = numerics.widen(args.dy, compute), numerics.widen(args.x, compute)
        if desc.codes.is_float:
            dx = quantize_to_float_backward(dy, x, scale, desc.codes)
        else:
            dx = quantize_backward(dy, x, scale, zero_point, *desc.code_range, compute)
        numerics.store_gradient(args.dx, dx, args.accumulate, compute)
