"""Mutants of scatter and gather."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.mutant import Mutant, Run, changed, described, instead_of
from holdfast.core.plan import AnyPlan
from holdfast.numerics.reference import Array, compute_type
from holdfast.ops.scatter import reference
from holdfast.ops.segment_sum.mutants import a_lost_duplicate, backwards, in_one_go

_SCATTER, _GATHER = ("scatter forward",), ("gather forward",)
_result, _destinations = reference.result, reference.destinations


def _first_axis(index: Array, desc: Any) -> Array:
    """Destinations as if every line were the first."""
    return np.asarray(index.astype(np.int64) * desc.step).reshape(-1)


def _wrong_axis(index: Array, desc: Any) -> Array:
    return np.asarray(np.minimum(_destinations(index, desc) + (desc.step > 1), desc.rows - 1))


def _each_term_times_alpha(total: Array, base: Array | None, terms: Array, desc: Any) -> Array:
    """Input is multiplied too."""
    if desc.alpha == 1.0:
        return _result(total, base, terms, desc)
    alpha = compute_type(desc.compute)(desc.alpha)
    return np.asarray(alpha * (total if base is None else base + total))


def _self_not_counted(total: Array, base: Array | None, terms: Array, desc: Any) -> Array:
    if not desc.by_count or base is None:
        return _result(total, base, terms, desc)
    return np.asarray((base + total) / terms.astype(compute_type(desc.compute)))


def _input_lost(total: Array, base: Array | None, terms: Array, desc: Any) -> Array:
    return _result(total, None if base is None else np.zeros_like(base), terms, desc)


def _wrapped(plan: AnyPlan, desc: Any, run: Run, args: Any) -> None:
    """A bad index is taken modulo the number of rows."""
    run(changed(args, index=args.index.remainder(max(desc.extent, 1))))


MUTANTS = (
    Mutant("a bad index wraps around", _wrapped, _GATHER),
    Mutant("a lost duplicate", instead_of("sources_of", a_lost_duplicate), _SCATTER),
    Mutant("a dropped chunk boundary", instead_of("ordered_sum", in_one_go), _SCATTER),
    Mutant("terms in descending order", instead_of("ordered_sum", backwards), _SCATTER),
    Mutant("all lines are the first", instead_of("destinations", _first_axis), _SCATTER + _GATHER),
    Mutant("the next destination", instead_of("destinations", _wrong_axis), _SCATTER + _GATHER),
    Mutant("input multiplied by alpha", instead_of("result", _each_term_times_alpha), _SCATTER),
    Mutant("input not counted in a mean", instead_of("result", _self_not_counted), _SCATTER),
    Mutant("input lost", instead_of("result", _input_lost), _SCATTER),
    Mutant("no mean", described(reduce="sum"), _SCATTER),
    Mutant("alpha ignored", described(alpha=1.0), _SCATTER),
)
