"""Benchmark of fake_quantize and its gradients against torch's fake quantization and a plain formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.benchmark import Call, Case, Described, NoPeer, Tensors
from holdfast.core.granularity import PerChannel, PerTensor
from holdfast.ops.affine.benchmark import ScaledCase, ScaledProblem, broadcastable, fake_quantizer, grouped
from holdfast.ops.fake_quantize.plan import FakeQuantizeBackwardPlan, FakeQuantizePlan, SteKind
from holdfast.ops.fake_quantize.torch_op import fake_quantize

LAYOUTS = ("per tensor", "per channel, axis 0", "per channel, last", "per group of 32")
#: IDENTITY is not timed: autograd passes dy on without a kernel.
TIMED = (SteKind.IN_RANGE, SteKind.CLIPPED_IDENTITY, SteKind.HARD_TANH, SteKind.TANH)


@dataclass(frozen=True)
class FakeQuantizeProblem(ScaledProblem):
    case: FakeQuantizeCase

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        case = self.case
        assert case.ste is None
        return lambda: (
            fake_quantize(
                tensors["x"], tensors["scale"], tensors["zero_point"],
                dtype=case.codes, granularity=case.granularity,
            ),
        )  # fmt: skip

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        case, shape = self.case, self.plan.descriptor.shape
        scale = broadcastable(tensors["scale"], case.granularity, len(shape))
        limits = case.code.code_range

        def forward(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            r = torch.clamp(torch.round(grouped(x, case.granularity).float() / s), *limits)
            return (r * s).to(x.dtype).view(shape)

        if case.ste is None:
            return forward, [tensors["x"], scale]
        estimate = _ESTIMATORS[case.ste]

        def backward(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            wide_dy, wide_x = (grouped(t, case.granularity).float() for t in (dy, x))
            return estimate(wide_dy, wide_x, s, *limits).to(dy.dtype).view(shape)

        return backward, [tensors["dy"], tensors["x"], scale]

    def torch_op(self, tensors: Tensors) -> Call:
        """torch.fake_quantize_per_tensor_affine or _per_channel_affine, or its gradient."""
        case = self.case
        if not isinstance(case.granularity, PerTensor | PerChannel):
            raise NoPeer("torch has no operator for this granularity")
        if case.ste not in (None, SteKind.IN_RANGE):
            raise NoPeer("torch has no such estimator")
        scale = tensors["scale"]
        zero = torch.zeros_like(scale, dtype=torch.int32)
        if case.ste is None:
            return fake_quantizer(case.granularity, tensors["x"], scale, zero)
        x = tensors["x"].detach().requires_grad_()
        y = fake_quantizer(case.granularity, x, scale, zero)()
        return lambda: torch.autograd.grad(y, x, tensors["dy"], retain_graph=True)


@dataclass(frozen=True)
class FakeQuantizeCase(ScaledCase):
    """The forward, or the gradient by ``ste``."""

    ste: SteKind | None = None

    problem_type = FakeQuantizeProblem

    def described(self, elements: int) -> Described:
        fields = {"granularity": self.granularity, "input_dtype": self.real, "dtype": self.codes}
        fields["shape"] = self.shape(elements)
        if self.ste is None:
            return FakeQuantizePlan, fields
        return FakeQuantizeBackwardPlan, {**fields, "ste": self.ste}


# The estimators in plain torch.


def _in_range(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, least: int, most: int) -> torch.Tensor:
    r = torch.round(x / s)
    return torch.where((r >= least) & (r <= most), dy, 0.0)


def _clipped(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return torch.where((x >= least * s) & (x <= most * s), dy, 0.0)


def _hard_tanh(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, least: int, most: int) -> torch.Tensor:
    low, high = least * s, most * s
    return dy * torch.relu(1 - torch.abs(x - (low + high) / 2) / ((high - low) / 2))


def _tanh(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return dy * (1 - torch.tanh((x - (least * s + most * s) / 2) / s) ** 2)


_ESTIMATORS = {
    SteKind.IN_RANGE: _in_range, SteKind.CLIPPED_IDENTITY: _clipped, SteKind.HARD_TANH: _hard_tanh,
    SteKind.TANH: _tanh,
}  # fmt: skip


def _forward(layout: str, real: torch.dtype = torch.float32, *, function: bool = False) -> FakeQuantizeCase:
    return FakeQuantizeCase("fake_quantize", layout, real, torch.int8, function=function)


def _backward(ste: SteKind, layout: str, real: torch.dtype = torch.float32) -> FakeQuantizeCase:
    return FakeQuantizeCase(f"fake_quantize backward {ste}", layout, real, torch.int8, ste=ste)


def full_cases() -> list[FakeQuantizeCase]:
    """The forward and every estimator, for each layout, in float32 and bfloat16."""
    reals = (torch.float32, torch.bfloat16)
    forward = [_forward(layout, real) for layout in LAYOUTS for real in reals]
    return forward + [_backward(ste, layout, real) for ste in TIMED for layout in LAYOUTS for real in reals]


def cpu_cases() -> list[FakeQuantizeCase]:
    """Each layout forward and with the first estimator; the other estimators once; the function."""
    return [
        *(_forward(layout) for layout in LAYOUTS),
        *(_backward(TIMED[0], layout) for layout in LAYOUTS),
        *(_backward(ste, LAYOUTS[1]) for ste in TIMED[1:]),
        _forward(LAYOUTS[0], function=True),
    ]


def quick_cases() -> list[FakeQuantizeCase]:
    return [_forward(LAYOUTS[1]), _backward(SteKind.IN_RANGE, LAYOUTS[1])]


def host_cases() -> dict[str, Case]:
    """Cases for the time on the host, on a small tensor."""
    case = FakeQuantizeCase("fake_quantize", "per tensor", torch.float32, torch.int8, function=True)
    return {"hf.fake_quantize": case}
