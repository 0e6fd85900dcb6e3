"""Training steps of fake quantization on the weights and activations of language models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from holdfast.core import formats
from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import INTEGERS
from holdfast.core.granularity import Granularity, PerGroup, PerToken
from holdfast.core.training_step import COMPILED, EAGER, OURS, ModelCase, Step
from holdfast.ops.fake_quantize.torch_op import fake_quantize

#: The number of rows is not halved below this.
LEAST = 8

#: The public function, torch's operator and the plain formula.
Functions = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class FakeQuantizeModel(ModelCase):
    """A matrix of ``shape`` with codes of dtype ``codes``. ``scales`` is a key of ``_FUNCTIONS``."""

    dynamic_shapes: ClassVar[bool] = False

    shape: tuple[int, int]
    granularity: Granularity
    codes: torch.dtype
    scales: str

    @property
    def label(self) -> str:
        rows, columns = self.shape
        layout = "per token" if self.group == columns else f"groups of {self.group}"
        return f"{rows}x{columns} {dtype_name(self.codes)} {layout}, scales {self.scales}"

    @property
    def group(self) -> int:
        """The number of elements that share a scale."""
        return self.granularity.group_size if isinstance(self.granularity, PerGroup) else self.shape[1]

    @property
    def code_range(self) -> tuple[int, int]:
        return INTEGERS[dtype_name(self.codes)].code_range

    @property
    def largest(self) -> int:
        return math.prod(self.shape)

    def at(self, elements: int) -> FakeQuantizeModel:
        found = self
        while found.largest > elements and found.shape[0] > LEAST:
            found = replace(found, shape=(max(found.shape[0] // 2, LEAST), found.shape[1]))
        return found

    def steps(self, device: torch.device) -> dict[str, Step]:
        """About one in twenty values is out of the range of a fixed or learned scale."""
        generator = torch.Generator(device).manual_seed(26)
        x, dout = (
            torch.randn(self.shape, device=device, generator=generator).to(self.real) for _ in range(2)
        )
        spread = torch.rand(self.largest // self.group, device=device, generator=generator)
        scale = ((1.5 + spread) / self.code_range[1]).view(self.granularity.view(self.shape).scale_shape)
        x.requires_grad_()
        scale.requires_grad_(self.scales == "learned")
        return steps_of(_FUNCTIONS[self.scales](self), (x, scale), dout)


def steps_of(functions: Functions, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> dict[str, Step]:
    names = (OURS, EAGER, COMPILED)
    return {name: Step(of, inputs, dout) for name, of in zip(names, functions, strict=True)}


def with_fixed_scales(case: FakeQuantizeModel) -> Functions:
    (least, most), group = case.code_range, case.group

    def ours(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return fake_quantize(x, scale, dtype=case.codes, granularity=case.granularity)

    def eager(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """torch's operator per channel: a channel is what shares a scale."""
        rows, zero = x.view(-1, group), torch.zeros(scale.numel(), dtype=torch.int32, device=x.device)
        return torch.fake_quantize_per_channel_affine(rows, scale.view(-1), zero, 0, least, most).view_as(x)

    def formula(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide, s = x.float().view(-1, group), scale.view(-1, 1)
        r = torch.round(wide / s)
        y = (torch.clamp(r, least, most) * s).detach()
        passes = torch.where((r >= least) & (r <= most), wide - wide.detach(), 0.0)
        return (y + passes).to(x.dtype).view_as(x)

    return ours, eager, formula


def _learned(case: FakeQuantizeModel) -> Functions:
    (least, most), group = case.code_range, case.group
    factor = 1 / math.sqrt(group * most)

    def ours(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return fake_quantize(x, scale, dtype=case.codes, granularity=case.granularity, grad_factor="lsq")

    def eager(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows, zero = x.view(-1, group), torch.zeros(scale.numel(), device=x.device)
        learnable = torch.ops.aten._fake_quantize_learnable_per_channel_affine
        made: torch.Tensor = learnable(rows, scale.view(-1), zero, 0, least, most, factor)
        return made.view_as(x)

    def formula(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        s = scale.view(-1, 1)
        s = s * factor + (s - s * factor).detach()
        t = x.float().view(-1, group) / s
        r = torch.round(t).detach()
        inside = (r >= least) & (r <= most)
        codes = torch.where(inside, t + (r - t).detach(), torch.clamp(r, least, most))
        return (codes * s).to(x.dtype).view_as(x)

    return ours, eager, formula


_FUNCTIONS: dict[str, Callable[[FakeQuantizeModel], Functions]] = {
    "fixed": with_fixed_scales,
    "learned": _learned,
}


#: A weight and the activations of a language model.
MATRICES: tuple[tuple[str, tuple[int, int], Granularity, torch.dtype], ...] = (
    ("LLM weight", (14336, 4096), PerGroup(32), formats.INT4.torch),
    ("LLM activations", (8192, 4096), PerToken(), torch.int8),
)


def model_cases() -> list[FakeQuantizeModel]:
    return [
        FakeQuantizeModel("fake_quantize", matrix[0], real, *matrix[1:], scales)
        for real in (torch.float32, torch.bfloat16)
        for scales in _FUNCTIONS
        for matrix in MATRICES
        if (matrix[0], scales) != ("LLM activations", "learned")
    ]
