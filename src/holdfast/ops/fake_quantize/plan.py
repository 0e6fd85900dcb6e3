"""Plans of fake_quantize: ``y = dequantize(quantize(x))`` in one pass, and its gradient.

The derivative of rounding is 0 almost everywhere; a straight-through estimator replaces it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch

from holdfast.core.checks import shown
from holdfast.core.declaration import Output, arguments
from holdfast.core.dtypes import Float
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.formats import CARRIED, Format, format_of
from holdfast.core.granularity import ONE_SCALE, Granularity, validate_granularity
from holdfast.core.plan import Args
from holdfast.ops.affine.plan import (
    AffinePlan,
    Scale,
    ScaledDescriptor,
    StraightThroughArgs,
    ZeroPoint,
    one_rounding_ulp,
    range_of,
    validate_range,
)


class SteKind(StrEnum):
    """The straight-through estimators, which replace the derivative of rounding and clamping.

    lo = q_min - zero_point and hi = q_max - zero_point. lo_x = lo * scale and hi_x = hi * scale. mid is the
    middle of lo_x to hi_x, and half is half of its width.
    """

    #: dx = dy
    IDENTITY = "identity"
    #: dx = dy where lo_x <= x <= hi_x, else 0
    CLIPPED_IDENTITY = "clipped_identity"
    #: dx = dy * (1 - tanh((x - mid) / scale)**2)
    TANH = "tanh"
    #: dx = dy * max(0, 1 - |x - mid| / half)
    HARD_TANH = "hard_tanh"
    #: dx = dy where lo <= rint(x / scale) <= hi, else 0. A float format rounds x / scale to itself.
    IN_RANGE = "in_range"


@dataclass(frozen=True, kw_only=True)
class FakeCodesDescriptor(ScaledDescriptor):
    """Real numbers rounded to codes that are not stored: codes of ``dtype``, or q_min to q_max."""

    granularity: Granularity = ONE_SCALE
    dtype: torch.dtype | None = None
    q_min: int | None = None
    q_max: int | None = None

    @property
    def output_dtype(self) -> torch.dtype:
        return self.input_dtype

    @property
    def code_range(self) -> tuple[int, int]:
        """q_min and q_max; the defaults are those of ``dtype``."""
        return range_of(self.codes, self.q_min, self.q_max)

    @property
    def codes(self) -> Format:
        """The format of the codes. Without a dtype, integers of 16 bits."""
        if self.dtype is None:
            return CARRIED["float32"]
        codes = format_of(self.dtype, "dtype")
        if codes.carried:
            raise InvalidDescriptor(
                f"dtype is {self.dtype}; it must be the dtype of the codes, such as torch.int8 or "
                "torch.float8_e4m3fn. For other ranges leave dtype out and give q_min and q_max. The result "
                "always has the dtype of the input."
            )
        return codes

    def validate(self) -> None:
        validate_granularity(self.granularity)
        super().validate()
        if self.dtype is None and (self.q_min is None or self.q_max is None):
            raise InvalidDescriptor("there is no range of codes; give dtype, or both q_min and q_max.")
        holder = "codes of 16 bits may be" if self.dtype is None else f"{self.dtype} holds"
        validate_range(self.codes, self.q_min, self.q_max, holder)


@dataclass(frozen=True, kw_only=True)
class FakeQuantizeDescriptor(FakeCodesDescriptor):
    """Fake quantization of a tensor."""


@dataclass(frozen=True, kw_only=True)
class EstimatedDescriptor(FakeCodesDescriptor):
    """A gradient of fake quantization with respect to its input, by the estimator ``ste``."""

    ste: SteKind = SteKind.IN_RANGE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ste", estimator(self.ste))


@dataclass(frozen=True, kw_only=True)
class FakeQuantizeBackwardDescriptor(EstimatedDescriptor):
    """The gradient of fake quantization with respect to its input, by the estimator ``ste``."""


def estimator(ste: str) -> SteKind:
    """The ``SteKind`` of a name or of a ``SteKind``."""
    try:
        return SteKind(ste)
    except ValueError:
        named = ", ".join(repr(kind.value) for kind in SteKind)
        raise InvalidDescriptor(
            f"ste is {shown(ste)}; accepted are a SteKind or its name: {named}."
        ) from None


def refused_learning(codes: Format) -> str:
    """The error sentence for a learned scale with a float format."""
    return (
        f"scale is to be learned for {codes.torch}, and there is no gradient of the scale of a float format; "
        "detach the scale, and find it by choose_scale."
    )


@arguments
class FakeQuantizeArgs(Args):
    """Reads ``x``, writes ``y``. The kernel rounds a floating ``zero_point``."""

    x: torch.Tensor
    scale: Scale
    y: Output
    zero_point: ZeroPoint = None


@arguments
class FakeQuantizeBackwardArgs(StraightThroughArgs):
    """The args of every straight-through estimator. The kernel rounds a floating ``zero_point``."""


D = TypeVar("D", bound=FakeCodesDescriptor)
A = TypeVar("A", bound=Args)


class FakeCodesPlan(AffinePlan[D, A]):
    """Base of the plans of fake quantization. A zero point may be floating, since it may be learned."""

    def mode(self) -> str:
        codes = self.descriptor.codes
        return f"{super().mode()}, {codes.name}" if codes.is_float else super().mode()

    def _zero_point_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dict.fromkeys((torch.int32, torch.float32, self.descriptor.input_dtype)))


class FakeQuantizePlan(FakeCodesPlan[FakeQuantizeDescriptor, FakeQuantizeArgs]):
    """y = dequantize(quantize(x)) in every bit; NaN stays NaN, for integer codes too."""

    def ulp(self) -> dict[str, float]:
        # Relative to the code of quantize, times the scale.
        real = self.descriptor.real
        return {"y": one_rounding_ulp(real, real.compute)}


class FakeQuantizeBackwardPlan(FakeCodesPlan[FakeQuantizeBackwardDescriptor, FakeQuantizeBackwardArgs]):
    """dx = dy times the derivative that the straight-through estimator gives at x."""

    def mode(self) -> str:
        return f"{super().mode()}, {self.descriptor.ste}"

    def bytes_moved(self) -> int:
        if self.descriptor.ste is not SteKind.IDENTITY:
            return super().bytes_moved()
        return 2 * math.prod(self.descriptor.shape) * self.descriptor.input_dtype.itemsize

    def ulp(self) -> dict[str, float]:
        return {"dx": estimator_ulp(self.descriptor.ste, self.descriptor.real)}


def estimator_ulp(ste: SteKind, real: Float) -> float:
    """The error of a gradient in ULP, relative to the estimator at its rounded argument.

    The argument is (x - mid) / scale, or |x - mid| / half.
    """
    steps = _ULP[ste]
    if steps == 0 or real is real.compute:
        return steps
    return 0.5 + steps * 2.0 ** (real.precision - real.compute.precision)


#: The error of each estimator in ULP of the compute type. The relative error of 1 - tanh^2 is below
#: 4 * 2^-24 in float32, by a sweep over every argument; 1 - t is rounded once; the product with dy rounds.
_ULP = {
    SteKind.IDENTITY: 0.0, SteKind.CLIPPED_IDENTITY: 0.0, SteKind.IN_RANGE: 0.0, SteKind.HARD_TANH: 1.5,
    SteKind.TANH: 4.5,
}  # fmt: skip
