"""Mutants of affine_grid and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.mutant import Mutant, Run, changed, described, instead_of
from holdfast.core.plan import AnyPlan
from holdfast.numerics.reference import Array
from holdfast.ops.affine_grid import reference
from holdfast.ops.affine_grid.plan import MapDescriptor
from holdfast.ops.tree_sum.reference import tree_sum

_F, _B = ("affine_grid forward",), ("affine_grid backward",)
_ANY = _F + _B

_coordinates, _places = reference.coordinates, reference.places


def _axes_swapped(desc: MapDescriptor) -> list[Array]:
    return _places(desc)[::-1]


def _in_steps(size: int, desc: MapDescriptor) -> Array:
    """Coordinates as the first plus a rounded multiple of the step, instead of a quotient."""
    exact = _coordinates(size, desc)
    step = exact.dtype.type(2) / exact.dtype.type(max(size - 1 if desc.align_corners else size, 1))
    steps: Array = exact[:1] + step * np.arange(size).astype(exact.dtype)
    return steps


def _not_moved(plan: AnyPlan, desc: Any, run: Run, args: Any) -> None:
    """The last column of theta, the translation, is ignored."""
    theta = args.theta.clone()
    theta[..., -1] = 0
    run(changed(args, theta=theta))


def _in_one_go(terms: Array) -> Array:
    return np.asarray(np.sum(terms, axis=-1, dtype=terms.dtype))


def _last_place_lost(terms: Array) -> Array:
    return tree_sum(terms[..., :-1])


MUTANTS = (
    Mutant("swapped x and y", instead_of("places", _axes_swapped), _ANY),
    Mutant("corners always aligned", described(align_corners=True), _ANY),
    Mutant("align_corners ignored", described(align_corners=False), _ANY),
    Mutant("coordinates in steps", instead_of("coordinates", _in_steps), _ANY),
    Mutant("not moved", _not_moved, _F),
    Mutant("sum in another order", instead_of("tree_sum", _in_one_go), _B),
    Mutant("last place lost", instead_of("tree_sum", _last_place_lost), _B),
)
