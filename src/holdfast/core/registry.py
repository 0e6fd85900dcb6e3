"""The registry: the backends in order of preference, and the plans by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from holdfast.core.plan import Plan


@dataclass(frozen=True)
class Backend:
    """A backend: reference, cpu or gpu.

    ``why_not(device)`` returns the reason why the backend cannot run on a device, or None.
    ``architecture(device)`` names the compilation target. Neither imports a compiler.
    """

    name: str
    why_not: Callable[[torch.device], str | None]
    architecture: Callable[[torch.device], str]


_backends: dict[str, Backend] = {}
_plans: dict[str, type[Plan[Any, Any]]] = {}


def register_backend(backend: Backend) -> None:
    _backends[backend.name] = backend


def backends() -> dict[str, Backend]:
    """The backends, in order of preference."""
    return dict(_backends)


def register_plan(plan: type[Plan[Any, Any]]) -> None:
    _plans[plan.__name__] = plan


def plans() -> dict[str, type[Plan[Any, Any]]]:
    """Every plan that can be selected, by name."""
    return dict(_plans)
