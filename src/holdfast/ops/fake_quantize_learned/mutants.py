"""Mutants of the gradients of a learned scale and zero point, and of their sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.core.mutant import Mutant, Run, described, instead_of
from holdfast.core.plan import AnyPlan, Args
from holdfast.numerics.reference import Array, bounds, rounded_quotient
from holdfast.ops.affine.mutants import axis_swapped, neighbours_scale
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize_learned.reference import scale_terms

_B = ("fake_quantize_learned backward",)


def _terms(of: Callable[..., Any], *, of_nan: bool = False) -> Callable[..., Array]:
    """Terms by ``of``(dy, t, r, scale, lo, hi). Where t is NaN the term is 0, unless ``of_nan``."""

    def terms(
        dy: Array, x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any
    ) -> Array:
        _, lo, hi = bounds(zero_point, q_min, q_max, compute)
        t = x / s
        added = of(dy, t, rounded_quotient(x, s), s, lo, hi)
        return np.asarray(np.where(np.isnan(t) & (not of_nan), 0, added), dy.dtype)

    return terms


def _right(dy: Array, t: Array, r: Array, s: Array, lo: Array, hi: Array) -> Array:
    return dy * np.where(r < lo, lo, np.where(r > hi, hi, r - t))


def _saturated_forgotten(dy: Array, t: Array, r: Array, s: Array, lo: Array, hi: Array) -> Array:
    return np.where((lo <= r) & (r <= hi), dy * (r - t), 0)


def _in_range_forgotten(dy: Array, t: Array, r: Array, s: Array, lo: Array, hi: Array) -> Array:
    return np.where(r < lo, dy * lo, np.where(r > hi, dy * hi, 0))


def _not_rounded(dy: Array, t: Array, r: Array, s: Array, lo: Array, hi: Array) -> Any:
    """Omit the rounding error r - t: dy times the clamped code."""
    return dy * np.clip(r, lo, hi)


def _bounds_saturated(dy: Array, t: Array, r: Array, s: Array, lo: Array, hi: Array) -> Array:
    """Treat codes at the bounds as saturated."""
    return dy * np.where(r <= lo, lo, np.where(r >= hi, hi, r - t))


def _masked_by_value(dy: Array, t: Array, r: Array, s: Array, lo: Array, hi: Array) -> Array:
    """Compare the quotient with the bounds, instead of the rounded quotient."""
    return dy * np.where(t < lo, lo, np.where(t > hi, hi, r - t))


def _everywhere(dy: Array, t: Array, r: Array, s: Array, lo: Array, hi: Array) -> Array:
    return -(dy * s)


def _outside(value: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    return _terms(lambda dy, t, r, s, lo, hi: np.where((r < lo) | (r > hi), value(dy, s), 0))


def in_one_go(terms: Array) -> Array:
    """Sum in NumPy's order."""
    return np.asarray(np.sum(terms, axis=-1, dtype=terms.dtype))


def one_by_one(terms: Array) -> Array:
    """Sum in the order of a sequential loop."""
    total = np.zeros(terms.shape[:-1], terms.dtype)
    for index in range(terms.shape[-1]):
        total = total + terms[..., index]
    return total


def in_wider_type(terms: Array) -> Array:
    """Sum in extended precision."""
    return np.asarray(np.sum(terms.astype(np.longdouble), axis=-1), terms.dtype)


def _factor_on_terms(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """Multiply each term by the factor, instead of the sum."""

    def terms(*given: Any) -> Array:
        found = scale_terms(*given)
        return np.asarray(found * found.dtype.type(desc.grad_factor))

    def without_factor(args: Args) -> None:
        described(grad_factor=1.0)(plan, desc, run, args)

    instead_of("scale_terms", terms)(plan, desc, without_factor, args)


MUTANTS = (
    Mutant("swapped axis", axis_swapped, _B),
    Mutant("a neighbour's scale", neighbours_scale, _B),
    Mutant("no gradient factor", described(grad_factor=1.0), _B),
    Mutant("gradient factor on each term", _factor_on_terms, _B),
    Mutant("estimator ignored", described(ste=SteKind.IN_RANGE), _B),
    Mutant("sum in another order", instead_of("tree_sum", in_one_go), _B),
    Mutant("sum one by one", instead_of("tree_sum", one_by_one), _B),
    Mutant("sum in a wider type", instead_of("tree_sum", in_wider_type), _B),
    Mutant("saturated terms forgotten", instead_of("scale_terms", _terms(_saturated_forgotten)), _B),
    Mutant("terms in range forgotten", instead_of("scale_terms", _terms(_in_range_forgotten)), _B),
    Mutant("rounding error forgotten", instead_of("scale_terms", _terms(_not_rounded)), _B),
    Mutant("bounds saturated", instead_of("scale_terms", _terms(_bounds_saturated)), _B),
    Mutant("mask on the quotient", instead_of("scale_terms", _terms(_masked_by_value)), _B),
    Mutant("NaN added", instead_of("scale_terms", _terms(_right, of_nan=True)), _B),
    Mutant("zero point, sign", instead_of("zero_point_terms", _outside(lambda dy, s: dy * s)), _B),
    Mutant("zero point, no scale", instead_of("zero_point_terms", _outside(lambda dy, s: -dy + 0 * s)), _B),
    Mutant("zero point, everywhere", instead_of("zero_point_terms", _terms(_everywhere)), _B),
)
