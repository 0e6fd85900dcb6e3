"""Example calls of public functions, listed in an op's ``calls.py``.

Tests vary each call and each argument: a wrong kind of tensor, a gradient, export.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """A function with valid arguments. ``by`` names the differentiable arguments."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    by: tuple[str, ...] = ()
    #: Arguments that are documented to receive no gradient.
    constant: tuple[str, ...] = ()
    #: Arguments that hold integer codes, which have no derivative in any mode.
    discrete: tuple[str, ...] = ()

    def __call__(self, **changed: Any) -> Any:
        return self.function(**{**self.arguments, **changed})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, torch.Tensor)}

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)
