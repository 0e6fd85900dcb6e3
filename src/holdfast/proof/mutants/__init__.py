"""Wrong kernels, each with a mistake that was really made somewhere. Conformance must reject every one.

A mutant is the reference with one function replaced, or with its result spoiled. It goes where ``select``
puts a kernel and is compared by what compares the real ones. The control is the reference itself, passed
through the same machinery unspoiled: it must pass, or the rejections would mean nothing.

Each module here but ``machinery`` holds the mistakes of one family of ops, in its ``MUTANTS``.
"""

from __future__ import annotations

import importlib
import pkgutil

from holdfast.proof.mutants.machinery import CONTROL, WALK, Mutant, MutantError, rejection

__all__ = ["CONTROL", "MUTANTS", "WALK", "Mutant", "MutantError", "rejection"]


def _found() -> tuple[Mutant, ...]:
    """What the modules of this folder list."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "machinery"]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(mutant for module in modules for mutant in module.MUTANTS)


#: Every mistake that is tried, in any plan.
MUTANTS: tuple[Mutant, ...] = (*WALK, *_found())
