"""Benchmark of dequantize against torch's quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Call, Tensors
from holdfast.core.stream import Stream
from holdfast.ops.affine.benchmark import (
    CodesCase,
    ScaledProblem,
    broadcastable,
    cpu_rows,
    full_rows,
    grouped,
    quantizer,
    torch_zero_point,
    unpack,
)
from holdfast.ops.dequantize.torch_op import dequantize


@dataclass(frozen=True)
class DequantizeCase(CodesCase):
    """A benchmark row of dequantize."""

    def problem(self, elements: int, stream: Stream, backend: str | None = None) -> DequantizeProblem:
        return DequantizeProblem(self, self.plan(elements, stream, backend), stream)


@dataclass(frozen=True)
class DequantizeProblem(ScaledProblem):
    """A case at one size on one device."""

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
        zero_point = tensors["zero_point"]
        scale = broadcastable(tensors["scale"], granularity, len(shape))
        zero = None if zero_point is None else broadcastable(zero_point, granularity, len(shape))

        def forward(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
            q = unpack(q, code) if desc.per_byte > 1 else q
            q = grouped(q, granularity).float()
            return ((q if z is None else q - z) * s).to(case.real).view(shape)

        return forward, [tensors["q"], scale, zero]

    def torch_op(self, tensors: Tensors) -> Call:
        """torch's ``dequantize`` of a tensor that torch quantized."""
        torch_zero_point(self.case, tensors)
        return quantizer(self.case, torch.randn_like(tensors["y"]), tensors)().dequantize


def full_cases() -> list[DequantizeCase]:
    return full_rows(DequantizeCase, "dequantize")


def cpu_cases() -> list[DequantizeCase]:
    function = DequantizeCase("dequantize", "per tensor", torch.float32, torch.int8, function=True)
    return [*cpu_rows(DequantizeCase, "dequantize"), function]


def quick_cases() -> list[DequantizeCase]:
    return [DequantizeCase("dequantize", "per channel, axis 0", torch.float32, torch.int8)]
