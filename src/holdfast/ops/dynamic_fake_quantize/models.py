"""Training steps of dynamic_fake_quantize on the weights and activations of language models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.training_step import Step
from holdfast.ops.choose_scale.plan import SCALE_FLOOR
from holdfast.ops.dynamic_fake_quantize.torch_op import dynamic_fake_quantize
from holdfast.ops.fake_quantize.models import MATRICES, FakeQuantizeModel, steps_of, with_fixed_scales


@dataclass(frozen=True)
class DynamicFakeQuantizeModel(FakeQuantizeModel):
    """A matrix with scales of its own data."""

    scales: str = "of the data"

    def steps(self, device: torch.device) -> dict[str, Step]:
        generator = torch.Generator(device).manual_seed(27)
        x, dout = (
            torch.randn(self.shape, device=device, generator=generator).to(self.real) for _ in range(2)
        )
        _, eager_fixed, formula_fixed = with_fixed_scales(self)

        def ours(x: torch.Tensor) -> torch.Tensor:
            return dynamic_fake_quantize(x, dtype=self.codes, granularity=self.granularity)

        def scale_of(x: torch.Tensor) -> torch.Tensor:
            largest = x.detach().view(-1, self.group).abs().amax(1).float()
            # By a tensor: on CUDA torch divides by a number as a product with its reciprocal.
            return torch.clamp(largest / torch.full_like(largest, self.code_range[1]), min=SCALE_FLOOR)

        def eager(x: torch.Tensor) -> torch.Tensor:
            return eager_fixed(x, scale_of(x))

        def formula(x: torch.Tensor) -> torch.Tensor:
            return formula_fixed(x, scale_of(x))

        return steps_of((ours, eager, formula), (x.requires_grad_(),), dout)


def model_cases() -> list[DynamicFakeQuantizeModel]:
    return [
        DynamicFakeQuantizeModel("dynamic_fake_quantize", matrix[0], real, *matrix[1:])
        for real in (torch.float32, torch.bfloat16)
        for matrix in MATRICES
    ]
