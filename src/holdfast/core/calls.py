"""Example calls: every public function with good arguments, which an op lists in its ``calls.py``.

Tests try something on each function and argument: a wrong kind of tensor, a gradient, export.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """A function, good arguments for it, and which of them it has a gradient with respect to."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    by: tuple[str, ...] = ()
    #: Arguments that no gradient flows through, as the documentation says.
    constant: tuple[str, ...] = ()
    #: Arguments whose codes are integers, which have no derivative in any mode.
    discrete: tuple[str, ...] = ()

    def __call__(self, **changed: Any) -> Any:
        return self.function(**{**self.arguments, **changed})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, torch.Tensor)}

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)
