"""Plans of observe_range and choose_scale: the range of the elements of each scale, and a scale for it.

``low = min(x, 0)`` and ``high = max(x, 0)`` over the elements of a scale. lowest and highest are the lowest
and the highest code that the scale uses. A symmetric scale is ``max(high / highest, low / lowest, 1e-12)``.
Otherwise it is ``max((high - low) / (highest - lowest), 1e-12)``, with
``zero_point = lowest - rint(low / scale)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Expected
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.formats import Format
from holdfast.core.granularity import ONE_SCALE, Granularity, validate_granularity
from holdfast.core.plan import Args
from holdfast.ops.affine.plan import PER_SCALE, AffinePlan, ScaledDescriptor, ToCodesDescriptor

#: The least scale. It makes division by the scale of all zeros possible.
SCALE_FLOOR = 1e-12


@dataclass(frozen=True, kw_only=True)
class ScaleOfData:
    """The rule that computes scales from the data.

    ``symmetric`` scales have no zero point. ``narrow`` omits codes: for a symmetric scale those without an
    opposite code, else the lowest one. The default of ``narrow`` is ``symmetric``.
    """

    granularity: Granularity = ONE_SCALE
    symmetric: bool = True
    narrow: bool | None = None

    def ends(self, q_min: int, q_max: int) -> tuple[int, int]:
        """The lowest and the highest code that the range of the data is mapped to."""
        narrow = self.symmetric if self.narrow is None else self.narrow
        if not narrow:
            return q_min, q_max
        if not self.symmetric:
            return q_min + 1, q_max
        most = min(-q_min, q_max)
        return -most, most

    def validate_ends(self, q_min: int, q_max: int, codes: Format) -> None:
        """Raise unless there is a scale for codes from q_min to q_max."""
        if not self.symmetric and not codes.zero_point:
            raise InvalidDescriptor(
                f"symmetric=False asks for a zero point, and {codes.torch} has none; leave symmetric out."
            )
        lowest, highest = self.ends(q_min, q_max)
        if self.symmetric and not lowest < 0 < highest:
            raise InvalidDescriptor(
                f"a symmetric scale needs codes on both sides of 0, and the codes are {q_min} to {q_max}; "
                "pass symmetric=False for a scale with a zero point, or choose a signed dtype."
            )
        if lowest >= highest:
            raise InvalidDescriptor(
                f"the codes are {q_min} to {q_max}, of which the scale uses {lowest} to {highest}; it "
                "needs at least two codes. Choose a wider range."
            )


@dataclass(frozen=True, kw_only=True)
class PerScaleDescriptor(ScaledDescriptor):
    """A tensor ``x``, and outputs with one value of its compute type per scale."""

    granularity: Granularity = ONE_SCALE

    @property
    def output_dtype(self) -> torch.dtype:
        return self.real.compute.torch

    @property
    def empty(self) -> bool:
        return self.view.scale_count == 0

    def expected(self, name: str) -> Expected:
        if name == "x":
            return self.shape, self.input_dtype
        return self.view.scale_shape, self.output_dtype

    def validate(self) -> None:
        validate_granularity(self.granularity)
        super().validate()


@dataclass(frozen=True, kw_only=True)
class ObserveRangeDescriptor(PerScaleDescriptor):
    """The range of the elements of each scale."""


@dataclass(frozen=True, kw_only=True)
class FromDataDescriptor(ScaleOfData, ScaledDescriptor):
    """Outputs ``scale`` and ``zero_point``, computed from ``x`` for its ``codes``."""

    @property
    def empty(self) -> bool:
        return self.view.scale_count == 0

    def expected(self, name: str) -> Expected:
        if name not in ("scale", "zero_point"):
            return super().expected(name)
        return self.view.scale_shape, torch.int32 if name == "zero_point" else self.real.compute.torch

    def validate(self) -> None:
        validate_granularity(self.granularity)
        super().validate()
        self.validate_ends(*self.code_range, self.codes)


@dataclass(frozen=True, kw_only=True)
class ChooseScaleDescriptor(FromDataDescriptor, ToCodesDescriptor):
    """``output_dtype`` is the dtype of the codes that the scale is for."""

    q_min: int | None = None
    q_max: int | None = None


@arguments
class ObserveRangeArgs(Args):
    """Reads ``x``, writes ``low`` and ``high``."""

    x: torch.Tensor
    low: Output
    high: Output


@arguments
class ChooseScaleArgs(Args):
    """Reads ``x``, writes ``scale`` and, unless the scale is symmetric, ``zero_point``."""

    x: torch.Tensor
    scale: Output
    zero_point: Output | None = None


D = TypeVar("D", bound=ScaledDescriptor)
A = TypeVar("A", bound=Args)


class FromDataPlan(AffinePlan[D, A]):
    """Base of the plans whose outputs have one value per scale."""

    def _refused_operand(self, name: str, operand: Any) -> str:
        if name == "zero_point" and self._symmetric:
            return "" if operand is None else "a symmetric scale has no zero_point; leave it None."
        return super()._refused_operand(name, operand)

    @property
    def _symmetric(self) -> bool:
        return isinstance(self.descriptor, ScaleOfData) and self.descriptor.symmetric

    def bytes_moved(self) -> int:
        results = len(PER_SCALE.intersection(self.outputs)) - self._symmetric
        return super().bytes_moved() + 4 * (results - 1) * self.descriptor.view.scale_count

    def _refused_values(self, args: A) -> str:
        return ""


class ObserveRangePlan(FromDataPlan[ObserveRangeDescriptor, ObserveRangeArgs]):
    """low = min(x, 0) and high = max(x, 0) over the elements of each scale. Both are NaN if an element is."""

    def ulp(self) -> dict[str, float]:
        return {"low": 0.0, "high": 0.0}


class ChooseScalePlan(FromDataPlan[ChooseScaleDescriptor, ChooseScaleArgs]):
    """scale = max(high / highest, low / lowest, 1e-12).

    With a zero point it is max((high - low) / (highest - lowest), 1e-12).
    """

    def ulp(self) -> dict[str, float]:
        return scale_error(self.descriptor)


def scale_error(desc: ScaleOfData) -> dict[str, float]:
    """The error of a scale in ULP: one rounding of a quotient, and one of high - low if not symmetric.

    The zero point is off by 1 at most: rounding low / scale can reach a tie of rint.
    """
    return {"scale": 0.5 if desc.symmetric else 1.5, "zero_point": 1.0}
