"""Plans of quantize: real numbers to codes, and the straight-through gradient.

``q = clamp(rint(x / scale) + zero_point, q_min, q_max)``. One kernel covers the four granularities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Expected
from holdfast.core.plan import Args
from holdfast.ops.affine.plan import (
    AffinePlan,
    Scale,
    StraightThroughArgs,
    ToCodesDescriptor,
    ZeroPoint,
    define_granularities,
    one_rounding_ulp,
)


@dataclass(frozen=True, kw_only=True)
class QuantizeBackwardDescriptor(ToCodesDescriptor):
    """``output_dtype`` is the dtype of the forward's codes. A floating one is also the dtype of ``dy``."""

    q_min: int | None = None
    q_max: int | None = None

    def expected(self, name: str) -> Expected:
        return self.shape, self.gradient_of_codes if name == "dy" else self.input_dtype


@dataclass(frozen=True, kw_only=True)
class QuantizeDescriptor(QuantizeBackwardDescriptor):
    """``packed`` stores several 2-bit or 4-bit codes per byte, along the last axis, low bits first."""

    packed: bool = False

    @property
    def is_packed(self) -> bool:
        return self.packed

    def expected(self, name: str) -> Expected:
        return (self.code_shape, self.code_storage) if name == "q" else (self.shape, self.input_dtype)


@arguments
class QuantizeArgs(Args):
    """Reads ``x``, writes ``q``."""

    x: torch.Tensor
    scale: Scale
    q: Output
    zero_point: ZeroPoint = None


@arguments
class QuantizeBackwardArgs(StraightThroughArgs):
    """The args of every straight-through estimator."""


class QuantizePlan(AffinePlan[QuantizeDescriptor, QuantizeArgs], abstract=True):
    """q = clamp(rint(x / scale) + zero_point, q_min, q_max); NaN takes the code of 0.0."""

    def ulp(self) -> dict[str, float]:
        # The quotient is rounded before rint. Close to a tie, that first rounding can reach the tie.
        return {"q": 1.0}


class QuantizeBackwardPlan(AffinePlan[QuantizeBackwardDescriptor, QuantizeBackwardArgs], abstract=True):
    """dx = dy / scale where q_min <= rint(x / scale) + zero_point <= q_max, else 0."""

    def ulp(self) -> dict[str, float]:
        real = self.descriptor.real
        return {"dx": one_rounding_ulp(real, real.compute)}


define_granularities(QuantizePlan)
define_granularities(QuantizeBackwardPlan)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The classes that ``define_granularities`` makes."""
