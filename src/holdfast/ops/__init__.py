"""The ops. Each is a folder here and is found by being here.

A folder may have the modules ``plan``, ``torch_op``, ``cases``, ``space``, ``mutants``, ``kernel_mutants``,
``sweeps``, ``calls``, ``bench``, ``models``, ``drawn`` and ``sharding``. ``modules`` finds all of one name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """The folders, in alphabetical order."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if found.ispkg)


def modules(name: str) -> list[ModuleType]:
    """The module called ``name`` of every op that has one, imported."""
    paths = [f"{__name__}.{op}.{name}" for op in names()]
    return [importlib.import_module(path) for path in paths if importlib.util.find_spec(path)]
