"""The plan of dynamic_quantize: scales computed from the data, and the codes for these scales.

The bits are those of choose_scale followed by quantize. If a kernel can hold all elements of a scale, it
reads them once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.declaration import Output, arguments
from holdfast.core.plan import Args
from holdfast.ops.choose_scale.plan import FromDataDescriptor, FromDataPlan, scale_error
from holdfast.ops.quantize.plan import QuantizeDescriptor


@dataclass(frozen=True, kw_only=True)
class DynamicQuantizeDescriptor(FromDataDescriptor, QuantizeDescriptor):
    """``output_dtype`` is the dtype of the codes. ``packed`` stores several 2-bit or 4-bit codes per byte."""


@arguments
class DynamicQuantizeArgs(Args):
    """Reads ``x``, writes ``q``, ``scale`` and, unless the scale is symmetric, ``zero_point``."""

    x: torch.Tensor
    q: Output
    scale: Output
    zero_point: Output | None = None


class DynamicQuantizePlan(FromDataPlan[DynamicQuantizeDescriptor, DynamicQuantizeArgs]):
    """q = clamp(rint(x / scale) + zero_point, q_min, q_max), with the scale that choose_scale gives for x."""

    def ulp(self) -> dict[str, float]:
        # The codes are those of quantize with the stored scale.
        return {"q": 1.0, **scale_error(self.descriptor)}
