"""Mutants of observe_range and choose_scale, which also apply to the dynamic ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from holdfast.core.granularity import Granularity
from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array
from holdfast.ops.affine import reference as affine
from holdfast.ops.affine.mutants import axis_swapped
from holdfast.ops.choose_scale.plan import SCALE_FLOOR
from holdfast.ops.choose_scale.reference import observe_range, scale_of_range

Range = Callable[[Array, Granularity], tuple[Array, Array]]


def _of_changed(change: Callable[[Array], Array]) -> Range:
    """The range of ``change(x)`` instead of x."""
    return lambda x, granularity: observe_range(change(x), granularity)


def _nan_dropped(x: Array) -> Array:
    return np.where(np.isnan(x), x.dtype.type(0), x)


def _infinity_dropped(x: Array) -> Array:
    return np.where(np.isinf(x), x.dtype.type(0), x)


def _last_dropped(x: Array) -> Array:
    """Ignore the last element."""
    kept = x.copy()
    kept.reshape(-1)[-1:] = 0
    return kept


def _nan_for_one_end(x: Array, granularity: Granularity) -> tuple[Array, Array]:
    low, high = observe_range(x, granularity)
    return np.where(np.isnan(low), low.dtype.type(0), low), high


def _without_zero(x: Array, granularity: Granularity) -> tuple[Array, Array]:
    """The least and the largest element, without 0."""
    low, high = (end.copy() for end in observe_range(x, granularity))
    numbers = np.broadcast_to(affine.broadcast_scales(np.arange(low.size), granularity, x.shape), x.shape)
    for number in range(low.size):
        own = x[numbers == number]
        if own.size:
            low.flat[number], high.flat[number] = own.min(), own.max()
    return low, high


Chosen = Callable[[Array, Array, int, int, bool], Array]


def _scale(of: Callable[..., Array], *, floor: float = SCALE_FLOOR, symmetric: bool) -> Chosen:
    """Replace the formula of symmetric scales only, or of the others only."""

    def chosen(low: Array, high: Array, lowest: int, highest: int, given: bool) -> Array:
        if given is not symmetric:
            return scale_of_range(low, high, lowest, highest, given)
        kind = high.dtype.type
        with np.errstate(all="ignore"):
            scale = of(low, high, kind(lowest), kind(highest))
            return np.asarray(np.maximum(scale, kind(floor)))

    return chosen


_symmetric = partial(_scale, symmetric=True)
_affine = partial(_scale, symmetric=False)


def _larger(low: Array, high: Array, lowest: Any, highest: Any) -> Array:
    return np.asarray(np.maximum(high / highest, low / lowest))


def _high_alone(low: Array, high: Array, lowest: Any, highest: Any) -> Array:
    return np.asarray(high / highest)


def _over_larger_code(low: Array, high: Array, lowest: Any, highest: Any) -> Array:
    return np.asarray(np.maximum(high, -low) / np.maximum(highest, -lowest))


def _over_half_a_code_more(low: Array, high: Array, lowest: Any, highest: Any) -> Array:
    return np.asarray(np.maximum(high, -low) / (highest - lowest + 1) * 2)


def _by_reciprocal(low: Array, high: Array, lowest: Any, highest: Any) -> Array:
    return np.asarray(np.maximum(high * (1 / highest), low * (1 / lowest)))


def _width(low: Array, high: Array, lowest: Any, highest: Any) -> Array:
    return np.asarray((high - low) / (highest - lowest))


def _truncated(low: Array, scale: Array, lowest: int, highest: int) -> Array:
    with np.errstate(all="ignore"):
        r = np.trunc(low / scale)
    return np.asarray(np.clip(lowest - np.where(np.isnan(r), 0, r), lowest, highest), np.int32)


def _of_high(low: Array, scale: Array, lowest: int, highest: int) -> Array:
    """Compute the zero point from the highest code instead of the lowest."""
    with np.errstate(all="ignore"):
        r = np.rint(low / scale)
    return np.asarray(np.clip(highest + np.where(np.isnan(r), 0, r), lowest, highest), np.int32)


#: Plans that choose scales, and plans that compute a range.
_S = ("choose_scale forward", "dynamic_quantize forward", "dynamic_fake_quantize forward")
_R = ("observe_range forward", *_S)

MUTANTS = (
    Mutant("swapped axis", axis_swapped, _R),
    Mutant("NaN dropped", instead_of("observe_range", _of_changed(_nan_dropped)), _R),
    Mutant("infinity dropped", instead_of("observe_range", _of_changed(_infinity_dropped)), _R),
    Mutant("last element dropped", instead_of("observe_range", _of_changed(_last_dropped)), _R),
    Mutant("NaN for one end only", instead_of("observe_range", _nan_for_one_end), _R[:1]),
    Mutant("zero left out of the range", instead_of("observe_range", _without_zero), _R),
    Mutant("no floor", instead_of("scale_of_range", _symmetric(_larger, floor=0)), _S),
    Mutant("no floor, zero point", instead_of("scale_of_range", _affine(_width, floor=0)), _S),
    Mutant("sign forgotten", instead_of("scale_of_range", _symmetric(_high_alone)), _S),
    Mutant("largest code for both ends", instead_of("scale_of_range", _symmetric(_over_larger_code)), _S),
    Mutant("half a code more", instead_of("scale_of_range", _symmetric(_over_half_a_code_more)), _S),
    Mutant("reciprocal instead of division", instead_of("scale_of_range", _symmetric(_by_reciprocal)), _S),
    Mutant("width overflows", instead_of("scale_of_range", _affine(_width)), _S),
    Mutant("zero point cut off", instead_of("zero_point_of_range", _truncated), _S),
    Mutant("zero point from the other end", instead_of("zero_point_of_range", _of_high), _S),
)
