"""Quantize: real numbers to codes, and the straight-through gradient back.

``q = clamp(rint(x / scale) + zero_point, q_min, q_max)``, at four granularities that are one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.operands import Operand
from holdfast.core.plan import Args
from holdfast.ops.affine.plan import (
    AffinePlan,
    IntoCodes,
    OverChannels,
    OverGroups,
    OverTensor,
    OverTokens,
    Scale,
    StraightThroughArgs,
    ZeroPoint,
    rounded_once,
)


@dataclass(frozen=True, kw_only=True)
class QuantizeBackwardDescriptor(IntoCodes):
    """``output_dtype`` is what the forward made; a floating one is the dtype of ``dy`` too."""

    q_min: int | None = None
    q_max: int | None = None

    def expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape, self.gradient_of_codes if name == "dy" else self.input_dtype


@dataclass(frozen=True, kw_only=True)
class QuantizeDescriptor(QuantizeBackwardDescriptor):
    """``packed`` puts 2-bit and 4-bit codes side by side in bytes, along the last axis, low bits first."""

    packed: bool = False

    @property
    def is_packed(self) -> bool:
        return self.packed

    def expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.code_shape, self.code_storage) if name == "q" else (self.shape, self.input_dtype)


@dataclass(kw_only=True, slots=True, eq=False)
class QuantizeArgs(Args):
    """``x`` is read, ``q`` is written."""

    x: torch.Tensor
    scale: Scale
    q: torch.Tensor
    zero_point: ZeroPoint = None

    def operands(self) -> tuple[Operand, ...]:
        return self.q, self.x, self.scale, self.zero_point


@dataclass(kw_only=True, slots=True, eq=False)
class QuantizeBackwardArgs(StraightThroughArgs):
    """Those of every straight-through estimator."""


class QuantizePlan(AffinePlan[QuantizeDescriptor, QuantizeArgs]):
    """q = clamp(rint(x / scale) + zero_point, q_min, q_max); NaN takes the code of 0.0."""

    op = "quantize"
    direction = "forward"
    outputs = ("q",)
    tensors = ("q", "x")
    kernels = {
        "cpu": "holdfast.ops.quantize.cpu:Quantize",
        "gpu": "holdfast.ops.quantize.gpu:Quantize",
        "reference": "holdfast.ops.quantize.reference:Quantize",
    }
    cases = "holdfast.ops.quantize.cases"

    def _ulp(self) -> dict[str, float]:
        # The quotient is rounded before it is rounded to a code: beside a tie, that can cross it.
        return {"q": 1.0}


class QuantizeBackwardPlan(AffinePlan[QuantizeBackwardDescriptor, QuantizeBackwardArgs]):
    """dx = dy / scale where q_min <= rint(x / scale) + zero_point <= q_max, else 0."""

    op = "quantize"
    direction = "backward"
    outputs = ("dx",)
    tensors = ("dx", "dy", "x")
    kernels = {
        "cpu": "holdfast.ops.quantize.cpu:QuantizeBackward",
        "gpu": "holdfast.ops.quantize.gpu:QuantizeBackward",
        "reference": "holdfast.ops.quantize.reference:QuantizeBackward",
    }
    cases = "holdfast.ops.quantize.cases"

    def _ulp(self) -> dict[str, float]:
        real = self.descriptor.real
        return {"dx": rounded_once(real, real.compute)}


@dataclass(frozen=True, kw_only=True)
class QuantizePerTensorDescriptor(OverTensor, QuantizeDescriptor):
    """Quantize, one scale for the whole tensor."""


QuantizePerTensorArgs = QuantizeArgs


class QuantizePerTensorPlan(QuantizePlan):
    """Quantize, one scale for the whole tensor."""

    Descriptor = QuantizePerTensorDescriptor
    Args = QuantizeArgs


@dataclass(frozen=True, kw_only=True)
class QuantizePerTensorBackwardDescriptor(OverTensor, QuantizeBackwardDescriptor):
    """QuantizeBackward, one scale for the whole tensor."""


QuantizePerTensorBackwardArgs = QuantizeBackwardArgs


class QuantizePerTensorBackwardPlan(QuantizeBackwardPlan):
    """QuantizeBackward, one scale for the whole tensor."""

    Descriptor = QuantizePerTensorBackwardDescriptor
    Args = QuantizeBackwardArgs


@dataclass(frozen=True, kw_only=True)
class QuantizePerChannelDescriptor(OverChannels, QuantizeDescriptor):
    """Quantize, one scale for each index of ``axis``."""


QuantizePerChannelArgs = QuantizeArgs


class QuantizePerChannelPlan(QuantizePlan):
    """Quantize, one scale for each index of ``axis``."""

    Descriptor = QuantizePerChannelDescriptor
    Args = QuantizeArgs


@dataclass(frozen=True, kw_only=True)
class QuantizePerChannelBackwardDescriptor(OverChannels, QuantizeBackwardDescriptor):
    """QuantizeBackward, one scale for each index of ``axis``."""


QuantizePerChannelBackwardArgs = QuantizeBackwardArgs


class QuantizePerChannelBackwardPlan(QuantizeBackwardPlan):
    """QuantizeBackward, one scale for each index of ``axis``."""

    Descriptor = QuantizePerChannelBackwardDescriptor
    Args = QuantizeBackwardArgs


@dataclass(frozen=True, kw_only=True)
class QuantizePerTokenDescriptor(OverTokens, QuantizeDescriptor):
    """Quantize, one scale for each row of the last axis."""


QuantizePerTokenArgs = QuantizeArgs


class QuantizePerTokenPlan(QuantizePlan):
    """Quantize, one scale for each row of the last axis."""

    Descriptor = QuantizePerTokenDescriptor
    Args = QuantizeArgs


@dataclass(frozen=True, kw_only=True)
class QuantizePerTokenBackwardDescriptor(OverTokens, QuantizeBackwardDescriptor):
    """QuantizeBackward, one scale for each row of the last axis."""


QuantizePerTokenBackwardArgs = QuantizeBackwardArgs


class QuantizePerTokenBackwardPlan(QuantizeBackwardPlan):
    """QuantizeBackward, one scale for each row of the last axis."""

    Descriptor = QuantizePerTokenBackwardDescriptor
    Args = QuantizeBackwardArgs


@dataclass(frozen=True, kw_only=True)
class QuantizePerGroupDescriptor(OverGroups, QuantizeDescriptor):
    """Quantize, one scale for each ``group_size`` neighbours along ``axis``."""


QuantizePerGroupArgs = QuantizeArgs


class QuantizePerGroupPlan(QuantizePlan):
    """Quantize, one scale for each ``group_size`` neighbours along ``axis``."""

    Descriptor = QuantizePerGroupDescriptor
    Args = QuantizeArgs


@dataclass(frozen=True, kw_only=True)
class QuantizePerGroupBackwardDescriptor(OverGroups, QuantizeBackwardDescriptor):
    """QuantizeBackward, one scale for each ``group_size`` neighbours along ``axis``."""


QuantizePerGroupBackwardArgs = QuantizeBackwardArgs


class QuantizePerGroupBackwardPlan(QuantizeBackwardPlan):
    """QuantizeBackward, one scale for each ``group_size`` neighbours along ``axis``."""

    Descriptor = QuantizePerGroupBackwardDescriptor
    Args = QuantizeBackwardArgs
