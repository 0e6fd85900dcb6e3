"""Fake quantization: what is left of real numbers once they have been codes, and a gradient past that.

``y = dequantize(quantize(x))`` in one pass. Rounding has no useful derivative; an estimator stands in for it.
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
    range_of,
    rounded_once,
    validate_range,
)


class SteKind(StrEnum):
    """The straight-through estimators: what stands in for the derivative of rounding and clamping.

    With lo and hi the bounds of the codes less the zero point, lo_x = lo * scale, hi_x = hi * scale, and mid
    and half the middle and half the width of lo_x to hi_x:
    """

    #: dx = dy
    IDENTITY = "identity"
    #: dx = dy where lo_x <= x <= hi_x, else 0
    CLIPPED_IDENTITY = "clipped_identity"
    #: dx = dy * (1 - tanh((x - mid) / scale)**2)
    TANH = "tanh"
    #: dx = dy * max(0, 1 - |x - mid| / half)
    HARD_TANH = "hard_tanh"
    #: dx = dy where lo <= rint(x / scale) <= hi, else 0; a float format rounds x / scale in place of rint
    IN_RANGE = "in_range"


@dataclass(frozen=True, kw_only=True)
class FakeCodesDescriptor(ScaledDescriptor):
    """Real numbers that are rounded to codes which nobody stores: those of ``dtype``, or q_min to q_max."""

    granularity: Granularity = ONE_SCALE
    dtype: torch.dtype | None = None
    q_min: int | None = None
    q_max: int | None = None

    @property
    def output_dtype(self) -> torch.dtype:
        return self.input_dtype

    @property
    def code_range(self) -> tuple[int, int]:
        """q_min and q_max, where not given those of ``dtype``."""
        return range_of(self.codes, self.q_min, self.q_max)

    @property
    def codes(self) -> Format:
        """The format of the codes; without a dtype, all integers of 16 bits."""
        if self.dtype is None:
            return CARRIED["float32"]
        codes = format_of(self.dtype, "dtype")
        if codes.carried:
            raise InvalidDescriptor(
                f"dtype is {self.dtype}; it names the codes that are faked, such as torch.int8 or "
                "torch.float8_e4m3fn. For other ranges leave it out and give q_min and q_max; the result has "
                "the dtype of the input."
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
class FakeQuantizeBackwardDescriptor(FakeCodesDescriptor):
    """Its gradient with respect to that tensor, by the estimator ``ste``."""

    ste: SteKind = SteKind.IN_RANGE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ste", estimator(self.ste))


def estimator(ste: str) -> SteKind:
    """The estimator of this name, which may be a ``SteKind`` already."""
    try:
        return SteKind(ste)
    except ValueError:
        named = ", ".join(repr(kind.value) for kind in SteKind)
        raise InvalidDescriptor(
            f"ste is {shown(ste)}; accepted are a SteKind or its name: {named}."
        ) from None


def refused_learning(codes: Format) -> str:
    """Why no scale is learned for a float format."""
    return (
        f"scale is to be learned for {codes.torch}, and there is no gradient of the scale of a float format; "
        "detach the scale, and find it by choose_scale."
    )


@arguments
class FakeQuantizeArgs(Args):
    """``x`` is read, ``y`` is written. A floating ``zero_point`` is rounded where it is used."""

    x: torch.Tensor
    scale: Scale
    y: Output
    zero_point: ZeroPoint = None


@arguments
class FakeQuantizeBackwardArgs(StraightThroughArgs):
    """Those of every straight-through estimator; a floating ``zero_point`` is rounded where it is used."""


D = TypeVar("D", bound=FakeCodesDescriptor)
A = TypeVar("A", bound=Args)


class FakeCodesPlan(AffinePlan[D, A]):
    """What the plans here have in common: a zero point may be learned, and is then a float."""

    def mode(self) -> str:
        codes = self.descriptor.codes
        return f"{super().mode()}, {codes.name}" if codes.is_float else super().mode()

    def _zero_point_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dict.fromkeys((torch.int32, torch.float32, self.descriptor.input_dtype)))


class FakeQuantizePlan(FakeCodesPlan[FakeQuantizeDescriptor, FakeQuantizeArgs]):
    """y = dequantize(quantize(x)) in every bit; NaN stays NaN, for integer codes too."""

    def ulp(self) -> dict[str, float]:
        # Counted from the code that quantize gives, times the scale.
        real = self.descriptor.real
        return {"y": rounded_once(real, real.compute)}


class FakeQuantizeBackwardPlan(FakeCodesPlan[FakeQuantizeBackwardDescriptor, FakeQuantizeBackwardArgs]):
    """dx = dy, as far as the estimator lets it through."""

    def mode(self) -> str:
        return f"{super().mode()}, {self.descriptor.ste}"

    def bytes_moved(self) -> int:
        if self.descriptor.ste is not SteKind.IDENTITY:
            return super().bytes_moved()
        return 2 * math.prod(self.descriptor.shape) * self.descriptor.input_dtype.itemsize

    def ulp(self) -> dict[str, float]:
        return {"dx": estimator_ulp(self.descriptor.ste, self.descriptor.real)}


def estimator_ulp(ste: SteKind, real: Float) -> float:
    """The error of a gradient, counted from the estimator at its rounded argument.

    That is (x - mid) / scale, or |x - mid| / half.
    """
    steps = _ULP[ste]
    if steps == 0 or real is real.compute:
        return steps
    return 0.5 + steps * 2.0 ** (real.precision - real.compute.precision)


#: The error of each estimator in ULP of the compute type. 1 - tanh^2 is off by less than 4 * 2^-24 of itself
#: in float32, by trial of every argument; 1 - t is rounded once. Then the product with dy is rounded.
_ULP = {
    SteKind.IDENTITY: 0.0,
    SteKind.CLIPPED_IDENTITY: 0.0,
    SteKind.IN_RANGE: 0.0,
    SteKind.HARD_TANH: 1.5,
    SteKind.TANH: 4.5,
}
