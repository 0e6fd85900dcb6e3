"""The plan of lsq_init: the initial scale of LSQ, ``2 * mean(|x|) / sqrt(q_max)`` over a scale's elements.

It is the tree sum of the magnitudes times ``2 / (n * sqrt(q_max))``, a factor that is computed in float64 and
rounded to the compute type once. No scale is below the floor of ``choose_scale``. A NaN makes the scale NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from holdfast.core.contract import error_in_ulp
from holdfast.core.declaration import Output, arguments
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.formats import LARGEST_CODE
from holdfast.core.plan import Args
from holdfast.core.segments import segment_length
from holdfast.ops.choose_scale.plan import SCALE_FLOOR, FromDataPlan, PerScaleDescriptor
from holdfast.ops.tree_sum.blocks import rounding_errors


@dataclass(frozen=True, kw_only=True)
class LsqInitDescriptor(PerScaleDescriptor):
    """The initial scales of a tensor. ``q_max`` is the highest code."""

    q_max: int

    @property
    def factor(self) -> float:
        """The factor of the sum of magnitudes."""
        return 2.0 / (max(segment_length(self.view), 1) * math.sqrt(self.q_max))

    @property
    def floor(self) -> float:
        return SCALE_FLOOR

    def validate(self) -> None:
        super().validate()
        if not 1 <= self.q_max <= LARGEST_CODE:
            raise InvalidDescriptor(
                f"q_max is {self.q_max}; for the first scale of LSQ it must be from 1 to {LARGEST_CODE}. "
                "Choose another range, or take a scale from choose_scale."
            )


@arguments
class LsqInitArgs(Args):
    """Reads ``x``, writes ``scale``."""

    x: torch.Tensor
    scale: Output


class LsqInitPlan(FromDataPlan[LsqInitDescriptor, LsqInitArgs]):
    """scale = max(2 * mean(|x|) / sqrt(q_max), 1e-12) over the elements of each scale. NaN stays NaN."""

    def ulp(self) -> dict[str, float]:
        """The roundings of the sum, of the factor and of their product.

        The factor takes three float64 operations: a root, a product and a quotient. If the compute type is
        float32, the factor is rounded to it too.
        """
        compute = self.descriptor.real.compute
        of_factor = 3 * 2.0 ** (compute.precision - 53) + (compute.bits == 32)
        roundings = rounding_errors(segment_length(self.descriptor.view)) + of_factor + 1
        return {"scale": error_in_ulp(roundings, compute, compute)}
