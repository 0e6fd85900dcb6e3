"""Benchmarks of interpolate and its gradient against torch, whose gradients vary between runs on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.benchmark import Call, Case, Described, Problem, Tensors
from holdfast.ops.interpolate.plan import InterpolateBackwardPlan, InterpolatePlan


@dataclass(frozen=True)
class InterpolateProblem(Problem):
    """A case at one size on one device."""

    case: InterpolateCase

    @property
    def special_inputs(self) -> tuple[str, ...]:
        return self.plan.inputs

    def draw(self) -> Tensors:
        """Multiples of 1/8."""
        desc, device = self.plan.descriptor, self.stream.device
        generator = torch.Generator(device).manual_seed(22)
        tensors: Tensors = {}
        for name in self.plan.operands:
            shape, dtype = desc.expected(name)
            eighths = torch.randint(-8, 9, shape, dtype=torch.int8, device=device, generator=generator)
            tensors[name] = eighths.to(dtype) / 8
        return tensors

    def formula(self, tensors: Tensors) -> tuple[Callable[..., Any], list[Any]]:
        """torch's operator in float32."""
        resize, shape = self._resize, self.plan.descriptor.shape

        def forward(image: torch.Tensor) -> torch.Tensor:
            return resize(image.float()).to(image.dtype)

        def backward(dout: torch.Tensor) -> torch.Tensor:
            image = torch.zeros(shape, device=dout.device, requires_grad=True)
            return torch.autograd.grad(resize(image), image, dout.float())[0].to(dout.dtype)

        return (backward, [tensors["dout"]]) if self.case.backward else (forward, [tensors["input"]])

    def torch_op(self, tensors: Tensors) -> Call:
        if not self.case.backward:
            return lambda: self._resize(tensors["input"])
        image = torch.zeros_like(tensors["dinput"], requires_grad=True)
        out = self._resize(image)
        return lambda: torch.autograd.grad(out, image, tensors["dout"], retain_graph=True)[0]

    def _resize(self, image: torch.Tensor) -> torch.Tensor:
        desc = self.plan.descriptor
        return F.interpolate(image, desc.output_size, mode=str(desc.mode))


@dataclass(frozen=True)
class InterpolateCase(Case):
    """An image of ``shape``, twice as large."""

    problem_type = InterpolateProblem

    shape: tuple[int, ...] = ()
    mode: str = "bilinear"
    backward: bool = False

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "shape": list(self.shape),
            "output_size": list(self.size),
            "mode": self.mode,
        }

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(2 * n for n in self.shape[2:])

    @property
    def largest(self) -> int:
        return torch.Size((*self.shape[:2], *self.size)).numel()

    def elements(self, *, on_gpu: bool, quick: bool) -> int:
        return self.largest // 16 if quick or not on_gpu else self.largest

    def at(self, elements: int) -> InterpolateCase:
        batch, channels, *size = self.shape
        while batch * channels > 1 and replace(self, shape=(batch, channels, *size)).largest > elements:
            batch, channels = (batch // 2, channels) if batch > 1 else (batch, channels // 2)
        return replace(self, shape=(batch, channels, *size))

    @property
    def label(self) -> str:
        sizes = "x".join(map(str, self.shape[2:]))
        return f"N{self.shape[0]} C{self.shape[1]} {sizes}, {self.mode}, twice as large"

    def described(self, elements: int) -> Described:
        sized = self.at(elements)
        fields = {
            "shape": sized.shape, "output_size": sized.size, "mode": self.mode, "dtype": self.real,
        }  # fmt: skip
        return InterpolateBackwardPlan if self.backward else InterpolatePlan, fields


_SHAPE = (8, 64, 128, 128)
_SHAPES = {
    "bilinear": _SHAPE, "nearest": _SHAPE, "bicubic": _SHAPE, "trilinear": (2, 32, 32, 64, 64),
}  # fmt: skip


def _case(mode: str, real: torch.dtype, *, backward: bool) -> InterpolateCase:
    op = "interpolate backward" if backward else "interpolate"
    return InterpolateCase(op, mode, real, shape=_SHAPES[mode], mode=mode, backward=backward)


def full_cases() -> list[InterpolateCase]:
    found = [_case(mode, torch.float32, backward=backward) for backward in (False, True) for mode in _SHAPES]
    return [*found, *(_case("bilinear", torch.bfloat16, backward=backward) for backward in (False, True))]


def cpu_cases() -> list[InterpolateCase]:
    return [_case("bilinear", torch.float32, backward=backward) for backward in (False, True)]


def quick_cases() -> list[InterpolateCase]:
    return [_case("bilinear", torch.float32, backward=True)]
