"""Wrong kernels, each with a mistake that was really made somewhere. Conformance must reject every one.

A mutant is the reference with one function replaced, or with its result spoiled. It goes where ``select``
puts a kernel and is compared by what compares the real ones. The control is the reference itself, passed
through the same machinery unspoiled: it must pass, or the rejections would mean nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.core.case import operands_of
from holdfast.core.plan import Args, Kernel, Launch
from holdfast.numerics.reference import Array, bounds, rounded_quotient
from holdfast.proof.conformance import REFERENCE, AnyPlan, Difference, around, cases_of, check, expected

#: Runs a reference kernel's launch on args, wrongly.
Spoil = Callable[[AnyPlan, Any, Callable[[Args], None], Args], None]


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the plans in which it can be made (``op direction``; all if none is named)."""

    name: str
    spoil: Spoil
    plans: tuple[str, ...] = ()
    only: Callable[[AnyPlan], bool] = lambda plan: True

    def fits(self, plan: AnyPlan) -> bool:
        return (not self.plans or f"{plan.op} {plan.direction}" in self.plans) and self.only(plan)


class _Spoiled:
    """A reference kernel that runs through ``mutant.spoil``."""

    workspace_size = 0

    def __init__(self, mutant: Mutant, plan: AnyPlan, desc: Any, device: torch.device) -> None:
        self.mutant, self.plan, self.desc = mutant, plan, desc
        self.kernel = plan._kernel("reference", desc, device)

    def compile(self) -> None:
        """NumPy needs none."""

    def prepare(self, args: Args) -> Launch[Any]:
        right = self.kernel.prepare(args)

        def launch(stream: Any, workspace: Any, args: Args, addresses: Any) -> None:
            self.mutant.spoil(self.plan, self.desc, lambda given: right(stream, workspace, given, ()), args)

        return launch


def kernel(mutant: Mutant, plan: AnyPlan, desc: Any, device: torch.device) -> Kernel[Any]:
    """The mutant as a kernel of ``plan``."""
    return _Spoiled(mutant, plan, desc, device)


def rejection(mutant: Mutant, plan: AnyPlan) -> Difference | None:
    """The first case of ``plan`` that tells the mutant from the reference."""
    for case in cases_of(plan):
        args, reference = expected(plan, case)
        found = check(plan, case, REFERENCE, args, reference, around(partial(kernel, mutant)))
        if found:
            return found[0]
    return None


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    right = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, right)


def _instead_of(name: str, function: Callable[..., Any]) -> Spoil:
    """Run with ``function`` in place of the function ``name`` of the op's reference."""

    def spoil(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Args) -> None:
        with _replaced(importlib.import_module(plan.kernels["reference"].partition(":")[0]), name, function):
            run(args)

    return spoil


# Mistakes of the arithmetic. Each is the function of the reference, with one thing changed.


