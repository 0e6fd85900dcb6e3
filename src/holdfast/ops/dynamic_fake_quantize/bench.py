"""Benchmark of dynamic_fake_quantize and its gradient against a plain formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Case, Described, Tensors
from holdfast.ops.affine.benchmark import INT4, ScaledCase, ScaledProblem, grouped
from holdfast.ops.choose_scale.plan import SCALE_FLOOR
from holdfast.ops.choose_scale.torch_op import choose_scale
from holdfast.ops.dynamic_fake_quantize.plan import DynamicFakeQuantizeBackwardPlan, DynamicFakeQuantizePlan
from holdfast.ops.dynamic_fake_quantize.torch_op import dynamic_fake_quantize

LAYOUTS = ("per token", "per group of 32", "per group of 128", "per channel, axis 0")


@dataclass(frozen=True)
class DynamicFakeQuantizeProblem(ScaledProblem):
    case: DynamicFakeQuantizeCase

    def draw(self) -> Tensors:
        tensors = super().draw()
        if self.case.backward:
            granularity, codes = self.case.granularity, self.case.codes
            tensors["scale"] = choose_scale(tensors["x"], dtype=codes, granularity=granularity)
        return tensors

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        case = self.case
        return lambda: dynamic_fake_quantize(
            tensors["x"], dtype=case.codes, granularity=case.granularity, return_scale=True
        )

    def formula(self, tensors: Tensors) -> tuple[Callable[..., Any], list[Any]]:
        case, shape = self.case, self.plan.descriptor.shape
        least, most = case.code.code_range

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = grouped(x, case.granularity).float()
            scale = torch.clamp(wide.abs().amax(-1, keepdim=True) / most, min=SCALE_FLOOR)
            y = torch.clamp(torch.round(wide / scale), least, most) * scale
            return y.to(x.dtype).view(shape), scale.squeeze(-1)

        def backward(dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            r = torch.round(grouped(x, case.granularity).float() / scale.unsqueeze(-1))
            return torch.where((r >= least) & (r <= most), grouped(dy, case.granularity), 0.0).view(shape)

        if case.backward:
            return backward, [tensors["dy"], tensors["x"], tensors["scale"]]
        return forward, [tensors["x"]]


@dataclass(frozen=True)
class DynamicFakeQuantizeCase(ScaledCase):
    """Symmetric scales: the forward, or the gradient by the default estimator."""

    backward: bool = False

    problem_type = DynamicFakeQuantizeProblem

    def described(self, elements: int) -> Described:
        plan = DynamicFakeQuantizeBackwardPlan if self.backward else DynamicFakeQuantizePlan
        fields = {"granularity": self.granularity, "input_dtype": self.real, "dtype": self.codes}
        return plan, {"shape": self.shape(elements), **fields}


def _cases(layouts: tuple[str, ...], *reals: torch.dtype) -> list[DynamicFakeQuantizeCase]:
    return [
        DynamicFakeQuantizeCase("dynamic_fake_quantize", layout, real, codes)
        for layout in layouts
        for real in reals
        for codes in (torch.int8, INT4)
    ]


def _gradients(layouts: tuple[str, ...], *reals: torch.dtype) -> list[DynamicFakeQuantizeCase]:
    name = "dynamic_fake_quantize backward"
    return [
        DynamicFakeQuantizeCase(name, layout, real, torch.int8, backward=True)
        for layout in layouts
        for real in reals
    ]


def full_cases() -> list[DynamicFakeQuantizeCase]:
    """Each layout in float32 and bfloat16."""
    reals = (torch.float32, torch.bfloat16)
    return _cases(LAYOUTS, *reals) + _gradients(LAYOUTS[:2], *reals)


def cpu_cases() -> list[DynamicFakeQuantizeCase]:
    return _cases(LAYOUTS[:2], torch.float32) + _gradients(LAYOUTS[:1], torch.float32)


def host_cases() -> dict[str, Case]:
    """Cases for the time on the host, on a small tensor."""
    name = "dynamic_fake_quantize"
    case = DynamicFakeQuantizeCase(name, "per token", torch.float32, torch.int8, function=True)
    return {"hf.dynamic_fake_quantize": case}
