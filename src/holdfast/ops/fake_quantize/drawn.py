"""Random problems of fake_quantize for ``holdfast bench --drawn``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from holdfast.core import formats
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerToken
from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.core.training_step import Step, StepCase
from holdfast.ops.affine.benchmark import broadcastable
from holdfast.ops.affine.random_layouts import drawn_channels, layout_name
from holdfast.ops.fake_quantize.models import FakeQuantizeModel, Functions, steps_of
from holdfast.ops.fake_quantize.torch_op import fake_quantize

#: The range of int8 codes.
LEAST, MOST = -128, 127


@dataclass(frozen=True)
class FakeQuantizeDrawn(StepCase):
    """A tensor of ``shape`` with int8 codes, per tensor or per channel. ``scales``: "fixed" or "learned"."""

    shape: tuple[int, ...]
    granularity: Granularity
    scales: str

    @property
    def label(self) -> str:
        return f"{layout_name(self.shape, self.granularity)}, scales {self.scales}"

    def steps(self, device: torch.device) -> dict[str, Step]:
        """About one in twenty values is out of range."""
        generator = torch.Generator(device).manual_seed(31)
        x, dout = (
            torch.randn(self.shape, device=device, generator=generator).to(self.real) for _ in range(2)
        )
        spread = torch.rand(self.granularity.view(self.shape).scale_shape, device=device, generator=generator)
        scale = (1.5 + spread) / MOST
        inputs = x.requires_grad_(), scale.requires_grad_(self.scales == "learned")
        return steps_of(self._functions(scale), inputs, dout)

    def _functions(self, scale: torch.Tensor) -> Functions:
        granularity, learned = self.granularity, self.scales == "learned"
        # The learnable operator of torch has scales of one axis.
        zero = torch.zeros_like(scale.view(-1), dtype=torch.float32 if learned else torch.int32)
        learnable = torch.ops.aten._fake_quantize_learnable_per_tensor_affine
        learnable_channels = torch.ops.aten._fake_quantize_learnable_per_channel_affine

        def eager(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            if isinstance(granularity, PerChannel):
                of_channels = learnable_channels if learned else torch.fake_quantize_per_channel_affine
                return of_channels(x, scale, zero, granularity.axis, LEAST, MOST)
            of_tensor = learnable if learned else torch.fake_quantize_per_tensor_affine
            return of_tensor(x, scale.view(1), zero, LEAST, MOST)

        def formula(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            s = broadcastable(scale, granularity, x.dim())
            t = x.float() / s
            r = torch.round(t).detach()
            inside = (r >= LEAST) & (r <= MOST)
            codes = torch.where(inside, t + (r - t).detach(), torch.clamp(r, LEAST, MOST))
            return (codes * s).to(x.dtype)

        return partial(fake_quantize, granularity=granularity), eager, formula


def drawn_rows(sizes: RandomSizes) -> tuple[tuple[int, int], Granularity]:
    """The shape of a matrix with scales of its rows, or of groups in its rows."""
    half = max(sizes.elements // 2, 1)
    if sizes.chance(2):
        columns = sizes.size(1, min(half, 16384))
        return (max(half // columns, 1), columns), PerToken()
    group = sizes.one_of((32, 64, 128))
    columns = group * sizes.size(1, min(max(half // group, 1), 128))
    return (max(half // columns, 1), columns), PerGroup(group)


def _draw(sizes: RandomSizes, op: str, scales: str) -> StepCase:
    if sizes.chance(4):
        codes = sizes.one_of((torch.int8, formats.INT4.torch))
        return FakeQuantizeModel(op, "", sizes.real, *drawn_rows(sizes), codes, scales)
    return FakeQuantizeDrawn(op, "", sizes.real, *drawn_channels(sizes), scales)


DRAWS: dict[str, DrawCase] = {
    op: partial(_draw, op=op, scales=scales)
    for op, scales in (("fake_quantize", "fixed"), ("fake_quantize learned", "learned"))
}
