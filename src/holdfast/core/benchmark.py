"""Benchmark cases: a ``Case`` is a row of the table, a ``Problem`` is a case at one size on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch

from holdfast.core.contract import PlanPreference
from holdfast.core.dtypes import dtype_name
from holdfast.core.plan import Plan
from holdfast.core.stream import Stream, Workspace

#: The operands of a plan by name. Optional operands may be None.
Tensors = dict[str, Any]
#: A plan, and the fields of its descriptor.
Described = tuple[type[Plan[Any, Any]], dict[str, Any]]
#: The call that is timed.
Call = Callable[[], object]

#: Special values that ``put_special_values`` writes into the inputs of a check.
_SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 3e38, -3e38, 1e-42, 0.5, 1.5, -0.5, -2.5)


class NoPeer(Exception):
    """The peer does not exist for this case; the message says why."""


@dataclass(frozen=True)
class Case:
    """One row of the table. ``function`` times the public function, which allocates, instead of the plan.

    A subclass defines ``described``, and names the class of its problems.
    """

    problem_type: ClassVar[type[Problem]]

    op: str
    variant: str  # distinguishes the rows of an op: a granularity, a mode, a shape
    real: torch.dtype  # floating dtype of the large tensors
    function: bool = field(default=False, kw_only=True)

    @property
    def label(self) -> str:
        """The variant with all details."""
        return self.variant

    @property
    def dtypes(self) -> str:
        """The dtypes, as a column heading."""
        return dtype_name(self.real)

    @property
    def name(self) -> str:
        return f"{'hf.' if self.function else ''}{self.op} {self.label}, {self.dtypes}"

    def facts(self) -> dict[str, Any]:
        """Fields of the row in JSON. ``family`` is the op that lists the case."""
        family = type(self).__module__.split(".")[-2]
        return {"family": family, "real_dtype": dtype_name(self.real), "dtypes": self.dtypes}

    def elements(self, *, on_gpu: bool, quick: bool) -> int:
        """Default number of elements: enough to saturate memory bandwidth."""
        if on_gpu:
            return 2**26 if quick else 2**28 if self.real == torch.float32 else 2**27
        return 2**24 if quick else 2**25

    def at(self, elements: int) -> Case:
        """This case with its largest tensor reduced to ``elements``, if the case's name contains sizes."""
        return self

    def described(self, elements: int) -> Described:
        """The plan and the fields of its descriptor; the largest tensor has ``elements`` elements."""
        raise NotImplementedError

    def problem(self, elements: int, stream: Stream, backend: str | None = None) -> Problem:
        """The case on the device of ``stream``; its largest tensor has ``elements`` elements."""
        plan, fields = self.described(elements)
        preference = PlanPreference(backend=backend, precompile=False)
        return self.problem_type(self, plan.select(stream, plan.Descriptor(**fields), preference), stream)


class SizedCase(Case):
    """A case whose name contains sizes: ``columns``, and the numbers of rows that ``lengths`` names."""

    lengths: ClassVar[tuple[str, ...]]
    columns: int

    @property
    def largest(self) -> int:
        """Number of elements of the largest tensor."""
        return max(getattr(self, name) for name in self.lengths) * self.columns  # type: ignore[no-any-return]

    def elements(self, *, on_gpu: bool, quick: bool) -> int:
        return self.largest // 16 if quick else self.largest

    def at(self, elements: int) -> Self:
        if elements >= self.largest:
            return self
        scaled = {name: max(1, getattr(self, name) * elements // self.largest) for name in self.lengths}
        return replace(self, **scaled)


@dataclass(frozen=True)
class Problem(ABC):
    """A case at one size on one device, with its plan."""

    case: Case
    plan: Plan[Any, Any]
    stream: Stream

    @abstractmethod
    def draw(self) -> Tensors:
        """The operands of the plan by name: random inputs and uninitialized outputs."""

    @abstractmethod
    def formula(self, tensors: Tensors) -> tuple[Callable[..., Any], list[Any]]:
        """The op written in plain torch, and its inputs."""

    def torch_op(self, tensors: Tensors) -> Call:
        """A call of torch's own operator for this op."""
        raise NoPeer("torch has no operator for this")

    def other_peers(self, tensors: Tensors) -> Mapping[str, Callable[[], Call]]:
        """Other peers: for each name, a function that returns the call to time."""
        return {}

    def put_special_values(self, tensors: Tensors) -> None:
        """Write special values into the ``special_inputs``, before a check."""
        for name in self.special_inputs:
            flat = tensors[name].view(-1)
            flat[: len(_SPECIAL)] = torch.tensor(_SPECIAL, device=flat.device).to(flat.dtype)

    @property
    def special_inputs(self) -> tuple[str, ...]:
        """Names of the floating inputs that may hold any value."""
        return ()

    def call(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        """The call to time, with all preparation done: a run of the plan, or the public function."""
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
        """A call of the public function on the same tensors; returns results in the order of the outputs."""
        raise NotImplementedError
