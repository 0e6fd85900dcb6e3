"""Mutants of embedding. Those of the ordered sum, its gradient, are in segment_sum."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.mutant import Mutant, Run, changed, described, instead_of
from holdfast.core.plan import AnyPlan, Args
from holdfast.numerics.reference import Array

_FORWARD, _BACKWARD = ("embedding forward",), ("embedding backward",)


def _nothing_is_padding(indices: Array, padding: int) -> Array:
    return indices


def _nearest_row(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """A bad index reads the first or the last row."""
    indices: torch.Tensor = args.indices  # type: ignore[attr-defined]
    run(changed(args, indices=indices.clamp(0, max(desc.rows - 1, 0))))


def _wrapped(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """A bad index is taken modulo the number of rows."""
    indices: torch.Tensor = args.indices  # type: ignore[attr-defined]
    run(changed(args, indices=indices.remainder(max(desc.rows, 1))))


def _neighbours_row(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    weight: torch.Tensor = args.weight  # type: ignore[attr-defined]
    run(changed(args, weight=weight.roll(1, 0)))


MUTANTS = (
    Mutant("an unskipped padding row", instead_of("kept_indices", _nothing_is_padding), _BACKWARD),
    Mutant("no division by the frequency", described(scale_grad_by_freq=False), _BACKWARD),
    Mutant("a bad index reads the nearest row", _nearest_row, _FORWARD),
    Mutant("a bad index wraps around", _wrapped, _FORWARD),
    Mutant("a neighbour's row", _neighbours_row, _FORWARD),
)
