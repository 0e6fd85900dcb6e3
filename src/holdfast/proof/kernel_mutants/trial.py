"""Runs one mutant, in a process that has not imported any kernel."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.core.mutant import KernelMutant
from holdfast.core.registry import plans
from holdfast.proof.conformance import Difference
from holdfast.proof.kernel_mutants.search import SEARCHES


@dataclass(frozen=True)
class Trial:
    """The result of one mutant: its first ``difference`` from the reference, or the ``error`` it raised."""

    mutant: str
    by: str
    seconds: float
    difference: Difference | None = None
    error: str = ""

    @property
    def caught(self) -> bool:
        return self.difference is not None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Trial:
        found = fields["difference"]
        return cls(**{**fields, "difference": Difference(**found) if found else None})


class _MutantFinder(MetaPathFinder):
    """Imports module ``name`` from ``file``."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self.file) if fullname == self.name else None


def attempt(label: str, mutant: KernelMutant, by: str, folder: Path) -> Trial:
    """Run the plans with the mutant's source until one differs. ``folder`` is for its source and cache."""
    began = time.perf_counter()
    try:
        difference, error = _searched(mutant, by, folder), ""
    except Exception as raised:  # an exception is not a difference
        difference, error = None, f"{type(raised).__name__}: {raised}"
    return Trial(label, by, time.perf_counter() - began, difference, error)


def _searched(mutant: KernelMutant, by: str, folder: Path) -> Difference | None:
    import numba

    if mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} was imported before its mutant could be.")
    file = folder / mutant.path.name
    file.write_text(mutant.source())
    sys.meta_path.insert(0, _MutantFinder(mutant.module, file))
    numba.config.CACHE_DIR = str(folder)  # the unchanged kernels are cached under the same names
    for name in mutant.plans:
        found = SEARCHES[by](plans()[name], mutant)
        if found:
            return found
        if mutant.module not in sys.modules:
            raise RuntimeError(f"{name} does not use {mutant.module}.")
    return None
