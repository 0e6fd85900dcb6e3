"""The kernel mutants of every op, by label."""

from __future__ import annotations

from functools import cache

from holdfast import ops
from holdfast.core.mutant import KernelMutant


@cache
def families() -> dict[str, tuple[KernelMutant, ...]]:
    """The mutants by op, from the ``kernel_mutants.py`` of each op."""
    return {module.__name__.split(".")[-2]: module.MUTANTS for module in ops.modules("kernel_mutants")}


def label_of(family: str, mutant: KernelMutant) -> str:
    """The unique label of a mutant: family, backend, mistake."""
    return f"{family}, {mutant.backend}: {mutant.name}"


@cache
def every_mutant() -> dict[str, KernelMutant]:
    """Every mutant by label."""
    return {label_of(family, mutant): mutant for family, own in families().items() for mutant in own}
