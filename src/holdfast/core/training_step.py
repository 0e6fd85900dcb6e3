"""Rows of ``holdfast bench --models`` and ``--drawn``: a training step of a public function and its peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from holdfast.core.dtypes import dtype_name

#: The names of the steps. A case lists the first three; the last is ``EAGER`` in torch's deterministic mode.
OURS, EAGER, COMPILED, DETERMINISTIC = "holdfast", "eager", "compiled", "deterministic"


@dataclass(frozen=True)
class Step:
    """One forward and backward of ``function``, with the gradients of all inputs that require them."""

    function: Callable[..., torch.Tensor]
    inputs: tuple[Any, ...]
    dout: torch.Tensor
    leaves: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        tensors = (value for value in self.inputs if isinstance(value, torch.Tensor))
        object.__setattr__(self, "leaves", tuple(value for value in tensors if value.requires_grad))

    def forward(self) -> torch.Tensor:
        return self.function(*self.inputs)

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.dout) if self.leaves else ()


class DeterministicStep(Step):
    """A step under ``torch.use_deterministic_algorithms(True)``."""

    def forward(self) -> torch.Tensor:
        with _Deterministic():
            return super().forward()

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _Deterministic():
            return super().backward(out)


class _Deterministic:
    """torch's deterministic mode, and the mode before it afterwards."""

    def __enter__(self) -> None:
        self.mode = torch.get_deterministic_debug_mode()
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.set_deterministic_debug_mode(self.mode)


@dataclass(frozen=True)
class StepCase(ABC):
    """One row. ``model`` is what users call the work, or empty; ``real`` the dtype of the large tensors."""

    op: str
    model: str
    real: torch.dtype

    @property
    @abstractmethod
    def label(self) -> str:
        """The sizes that run, and what else distinguishes the row from others of its model."""

    @property
    def name(self) -> str:
        model = f"{self.model}, " if self.model else ""
        return f"{self.op}: {model}{self.label}, {dtype_name(self.real)}"

    @abstractmethod
    def steps(self, device: torch.device) -> dict[str, Step]:
        """The public function, torch's operator, and the plain formula that torch.compile is given.

        The formula computes what the public function computes. Other steps follow under their own names.
        """


@dataclass(frozen=True)
class ModelCase(StepCase):
    """A row on the shape of a real model."""

    #: Whether the cases of the op share what torch.compile makes of their formula.
    dynamic_shapes: ClassVar[bool] = True

    @property
    def family(self) -> str:
        """The folder that lists the case."""
        return type(self).__module__.split(".")[-2]

    @property
    @abstractmethod
    def largest(self) -> int:
        """Number of elements of the largest tensor."""

    @abstractmethod
    def at(self, elements: int) -> Self:
        """This case with smaller sizes, so that the largest tensor has about ``elements`` elements."""
