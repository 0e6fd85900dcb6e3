"""Benchmarks of embedding_bag and the gradient of its table, against torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.benchmark import Call, Described, Problem, SizedCase, Tensors
from holdfast.ops.embedding_bag.plan import MODES, EmbeddingBagBackwardPlan, EmbeddingBagPlan
from holdfast.ops.embedding_bag.torch_op import embedding_bag


@dataclass(frozen=True)
class BagProblem(Problem):
    case: BagCase

    def draw(self) -> Tensors:
        """Indices, offsets, and rows of multiples of 1/8, whose sums are exact in any order."""
        desc, device = self.plan.descriptor, self.stream.device
        generator = torch.Generator(device).manual_seed(21)
        tensors: Tensors = {}
        for name in self.plan.operands:
            expected = desc.expected(name)
            if expected is None:
                tensors[name] = None
            elif name in self.plan.outputs:
                tensors[name] = torch.empty(expected[0], dtype=expected[1], device=device)
            elif name == "indices":
                tensors[name] = torch.randint(0, desc.rows, desc.shape, device=device, generator=generator)
            elif name == "offsets":
                tensors[name] = torch.arange(desc.bags, device=device) * self.case.length
            else:
                shape, dtype = expected
                eighths = torch.randint(-8, 9, shape, dtype=torch.int8, device=device, generator=generator)
                tensors[name] = eighths.to(dtype) / 8
        return tensors

    @property
    def special_inputs(self) -> tuple[str, ...]:
        return ("dout",) if self.case.backward else ("weight",)

    def _table(self, tensors: Tensors) -> torch.Tensor:
        known = tensors["weight"] if tensors.get("weight") is not None else tensors["dweight"]
        return torch.zeros_like(known).requires_grad_()

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        indices, offsets, mode = tensors["indices"], tensors["offsets"], self.case.mode
        if not self.case.backward:
            return lambda: (embedding_bag(indices, tensors["weight"], offsets, mode=mode),)
        weight = self._table(tensors)
        out = embedding_bag(indices, weight, offsets, mode=mode)
        return lambda: torch.autograd.grad(out, weight, tensors["dout"], retain_graph=True)

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        """Indexing and a reduction; for the gradient ``index_add_``, which uses atomics on CUDA."""
        desc, mode, length = self.plan.descriptor, self.case.mode, self.case.length

        def forward(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            rows = weight[indices.view(-1, length)]
            return rows.amax(1) if mode == "max" else rows.mean(1) if mode == "mean" else rows.sum(1)

        if not self.case.backward:
            return forward, [tensors["weight"], tensors["indices"]]

        def backward(dout: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            terms = (dout / length if mode == "mean" else dout).repeat_interleave(length, 0)
            return dout.new_zeros(desc.rows, dout.shape[1]).index_add_(0, indices.view(-1), terms)

        return backward, [tensors["dout"], tensors["indices"]]

    def torch_op(self, tensors: Tensors) -> Call:
        """F.embedding_bag, and its gradient."""
        indices, offsets, mode = tensors["indices"], tensors["offsets"], self.case.mode
        if not self.case.backward:
            return lambda: F.embedding_bag(indices, tensors["weight"], offsets, mode=mode)
        weight = self._table(tensors)
        out = F.embedding_bag(indices, weight, offsets, mode=mode)
        return lambda: torch.autograd.grad(out, weight, tensors["dout"], retain_graph=True)


@dataclass(frozen=True)
class BagCase(SizedCase):
    """``bags`` bags of ``length`` uniform indices into ``rows`` rows of ``columns``."""

    problem_type = BagProblem
    lengths = ("rows", "bags")

    rows: int
    columns: int
    bags: int
    length: int
    mode: str
    offsets: bool
    backward: bool = False

    def facts(self) -> dict[str, Any]:
        sizes = {"rows": self.rows, "columns": self.columns, "bags": self.bags, "length": self.length}
        return {**super().facts(), **sizes, "mode": self.mode, "offsets": self.offsets}

    @property
    def label(self) -> str:
        given = "offsets" if self.offsets else "rows"
        return f"{self.mode}, V={self.rows} D={self.columns}, {self.bags} bags of {self.length} by {given}"

    def described(self, elements: int) -> Described:
        sized = self.at(elements)
        fields: dict[str, Any] = {
            "shape": (sized.bags * self.length,) if self.offsets else (sized.bags, self.length),
            "offsets": sized.bags if self.offsets else None, "num_embeddings": sized.rows,
            "embedding_dim": self.columns, "dtype": self.real, "mode": self.mode,
        }  # fmt: skip
        return EmbeddingBagBackwardPlan if self.backward else EmbeddingBagPlan, fields


def _case(mode: str, offsets: bool, bags: int, *, backward: bool, **more: Any) -> BagCase:
    op = "embedding_bag backward" if backward else "embedding_bag"
    return BagCase(op, mode, torch.float32, 10**6, 128, bags, 32, mode, offsets, backward, **more)


def full_cases() -> list[BagCase]:
    """Sums and means of bags, by offsets and by rows, in both directions."""
    return [
        _case(mode, offsets, 8192, backward=backward)
        for backward in (False, True)
        for mode in MODES
        for offsets in (True, False)
        if mode != "max" or (offsets and not backward)
    ]


def cpu_cases() -> list[BagCase]:
    """The function in every mode, by rows and by offsets; and the gradient of the mean."""
    forward = [
        _case(mode, offsets, 8192, backward=False, function=True)
        for mode in MODES
        for offsets in (True, False)
    ]
    return [*forward, _case("mean", True, 1024, backward=True, function=True)]


def quick_cases() -> list[BagCase]:
    return [_case("mean", True, 8192, backward=backward) for backward in (False, True)]
