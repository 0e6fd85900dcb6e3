"""Benchmarks of embedding and its gradient, against torch and against sums with atomics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.benchmark import Call, Described, Problem, SizedCase, Tensors
from holdfast.ops.embedding.plan import EmbeddingBackwardPlan, EmbeddingPlan
from holdfast.ops.embedding.torch_op import embedding


@dataclass(frozen=True)
class EmbeddingProblem(Problem):
    case: EmbeddingCase

    def draw(self) -> Tensors:
        """Indices, and rows of multiples of 1/8, whose sums are exact in any order."""
        desc, device = self.plan.descriptor, self.stream.device
        generator = torch.Generator(device).manual_seed(20)
        tensors: Tensors = {}
        for name in self.plan.operands:
            shape, dtype = desc.expected(name)
            if name in self.plan.outputs:
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            elif name != "indices":
                eighths = torch.randint(-8, 9, shape, dtype=torch.int8, device=device, generator=generator)
                tensors[name] = eighths.to(dtype) / 8
        share = torch.rand(desc.shape, dtype=torch.float64, device=device, generator=generator)
        if self.case.spread == "equal":
            tensors["indices"] = torch.full(desc.shape, desc.rows // 2, device=device)
        elif self.case.spread == "zipf":
            tensors["indices"] = (desc.rows**share - 1).long().clamp(0, desc.rows - 1)
        else:
            tensors["indices"] = (desc.rows * share).long().clamp(0, desc.rows - 1)
        return tensors

    @property
    def special_inputs(self) -> tuple[str, ...]:
        return ("dout",) if self.case.backward else ("weight",)

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        if not self.case.backward:
            return lambda: (embedding(tensors["indices"], tensors["weight"]),)
        weight = self._table(tensors)
        out = embedding(tensors["indices"], weight)
        return lambda: torch.autograd.grad(out, weight, tensors["dout"], retain_graph=True)

    def _table(self, tensors: Tensors) -> torch.Tensor:
        return torch.zeros_like(tensors["dweight"]).requires_grad_()

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        """Indexing; for the gradient ``index_add_``, which uses atomics on CUDA."""
        if not self.case.backward:
            return lambda weight, indices: weight[indices], [tensors["weight"], tensors["indices"]]
        rows = self.plan.descriptor.rows

        def backward(dout: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return dout.new_zeros(rows, dout.shape[-1]).index_add_(0, indices, dout)

        return backward, [tensors["dout"], tensors["indices"]]

    def torch_op(self, tensors: Tensors) -> Call:
        """F.embedding, and its gradient."""
        if not self.case.backward:
            return lambda: F.embedding(tensors["indices"], tensors["weight"])
        if self.case.function:
            weight = self._table(tensors)
            out = F.embedding(tensors["indices"], weight)
            return lambda: torch.autograd.grad(out, weight, tensors["dout"], retain_graph=True)
        dense = torch.ops.aten.embedding_dense_backward
        return lambda: dense(tensors["dout"], tensors["indices"], self.plan.descriptor.rows, -1, False)


@dataclass(frozen=True)
class EmbeddingCase(SizedCase):
    """``count`` indices of distribution ``spread`` into ``rows`` rows of ``columns``: lookup or gradient."""

    problem_type = EmbeddingProblem
    lengths = ("rows", "count")

    rows: int
    columns: int
    count: int
    spread: str
    backward: bool = False

    def facts(self) -> dict[str, Any]:
        sizes = {"rows": self.rows, "columns": self.columns, "count": self.count, "spread": self.spread}
        return {**super().facts(), **sizes}

    @property
    def label(self) -> str:
        return f"V={self.rows} D={self.columns} N={self.count}, {self.spread}"

    def described(self, elements: int) -> Described:
        sized = self.at(elements)
        fields: dict[str, Any] = {
            "shape": (sized.count,), "num_embeddings": sized.rows, "embedding_dim": self.columns,
            "dtype": self.real,
        }  # fmt: skip
        return EmbeddingBackwardPlan if self.backward else EmbeddingPlan, fields


#: (rows, columns, number of indices, their distribution, dtype).
_SHAPES = (
    (50257, 768, 32768, "zipf", torch.float32),
    (128256, 4096, 16384, "zipf", torch.bfloat16),
    (128256, 4096, 16384, "uniform", torch.float32),
    (10**6, 128, 262144, "zipf", torch.float32),
    (10**6, 64, 2**20, "uniform", torch.float32),
    (50257, 768, 32768, "equal", torch.float32),
)


def _case(
    rows: int, columns: int, count: int, spread: str, real: torch.dtype, *, backward: bool, **more: Any
) -> EmbeddingCase:
    op = "embedding backward" if backward else "embedding"
    return EmbeddingCase(op, spread, real, rows, columns, count, spread, backward, **more)


def full_cases() -> list[EmbeddingCase]:
    """Both directions of every shape."""
    return [_case(*shape, backward=backward) for backward in (False, True) for shape in _SHAPES]


def cpu_cases() -> list[EmbeddingCase]:
    """The functions, since allocating the gradient dominates on a CPU; and the backward plan alone."""
    shape = (50257, 768, 8192, "zipf", torch.float32)
    return [
        _case(*shape, backward=False, function=True),
        _case(*shape, backward=True, function=True),
        _case(*shape, backward=True),
    ]


def quick_cases() -> list[EmbeddingCase]:
    return [_case(*_SHAPES[0], backward=True)]
