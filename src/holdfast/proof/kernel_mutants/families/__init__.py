"""The mutants by family: each module here lists those of ops that share their kernels."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from holdfast.proof.kernel_mutants.record import KernelMutant


@cache
def families() -> dict[str, tuple[KernelMutant, ...]]:
    """What the modules of this folder list."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return {name: importlib.import_module(f"{__name__}.{name}").MUTANTS for name in names}


def label_of(family: str, mutant: KernelMutant) -> str:
    """What a mutant is called among all: family, backend, mistake."""
    return f"{family}, {mutant.backend}: {mutant.name}"


@cache
def every_mutant() -> dict[str, KernelMutant]:
    """Every mutant by its label."""
    return {label_of(family, mutant): mutant for family, own in families().items() for mutant in own}
