"""Training steps of embedding on the tables of language models and recommenders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.training_step import COMPILED, EAGER, OURS, ModelCase, Step
from holdfast.ops.embedding.torch_op import embedding

#: Numbers of rows and indices are not halved below this.
LEAST = 64


def drawn_indices(
    spread: str, rows: int, shape: tuple[int, ...], device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Indices into ``rows`` rows: uniform, or with the frequencies of Zipf's law."""
    share = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
    places = rows**share - 1 if spread == "zipf" else rows * share
    return places.long().clamp(0, rows - 1)


def halved(size: int) -> int:
    return max(size // 2, min(size, LEAST))


@dataclass(frozen=True)
class EmbeddingModel(ModelCase):
    """``count`` indices of distribution ``spread`` into ``rows`` rows of ``columns``."""

    rows: int
    columns: int
    count: int
    spread: str

    @property
    def label(self) -> str:
        return f"V={self.rows} D={self.columns} N={self.count} {self.spread}"

    @property
    def largest(self) -> int:
        return max(self.rows, self.count) * self.columns

    def at(self, elements: int) -> EmbeddingModel:
        found = self
        while found.largest > elements:
            smaller = replace(found, rows=halved(found.rows), count=halved(found.count))
            if smaller == found:
                break
            found = smaller
        return found

    def steps(self, device: torch.device) -> dict[str, Step]:
        generator = torch.Generator(device).manual_seed(24)
        weight = torch.randn(self.rows, self.columns, device=device, generator=generator).to(self.real)
        dout = torch.randn(self.count, self.columns, device=device, generator=generator).to(self.real)
        indices = drawn_indices(self.spread, self.rows, (self.count,), device, generator)
        inputs = indices, weight.requires_grad_()
        return {
            OURS: Step(embedding, inputs, dout),
            EAGER: Step(F.embedding, inputs, dout),
            COMPILED: Step(_with_atomics, inputs, dout),
        }


class _Atomics(torch.autograd.Function):
    """A lookup whose gradient is ``index_add_``, which torch.compile turns into atomic additions."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        return weight[indices]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[None, torch.Tensor]:
        (indices,) = ctx.saved_tensors
        return None, dout.new_zeros(ctx.rows, dout.shape[1]).index_add_(0, indices, dout)


def _with_atomics(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _Atomics.apply(indices, weight)  # type: ignore[no-any-return, no-untyped-call]


#: (model, rows, columns, number of indices, their distribution).
_SHAPES: tuple[tuple[str, int, int, int, str], ...] = (
    ("LLM embedding", 50257, 768, 32768, "zipf"),
    ("LLM embedding", 128256, 4096, 16384, "zipf"),
    ("LLM embedding", 128256, 4096, 16384, "uniform"),
    ("recommender", 10**6, 128, 262144, "zipf"),
    ("recommender", 10**6, 64, 2**20, "uniform"),
    ("few rows", 10, 64, 2**20, "uniform"),
    ("few indices", 50257, 768, 64, "zipf"),
    ("tall table", 10**7, 64, 65536, "uniform"),
)


def model_cases() -> list[EmbeddingModel]:
    """Every shape in two dtypes."""
    return [
        EmbeddingModel("embedding", shape[0], real, *shape[1:])
        for real in (torch.float32, torch.bfloat16)
        for shape in _SHAPES
    ]
