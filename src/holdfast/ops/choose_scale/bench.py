"""Benchmark of choose_scale against a plain formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Tensors
from holdfast.core.contract import PlanPreference
from holdfast.core.granularity import PerTensor
from holdfast.core.stream import Stream
from holdfast.ops.affine.benchmark import ScaledCase, ScaledProblem
from holdfast.ops.choose_scale.plan import SCALE_FLOOR, ChooseScaleDescriptor, ChooseScalePlan

LAYOUTS = ("per tensor", "per token")


@dataclass(frozen=True)
class ChooseScaleCase(ScaledCase):
    """Symmetric scales, per tensor or per token."""

    def problem(self, elements: int, stream: Stream, backend: str | None = None) -> ChooseScaleProblem:
        descriptor = ChooseScaleDescriptor(
            shape=self.shape(elements),
            granularity=self.granularity,
            input_dtype=self.real,
            output_dtype=self.codes,
        )
        preference = PlanPreference(backend=backend, precompile=False)
        return ChooseScaleProblem(self, ChooseScalePlan.select(stream, descriptor, preference), stream)


@dataclass(frozen=True)
class ChooseScaleProblem(ScaledProblem):
    """A case at one size on one device."""

    case: ChooseScaleCase

    @property
    def special_inputs(self) -> tuple[str, ...]:
        """No special values per tensor: one NaN makes the only scale NaN."""
        return () if isinstance(self.case.granularity, PerTensor) else ("x",)

    def draw(self) -> Tensors:
        tensors = super().draw()
        shape, dtype = self.plan.descriptor.expected("scale")
        return {**tensors, "scale": torch.empty(shape, dtype=dtype, device=self.stream.device)}

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        axes = None if isinstance(self.case.granularity, PerTensor) else -1
        most = self.case.code.code_range[1]

        def choose_scale(x: torch.Tensor) -> torch.Tensor:
            largest = x.abs().amax() if axes is None else x.abs().amax(axes)
            return torch.clamp(largest.float() / most, min=SCALE_FLOOR)

        return choose_scale, [tensors["x"]]


def full_cases() -> list[ChooseScaleCase]:
    return [
        ChooseScaleCase("choose_scale", layout, real, torch.int8)
        for layout in LAYOUTS
        for real in (torch.float32, torch.bfloat16)
    ]


def cpu_cases() -> list[ChooseScaleCase]:
    return [ChooseScaleCase("choose_scale", layout, torch.float32, torch.int8) for layout in LAYOUTS]


def quick_cases() -> list[ChooseScaleCase]:
    return []