def _reciprocal_codes(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        r = np.rint(x * (x.dtype.type(1) / s))
    return np.clip(np.where(np.isnan(r), 0, r), lo, hi).astype(np.int64) + z


def _zero_point_first(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    z, _, _ = bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        r = np.rint(x / s + z.astype(x.dtype))
        r = np.where(np.isnan(r), z, r)
    return np.clip(r, q_min, q_max).astype(np.int64)


def _exclusive_codes(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, s)
    return np.clip(np.where(np.isnan(r), 0, r), lo, np.maximum(lo, hi - 1)).astype(np.int64) + z


def _ties_away(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    with np.errstate(all="ignore"):
        t = x / s
        r = np.where(np.abs(t - np.trunc(t)) == 0.5, np.trunc(t) + np.copysign(1, t), np.rint(t))
    return np.clip(np.where(np.isnan(r), 0, r), lo, hi).astype(np.int64) + z


def _nan_to_least(x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any) -> Array:
    z, lo, hi = bounds(zero_point, q_min, q_max, compute)
    r = rounded_quotient(x, s)
    return np.clip(np.where(np.isnan(r), lo, r), lo, hi).astype(np.int64) + z


def _gradient(mask: Callable[..., Array], value: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def backward(
        dy: Array, x: Array, s: Array, zero_point: Array, q_min: int, q_max: int, compute: Any
    ) -> Array:
        z, lo, hi = bounds(zero_point, q_min, q_max, compute)
        with np.errstate(all="ignore"):
            kept = mask(x, s, z.astype(x.dtype), lo, hi)
            return np.where(kept, value(dy, s), dy.dtype.type(0))

    return backward


def _divided(dy: Array, s: Array) -> Array:
    return dy / s


def _in_range(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s)
    return (lo <= r) & (r <= hi)


def _inside(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s)
    return (lo < r) & (r < hi)


def _in_range_zero_point_first(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s + z)
    return (lo + z <= r) & (r <= hi + z)


def _not_outside(x: Array, s: Array, z: Array, lo: Array, hi: Array) -> Array:
    r = np.rint(x / s)
    found: Array = np.logical_not((r < lo) | (r > hi))
    return found


def _distributed(codes: Array, s: Array, zero_point: Array) -> Array:
    z = np.clip(zero_point, -(2**23), 2**23)
    with np.errstate(all="ignore"):
        apart: Array = codes.astype(s.dtype) * s - z.astype(s.dtype) * s
        return apart


def _without_zero_point(codes: Array, s: Array, zero_point: Array) -> Array:
    with np.errstate(all="ignore"):
        return codes.astype(s.dtype) * s


# Mistakes of the walk: what was computed is right, but not where it belongs.


def _zeros(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Args) -> None:
    for name in plan.outputs:
        getattr(args, name).zero_()


def _last_dropped(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Args) -> None:
    before = {name: getattr(args, name).clone() for name in plan.outputs}
    run(args)
    for name, kept in before.items():
        out = getattr(args, name)
        if out.dim():
            rest = out.shape[-1] // 8 * 8  # the columns after the last whole tile
            out[..., rest:] = kept[..., rest:]


def _strides_ignored(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Args) -> None:
    wrong = {
        name: value.as_strided(value.shape, torch.empty(value.shape, device="meta").stride())
        if isinstance(value, torch.Tensor) and value.is_contiguous() is False and 0 not in value.stride()
        else value
        for name, value in operands_of(args).items()
    }
    run(type(args)(**wrong))


def _axis_swapped(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Args) -> None:
    """Look scales up along another axis of the same size."""
    affine = importlib.import_module("holdfast.ops.affine.reference")
    right = affine.spread

    def spread(values: Array, granularity: Any, shape: tuple[int, ...]) -> Array:
        found = np.broadcast_to(right(values, granularity, shape), shape)
        same = [(a, b) for a in range(len(shape)) for b in range(a) if shape[a] == shape[b] > 1]
        return np.swapaxes(found, *same[0]) if same else found

    with _replaced(affine, "spread", spread):
        run(args)


def _accumulate_ignored(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Any) -> None:
    run(type(args)(**{**operands_of(args), "accumulate": False}))


def _nibbles_swapped(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Any) -> None:
    if desc.per_byte == 1:
        run(args)
        return
    if plan.direction == "forward" and plan.op == "quantize":
        run(args)
        args.q.copy_((args.q << 4) | (args.q >> 4))
    else:
        run(type(args)(**{**operands_of(args), "q": (args.q << 4) | (args.q >> 4)}))


def _as_it_is(plan: AnyPlan, desc: Any, run: Callable[[Args], None], args: Args) -> None:
    run(args)


def _shares_scales(plan: AnyPlan) -> bool:
    return "PerTensor" not in plan.__name__


CONTROL = Mutant("the reference itself", _as_it_is)

_Q, _QB, _D, _DB = "quantize forward", "quantize backward", "dequantize forward", "dequantize backward"

MUTANTS = (
    Mutant("zeros", _zeros),
    Mutant("last tile dropped", _last_dropped),
    Mutant("strides ignored", _strides_ignored),
    Mutant("swapped axis", _axis_swapped, only=_shares_scales),
    Mutant("swapped nibbles", _nibbles_swapped, (_Q, _D)),
    Mutant("accumulate ignored", _accumulate_ignored, (_QB, _DB)),
    Mutant("reciprocal instead of division", _instead_of("quantize", _reciprocal_codes), (_Q,)),
    Mutant("zero point added before rounding", _instead_of("quantize", _zero_point_first), (_Q,)),
    Mutant("exclusive bound", _instead_of("quantize", _exclusive_codes), (_Q,)),
    Mutant("ties away from zero", _instead_of("quantize", _ties_away), (_Q,)),
    Mutant("NaN to the least code", _instead_of("quantize", _nan_to_least), (_Q,)),
    Mutant(
        "no 1/scale", _instead_of("quantize_backward", _gradient(_in_range, lambda dy, s: dy + 0 * s)), (_QB,)
    ),
    Mutant("exclusive bound", _instead_of("quantize_backward", _gradient(_inside, _divided)), (_QB,)),
    Mutant(
        "zero point added before rounding",
        _instead_of("quantize_backward", _gradient(_in_range_zero_point_first, _divided)),
        (_QB,),
    ),
    Mutant(
        "reciprocal instead of division",
        _instead_of("quantize_backward", _gradient(_in_range, lambda dy, s: dy * (dy.dtype.type(1) / s))),
        (_QB,),
    ),
    Mutant("NaN in range", _instead_of("quantize_backward", _gradient(_not_outside, _divided)), (_QB,)),
    Mutant("zero point multiplied apart", _instead_of("dequantize", _distributed), (_D,)),
    Mutant("no zero point", _instead_of("dequantize", _without_zero_point), (_D,)),
    Mutant("no scale", _instead_of("dequantize_backward", lambda dy, s: dy + 0 * s), (_DB,)),
    Mutant(
        "division by the reciprocal",
        _instead_of("dequantize_backward", lambda dy, s: dy / (dy.dtype.type(1) / s)),
        (_DB,),
    ),
)
