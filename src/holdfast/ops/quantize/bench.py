"""Benchmark of quantize and its gradient against torch's quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.core.benchmark import Call, Case, Tensors
from holdfast.ops.affine import benchmark as affine
from holdfast.ops.quantize.torch_op import quantize

OPS = ("quantize", "quantize backward")


@dataclass(frozen=True)
class QuantizeProblem(affine.ScaledProblem):
    case: QuantizeCase

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        case = self.case
        assert not case.backward
        given = tensors["x"], tensors["scale"], tensors["zero_point"]
        options: dict[str, Any] = {
            "dtype": case.codes, "granularity": case.granularity, "packed": case.packed
        }  # fmt: skip
        return lambda: (quantize(*given, **options),)

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        case, desc = self.case, self.plan.descriptor
        granularity, shape, code = desc.granularity, desc.shape, case.code
        least, most = code.code_range
        scale, zero = self.broadcast_scales(tensors)

        def forward(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
            r = torch.round(affine.grouped(x, granularity).float() / s)
            q = torch.clamp(r if z is None else r + z, least, most).to(code.storage).view(shape)
            return affine.pack(q, code) if desc.per_byte > 1 else q

        def backward(
            dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None
        ) -> torch.Tensor:
            r = torch.round(affine.grouped(x, granularity).float() / s)
            r = r if z is None else r + z
            dx = affine.grouped(dy, granularity).float() / s
            return torch.where((r >= least) & (r <= most), dx, 0.0).to(case.real).view(shape)

        if case.backward:
            return backward, [tensors["dy"], tensors["x"], scale, zero]
        return forward, [tensors["x"], scale, zero]

    def torch_op(self, tensors: Tensors) -> Call:
        """torch.quantize_per_tensor or _per_channel; for the backward, the gradient of fake_quantize."""
        zero = affine.torch_zero_point(self.case, tensors)
        if not self.case.backward:
            return affine.quantizer(self.case, tensors["x"], tensors)
        x = tensors["x"].detach().requires_grad_()
        y = affine.fake_quantizer(self.case.granularity, x, tensors["scale"], zero)()
        return lambda: torch.autograd.grad(y, x, tensors["dy"], retain_graph=True)


@dataclass(frozen=True)
class QuantizeCase(affine.CodesCase):
    """A benchmark row of quantize or of its gradient."""

    problem_type = QuantizeProblem


def full_cases() -> list[QuantizeCase]:
    return [row for op in OPS for row in affine.full_rows(QuantizeCase, op)]


def cpu_cases() -> list[QuantizeCase]:
    function = QuantizeCase("quantize", "per tensor", torch.float32, torch.int8, function=True)
    return [*(row for op in OPS for row in affine.cpu_rows(QuantizeCase, op)), function]


def quick_cases() -> list[QuantizeCase]:
    return [
        QuantizeCase("quantize", "per tensor", torch.float32, torch.int8),
        QuantizeCase("quantize", "per channel, axis 0", torch.float32, torch.int8),
        QuantizeCase("quantize", "per group of 32", torch.bfloat16, affine.INT4, packed=True),
        QuantizeCase("quantize backward", "per tensor", torch.float32, torch.int8),
    ]


def host_cases() -> dict[str, Case]:
    """Cases for the time on the host, on a small tensor."""
    case = QuantizeCase("quantize", "per tensor", torch.float32, torch.int8)
    return {"plan.run": case, "hf.quantize": replace(case, function=True)}
