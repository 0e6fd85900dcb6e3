"""Random problems of quantize for ``holdfast bench --drawn``. It has no gradient."""

from __future__ import annotations

from functools import partial

import torch

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.core.training_step import COMPILED, EAGER, OURS, Step
from holdfast.ops.affine.random_layouts import CodesDrawn, drawn_channels
from holdfast.ops.quantize.torch_op import quantize


class QuantizeDrawn(CodesDrawn):
    """int8 codes of a tensor."""

    def steps(self, device: torch.device) -> dict[str, Step]:
        x, scale = self.values(device), self.scale(device)

        def formula(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
            return torch.clamp(torch.round(x.float() / self.broadcast(scale)), -128, 127).to(torch.int8)

        eager = formula if self.formula else self.quantizer(device)
        functions = {OURS: partial(quantize, granularity=self.granularity), EAGER: eager, COMPILED: formula}
        return {name: Step(function, (x, scale), x) for name, function in functions.items()}


def _draw(sizes: RandomSizes) -> QuantizeDrawn:
    return QuantizeDrawn("quantize", "", sizes.real, *drawn_channels(sizes))


DRAWS: dict[str, DrawCase] = {"quantize": _draw}
