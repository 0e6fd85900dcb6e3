"""The mistakes of quantize, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array, bounds, rounded_quotient

# Mistakes of the arithmetic. Each is the function of the reference, with one thing changed.


def reciprocal_codes(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """A product with 1 / scale for the quotient."""
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        r = np.rint(x * (x.dtype.type(1) / s))
    return np.clip(np.where(np.isnan(r), 0, r), lo, hi).astype(np.int64) + z


def zero_point_first(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """The zero point added before rounding, where an odd one moves ties."""
    z, _, _ = bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        r = np.rint(x / s + z.astype(x.dtype))
        r = np.where(np.isnan(r), z, r)
    return np.clip(r, q_min, q_max).astype(np.int64)


def exclusive_codes(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """The largest code never reached."""
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, s)
    return np.clip(np.where(np.isnan(r), 0, r), lo, np.maximum(lo, hi - 1)).astype(np.int64) + z


def ties_away(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """Ties away from zero."""
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        t = x / s
        r = np.where(np.abs(t - np.trunc(t)) == 0.5, np.trunc(t) + np.copysign(1, t), np.rint(t))
    return np.clip(np.where(np.isnan(r), 0, r), lo, hi).astype(np.int64) + z


def _nan_to_least(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, s)
    return np.clip(np.where(np.isnan(r), lo, r), lo, hi).astype(np.int64) + z


def _gradient(mask: Callable[..., Array], value: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def backward(
        dy: Array, x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any
    ) -> Array:
        z, lo, hi = bounds(zero_point, q_min, q_max, compute)
        with np.errstate(all="ignore"):
            kept = mask(x, s, z.astype(x.dtype), lo, hi)
            return np.where(kept, value(dy, s), dy.dtype.type(0))

    return backward


def _divided(dy: Array, s: Array) -> Array:
    return dy / s


def _in_range(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s)
    return (lo <= r) & (r <= hi)


def _inside(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s)
    return (lo < r) & (r < hi)


def _in_range_zero_point_first(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s + z)
    return (lo + z <= r) & (r <= hi + z)


def _not_outside(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s)
    found: Array = np.logical_not((r < lo) | (r > hi))
    return found


_Q, _QB = "quantize forward", "quantize backward"

MUTANTS = (
    Mutant("reciprocal instead of division", instead_of("quantize", reciprocal_codes), (_Q,)),
    Mutant("zero point added before rounding", instead_of("quantize", zero_point_first), (_Q,)),
    Mutant("exclusive bound", instead_of("quantize", exclusive_codes), (_Q,)),
    Mutant("ties away from zero", instead_of("quantize", ties_away), (_Q,)),
    Mutant("NaN to the least code", instead_of("quantize", _nan_to_least), (_Q,)),
    Mutant(
        "no 1/scale", instead_of("quantize_backward", _gradient(_in_range, lambda dy, s: dy + 0 * s)), (_QB,)
    ),
    Mutant("exclusive bound", instead_of("quantize_backward", _gradient(_inside, _divided)), (_QB,)),
    Mutant(
        "zero point added before rounding",
        instead_of("quantize_backward", _gradient(_in_range_zero_point_first, _divided)),
        (_QB,),
    ),
    Mutant(
        "reciprocal instead of division",
        instead_of("quantize_backward", _gradient(_in_range, lambda dy, s: dy * (dy.dtype.type(1) / s))),
        (_QB,),
    ),
    Mutant("NaN in range", instead_of("quantize_backward", _gradient(_not_outside, _divided)), (_QB,)),
)
