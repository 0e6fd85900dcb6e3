"""Mutants of quantize, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.core.formats import Format
from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array, bounds, encode, nearest, rounded_quotient

# Each function is that of the reference with one change.


def reciprocal_codes(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """Multiply by 1 / scale instead of dividing."""
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = np.rint(x * (x.dtype.type(1) / s))
    return np.clip(np.where(np.isnan(r), 0, r), lo, hi).astype(np.int64) + z


def zero_point_first(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """Add the zero point before rounding. An odd zero point then changes the result of ties."""
    z, _, _ = bounds(zero_point, q_min, q_max, compute)
    r = np.rint(x / s + z.astype(x.dtype))
    return np.clip(np.where(np.isnan(r), z, r), q_min, q_max).astype(np.int64)


def exclusive_codes(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """Clamp to less than the largest code."""
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, s)
    return np.clip(np.where(np.isnan(r), 0, r), lo, np.maximum(lo, hi - 1)).astype(np.int64) + z


def ties_away(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """Round ties away from zero."""
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    t = x / s
    r = np.where(np.abs(t - np.trunc(t)) == 0.5, np.trunc(t) + np.copysign(1, t), np.rint(t))
    return np.clip(np.where(np.isnan(r), 0, r), lo, hi).astype(np.int64) + z


def _nan_to_least(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, s)
    return np.clip(np.where(np.isnan(r), lo, r), lo, hi).astype(np.int64) + z


def _gradient(
    kept: Callable[..., Any], value: Callable[[Array, Array], Array] = lambda dy, s: dy / s
) -> Callable[..., Array]:
    """The gradient ``value`` where ``kept(x / s, z, lo, hi)``, else 0."""

    def backward(
        dy: Array, x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any
    ) -> Array:
        z, lo, hi = bounds(zero_point, q_min, q_max, compute)
        return np.where(kept(x / s, z.astype(x.dtype), lo, hi), value(dy, s), dy.dtype.type(0))

    return backward


def _in_range(t: Array, z: Array, lo: Array, hi: Array) -> Any:
    return (lo <= np.rint(t)) & (np.rint(t) <= hi)


def _inside(t: Array, z: Array, lo: Array, hi: Array) -> Any:
    return (lo < np.rint(t)) & (np.rint(t) < hi)


def _in_range_zero_point_first(t: Array, z: Array, lo: Array, hi: Array) -> Any:
    return (lo + z <= np.rint(t + z)) & (np.rint(t + z) <= hi + z)


def _not_outside(t: Array, z: Array, lo: Array, hi: Array) -> Any:
    return ~((np.rint(t) < lo) | (np.rint(t) > hi))


# Mutants of float formats: functions that replace the rounding of a quotient.


def _rounded(round_to: Callable[[Array, Format], Array]) -> Callable[..., Array]:
    """``quantize_to_float`` with another rounding, then saturated."""
    return lambda x, s, codes: encode(np.clip(round_to(x / s, codes), *codes.code_range), codes)


def _float_ties_away(t: Array, codes: Format) -> Array:
    step = np.ldexp(1.0, np.maximum(np.frexp(t)[1] - 1, 1 - codes.exponent_bias) - codes.mantissa_bits)
    return np.asarray(np.trunc(t / step + np.copysign(0.5, t)) * step)


def _flushed(t: Array, codes: Format) -> Array:
    r = nearest(t, codes)
    return np.where(np.abs(r) < 2.0 ** (1 - codes.exponent_bias), np.copysign(0, r), r)


def _steps_without_end(t: Array, codes: Format) -> Array:
    step = np.ldexp(1.0, np.frexp(t)[1] - 1 - codes.mantissa_bits)
    return np.asarray(np.rint(t / step) * step)


def _overflowing(t: Array, codes: Format) -> Array:
    r = nearest(t, codes)
    return np.where(np.abs(r) > codes.code_range[1], np.nan, r)


def _float_reciprocal(x: Array, s: Array, codes: Format) -> Array:
    return encode(np.clip(nearest(x * (x.dtype.type(1) / s), codes), *codes.code_range), codes)


#: Replacements of ``quantize_to_float``, by mutant name.
FLOAT_MISTAKES: dict[str, Callable[..., Array]] = {
    "float: ties away from zero": _rounded(_float_ties_away),
    "float: subnormal numbers flushed": _rounded(_flushed),
    "float: no subnormal step": _rounded(_steps_without_end),
    "float: NaN above the range": _rounded(_overflowing),
    "float: infinity to NaN": _rounded(lambda t, codes: np.where(np.isinf(t), np.nan, nearest(t, codes))),
    "float: NaN to zero": _rounded(lambda t, codes: np.where(np.isnan(t), 0.0, nearest(t, codes))),
    "float: the sign of zero lost": _rounded(lambda t, codes: nearest(t, codes) + 0.0),
    "float: reciprocal instead of division": _float_reciprocal,
}


def not_rounded(x: Array, s: Array, codes: Format) -> Array:
    """Return the quotient without rounding it."""
    return np.asarray(x / s)


def _one_step_further(x: Array, s: Array, codes: Format) -> Array:
    r = nearest(x / s, codes)
    return np.asarray(np.nextafter(r, np.copysign(np.inf, r)))


#: Replacements of ``rounded_to_float`` in a gradient, by mutant name.
FLOAT_RANGE_MISTAKES: dict[str, Callable[..., Array]] = {
    "float: range before rounding": not_rounded,
    "float: exclusive bound": _one_step_further,
}

#: Replacements of ``quantize_backward``, by mutant name.
_GRADIENTS = {
    "no 1/scale": _gradient(_in_range, lambda dy, s: dy + 0 * s),
    "exclusive bound": _gradient(_inside),
    "zero point added before rounding": _gradient(_in_range_zero_point_first),
    "reciprocal instead of division": _gradient(_in_range, lambda dy, s: dy * (dy.dtype.type(1) / s)),
    "NaN in range": _gradient(_not_outside),
}

_Q, _QB = "quantize forward", "quantize backward"

MUTANTS = (
    Mutant("reciprocal instead of division", instead_of("quantize", reciprocal_codes), (_Q,)),
    Mutant("zero point added before rounding", instead_of("quantize", zero_point_first), (_Q,)),
    Mutant("exclusive bound", instead_of("quantize", exclusive_codes), (_Q,)),
    Mutant("ties away from zero", instead_of("quantize", ties_away), (_Q,)),
    Mutant("NaN to the least code", instead_of("quantize", _nan_to_least), (_Q,)),
    *(Mutant(name, instead_of("quantize_backward", of), (_QB,)) for name, of in _GRADIENTS.items()),
    *(Mutant(name, instead_of("quantize_to_float", of), (_Q,)) for name, of in FLOAT_MISTAKES.items()),
    *(Mutant(name, instead_of("rounded_to_float", of), (_QB,)) for name, of in FLOAT_RANGE_MISTAKES.items()),
)
