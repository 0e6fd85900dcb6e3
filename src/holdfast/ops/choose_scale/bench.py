"""Benchmark of choose_scale against a plain formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Described, Tensors
from holdfast.core.granularity import PerTensor
from holdfast.ops.affine.benchmark import ScaledCase, ScaledProblem
from holdfast.ops.choose_scale.plan import SCALE_FLOOR, ChooseScalePlan

LAYOUTS = ("per tensor", "per token")


@dataclass(frozen=True)
class ChooseScaleProblem(ScaledProblem):
    case: ChooseScaleCase

    @property
    def special_inputs(self) -> tuple[str, ...]:
        """No special values per tensor: one NaN makes the only scale NaN."""
        return () if isinstance(self.case.granularity, PerTensor) else ("x",)

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        axes = None if isinstance(self.case.granularity, PerTensor) else -1
        most = self.case.code.code_range[1]

        def choose_scale(x: torch.Tensor) -> torch.Tensor:
            largest = x.abs().amax() if axes is None else x.abs().amax(axes)
            return torch.clamp(largest.float() / most, min=SCALE_FLOOR)

        return choose_scale, [tensors["x"]]


@dataclass(frozen=True)
class ChooseScaleCase(ScaledCase):
    """Symmetric scales, per tensor or per token."""

    problem_type = ChooseScaleProblem

    def described(self, elements: int) -> Described:
        fields = {"granularity": self.granularity, "input_dtype": self.real, "output_dtype": self.codes}
        return ChooseScalePlan, {"shape": self.shape(elements), **fields}


def full_cases() -> list[ChooseScaleCase]:
    return [
        ChooseScaleCase("choose_scale", layout, real, torch.int8)
        for layout in LAYOUTS
        for real in (torch.float32, torch.bfloat16)
    ]


def cpu_cases() -> list[ChooseScaleCase]:
    return [ChooseScaleCase("choose_scale", layout, torch.float32, torch.int8) for layout in LAYOUTS]
