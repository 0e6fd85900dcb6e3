"""Mutants: deliberate mistakes, which an op lists beside its kernels and which its cases must reveal.

``Mutant`` is a mistake in the reference: one function replaced, or its result spoiled. ``KernelMutant`` is a
mistake in the source of a CPU or GPU kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

from holdfast.core.case import operands_of
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.stream import CPU_STREAM, NO_WORKSPACE

Run = Callable[[Args], None]
#: Runs a reference kernel's launch on args, wrongly.
Spoil = Callable[[AnyPlan, Any, Run, Any], None]


class MutantError(Exception):
    """A mutant that proves nothing: it raised, or what it replaces is gone or is never used."""


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the plans in which it can be made (``op direction``; all if none is named)."""

    name: str
    spoil: Spoil
    plans: tuple[str, ...] = ()
    only: Callable[[AnyPlan], bool] = lambda plan: True

    def fits(self, plan: AnyPlan) -> bool:
        return (not self.plans or f"{plan.op} {plan.direction}" in self.plans) and self.only(plan)


#: What the current mutant replaces, and which of these were used.
targets: set[str] = set()
used_targets: set[str] = set()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``value``, a function or a property, for what ``owner`` calls ``name``, for as long as this is open."""
    if not hasattr(owner, name):
        raise MutantError(f"{owner.__name__} has no {name!r} to replace.")
    right, target = getattr(owner, name), f"{owner.__name__}.{name}"
    targets.add(target)
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
        used_targets.add(target)
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


@dataclass(frozen=True)
class KernelMutant:
    """A mistake in a kernel's source: ``new`` instead of ``old`` in ``module``.

    Each of ``plans`` is run with it. Cases with ``likely`` in their names are tried first, to save time.
    """

    name: str
    module: str
    old: str
    new: str
    plans: tuple[str, ...]
    likely: str = ""

    @property
    def path(self) -> Path:
        """The source file. The module itself is not imported."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            raise MutantError(f"kernel mutant {self.name!r} names {self.module}, which does not exist.")
        return Path(spec.origin)

    @property
    def backend(self) -> str:
        """The backend that the kernel belongs to: a source that imports Triton is for the GPU."""
        return "gpu" if re.search(r"^import triton", self.path.read_text(), re.MULTILINE) else "cpu"

    def source(self) -> str:
        """The source with the mistake in it."""
        right = self.path.read_text()
        found = right.count(self.old)
        if found != 1:
            raise MutantError(
                f"kernel mutant {self.name!r} changes {self.old!r}, which {self.module} has {found} times. "
                f"It must be there once; name what stands there now."
            )
        return right.replace(self.old, self.new)
