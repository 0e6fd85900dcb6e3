"""Mutants of lsq_init."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from holdfast.core.mutant import Mutant, Run, Spoil, instead_of, replaced
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.fake_quantize_learned.mutants import in_one_go
from holdfast.ops.lsq_init.plan import LsqInitDescriptor

_F = ("lsq_init forward",)


def _property(name: str, found: Callable[[LsqInitDescriptor], float]) -> Spoil:
    """Run with another value of a property of the descriptor."""

    def spoil(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
        with replaced(LsqInitDescriptor, name, cast(Any, property(found))):
            run(args)

    return spoil


def _right(desc: LsqInitDescriptor) -> float:
    return 2.0 / (max(math.prod(desc.shape) // max(desc.view.scale_count, 1), 1) * math.sqrt(desc.q_max))


def _of_the_whole(desc: LsqInitDescriptor) -> float:
    """Divide by the number of all elements, not of those of a scale."""
    return 2.0 / (max(math.prod(desc.shape), 1) * math.sqrt(desc.q_max))


def _signed(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """Sum x instead of |x|."""
    with replaced(np, "abs", np.asarray):
        run(args)


MUTANTS = (
    Mutant("no factor of two", _property("factor", lambda desc: _right(desc) / 2), _F),
    Mutant("no root", _property("factor", lambda desc: _right(desc) / math.sqrt(desc.q_max)), _F),
    Mutant("mean over all", _property("factor", _of_the_whole), _F),
    Mutant("no floor", _property("floor", lambda desc: 0.0), _F),
    Mutant("mean of x", _signed, _F),
    Mutant("sum in another order", instead_of("tree_sum", in_one_go), _F),
)
