"""Training steps of embedding_bag on the bags of recommenders."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from holdfast.core.training_step import COMPILED, EAGER, OURS, ModelCase, Step
from holdfast.ops.embedding.models import drawn_indices, halved
from holdfast.ops.embedding_bag.torch_op import embedding_bag


@dataclass(frozen=True)
class BagModel(ModelCase):
    """``bags`` bags of ``length`` indices into ``rows`` rows of ``columns``.

    Bags by offsets have 1 to ``2 * length - 1`` indices.
    """

    rows: int
    columns: int
    bags: int
    length: int
    mode: str
    offsets: bool
    weighted: bool = False

    @property
    def label(self) -> str:
        given = f"{self.bags} bags of about {self.length} by offsets" if self.offsets else (
            f"{self.bags} bags of {self.length}"
        )  # fmt: skip
        weights = ", sample weights" if self.weighted else ""
        return f"V={self.rows} D={self.columns} {given}, {self.mode}{weights}"

    @property
    def largest(self) -> int:
        return max(self.rows, self.bags * self.length) * self.columns

    def at(self, elements: int) -> BagModel:
        found = self
        while found.largest > elements:
            smaller = replace(found, rows=halved(found.rows), bags=halved(found.bags))
            if smaller == found:
                break
            found = smaller
        return found

    def steps(self, device: torch.device) -> dict[str, Step]:
        generator = torch.Generator(device).manual_seed(25)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).to(self.real)

        weight, dout = normal(self.rows, self.columns).requires_grad_(), normal(self.bags, self.columns)
        lengths = torch.full((self.bags,), self.length, device=device)
        if self.offsets:
            lengths = torch.randint(1, 2 * self.length, (self.bags,), device=device, generator=generator)
        count = int(lengths.sum())
        offsets = lengths.cumsum(0) - lengths if self.offsets else None
        shape = (count,) if self.offsets else (self.bags, self.length)
        indices = drawn_indices("zipf", self.rows, shape, device, generator)
        samples = normal(*shape).requires_grad_() if self.weighted else None
        bag_of_index = torch.repeat_interleave(torch.arange(self.bags, device=device), lengths)
        mode, divisor = self.mode, lengths[:, None] if self.mode == "mean" else None

        def ours(indices: torch.Tensor, weight: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
            return embedding_bag(indices, weight, offsets, mode=mode, per_sample_weights=samples)

        def eager(indices: torch.Tensor, weight: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
            return F.embedding_bag(indices, weight, offsets, mode=mode, per_sample_weights=samples)

        inputs = indices, weight, samples
        gathered = Step(_gathered, (*inputs, bag_of_index, self.bags, divisor), dout)
        return {
            OURS: Step(ours, inputs, dout),
            EAGER: Step(eager, inputs, dout),
            COMPILED: Step(eager, inputs, dout) if mode == "max" else gathered,
        }


def _gathered(
    indices: torch.Tensor,
    weight: torch.Tensor,
    samples: torch.Tensor | None,
    bag_of_index: torch.Tensor,
    bags: int,
    divisor: torch.Tensor | None,
) -> torch.Tensor:
    """The rows of all indices, added to their bags in float32."""
    rows = weight[indices.view(-1)].float()
    if samples is not None:
        rows = rows * samples.view(-1, 1)
    sums = rows.new_zeros(bags, weight.shape[1]).index_add(0, bag_of_index, rows)
    return (sums if divisor is None else sums / divisor).to(weight.dtype)


def model_cases() -> list[BagModel]:
    """Sums and means, by offsets and by rows; weights for the samples of sums."""
    variants = [(mode, offsets) for mode in ("sum", "mean") for offsets in (True, False)]
    sizes = 10**6, 128, 8192, 32
    made = []
    for real in (torch.float32, torch.bfloat16):
        made += [
            BagModel("embedding_bag", "recommender bags", real, *sizes, mode, by) for mode, by in variants
        ]
        made.append(BagModel("embedding_bag", "recommender bags", real, *sizes, "sum", True, True))
    return made
