"""Training steps of grid_sample on the shapes of warps, look-ups, deformable attention and registration."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.training_step import COMPILED, EAGER, OURS, ModelCase, Step
from holdfast.ops.grid_sample.torch_op import grid_sample

#: Standard deviation of the entries of an affine map from identity.
MOVED = 0.03
#: Half the range of the noise that is added to coordinates.
NOISE = 0.01
#: Standard deviation of samples from their centre, in pixels.
SPREAD = 2.0
#: Sizes are not halved below this.
LEAST = 8


@dataclass(frozen=True)
class GridSampleModel(ModelCase):
    """An image of ``shape`` sampled to ``size`` by a grid of ``kind``, with the gradients ``wanted``."""

    shape: tuple[int, ...]
    size: tuple[int, ...]
    kind: str
    wanted: tuple[str, ...] = ("input", "grid")
    mode: str = "bilinear"
    padding: str = "zeros"

    @property
    def label(self) -> str:
        images, channels, *image = self.shape
        sizes = [f"N{images} C{channels} {_times(image)}"]
        if tuple(image) != self.size:
            sizes.append(f"to {_times(self.size)}")
        alone = f", d{self.wanted[0]} alone" if len(self.wanted) == 1 else ""
        modes = "".join(
            f", {mode}" for mode in (self.mode, self.padding) if mode not in ("bilinear", "zeros")
        )
        return f"{' '.join(sizes)} {self.kind}{modes}{alone}"

    @property
    def largest(self) -> int:
        images, channels, *image = self.shape
        return images * channels * max(math.prod(image), math.prod(self.size))

    def at(self, elements: int) -> GridSampleModel:
        found = self
        while found.largest > elements:
            images, channels, *image = found.shape
            if images > 1:
                smaller = replace(found, shape=(images // 2, channels, *image))
            else:
                smaller = replace(found, shape=(1, channels, *_halved(image)), size=_halved(found.size))
            if smaller == found:
                break
            found = smaller
        return found

    def steps(self, device: torch.device) -> dict[str, Step]:
        generator = torch.Generator(device).manual_seed(23)
        image = torch.randn(self.shape, device=device, generator=generator).to(self.real)
        dout = torch.randn((*self.shape[:2], *self.size), device=device, generator=generator).to(self.real)
        grid = self._grid(device, generator)
        image.requires_grad_("input" in self.wanted)
        grid.requires_grad_("grid" in self.wanted)
        # torch requires the grid in the dtype of the image.
        narrow = grid.detach().to(self.real).requires_grad_(grid.requires_grad)
        modes: dict[str, Any] = {"mode": self.mode, "padding_mode": self.padding, "align_corners": False}
        widened = Step(partial(_sample_in_float32, **modes), (image, grid), dout)
        eager = Step(partial(F.grid_sample, **modes), (image, narrow), dout)
        # torch's 16-bit kernel on the CPU crashes for images of more than 2**15 pixels.
        unusable = device.type == "cpu" and self.real.itemsize == 2
        return {
            OURS: Step(partial(grid_sample, **modes), (image, grid), dout),
            EAGER: widened if unusable else eager,
            COMPILED: widened,
        }

    def _grid(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        """Coordinates in float32. The last axis is x, y and, for a volume, z."""
        batch, axes = self.shape[0], len(self.size)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator)

        def uniform(*shape: int) -> torch.Tensor:
            return 2 * torch.rand(shape, device=device, generator=generator) - 1

        if self.kind == "random":
            return 1.05 * uniform(batch, *self.size, axes)
        if self.kind.startswith("affine"):
            theta = torch.eye(axes, axes + 1, device=device) + MOVED * normal(batch, axes, axes + 1)
            grid = F.affine_grid(theta, [batch, 1, *self.size], align_corners=False)
            return grid + NOISE * uniform(*grid.shape) if "noise" in self.kind else grid
        pixel = torch.tensor([2 / size for size in reversed(self.shape[2:])], device=device)
        if self.kind == "windows":  # of whole pixels around one centre for each image
            rows, columns = self.size
            down = torch.arange(rows, device=device) - rows // 2
            across = torch.arange(columns, device=device) - columns // 2
            window = torch.stack(torch.meshgrid(across, down, indexing="xy"), -1)
            return uniform(batch, 1, 1, axes) + window * pixel
        return uniform(batch, self.size[0], 1, axes) + SPREAD * normal(batch, *self.size, axes) * pixel


def _sample_in_float32(image: torch.Tensor, grid: torch.Tensor, **modes: Any) -> torch.Tensor:
    """torch's operator for an image of 16 bits with a float32 grid."""
    return F.grid_sample(image.float(), grid, **modes).to(image.dtype)


def _times(sizes: list[int] | tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _halved(sizes: list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(size // 2, min(size, LEAST)) for size in sizes)


#: (model, shape of the image, output size, kind of grid).
_SHAPES: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...] = (
    ("spatial transformer", (16, 3, 512, 512), (512, 512), "affine"),
    ("spatial transformer", (16, 3, 512, 512), (512, 512), "affine + noise"),
    ("depth warp", (4, 3, 480, 640), (480, 640), "affine"),
    ("feature warp", (8, 16, 512, 512), (512, 512), "affine"),
    ("feature warp", (8, 64, 256, 256), (256, 256), "affine"),
    ("feature warp", (8, 64, 256, 256), (256, 256), "random"),
    ("feature warp", (4, 256, 128, 128), (128, 128), "affine"),
    ("RAFT look-up", (7040, 1, 55, 128), (9, 9), "windows"),
    ("Deformable-DETR encoder", (64, 32, 100, 134), (13294, 4), "around centres"),
    ("Deformable-DETR decoder", (64, 32, 100, 134), (300, 4), "around centres"),
    ("tri-plane", (3, 32, 512, 512), (1, 2**18), "random"),
    ("volumetric registration", (1, 1, 160, 192, 224), (160, 192, 224), "affine"),
    ("volumetric registration", (1, 1, 160, 192, 224), (160, 192, 224), "affine + noise"),
    ("volumetric registration", (1, 3, 160, 192, 224), (160, 192, 224), "affine"),
    ("volumetric registration", (1, 3, 160, 192, 224), (160, 192, 224), "affine + noise"),
    ("volumetric registration", (1, 32, 80, 96, 112), (80, 96, 112), "affine"),
    ("volumetric registration", (1, 32, 80, 96, 112), (80, 96, 112), "affine + noise"),
)


def model_cases() -> list[GridSampleModel]:
    """Every shape in two dtypes; each gradient alone for the first one in float32."""
    made = [_case(*shape, real) for real in (torch.float32, torch.bfloat16) for shape in _SHAPES]
    alone = [replace(made[0], wanted=(name,)) for name in made[0].wanted]
    return [made[0], *alone, *made[1:]]


def _case(
    model: str, shape: tuple[int, ...], size: tuple[int, ...], kind: str, real: torch.dtype
) -> GridSampleModel:
    return GridSampleModel("grid_sample", model, real, shape, size, kind)
