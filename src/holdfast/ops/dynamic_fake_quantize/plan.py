"""Plans of dynamic_fake_quantize: fake quantization with scales computed from the data, and its gradient.

The bits are those of choose_scale followed by fake_quantize. If a kernel can hold all elements of a scale, it
reads them once. The gradient treats the scale as a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.declaration import Output, arguments
from holdfast.core.plan import Args
from holdfast.ops.affine.plan import one_rounding_ulp
from holdfast.ops.choose_scale.plan import FromDataDescriptor, FromDataPlan, ScaleOfData, scale_error
from holdfast.ops.fake_quantize.plan import (
    EstimatedDescriptor,
    FakeCodesDescriptor,
    FakeCodesPlan,
    FakeQuantizeBackwardArgs,
    SteKind,
    estimator_ulp,
)


@dataclass(frozen=True, kw_only=True)
class DynamicFakeQuantizeDescriptor(FromDataDescriptor, FakeCodesDescriptor):
    """Real numbers rounded to codes that are not stored: codes of ``dtype``, or q_min to q_max."""


@dataclass(frozen=True, kw_only=True)
class DynamicFakeQuantizeBackwardDescriptor(EstimatedDescriptor):
    """The gradient with respect to x, by the estimator ``ste``. ``symmetric`` is that of the forward."""

    symmetric: bool = True

    @property
    def covers_data(self) -> bool:
        """Whether the estimator is IN_RANGE and all finite data is in range, as for a symmetric scale.

        Such a scale is the largest magnitude divided by a code. Its rounding moves a quotient by less than
        half a code. With a zero point, which is rounded too, the code of an end can be out of range.
        """
        return self.symmetric and self.ste is SteKind.IN_RANGE

    def validate(self) -> None:
        super().validate()
        ScaleOfData(symmetric=self.symmetric, narrow=False).validate_ends(*self.code_range, self.codes)


@arguments
class DynamicFakeQuantizeArgs(Args):
    """Reads ``x``, writes ``y``, ``scale`` and, unless the scale is symmetric, ``zero_point``."""

    x: torch.Tensor
    y: Output
    scale: Output
    zero_point: Output | None = None


@arguments
class DynamicFakeQuantizeBackwardArgs(FakeQuantizeBackwardArgs):
    """``scale`` and ``zero_point`` are those that the forward wrote for ``x``."""


class DynamicFakeQuantizePlan(
    FromDataPlan[DynamicFakeQuantizeDescriptor, DynamicFakeQuantizeArgs],
    FakeCodesPlan[DynamicFakeQuantizeDescriptor, DynamicFakeQuantizeArgs],
):
    """y = fake_quantize(x, scale, zero_point), with the scale that choose_scale gives for x."""

    def ulp(self) -> dict[str, float]:
        # Relative to the code of quantize with the stored scale, times that scale.
        real = self.descriptor.real
        return {"y": one_rounding_ulp(real, real.compute), **scale_error(self.descriptor)}


class DynamicFakeQuantizeBackwardPlan(
    FakeCodesPlan[DynamicFakeQuantizeBackwardDescriptor, DynamicFakeQuantizeBackwardArgs]
):
    """dx of fake_quantize, by the straight-through estimator, with the scale that the forward wrote for x.

    With a symmetric scale and the estimator IN_RANGE: dx = dy where scale is finite, or scale is infinite and
    x is finite; else 0.
    """

    def mode(self) -> str:
        return f"{super().mode()}, {self.descriptor.ste}"

    def bytes_moved(self) -> int:
        desc = self.descriptor
        moved = 2 * math.prod(desc.shape) * desc.input_dtype.itemsize
        if desc.ste is SteKind.IDENTITY:
            return moved
        return moved + 4 * desc.view.scale_count if desc.covers_data else super().bytes_moved()

    def ulp(self) -> dict[str, float]:
        return {"dx": estimator_ulp(self.descriptor.ste, self.descriptor.real)}

    def _refused_operand(self, name: str, operand: Any) -> str:
        if name == "zero_point" and self.descriptor.symmetric and operand is not None:
            return "a symmetric scale has no zero_point; leave it None."
        return super()._refused_operand(name, operand)
