"""What a benchmark case is: a row of the table, and the same at a size on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.core.dtypes import dtype_name
from holdfast.core.plan import Plan
from holdfast.core.stream import Stream, Workspace

#: The operands of a plan by name; those that are optional may be None.
Tensors = dict[str, Any]
#: What is timed.
Call = Callable[[], object]

#: Values that kernels get wrong, put into the inputs of a check.
_SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 3e38, -3e38, 1e-42, 0.5, 1.5, -0.5, -2.5)


class NoPeer(Exception):
    """There is nothing to compare with; the message says why."""


@dataclass(frozen=True)
class Case(ABC):
    """One row of the table: a plan, or with ``function`` the public function, which allocates its output."""

    op: str
    variant: str  # what tells the rows of an op apart: a granularity, a mode, a shape
    real: torch.dtype  # the floating dtype of the larger tensors
    function: bool = field(default=False, kw_only=True)

    @property
    def label(self) -> str:
        """The variant, in all detail."""
        return self.variant

    @property
    def dtypes(self) -> str:
        """The dtypes, as the heading of a column."""
        return dtype_name(self.real)

    @property
    def name(self) -> str:
        return f"{'hf.' if self.function else ''}{self.op} {self.label}, {self.dtypes}"

    def facts(self) -> dict[str, Any]:
        """What the row says of itself in JSON; its family is the op that lists it."""
        family = type(self).__module__.split(".")[-2]
        return {"family": family, "real_dtype": dtype_name(self.real), "dtypes": self.dtypes}

    def elements(self, *, on_gpu: bool, quick: bool) -> int:
        """The size to measure at, where none is asked for: what fills the memory bus."""
        if on_gpu:
            return 2**26 if quick else 2**28 if self.real == torch.float32 else 2**27
        return 2**24 if quick else 2**25

    def at(self, elements: int) -> Case:
        """This case with its largest tensor cut to ``elements``, where its name says sizes."""
        return self

    @abstractmethod
    def problem(self, elements: int, stream: Stream, backend: str | None = None) -> Problem:
        """The case at a size, the elements of its largest tensor, on the device of ``stream``."""


@dataclass(frozen=True)
class Problem(ABC):
    """A case at one size on one device, with its plan."""

    case: Case
    plan: Plan[Any, Any]
    stream: Stream

    @abstractmethod
    def draw(self) -> Tensors:
        """The operands of the plan by name: random inputs, and outputs with nothing in them."""

    @abstractmethod
    def formula(self, tensors: Tensors) -> tuple[Callable[..., Any], list[Any]]:
        """The op in a few lines of torch, as one would write it, and its inputs."""

    def torch_op(self, tensors: Tensors) -> Call:
        """torch's own operator for this work."""
        raise NoPeer("torch has no operator for this")

    def other_peers(self, tensors: Tensors) -> Mapping[str, Callable[[], Call]]:
        """Whatever else there is to compare with: for each a name, and what makes its call."""
        return {}

    def put_special_values(self, tensors: Tensors) -> None:
        """Put the hard values into the inputs, for a check; here, into those of a real dtype."""
        for name in self.special_inputs:
            flat = tensors[name].view(-1)
            flat[: len(_SPECIAL)] = torch.tensor(_SPECIAL, device=flat.device).to(flat.dtype)

    @property
    def special_inputs(self) -> tuple[str, ...]:
        """The inputs that may hold any value."""
        return ()

    def call(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What is timed, with all else done before: a run of the plan, or the public function."""
        if self.case.function:
            return self.function(tensors)
        make: Any = self.plan.Args
        plan, stream, args = self.plan, self.stream, make(**tensors)
        workspace = Workspace.allocate(plan.workspace_size(), stream.device)
        outputs = tuple(tensors[name] for name in plan.outputs if tensors[name] is not None)

        def run() -> tuple[torch.Tensor, ...]:
            plan.run(stream, workspace, args)
            return outputs

        return run

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        """The public function on the same tensors; its results are in the order of the plan's outputs."""
        raise NotImplementedError
