"""How a mutant is made and tried, and the mistakes that any kernel can make."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from typing import Any

import torch

from holdfast.core.case import operands_of
from holdfast.core.plan import Args, Kernel, Launch
from holdfast.core.registry import plans
from holdfast.core.stream import CPU_STREAM, NO_WORKSPACE
from holdfast.proof.conformance import REFERENCE, AnyPlan, Difference, around, cases_of, difference, expected

Run = Callable[[Args], None]
#: Runs a reference kernel's launch on args, wrongly.
Spoil = Callable[[AnyPlan, Any, Run, Any], None]


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

    def __init__(self, mutant: Mutant, plan: AnyPlan, desc: Any, device: torch.device) -> None:
        self.mutant, self.plan, self.desc = mutant, plan, desc
        self.kernel = plan._kernel("reference", desc, device)
        self.workspace_size, self.cuts = self.kernel.workspace_size, self.kernel.cuts

    def compile(self) -> None:
        """NumPy needs none."""

    def prepare(self, args: Args) -> Launch[Any]:
        def launch(stream: Any, workspace: Any, args: Args, addresses: Any) -> None:
            def run(given: Args) -> None:
                self.kernel.prepare(given)(stream, workspace, given, given.signature()[1])

            self.mutant.spoil(self.plan, self.desc, run, args)

        return launch


def kernel(mutant: Mutant, plan: AnyPlan, desc: Any, device: torch.device) -> Kernel[Any]:
    """The mutant as a kernel of ``plan``."""
    return _Spoiled(mutant, plan, desc, device)


@lru_cache(maxsize=128)
def _expected(name: str, number: int) -> tuple[Args, Args]:
    """What a case of a plan starts with and ends with, kept while the plan's mutants are tried."""
    plan = plans()[name]
    return expected(plan, cases_of(plan)[number])


class MutantError(Exception):
    """A mutant that proves nothing: it raised, or what it replaces is gone or is never used."""


def rejection(mutant: Mutant, plan: AnyPlan) -> Difference | None:
    """The first case of ``plan`` that tells the mutant from the reference by its bits."""
    _replaced.clear()
    _used.clear()
    select = around(partial(kernel, mutant))
    for number, case in enumerate(cases_of(plan)):
        args, reference = _expected(plan.__name__, number)
        try:
            detail = difference(plan, case, REFERENCE, args, reference, select)
        except Exception as error:  # whatever it is, it shows nothing about the cases
            raise MutantError(
                f"mutant {mutant.name!r} raised {type(error).__name__} in {plan.__name__}, "
                f"case {case.name!r}: {error}. Only a difference counts; mend the mutant."
            ) from error
        if detail:
            return Difference(plan.__name__, case.name, str(REFERENCE), detail)
    unused = sorted(_replaced - _used)
    if unused:
        raise MutantError(
            f"mutant {mutant.name!r} replaces {', '.join(unused)}, which no case of {plan.__name__} uses. "
            f"Name what the reference uses now."
        )
    return None


#: What the mutant that is being tried replaces, and what of it was used.
_replaced: set[str] = set()
_used: set[str] = set()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``value``, a function or a property, for what ``owner`` calls ``name``, for as long as this is open."""
    if not hasattr(owner, name):
        raise MutantError(f"{owner.__name__} has no {name!r} to replace.")
    right, target = getattr(owner, name), f"{owner.__name__}.{name}"
    _replaced.add(target)
    setattr(owner, name, _noted(target, value))
    try:
        yield
    finally:
        setattr(owner, name, right)


def _noted(target: str, value: Any) -> Any:
    """``value``, noting that it is used."""
    if isinstance(value, property):
        return property(_noted(target, value.fget))

    @wraps(value)
    def noting(*args: Any, **options: Any) -> Any:
        _used.add(target)
        return value(*args, **options)

    return noting


def instead_of(name: str, function: Callable[..., Any]) -> Spoil:
    """Run with ``function`` in place of the function ``name`` of the op's reference."""

    def spoil(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
        module = importlib.import_module(plan.implementations("reference")[0].place.partition(":")[0])
        with replaced(module, name, function):
            run(args)

    return spoil


def described(**fields: Any) -> Spoil:
    """Run what the reference does for a descriptor with other ``fields``."""

    def spoil(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
        other = plan._kernel("reference", replace(desc, **fields), CPU_STREAM.device)
        other.prepare(args)(CPU_STREAM, NO_WORKSPACE, args, args.signature()[1])

    return spoil


def changed(args: Args, **operands: Any) -> Args:
    """``args`` with other values for some of its operands."""
    return type(args)(**{**operands_of(args), **operands})


def written(plan: AnyPlan, args: Args) -> dict[str, torch.Tensor]:
    """The outputs of a run by name, as far as they were asked for."""
    outputs = {name: getattr(args, name) for name in plan.outputs}
    return {name: out for name, out in outputs.items() if out is not None}


# Mistakes of the walk: what was computed is right, but not where it belongs.


def _zeros(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    for out in written(plan, args).values():
        out.zero_()


def _last_dropped(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    before = {name: out.clone() for name, out in written(plan, args).items()}
    run(args)
    for name, kept in before.items():
        out = getattr(args, name)
        if out.dim():
            rest = out.shape[-1] // 8 * 8  # the columns after the last whole tile
            out[..., rest:] = kept[..., rest:]
        else:
            out.copy_(kept)


#: Indices and offsets. Read at other strides they would be refused, and that is no difference.
_INDICES = (torch.int32, torch.int64)


def _strides_ignored(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    tensors = {name: value for name, value in operands_of(args).items() if isinstance(value, torch.Tensor)}
    wrong = {
        name: value.as_strided(value.shape, torch.empty(value.shape, device="meta").stride())
        for name, value in tensors.items()
        if value.dtype not in _INDICES and not value.is_contiguous() and 0 not in value.stride()
    }
    run(changed(args, **wrong))


def _accumulate_ignored(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    run(changed(args, accumulate=False))


def _accumulates(plan: AnyPlan) -> bool:
    return "accumulate" in plan.Args.__dataclass_fields__  # type: ignore[attr-defined]


def _as_it_is(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    run(args)


CONTROL = Mutant("the reference itself", _as_it_is)

#: What can go wrong in the kernels of any op.
WALK = (
    Mutant("zeros", _zeros),
    Mutant("last tile dropped", _last_dropped),
    Mutant("strides ignored", _strides_ignored),
    Mutant("accumulate ignored", _accumulate_ignored, only=_accumulates),
)
