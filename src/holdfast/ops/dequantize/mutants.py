"""The mistakes of dequantize, forward and backward."""

from __future__ import annotations

import numpy as np

from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array


def _distributed(codes: Array, s: Array, zero_point: Array) -> Array:
    z = np.clip(zero_point, -(2**23), 2**23)
    with np.errstate(all="ignore"):
        apart: Array = codes.astype(s.dtype) * s - z.astype(s.dtype) * s
        return apart


def without_zero_point(codes: Array, s: Array, zero_point: Array) -> Array:
    """The zero point not taken off again."""
    with np.errstate(all="ignore"):
        return codes.astype(s.dtype) * s


_D, _DB = "dequantize forward", "dequantize backward"

MUTANTS = (
    Mutant("zero point multiplied apart", instead_of("dequantize", _distributed), (_D,)),
    Mutant("no zero point", instead_of("dequantize", without_zero_point), (_D,)),
    Mutant("no scale", instead_of("dequantize_backward", lambda dy, s: dy + 0 * s), (_DB,)),
    Mutant(
        "division by the reciprocal",
        instead_of("dequantize_backward", lambda dy, s: dy / (dy.dtype.type(1) / s)),
        (_DB,),
    ),
)
