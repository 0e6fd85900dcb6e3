"""Benchmark of dynamic_quantize against a plain formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Described, Tensors
from holdfast.ops.affine.benchmark import INT4, ScaledCase, ScaledProblem, grouped, pack
from holdfast.ops.choose_scale.plan import SCALE_FLOOR
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizePlan

LAYOUTS = ("per token", "per group of 32", "per group of 128")


@dataclass(frozen=True)
class DynamicQuantizeProblem(ScaledProblem):
    case: DynamicQuantizeCase

    def formula(self, tensors: Tensors) -> tuple[Callable[..., tuple[torch.Tensor, ...]], list[Any]]:
        case, shape = self.case, self.plan.descriptor.shape
        least, most = case.code.code_range

        def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = grouped(x, case.granularity).float()
            scale = torch.clamp(wide.abs().amax(-1, keepdim=True) / most, min=SCALE_FLOOR)
            q = torch.clamp(torch.round(wide / scale), least, most).to(case.code.storage).view(shape)
            return pack(q, case.code) if case.packed else q, scale.squeeze(-1)

        return quantize, [tensors["x"]]


@dataclass(frozen=True)
class DynamicQuantizeCase(ScaledCase):
    """Symmetric scales per token or per group, and the codes."""

    problem_type = DynamicQuantizeProblem

    def described(self, elements: int) -> Described:
        fields = {"granularity": self.granularity, "input_dtype": self.real, "output_dtype": self.codes}
        return DynamicQuantizePlan, {"shape": self.shape(elements), "packed": self.packed, **fields}


def _cases(layouts: tuple[str, ...], real: torch.dtype) -> list[DynamicQuantizeCase]:
    stored = ((torch.int8, False), (INT4, True))
    return [DynamicQuantizeCase("dynamic_quantize", layout, real, *s) for layout in layouts for s in stored]


def full_cases() -> list[DynamicQuantizeCase]:
    """bfloat16 to int8 and to packed int4."""
    return _cases(LAYOUTS, torch.bfloat16)


def cpu_cases() -> list[DynamicQuantizeCase]:
    """float32 to int8 and to packed int4, per token."""
    return _cases(LAYOUTS[:1], torch.float32)
