"""Random layouts of tensors with scales, and problems of quantize and dequantize, for ``bench --drawn``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.core.granularity import Granularity, PerChannel, PerTensor
from holdfast.core.random_sizes import RandomSizes
from holdfast.core.training_step import StepCase
from holdfast.ops.affine.benchmark import broadcastable


def drawn_channels(sizes: RandomSizes) -> tuple[tuple[int, ...], Granularity]:
    """A random shape of a weight or of activations, with one scale or a scale for each channel."""
    half = max(sizes.elements // 2, 1)
    channels = sizes.size(1, min(half, 4096))
    rest = max(half // channels, 1)
    if sizes.chance(2):  # a matrix
        return (channels, rest), sizes.one_of((PerTensor(), PerChannel(0), PerChannel(1)))
    images = sizes.size(1, min(64, rest))
    shape = (images, channels, *sizes.image(max(rest // images, 1), 2))
    return shape, sizes.one_of((PerTensor(), PerChannel(0), PerChannel(1)))


def layout_name(shape: tuple[int, ...], granularity: Granularity) -> str:
    shared = f"per channel {granularity.axis}" if isinstance(granularity, PerChannel) else "per tensor"
    return f"{'x'.join(map(str, shape))} {shared}"


@dataclass(frozen=True)
class CodesDrawn(StepCase):
    """A random problem of quantize or dequantize with int8 codes.

    The scale is a number or one for each channel. torch's operators are for float32; the peer of other dtypes
    is the plain formula.
    """

    shape: tuple[int, ...]
    granularity: Granularity

    @property
    def formula(self) -> bool:
        """Whether the peer is the plain formula."""
        return self.real != torch.float32

    @property
    def label(self) -> str:
        peer = ", against the formula" if self.formula else ""
        return f"{layout_name(self.shape, self.granularity)}{peer}"

    def values(self, device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(32)
        return torch.randn(self.shape, device=device, generator=generator).to(self.real)

    def scale(self, device: torch.device) -> torch.Tensor | float:
        if isinstance(self.granularity, PerTensor):
            return 2 / 127
        generator = torch.Generator(device).manual_seed(33)
        shape = self.granularity.view(self.shape).scale_shape
        return (1.5 + torch.rand(shape, device=device, generator=generator)) / 127

    def broadcast(self, scale: torch.Tensor | float) -> torch.Tensor | float:
        if isinstance(scale, float):
            return scale
        return broadcastable(scale, self.granularity, len(self.shape))

    def quantizer(self, device: torch.device) -> Callable[..., torch.Tensor]:
        """torch's quantization to a quantized tensor."""
        if not isinstance(self.granularity, PerChannel):
            return lambda x, scale: torch.quantize_per_tensor(x, scale, 0, torch.qint8)
        axis = self.granularity.axis
        zero = torch.zeros(self.shape[axis], dtype=torch.int32, device=device)
        return lambda x, scale: torch.quantize_per_channel(x, scale, zero, axis, torch.qint8)
