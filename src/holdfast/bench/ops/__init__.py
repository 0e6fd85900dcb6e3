"""The cases of each family of ops: a module each, with ``full_cases``, ``cpu_cases`` and ``quick_cases``."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from holdfast.bench.case import Case


def _modules() -> list[ModuleType]:
    return [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]


def full_cases() -> list[Case]:
    """What a GPU is timed on: every op, configuration and dtype."""
    return [case for module in _modules() for case in module.full_cases()]


def cpu_cases() -> list[Case]:
    """What a CPU is timed on: each op and configuration once or twice."""
    return [case for module in _modules() for case in module.cpu_cases()]


def quick_cases() -> list[Case]:
    """A handful that shows each op."""
    return [case for module in _modules() for case in module.quick_cases()]
