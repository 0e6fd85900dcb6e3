"""A scale to begin to learn with: ``2 * mean(|x|) / sqrt(q_max)`` over the elements that share it, as LSQ has
it.

It is the tree sum of the magnitudes times ``2 / (n * sqrt(q_max))``, which is found in float64 and rounded to
the compute type once. No scale is below the floor of ``choose_scale``; a NaN makes the scale NaN.
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
    """The first scales of a tensor whose codes go up to ``q_max``."""

    q_max: int

    @property
    def factor(self) -> float:
        """What the sum of the magnitudes is multiplied by."""
        return 2.0 / (max(segment_length(self.view), 1) * math.sqrt(self.q_max))

    @property
    def floor(self) -> float:
        return SCALE_FLOOR

    def validate(self) -> None:
        super().validate()
        if not 1 <= self.q_max <= LARGEST_CODE:
            raise InvalidDescriptor(
                f"q_max is {self.q_max}; the scale that LSQ begins with is for codes that reach from 1 to "
                f"{LARGEST_CODE} above zero. Choose another range, or take a scale from choose_scale."
            )


@arguments
class LsqInitArgs(Args):
    """``x`` is read, ``scale`` is written."""

    x: torch.Tensor
    scale: Output


class LsqInitPlan(FromDataPlan[LsqInitDescriptor, LsqInitArgs]):
    """scale = max(2 * mean(|x|) / sqrt(q_max), 1e-12) over the elements of each scale; NaN if one is."""

    def ulp(self) -> dict[str, float]:
        """The roundings of the sum, of the factor, and of their product.

        The factor takes three operations of float64: a root, a product and a quotient. In float32 it is
        rounded to that as well.
        """
        compute = self.descriptor.real.compute
        of_factor = 3 * 2.0 ** (compute.precision - 53) + (compute.bits == 32)
        roundings = rounding_errors(segment_length(self.descriptor.view)) + of_factor + 1
        return {"scale": error_in_ulp(roundings, compute, compute)}
