"""Benchmarks of grid_sample and its gradients, against torch, whose gradients vary between runs on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.benchmark import Call, Case, Problem, Tensors
from holdfast.core.contract import PlanPreference
from holdfast.core.plan import Plan
from holdfast.core.stream import Stream
from holdfast.ops.grid_sample.plan import (
    GridSampleBackwardDescriptor,
    GridSampleBackwardPlan,
    GridSampleDescriptor,
    GridSamplePlan,
)
from holdfast.ops.grid_sample.torch_op import grid_sample

#: Grid coordinates are multiples of this: with sizes that are powers of two, sums are exact in any order.
STEP = 2.0**-10


@dataclass(frozen=True)
class GridSampleCase(Case):
    """An image of ``shape`` sampled to ``size`` by a grid of ``kind``: forward, or both gradients."""

    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    kind: str
    backward: bool = False

    def facts(self) -> dict[str, Any]:
        sizes = {"shape": list(self.shape), "output_size": list(self.size), "grid": self.kind}
        return {**super().facts(), **sizes}

    @property
    def largest(self) -> int:
        """Number of elements of the largest tensor."""
        images, channels, height, width = self.shape
        return images * channels * max(height * width, self.size[0] * self.size[1])

    def elements(self, *, on_gpu: bool, quick: bool) -> int:
        return self.largest // 16 if quick else self.largest

    @property
    def label(self) -> str:
        images, channels, height, width = self.shape
        return f"N{images} C{channels} {height}x{width} to {self.size[0]}x{self.size[1]}, {self.kind}"

    def at(self, elements: int) -> GridSampleCase:
        images, channels, *sizes = (*self.shape, *self.size)
        largest = self.largest
        while largest > elements and (images > 1 or min(sizes) > 8):
            if images > 1:
                images, largest = images // 2, largest // 2
            else:
                sizes, largest = [size // 2 for size in sizes], largest // 4
        return replace(self, shape=(images, channels, sizes[0], sizes[1]), size=(sizes[2], sizes[3]))

    def problem(self, elements: int, stream: Stream, backend: str | None = None) -> GridSampleProblem:
        sized = self.at(elements)
        fields: dict[str, Any] = {
            "shape": sized.shape, "output_size": sized.size, "input_dtype": self.real,
        }  # fmt: skip
        preference = PlanPreference(backend=backend, precompile=False)
        plan: Plan[Any, Any]
        if self.backward:
            plan = GridSampleBackwardPlan.select(stream, GridSampleBackwardDescriptor(**fields), preference)
        else:
            plan = GridSamplePlan.select(stream, GridSampleDescriptor(**fields), preference)
        return GridSampleProblem(self, plan, stream)


@dataclass(frozen=True)
class GridSampleProblem(Problem):
    """A case at one size on one device."""

    case: GridSampleCase

    def draw(self) -> Tensors:
        """The grid, and pixels and gradients that are multiples of 1/8."""
        desc, device = self.plan.descriptor, self.stream.device
        generator = torch.Generator(device).manual_seed(22)
        tensors: Tensors = {"grid": self._grid(generator)}
        for name in ("input", "out") if not self.case.backward else ("input", "dout", "dinput", "dgrid"):
            shape, dtype = desc.expected(name)
            if name in self.plan.outputs:
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            else:
                eighths = torch.randint(-8, 9, shape, dtype=torch.int8, device=device, generator=generator)
                tensors[name] = eighths.to(dtype) / 8
        return tensors

    def _grid(self, generator: torch.Generator) -> torch.Tensor:
        desc, device = self.plan.descriptor, self.stream.device
        noise = torch.rand(desc.grid_shape, device=device, generator=generator)
        if self.case.kind == "random":
            grid = noise * 2.1 - 1.05
        elif self.case.kind == "one pixel":
            grid = noise / max(desc.image_size)
        else:
            slanted = torch.tensor([[[1.0, 0.2, 0.0], [0.0, 1.0, 0.0]]], device=device)
            size = [desc.batch, 1, *desc.output_size]
            grid = F.affine_grid(slanted.expand(desc.batch, 2, 3), size, align_corners=False)
            grid = grid + 0.02 * (noise - 0.5)
        return torch.round(grid / STEP) * STEP

    @property
    def special_inputs(self) -> tuple[str, ...]:
        return ("grid", "dout") if self.case.backward else ("grid", "input")

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        if not self.case.backward:
            return lambda: (grid_sample(tensors["input"], tensors["grid"]),)
        return self._gradients(grid_sample, tensors["input"], tensors["grid"], tensors["dout"])

    def _gradients(
        self, sample: Callable[..., torch.Tensor], image: torch.Tensor, grid: torch.Tensor, dout: torch.Tensor
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        known = image.detach().requires_grad_(), grid.detach().requires_grad_()
        out = sample(*known)
        return lambda: torch.autograd.grad(out, known, dout, retain_graph=True)

    def formula(self, tensors: Tensors) -> tuple[Callable[..., Any], list[Any]]:
        """torch's operator in float32, as users write it for an image of 16 bits with a float32 grid."""

        def forward(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return F.grid_sample(image.float(), grid, align_corners=False).to(image.dtype)

        if not self.case.backward:
            return forward, [tensors["input"], tensors["grid"]]

        def backward(dout: torch.Tensor, image: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
            dinput, dgrid = torch.ops.aten.grid_sampler_2d_backward(
                dout.float(), image.float(), grid, 0, 0, False, [True, True]
            )
            return dinput.to(image.dtype), dgrid

        return backward, [tensors["dout"], tensors["input"], tensors["grid"]]

    def torch_op(self, tensors: Tensors) -> Call:
        """F.grid_sample and its gradients, with the grid in the dtype of the image, as torch requires."""
        image, grid = tensors["input"], tensors["grid"].to(tensors["input"].dtype)
        if not self.case.backward:
            return lambda: F.grid_sample(image, grid, align_corners=False)
        if self.case.function:
            return self._gradients(_torch_sample, image, grid, tensors["dout"])
        dense = torch.ops.aten.grid_sampler_2d_backward
        return lambda: dense(tensors["dout"], image, grid, 0, 0, False, [True, True])


def _torch_sample(image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(image, grid, align_corners=False)


#: (shape of the image, output size, kind of grid).
_SHAPES: tuple[tuple[tuple[int, int, int, int], tuple[int, int], str], ...] = (
    ((8, 64, 256, 256), (256, 256), "smooth"),
    ((8, 64, 256, 256), (256, 256), "random"),
    ((16, 3, 512, 512), (512, 512), "smooth"),
    ((4, 256, 128, 128), (128, 128), "smooth"),
    ((64, 32, 64, 64), (300, 32), "random"),
)
_DEGENERATE = ((8, 64, 256, 256), (256, 256), "one pixel")
_ON_CPU = ((2, 32, 128, 128), (128, 128), "smooth")


def _case(
    shape: tuple[int, int, int, int], size: tuple[int, int], kind: str, real: torch.dtype, *, backward: bool,
    **more: Any,
) -> GridSampleCase:  # fmt: skip
    op = "grid_sample backward" if backward else "grid_sample"
    return GridSampleCase(op, kind, real, shape, size, kind, backward, **more)


def full_cases() -> list[GridSampleCase]:
    """Both directions of every shape in two dtypes, and the gradients with all samples on one pixel."""
    found = [
        _case(*shape, real, backward=backward)
        for backward in (False, True)
        for shape in _SHAPES
        for real in (torch.float32, torch.bfloat16)
    ]
    return [*found, _case(*_DEGENERATE, torch.float32, backward=True)]


def cpu_cases() -> list[GridSampleCase]:
    return [
        _case(*_ON_CPU, torch.float32, backward=backward, function=function)
        for backward in (False, True)
        for function in (False, True)
    ]


def quick_cases() -> list[GridSampleCase]:
    return [_case(*_SHAPES[0], torch.float32, backward=True)]
