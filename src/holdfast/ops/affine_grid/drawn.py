"""Random problems of affine_grid for ``holdfast bench --drawn``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.core.training_step import COMPILED, EAGER, OURS, Step, StepCase
from holdfast.ops.affine_grid.torch_op import affine_grid


@dataclass(frozen=True)
class AffineGridDrawn(StepCase):
    """``images`` grids of ``size``."""

    images: int
    size: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"N{self.images} {'x'.join(map(str, self.size))}"

    def steps(self, device: torch.device) -> dict[str, Step]:
        generator = torch.Generator(device).manual_seed(30)
        axes = len(self.size)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).to(self.real)

        theta = normal(self.images, axes, axes + 1).requires_grad_()
        dout = normal(self.images, *self.size, axes)
        options: dict[str, Any] = {"size": [self.images, 1, *self.size], "align_corners": False}
        eager = Step(partial(F.affine_grid, **options), (theta,), dout)
        return {OURS: Step(partial(affine_grid, **options), (theta,), dout), EAGER: eager, COMPILED: eager}


def _draw(sizes: RandomSizes) -> AffineGridDrawn:
    axes = sizes.one_of((2, 3), (3, 1))
    points = max(sizes.elements // axes, 1)
    images = sizes.size(1, min(64, max(math.isqrt(points), 1)))
    return AffineGridDrawn("affine_grid", "", sizes.real, images, sizes.image(max(points // images, 1), axes))


DRAWS: dict[str, DrawCase] = {"affine_grid": _draw}
