"""Mutants for every quantization op: wrong scale lookup, wrong order of packed codes."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from holdfast.core.mutant import Mutant, Run, changed, replaced
from holdfast.core.plan import AnyPlan, Args
from holdfast.numerics.reference import Array


def axis_swapped(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """Look up scales along another axis of the same size."""
    affine = importlib.import_module("holdfast.ops.affine.reference")
    right = affine.broadcast_scales

    def broadcast_scales(values: Array, granularity: Any, shape: tuple[int, ...]) -> Array:
        found = np.broadcast_to(right(values, granularity, shape), shape)
        same = [(a, b) for a in range(len(shape)) for b in range(a) if shape[a] == shape[b] > 1]
        return np.swapaxes(found, *same[0]) if same else found

    with replaced(affine, "broadcast_scales", broadcast_scales):
        run(args)


def neighbours_scale(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """Use the scale before the right one."""
    affine = importlib.import_module("holdfast.ops.affine.reference")
    right = affine.broadcast_scales

    def broadcast_scales(values: Array, granularity: Any, shape: tuple[int, ...]) -> Array:
        before: Array = right(np.roll(values.reshape(-1), 1), granularity, shape)
        return before

    with replaced(affine, "broadcast_scales", broadcast_scales):
        run(args)


def nibbles_swapped(plan: AnyPlan, desc: Any, run: Run, args: Any) -> None:
    """Put the first of two packed codes into the high bits."""
    if desc.per_byte == 1:
        run(args)
    elif "q" in plan.outputs:
        run(args)
        args.q.copy_((args.q << 4) | (args.q >> 4))
    else:
        run(changed(args, q=(args.q << 4) | (args.q >> 4)))


def _shares_scales(plan: AnyPlan) -> bool:
    return "PerTensor" not in plan.__name__


_SCALED = ("quantize forward", "quantize backward", "dequantize forward", "dequantize backward")

MUTANTS = (
    Mutant("swapped axis", axis_swapped, _SCALED, only=_shares_scales),
    Mutant("a neighbour's scale", neighbours_scale, _SCALED, only=_shares_scales),
    Mutant("swapped nibbles", nibbles_swapped, ("quantize forward", "dequantize forward")),
)
