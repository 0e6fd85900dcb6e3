"""Benchmark of the gradients with a learned scale against torch's learnable fake quantization."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Call, Described, NoPeer, Tensors
from holdfast.core.granularity import PerChannel, PerTensor
from holdfast.ops.affine.benchmark import ScaledCase, ScaledProblem, grouped
from holdfast.ops.fake_quantize.bench import LAYOUTS
from holdfast.ops.fake_quantize_learned.plan import FakeQuantizeLearnedBackwardPlan

OP = "fake_quantize learned backward"


@dataclass(frozen=True)
class LearnedProblem(ScaledProblem):
    case: LearnedCase

    @property
    def special_inputs(self) -> tuple[str, ...]:
        """No special values per tensor: one NaN makes the only sum NaN."""
        return () if isinstance(self.case.granularity, PerTensor) else super().special_inputs

    def draw(self) -> Tensors:
        tensors = super().draw()
        scale, zero_point = tensors["scale"], tensors["zero_point"]
        tensors["dscale"], tensors["dzero_point"] = torch.empty_like(scale), None
        if zero_point is not None:
            tensors["zero_point"] = zero_point.float()
            tensors["dzero_point"] = torch.empty_like(scale)
        return tensors

    def formula(self, tensors: Tensors) -> tuple[Callable[..., tuple[torch.Tensor, ...]], list[Any]]:
        case, desc = self.case, self.plan.descriptor
        granularity, shape, factor = case.granularity, desc.shape, desc.grad_factor
        least, most = case.code.code_range
        varies = desc.view.varies
        within = [d for d, changes in enumerate(varies) if not changes]
        scale, zero = self.broadcast_scales(tensors)

        def backward(
            dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None
        ) -> tuple[torch.Tensor, ...]:
            wide_dy, wide_x = (grouped(t, granularity).float() for t in (dy, x))
            t = wide_x / s
            r = torch.round(t)
            low, high = (least, most) if z is None else (least - torch.round(z), most - torch.round(z))
            below, above = r < low, r > high
            dx = torch.where(below | above, 0.0, wide_dy).to(dy.dtype).view(shape)
            step = torch.where(below, low, torch.where(above, high, r - t))
            dscale = (wide_dy * step).sum(within) * factor
            if z is None:
                return dx, dscale
            return dx, dscale, torch.where(below | above, -wide_dy * s, 0.0).sum(within) * factor

        return backward, [tensors["dy"], tensors["x"], scale, zero]

    def torch_op(self, tensors: Tensors) -> Call:
        """The gradients of torch's learnable fake quantization, which always has a zero point."""
        granularity, factor = self.case.granularity, self.plan.descriptor.grad_factor
        if not isinstance(granularity, PerTensor | PerChannel):
            raise NoPeer("torch has no operator for this granularity")
        zero_point = tensors["zero_point"]
        zeros = torch.zeros_like(tensors["scale"]) if zero_point is None else zero_point
        given = tensors["x"], tensors["scale"].reshape(-1), zeros.reshape(-1)
        x, scale, zero = (tensor.detach().requires_grad_() for tensor in given)
        if isinstance(granularity, PerTensor):
            y = torch.ops.aten._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -128, 127, factor)
        else:
            axis = granularity.axis % x.dim()
            per_channel = torch.ops.aten._fake_quantize_learnable_per_channel_affine
            y = per_channel(x, scale, zero, axis, -128, 127, factor)
        return lambda: torch.autograd.grad(y, (x, scale, zero), tensors["dy"], retain_graph=True)


@dataclass(frozen=True)
class LearnedCase(ScaledCase):
    """``zero_point``: the zero point is learned too."""

    problem_type = LearnedProblem

    def described(self, elements: int) -> Described:
        shape = self.shape(elements)
        shared = math.prod(shape) // max(self.granularity.view(shape).scale_count, 1)
        fields = {
            "shape": shape, "granularity": self.granularity, "input_dtype": self.real, "dtype": self.codes,
            "zero_point_dtype": torch.float32 if self.zero_point else None,
            "grad_factor": 1 / math.sqrt(shared * self.code.code_range[1]),
        }  # fmt: skip
        return FakeQuantizeLearnedBackwardPlan, fields


def full_cases() -> list[LearnedCase]:
    """Each layout in float32 and bfloat16; one case with a learned zero point."""
    both = (torch.float32, torch.bfloat16)
    plain = [LearnedCase(OP, layout, real, torch.int8) for layout in LAYOUTS for real in both]
    return [*plain, LearnedCase(OP, LAYOUTS[1], torch.float32, torch.int8, zero_point=True)]


def cpu_cases() -> list[LearnedCase]:
    """Layouts with different loops, in float32."""
    layouts = ("per tensor", "per channel, axis 0", "per channel, last")
    return [LearnedCase(OP, layout, torch.float32, torch.int8) for layout in layouts]
