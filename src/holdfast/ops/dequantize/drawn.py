"""Random problems of dequantize for ``holdfast bench --drawn``. Integer codes have no gradient."""

from __future__ import annotations

from functools import partial

import torch

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.core.training_step import COMPILED, EAGER, OURS, Step
from holdfast.ops.affine.random_layouts import CodesDrawn, drawn_channels
from holdfast.ops.dequantize.torch_op import dequantize


class DequantizeDrawn(CodesDrawn):
    """Values of int8 codes."""

    def steps(self, device: torch.device) -> dict[str, Step]:
        x, scale = self.values(device), self.scale(device)
        codes = torch.clamp(torch.round(x.float() / self.broadcast(scale)), -128, 127).to(torch.int8)

        def formula(codes: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
            return (codes.float() * self.broadcast(scale)).to(self.real)

        eager = Step(formula, (codes, scale), x)
        if not self.formula:
            eager = Step(torch.Tensor.dequantize, (self.quantizer(device)(x, scale),), x)
        ours = partial(dequantize, dtype=self.real, granularity=self.granularity)
        return {
            OURS: Step(ours, (codes, scale), x), EAGER: eager, COMPILED: Step(formula, (codes, scale), x)
        }  # fmt: skip


def _draw(sizes: RandomSizes) -> DequantizeDrawn:
    return DequantizeDrawn("dequantize", "", sizes.real, *drawn_channels(sizes))


DRAWS: dict[str, DrawCase] = {"dequantize": _draw}
