"""Mutants of dequantize, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.formats import Format
from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array, decode


def _distributed(codes: Array, s: Array, zero_point: Array) -> Array:
    z = np.clip(zero_point, -(2**23), 2**23)
    return np.asarray(codes.astype(s.dtype) * s - z.astype(s.dtype) * s)


def without_zero_point(codes: Array, s: Array, zero_point: Array) -> Array:
    """Do not subtract the zero point."""
    return codes.astype(s.dtype) * s


def _without_subnormals(found: Array, codes: Format, compute: Any) -> Array:
    """Decode subnormal codes as normal numbers."""
    values = decode(found, codes, compute)
    lost = values.dtype.type(2.0 ** (1 - codes.exponent_bias))
    return np.where(np.abs(values) < lost, values + np.copysign(lost, values), values)


def _without_nan(found: Array, codes: Format, compute: Any) -> Array:
    """Decode NaN as the value one step above the greatest one."""
    values = decode(found, codes, compute)
    return np.where(np.isnan(values), values.dtype.type(480), values)


def _by_the_reciprocal(dy: Array, s: Array) -> Array:
    return np.asarray(dy / (dy.dtype.type(1) / s))


_D, _DB = "dequantize forward", "dequantize backward"

MUTANTS = (
    Mutant("zero point multiplied apart", instead_of("dequantize", _distributed), (_D,)),
    Mutant("no zero point", instead_of("dequantize", without_zero_point), (_D,)),
    Mutant("float: no subnormal numbers", instead_of("decode", _without_subnormals), (_D,)),
    Mutant("float: NaN is a number", instead_of("decode", _without_nan), (_D,)),
    Mutant("no scale", instead_of("dequantize_backward", lambda dy, s: dy + 0 * s), (_DB,)),
    Mutant("division by the reciprocal", instead_of("dequantize_backward", _by_the_reciprocal), (_DB,)),
)
