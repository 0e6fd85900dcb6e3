"""Random problems of interpolate for ``holdfast bench --drawn``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.core.training_step import COMPILED, EAGER, OURS, Step, StepCase
from holdfast.ops.interpolate.torch_op import interpolate

#: How often each mode is drawn, by the number of axes that are resized.
_MODES = {
    1: {"linear": 1, "nearest": 1},
    2: {"bilinear": 4, "nearest": 2, "nearest-exact": 1, "bicubic": 2, "area": 1},
    3: {"trilinear": 2, "nearest": 1, "area": 1},
}
#: Modes with antialias, which is drawn for every third one.
_ANTIALIAS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class InterpolateDrawn(StepCase):
    """A tensor of ``shape`` resized to ``size``."""

    shape: tuple[int, ...]
    size: tuple[int, ...]
    mode: str
    antialias: bool

    @property
    def label(self) -> str:
        images, channels, *image = self.shape
        old, new = ("x".join(map(str, sizes)) for sizes in (image, self.size))
        return f"N{images} C{channels} {old} to {new} {self.mode}{', antialias' * self.antialias}"

    def steps(self, device: torch.device) -> dict[str, Step]:
        generator = torch.Generator(device).manual_seed(29)
        x, dout = (
            torch.randn(shape, device=device, generator=generator).to(self.real)
            for shape in (self.shape, (*self.shape[:2], *self.size))
        )
        options: dict[str, Any] = {"size": self.size, "mode": self.mode, "antialias": self.antialias}
        inputs = (x.requires_grad_(),)
        eager = Step(partial(F.interpolate, **options), inputs, dout)
        return {OURS: Step(partial(interpolate, **options), inputs, dout), EAGER: eager, COMPILED: eager}


def _draw(sizes: RandomSizes) -> InterpolateDrawn:
    axes = sizes.one_of((1, 2, 3), (1, 4, 1))
    mode = sizes.one_of(list(_MODES[axes]), list(_MODES[axes].values()))
    channels = sizes.size(1, min(512, max(sizes.elements // 16, 1)))
    images = sizes.size(1, min(64, max(sizes.elements // channels // 4, 1)))
    large = sizes.image(max(sizes.elements // channels // images, 1), axes)
    if sizes.chance(2):
        factor = sizes.one_of((2, 4, 8), (4, 2, 1))
        small = tuple(max(size // factor, 1) for size in large)
        large = tuple(factor * size for size in small)
    else:
        small = tuple(sizes.size(max(size // 8, 1), size) for size in large)
    image, size = (large, small) if sizes.chance(2) else (small, large)
    # torch 2.13 gives a wrong result for an output of width 1 with antialias on the CPU.
    antialias = mode in _ANTIALIAS and size[-1] > 1 and sizes.chance(3)
    return InterpolateDrawn("interpolate", "", sizes.real, (images, channels, *image), size, mode, antialias)


DRAWS: dict[str, DrawCase] = {"interpolate": _draw}
