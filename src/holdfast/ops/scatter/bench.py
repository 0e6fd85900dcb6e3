"""Benchmarks of scatter against torch's index_add and scatter_add, which use atomics on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Call, Described, Problem, SizedCase, Tensors
from holdfast.ops.scatter.plan import ScatterPlan
from holdfast.ops.scatter.torch_op import index_add, scatter_add


@dataclass(frozen=True)
class ScatterProblem(Problem):
    case: ScatterCase

    def draw(self) -> Tensors:
        """Indices, and multiples of 1/8, whose sums are exact in any order."""
        desc, device = self.plan.descriptor, self.stream.device
        generator = torch.Generator(device).manual_seed(23)
        tensors: Tensors = {}
        for name in self.plan.operands:
            shape, dtype = desc.expected(name)
            if name == "out":
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            elif name != "index":
                eighths = torch.randint(-8, 9, shape, dtype=torch.int8, device=device, generator=generator)
                tensors[name] = eighths.to(dtype) / 8
        share = torch.rand(desc.shape, dtype=torch.float64, device=device, generator=generator)
        found = desc.rows**share - 1 if self.case.spread == "zipf" else desc.rows * share
        tensors["index"] = found.long().clamp(0, desc.rows - 1)
        return tensors

    @property
    def special_inputs(self) -> tuple[str, ...]:
        return ("src",)

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        own = scatter_add if self.case.columns == 1 else index_add
        return lambda: (own(tensors["input"], 0, tensors["index"], tensors["src"]),)

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        """The sum of all terms in float32, then of the input."""

        def added(input: torch.Tensor, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros_like(input, dtype=torch.float32).index_add_(0, index, src.float())
            return (input.float() + sums).to(input.dtype)

        return added, [tensors["input"], tensors["index"], tensors["src"]]

    def torch_op(self, tensors: Tensors) -> Call:
        own = torch.scatter_add if self.case.columns == 1 else torch.index_add
        return lambda: own(tensors["input"], 0, tensors["index"], tensors["src"])


@dataclass(frozen=True)
class ScatterCase(SizedCase):
    """``count`` rows of ``columns`` added to ``rows`` rows, with indices of distribution ``spread``."""

    problem_type = ScatterProblem
    lengths = ("rows", "count")

    rows: int
    columns: int
    count: int
    spread: str

    def facts(self) -> dict[str, Any]:
        sizes = {"rows": self.rows, "columns": self.columns, "count": self.count, "spread": self.spread}
        return {**super().facts(), **sizes}

    @property
    def label(self) -> str:
        return f"R={self.rows} D={self.columns} N={self.count}, {self.spread}"

    def described(self, elements: int) -> Described:
        sized = self.at(elements)
        fields: dict[str, Any] = {
            "shape": (sized.count,), "table": (sized.rows,), "dtype": self.real,
            "width": self.columns if self.columns > 1 else None,
        }  # fmt: skip
        return ScatterPlan, fields


#: (rows, columns, number of terms, distribution of the indices, dtype).
_SHAPES = (
    (10**5, 1, 10**6, "uniform", torch.float32),
    (10**5, 16, 10**6, "uniform", torch.float32),
    (10**5, 128, 10**6, "uniform", torch.float32),
    (10**5, 128, 10**6, "zipf", torch.float32),
    (10**5, 128, 10**6, "zipf", torch.bfloat16),
    (10**4, 1024, 10**5, "zipf", torch.float32),
    (10**6, 16, 10**7, "zipf", torch.float32),
)


def _case(rows: int, columns: int, count: int, spread: str, real: torch.dtype, **more: Any) -> ScatterCase:
    return ScatterCase("scatter", spread, real, rows, columns, count, spread, **more)


def full_cases() -> list[ScatterCase]:
    return [_case(*shape) for shape in _SHAPES]


def cpu_cases() -> list[ScatterCase]:
    shapes = ((10**4, 1, 10**5), (10**4, 16, 10**5), (10**4, 128, 10**5))
    return [_case(*shape, "zipf", torch.float32, function=True) for shape in shapes]


def quick_cases() -> list[ScatterCase]:
    return [_case(*_SHAPES[1])]
