"""Benchmark of dequantize against torch's quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Call, Tensors
from holdfast.ops.affine import benchmark as affine
from holdfast.ops.dequantize.torch_op import dequantize


@dataclass(frozen=True)
class DequantizeProblem(affine.ScaledProblem):
    case: DequantizeCase

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        case = self.case
        given = tensors["q"], tensors["scale"], tensors["zero_point"]
        options: dict[str, Any] = {
            "dtype": case.real, "granularity": case.granularity, "code_dtype": case.codes,
            "packed": case.packed,
        }  # fmt: skip
        return lambda: (dequantize(*given, **options),)

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        case, desc = self.case, self.plan.descriptor
        granularity, shape, code = desc.granularity, desc.shape, case.code
        scale, zero = self.broadcast_scales(tensors)

        def forward(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
            q = affine.unpack(q, code) if desc.per_byte > 1 else q
            q = affine.grouped(q, granularity).float()
            return ((q if z is None else q - z) * s).to(case.real).view(shape)

        return forward, [tensors["q"], scale, zero]

    def torch_op(self, tensors: Tensors) -> Call:
        """torch's ``dequantize`` of a tensor that torch quantized."""
        affine.torch_zero_point(self.case, tensors)
        return affine.quantizer(self.case, torch.randn_like(tensors["y"]), tensors)().dequantize


@dataclass(frozen=True)
class DequantizeCase(affine.CodesCase):
    """A benchmark row of dequantize."""

    problem_type = DequantizeProblem


def full_cases() -> list[DequantizeCase]:
    return affine.full_rows(DequantizeCase, "dequantize")


def cpu_cases() -> list[DequantizeCase]:
    function = DequantizeCase("dequantize", "per tensor", torch.float32, torch.int8, function=True)
    return [*affine.cpu_rows(DequantizeCase, "dequantize"), function]


def quick_cases() -> list[DequantizeCase]:
    return [DequantizeCase("dequantize", "per channel, axis 0", torch.float32, torch.int8)]
