"""Mutants: deliberate mistakes that the cases of an op must detect. They are listed in the op's folder.

``Mutant`` is a mistake in the reference: it replaces a function or changes the result. ``KernelMutant`` is a
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

import numpy as np

from holdfast.core.case import operands_of
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.stream import CPU_STREAM, NO_WORKSPACE

Run = Callable[[Args], None]
#: Runs a reference kernel with a mistake. Takes the plan, the descriptor, the correct run and the args.
Spoil = Callable[[AnyPlan, Any, Run, Any], None]


class MutantError(Exception):
    """A mutant that tests nothing: it raised, or its target does not exist or is never used."""


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the plans that it applies to (``op direction``; all plans if empty)."""

    name: str
    spoil: Spoil
    plans: tuple[str, ...] = ()
    only: Callable[[AnyPlan], bool] = lambda plan: True

    def fits(self, plan: AnyPlan) -> bool:
        return (not self.plans or f"{plan.op} {plan.direction}" in self.plans) and self.only(plan)


#: The functions that the current mutant replaces, and those that were called.
targets: set[str] = set()
used_targets: set[str] = set()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace the attribute ``name`` of ``owner`` by ``value``, a function or property, inside the block."""
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
    """``value``, wrapped to add ``target`` to ``used_targets`` when it is called."""
    if isinstance(value, property):
        return property(_noted(target, value.fget))

    @wraps(value)
    def noting(*args: Any, **options: Any) -> Any:
        used_targets.add(target)
        return value(*args, **options)

    return noting


def instead_of(name: str, function: Callable[..., Any]) -> Spoil:
    """Run with ``function`` instead of the function ``name`` of the reference, without NumPy's warnings."""

    def spoil(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
        module = importlib.import_module(plan.implementations("reference")[0].module)
        with replaced(module, name, function), np.errstate(all="ignore"):
            run(args)

    return spoil


def described(**fields: Any) -> Spoil:
    """Run the reference for a descriptor with these ``fields`` changed."""

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

    Each of ``plans`` runs with the mistake. Cases with ``likely`` in their names run first, to save time.
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
        """The backend of the kernel: "gpu" if the source imports Triton."""
        return "gpu" if re.search(r"^import triton", self.path.read_text(), re.MULTILINE) else "cpu"

    def source(self) -> str:
        right = self.path.read_text()
        found = right.count(self.old)
        if found != 1:
            raise MutantError(
                f"kernel mutant {self.name!r} changes {self.old!r}, which {self.module} has {found} times. "
                f"It must be there once; name what stands there now."
            )
        return right.replace(self.old, self.new)
