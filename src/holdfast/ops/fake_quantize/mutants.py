"""Mutants of fake_quantize and of its estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.core.mutant import Mutant, Spoil, instead_of
from holdfast.numerics.reference import Array, bounds, rounded_quotient
from holdfast.ops.affine.mutants import axis_swapped, neighbours_scale
from holdfast.ops.dequantize.mutants import without_zero_point
from holdfast.ops.dequantize.reference import dequantize
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize.reference import fake_quantize_backward
from holdfast.ops.quantize.mutants import (
    FLOAT_MISTAKES,
    FLOAT_RANGE_MISTAKES,
    exclusive_codes,
    reciprocal_codes,
    ties_away,
    zero_point_first,
)
from holdfast.ops.quantize.reference import quantize


def _nan_lost(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    return dequantize(quantize(x, s, zero_point, q_min, q_max, compute), s, zero_point)


def clamped_by_reals(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    """Clamp x to the real range, whose ends are rounded, and then round it to a code."""
    _, lo, hi = bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        kept = np.minimum(np.maximum(x, lo * s), hi * s)
        return np.where(np.isnan(x), x, np.rint(kept / s) * s)


#: A replacement of an estimator: dx from dy, x, the scale, lo, hi and the compute type.
Estimator = Callable[[Array, Array, Array, Array, Array, Any], Array]


def _instead(ste: SteKind, estimator: Estimator) -> Spoil:
    """Replace the estimator ``ste`` only."""

    def backward(
        dy: Array, x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, given: SteKind, compute: Any
    ) -> Array:
        if given is not ste:
            return fake_quantize_backward(dy, x, s, zero_point, q_min, q_max, given, compute)
        _, lo, hi = bounds(zero_point, q_min, q_max, compute)
        with np.errstate(all="ignore"):
            return estimator(dy, x, s, lo, hi, compute).astype(dy.dtype)

    return instead_of("fake_quantize_backward", backward)


def _taken_for(other: SteKind) -> Estimator:
    """Use the estimator ``other``."""

    def estimator(dy: Array, x: Array, s: Array, lo: Array, hi: Array, compute: Any) -> Array:
        least, most = lo.astype(np.int64), hi.astype(np.int64)
        # lo and hi include the zero point already, so it is 0 here. They may differ by element.
        return fake_quantize_backward(dy, x, s, np.int64(0), least, most, other, compute)  # type: ignore[arg-type]

    return estimator


def _masked(
    mask: Callable[..., Array], value: Callable[[Array, Array], Array] = lambda dy, s: dy
) -> Estimator:
    def estimator(dy: Array, x: Array, s: Array, lo: Array, hi: Array, compute: Any) -> Array:
        return np.where(mask(x, s, lo, hi), value(dy, s), dy.dtype.type(0))

    return estimator


def _multiplied(mask: Callable[..., Array]) -> Estimator:
    return lambda dy, x, s, lo, hi, compute: dy * mask(x, s, lo, hi)


def _code_in_range(x: Array, s: Array, lo: Array, hi: Array) -> Array:
    r = rounded_quotient(x, s)
    return (lo <= r) & (r <= hi)


def _code_inside(x: Array, s: Array, lo: Array, hi: Array) -> Array:
    r = rounded_quotient(x, s)
    return (lo < r) & (r < hi)


def _code_not_outside(x: Array, s: Array, lo: Array, hi: Array) -> Array:
    r = rounded_quotient(x, s)
    found: Array = np.logical_not((r < lo) | (r > hi))
    return found


def _value_in_range(x: Array, s: Array, lo: Array, hi: Array) -> Array:
    return (lo * s <= x) & (x <= hi * s)


def _value_inside(x: Array, s: Array, lo: Array, hi: Array) -> Array:
    return (lo * s < x) & (x < hi * s)


def _recomputed(ste: SteKind) -> Estimator:
    """Compute the scale from the largest element of x instead of using the given scale."""

    def estimator(dy: Array, x: Array, s: Array, lo: Array, hi: Array, compute: Any) -> Array:
        largest = np.max(np.where(np.isfinite(x), np.abs(x), 0), initial=0)
        found = np.asarray(largest / np.maximum(np.max(hi, initial=1), 1)).astype(x.dtype)
        return _taken_for(ste)(dy, x, found, lo, hi, compute)

    return estimator


def _middle(s: Array, lo: Array, hi: Array) -> Array:
    mid: Array = (lo * s + hi * s) / 2
    return mid


def _tanh(of: Callable[..., Array]) -> Estimator:
    def estimator(dy: Array, x: Array, s: Array, lo: Array, hi: Array, compute: Any) -> Array:
        dx: Array = dy * (1 - np.tanh(of(x, s, lo, hi)) ** 2)
        return dx

    return estimator


def _hard_tanh(of: Callable[..., Array], least: float = 0) -> Estimator:
    def estimator(dy: Array, x: Array, s: Array, lo: Array, hi: Array, compute: Any) -> Array:
        dx: Array = dy * np.maximum(least, 1 - np.abs(of(x, s, lo, hi)))
        return dx

    return estimator


def _over_scale(x: Array, s: Array, lo: Array, hi: Array) -> Array:
    return (x - _middle(s, lo, hi)) / s


def _over_half(x: Array, s: Array, lo: Array, hi: Array) -> Array:
    t: Array = (x - _middle(s, lo, hi)) / ((hi * s - lo * s) / 2)
    return t


_F, _B = "fake_quantize forward", "fake_quantize backward"
_IN_RANGE, _CLIPPED, _TANH, _HARD = (
    SteKind.IN_RANGE,
    SteKind.CLIPPED_IDENTITY,
    SteKind.TANH,
    SteKind.HARD_TANH,
)

MUTANTS = (
    Mutant("swapped axis", axis_swapped, (_F,)),
    Mutant("a neighbour's scale", neighbours_scale, (_F, _B)),
    Mutant("NaN lost", instead_of("fake_quantize", _nan_lost), (_F,)),
    Mutant("clamped before rounding", instead_of("fake_quantize", clamped_by_reals), (_F,)),
    Mutant("zero point not cancelled", instead_of("dequantize", without_zero_point), (_F,)),
    Mutant("zero point added before rounding", instead_of("quantize", zero_point_first), (_F,)),
    Mutant("reciprocal instead of division", instead_of("quantize", reciprocal_codes), (_F,)),
    Mutant("ties away from zero", instead_of("quantize", ties_away), (_F,)),
    Mutant("exclusive bound", instead_of("quantize", exclusive_codes), (_F,)),
    Mutant("in_range: mask on x", _instead(_IN_RANGE, _taken_for(_CLIPPED)), (_B,)),
    Mutant("in_range: exclusive bound", _instead(_IN_RANGE, _masked(_code_inside)), (_B,)),
    Mutant("in_range: NaN let through", _instead(_IN_RANGE, _masked(_code_not_outside)), (_B,)),
    Mutant("in_range: mask multiplied", _instead(_IN_RANGE, _multiplied(_code_in_range)), (_B,)),
    Mutant("in_range: 1/scale", _instead(_IN_RANGE, _masked(_code_in_range, lambda dy, s: dy / s)), (_B,)),
    Mutant("in_range: scale from the data", _instead(_IN_RANGE, _recomputed(_IN_RANGE)), (_B,)),
    Mutant("clipped: mask on the code", _instead(_CLIPPED, _taken_for(_IN_RANGE)), (_B,)),
    Mutant("clipped: exclusive bound", _instead(_CLIPPED, _masked(_value_inside)), (_B,)),
    Mutant("clipped: mask multiplied", _instead(_CLIPPED, _multiplied(_value_in_range)), (_B,)),
    Mutant("clipped: scale from the data", _instead(_CLIPPED, _recomputed(_CLIPPED)), (_B,)),
    Mutant("identity clipped", _instead(SteKind.IDENTITY, _taken_for(_CLIPPED)), (_B,)),
    Mutant("tanh taken for hard_tanh", _instead(_TANH, _taken_for(_HARD)), (_B,)),
    Mutant("tanh of x", _instead(_TANH, _tanh(lambda x, s, lo, hi: x - _middle(s, lo, hi))), (_B,)),
    Mutant("tanh around zero", _instead(_TANH, _tanh(lambda x, s, lo, hi: x / s)), (_B,)),
    Mutant("tanh over the range", _instead(_TANH, _tanh(_over_half)), (_B,)),
    Mutant("tanh of the library", _instead(_TANH, _tanh(_over_scale)), (_B,)),
    Mutant("hard_tanh taken for tanh", _instead(_HARD, _taken_for(_TANH)), (_B,)),
    Mutant("hard_tanh without max", _instead(_HARD, _hard_tanh(_over_half, -np.inf)), (_B,)),
    Mutant("hard_tanh multiplied by zero", _instead(_HARD, _hard_tanh(_over_half)), (_B,)),
    *(Mutant(name, instead_of("quantize_to_float", of), (_F,)) for name, of in FLOAT_MISTAKES.items()),
    *(Mutant(name, instead_of("rounded_to_float", of), (_B,)) for name, of in FLOAT_RANGE_MISTAKES.items()),
    Mutant("hard_tanh around zero", _instead(_HARD, _hard_tanh(lambda x, s, lo, hi: x / (hi * s))), (_B,)),
)
