"""Mutants of dynamic_fake_quantize and its backward, in addition to those of choose_scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.mutant import Mutant, instead_of
from holdfast.numerics.reference import Array
from holdfast.ops.affine.mutants import axis_swapped, neighbours_scale
from holdfast.ops.dynamic_quantize.mutants import half_precision
from holdfast.ops.fake_quantize.mutants import clamped_by_reals
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize.reference import fake_quantize, fake_quantize_backward, fake_quantize_to_float


def _by_reciprocal(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    one = x.dtype.type(1)
    with np.errstate(all="ignore"):
        return fake_quantize(x * (one / s), one, zero_point, q_min, q_max, compute) * s


def _saturated_to_one_less(x: Array, scale: Array, codes: Any, compute: Any) -> Array:
    """Saturate to the second largest value of the format."""
    largest = scale * x.dtype.type(codes.code_range[1] * 13 / 14)
    with np.errstate(all="ignore"):
        return np.clip(fake_quantize_to_float(x, scale, codes, compute), -largest, largest)


def _always(dy: Array, x: Array, scale: Array) -> Array:
    return dy


def _finite_scale_only(dy: Array, x: Array, scale: Array) -> Array:
    return np.where(np.isfinite(scale), dy, dy.dtype.type(0))


def _finite_x_only(dy: Array, x: Array, scale: Array) -> Array:
    return np.where(np.isfinite(x), dy, dy.dtype.type(0))


def _masked_by_product(dy: Array, x: Array, scale: Array) -> Array:
    passes = np.isfinite(scale) | (np.isinf(scale) & np.isfinite(x))
    with np.errstate(all="ignore"):
        return np.asarray(dy * passes.astype(dy.dtype))


def _zero_point_ignored(
    dy: Array, x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, ste: SteKind, compute: Any
) -> Array:
    return fake_quantize_backward(dy, x, s, np.zeros_like(zero_point), q_min, q_max, ste, compute)


_F, _B = ("dynamic_fake_quantize forward",), ("dynamic_fake_quantize backward",)

MUTANTS = (
    Mutant("scale in half precision", instead_of("scale_array", half_precision), _F),
    Mutant("reciprocal instead of division", instead_of("fake_quantize", _by_reciprocal), _F),
    Mutant("clamped before rounding", instead_of("fake_quantize", clamped_by_reals), _F),
    Mutant("saturated too early", instead_of("fake_quantize_to_float", _saturated_to_one_less), _F),
    Mutant("swapped axis", axis_swapped, _B),
    Mutant("a neighbour's scale", neighbours_scale, _B),
    Mutant("every gradient passed", instead_of("covered_backward", _always), _B),
    Mutant("an infinite scale passes nothing", instead_of("covered_backward", _finite_scale_only), _B),
    Mutant("scale not looked at", instead_of("covered_backward", _finite_x_only), _B),
    Mutant("mask multiplied", instead_of("covered_backward", _masked_by_product), _B),
    Mutant("zero point ignored", instead_of("fake_quantize_backward", _zero_point_ignored), _B),
)
