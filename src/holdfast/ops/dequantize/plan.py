"""Dequantize: codes back to real numbers, and the gradient with respect to codes carried as floats.

``y = (q - zero_point) * scale``, at four granularities that are one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.dtypes import Float, float_dtype
from holdfast.core.formats import Format, format_of
from holdfast.core.plan import Args, Operand
from holdfast.ops.affine.plan import (
    AffineDescriptor,
    AffinePlan,
    OverChannels,
    OverGroups,
    OverTensor,
    OverTokens,
    Scale,
    ZeroPoint,
    rounded_once,
)


@dataclass(frozen=True, kw_only=True)
class DequantizeBackwardDescriptor(AffineDescriptor):
    """``input_dtype`` is that of the codes; a floating one is the dtype of ``dq`` too."""

    input_dtype: torch.dtype = torch.int8
    output_dtype: torch.dtype = torch.float32

    @property
    def real(self) -> Float:
        return float_dtype(self.output_dtype, "output_dtype")

    @property
    def codes(self) -> Format:
        return format_of(self.input_dtype, "input_dtype")

    def expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape, self.gradient_of_codes if name == "dq" else self.output_dtype


@dataclass(frozen=True, kw_only=True)
class DequantizeDescriptor(DequantizeBackwardDescriptor):
    """``shape`` is that of ``y``; with ``packed`` the codes share bytes along the last axis."""

    packed: bool = False

    @property
    def is_packed(self) -> bool:
        return self.packed

    def expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.code_shape, self.code_storage) if name == "q" else (self.shape, self.output_dtype)


@dataclass(kw_only=True, slots=True, eq=False)
class DequantizeArgs(Args):
    """``q`` is read, ``y`` is written."""

    q: torch.Tensor
    scale: Scale
    y: torch.Tensor
    zero_point: ZeroPoint = None

    def operands(self) -> tuple[Operand, ...]:
        return self.y, self.q, self.scale, self.zero_point


@dataclass(kw_only=True, slots=True, eq=False)
class DequantizeBackwardArgs(Args):
    """``dy`` is read, ``dq`` is written, or with ``accumulate`` added to."""

    dy: torch.Tensor
    scale: Scale
    dq: torch.Tensor
    accumulate: bool = False

    def operands(self) -> tuple[Operand, ...]:
        return self.dq, self.dy, self.scale

    def options(self) -> tuple[Any, ...]:
        return (self.accumulate,)


class DequantizePlan(AffinePlan[DequantizeDescriptor, DequantizeArgs]):
    """y = (q - zero_point) * scale."""

    op = "dequantize"
    direction = "forward"
    outputs = ("y",)
    tensors = ("y", "q")
    kernels = {
        "cpu": "holdfast.ops.dequantize.cpu:Dequantize",
        "gpu": "holdfast.ops.dequantize.gpu:Dequantize",
        "reference": "holdfast.ops.dequantize.reference:Dequantize",
    }
    cases = "holdfast.ops.dequantize.cases"

    def _ulp(self) -> dict[str, float]:
        # Codes that are not whole numbers round once more, when the zero point is subtracted.
        real = self.descriptor.real
        subtracted = 2.0 ** (real.precision - real.compute.precision)
        return {"y": rounded_once(real, real.compute) + subtracted * self.descriptor.codes.carried}


class DequantizeBackwardPlan(AffinePlan[DequantizeBackwardDescriptor, DequantizeBackwardArgs]):
    """dq = dy * scale."""

    op = "dequantize"
    direction = "backward"
    outputs = ("dq",)
    tensors = ("dq", "dy")
    kernels = {
        "cpu": "holdfast.ops.dequantize.cpu:DequantizeBackward",
        "gpu": "holdfast.ops.dequantize.gpu:DequantizeBackward",
        "reference": "holdfast.ops.dequantize.reference:DequantizeBackward",
    }
    cases = "holdfast.ops.dequantize.cases"

    def _ulp(self) -> dict[str, float]:
        desc = self.descriptor
        return {"dq": rounded_once(float_dtype(desc.gradient_of_codes, "dq"), desc.real.compute)}


@dataclass(frozen=True, kw_only=True)
class DequantizePerTensorDescriptor(OverTensor, DequantizeDescriptor):
    """Dequantize, one scale for the whole tensor."""


DequantizePerTensorArgs = DequantizeArgs


class DequantizePerTensorPlan(DequantizePlan):
    """Dequantize, one scale for the whole tensor."""

    Descriptor = DequantizePerTensorDescriptor
    Args = DequantizeArgs


@dataclass(frozen=True, kw_only=True)
class DequantizePerTensorBackwardDescriptor(OverTensor, DequantizeBackwardDescriptor):
    """DequantizeBackward, one scale for the whole tensor."""


DequantizePerTensorBackwardArgs = DequantizeBackwardArgs


class DequantizePerTensorBackwardPlan(DequantizeBackwardPlan):
    """DequantizeBackward, one scale for the whole tensor."""

    Descriptor = DequantizePerTensorBackwardDescriptor
    Args = DequantizeBackwardArgs


@dataclass(frozen=True, kw_only=True)
class DequantizePerChannelDescriptor(OverChannels, DequantizeDescriptor):
    """Dequantize, one scale for each index of ``axis``."""


DequantizePerChannelArgs = DequantizeArgs


class DequantizePerChannelPlan(DequantizePlan):
    """Dequantize, one scale for each index of ``axis``."""

    Descriptor = DequantizePerChannelDescriptor
    Args = DequantizeArgs


@dataclass(frozen=True, kw_only=True)
class DequantizePerChannelBackwardDescriptor(OverChannels, DequantizeBackwardDescriptor):
    """DequantizeBackward, one scale for each index of ``axis``."""


DequantizePerChannelBackwardArgs = DequantizeBackwardArgs


class DequantizePerChannelBackwardPlan(DequantizeBackwardPlan):
    """DequantizeBackward, one scale for each index of ``axis``."""

    Descriptor = DequantizePerChannelBackwardDescriptor
    Args = DequantizeBackwardArgs


@dataclass(frozen=True, kw_only=True)
class DequantizePerTokenDescriptor(OverTokens, DequantizeDescriptor):
    """Dequantize, one scale for each row of the last axis."""


DequantizePerTokenArgs = DequantizeArgs


class DequantizePerTokenPlan(DequantizePlan):
    """Dequantize, one scale for each row of the last axis."""

    Descriptor = DequantizePerTokenDescriptor
    Args = DequantizeArgs


@dataclass(frozen=True, kw_only=True)
class DequantizePerTokenBackwardDescriptor(OverTokens, DequantizeBackwardDescriptor):
    """DequantizeBackward, one scale for each row of the last axis."""


DequantizePerTokenBackwardArgs = DequantizeBackwardArgs


class DequantizePerTokenBackwardPlan(DequantizeBackwardPlan):
    """DequantizeBackward, one scale for each row of the last axis."""

    Descriptor = DequantizePerTokenBackwardDescriptor
    Args = DequantizeBackwardArgs


@dataclass(frozen=True, kw_only=True)
class DequantizePerGroupDescriptor(OverGroups, DequantizeDescriptor):
    """Dequantize, one scale for each ``group_size`` neighbours along ``axis``."""


DequantizePerGroupArgs = DequantizeArgs


class DequantizePerGroupPlan(DequantizePlan):
    """Dequantize, one scale for each ``group_size`` neighbours along ``axis``."""

    Descriptor = DequantizePerGroupDescriptor
    Args = DequantizeArgs


@dataclass(frozen=True, kw_only=True)
class DequantizePerGroupBackwardDescriptor(OverGroups, DequantizeBackwardDescriptor):
    """DequantizeBackward, one scale for each ``group_size`` neighbours along ``axis``."""


DequantizePerGroupBackwardArgs = DequantizeBackwardArgs


class DequantizePerGroupBackwardPlan(DequantizeBackwardPlan):
    """DequantizeBackward, one scale for each ``group_size`` neighbours along ``axis``."""

    Descriptor = DequantizePerGroupBackwardDescriptor
    Args = DequantizeBackwardArgs
