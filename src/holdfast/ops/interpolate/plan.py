"""interpolate: an image resized along its last axes, and the gradient.

``torch.nn.functional.interpolate``: each output element is a weighted sum of input elements. The taps and
their weights are a table for each axis (``tables.py``), which depends on the descriptor alone. The gradient
uses the transposed tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast.core.checks import require_choice, shown
from holdfast.core.contract import error_in_ulp
from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Descriptor, Expected, whole_numbers
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.plan import Args, Plan
from holdfast.ops.interpolate.tables import SAME, Table, table_of

#: Maximum size of an axis: its indices are exact in float32.
LONGEST_AXIS = 2**24
#: Maximum number of taps of an axis.
MOST_TAPS = 2**29
#: Least and greatest scale factor.
LEAST_SCALE, GREATEST_SCALE = 2.0**-25, 2.0**25


class Mode(StrEnum):
    """Interpolation mode."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    LINEAR = "linear"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    TRILINEAR = "trilinear"
    AREA = "area"


#: Modes that accept ``align_corners``, and the number of axes that each requires.
AXES = {Mode.LINEAR: 1, Mode.BILINEAR: 2, Mode.BICUBIC: 2, Mode.TRILINEAR: 3}
#: Modes that accept ``antialias``.
ANTIALIASED = (Mode.BILINEAR, Mode.BICUBIC)


@dataclass(frozen=True, kw_only=True)
class ResizeDescriptor(Descriptor):
    """``shape`` is the shape of the input: (N, C, W), (N, C, H, W) or (N, C, D, H, W).

    ``output_size`` is (W), (H, W) or (D, H, W) of the output. ``scales`` are the scale factors of the axes;
    None, or 0 for an axis, stands for the ratio of the sizes.
    """

    output_size: tuple[int, ...]
    mode: Mode = Mode.NEAREST
    align_corners: bool = False
    antialias: bool = False
    scales: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        size = whole_numbers("output_size", self.output_size, (64, 64))
        object.__setattr__(self, "output_size", size)
        require_choice("mode", self.mode, tuple(Mode))
        object.__setattr__(self, "mode", Mode(self.mode))
        if self.scales is not None:
            object.__setattr__(self, "scales", _scales(self.scales))

    @property
    def input_size(self) -> tuple[int, ...]:
        return self.shape[2:]

    @property
    def axes(self) -> int:
        """1, 2 or 3."""
        return len(self.output_size)

    @property
    def planes(self) -> int:
        """Number of images times number of channels."""
        return self.shape[0] * self.shape[1]

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.shape[:2], *self.output_size)

    @property
    def empty(self) -> bool:
        return self.planes == 0

    def expected(self, name: str) -> Expected:
        return self.shape if name in ("input", "dinput") else self.output_shape, self.dtype

    def tables(self) -> tuple[Table, ...]:
        """The tables of x, y and z; an axis that the input does not have is one index wide."""
        scales = self.scales or (0.0,) * self.axes
        found = [
            table_of(str(self.mode), size, output_size, self.align_corners, self.antialias, scale)
            for size, output_size, scale in zip(self.input_size, self.output_size, scales, strict=True)
        ]
        return (*reversed(found), SAME, SAME)[:3]

    def transposed_tables(self) -> tuple[Table, ...]:
        sizes = (*reversed(self.input_size), 1, 1)
        return tuple(table.transposed(size) for table, size in zip(self.tables(), sizes, strict=False))

    def validate(self) -> None:
        super().validate()
        if len(self.shape) not in (3, 4, 5):
            raise InvalidDescriptor(
                f"shape is {self.shape}; accepted are (N, C, W), (N, C, H, W) and (N, C, D, H, W)."
            )
        if len(self.output_size) != len(self.input_size):
            raise InvalidDescriptor(
                f"output_size is {self.output_size} and the input has shape {self.shape}; it must have one "
                f"size for each of the last {len(self.input_size)} axes."
            )
        for name, sizes in (("input", self.input_size), ("output", self.output_size)):
            if not all(0 < size <= LONGEST_AXIS for size in sizes):
                raise InvalidDescriptor(
                    f"the {name} has size {sizes}; each axis must have from 1 to {LONGEST_AXIS} elements."
                )
        self._validate_mode()
        self._validate_scales()

    def _validate_mode(self) -> None:
        axes = AXES.get(self.mode, self.axes)
        if axes != self.axes:
            raise InvalidDescriptor(
                f"mode is '{self.mode}' for an input of shape {self.shape}; this mode needs an input of rank "
                f"{axes + 2}."
            )
        if self.align_corners and self.mode not in AXES:
            raise InvalidDescriptor(
                f"align_corners is True and mode is '{self.mode}'; only {_quoted(AXES)} align corners."
            )
        if self.antialias and self.mode not in ANTIALIASED:
            raise InvalidDescriptor(
                f"antialias is True and mode is '{self.mode}'; it must be {_quoted(ANTIALIASED)}."
            )

    def _validate_scales(self) -> None:
        scales = self.scales or ()
        if self.scales is not None and len(scales) != self.axes:
            raise InvalidDescriptor(
                f"scales is {shown(self.scales)}; it must have one number for each of the last {self.axes} "
                "axes, or be None."
            )
        if not all(scale == 0 or LEAST_SCALE <= scale <= GREATEST_SCALE for scale in scales):
            raise InvalidDescriptor(
                f"scales is {shown(self.scales)}; each must be from {LEAST_SCALE} to {GREATEST_SCALE}, or 0 "
                "for the ratio of the sizes."
            )
        if self.antialias:
            for size, output_size, scale in zip(
                self.input_size, self.output_size, scales or (0.0,) * self.axes, strict=True
            ):
                widest = min(size, 5 + 4 * max(1.0 / scale if scale else size / output_size, 1.0))
                if output_size * widest > MOST_TAPS:
                    raise InvalidDescriptor(
                        f"an axis of {size} elements, antialiased to {output_size} with a scale of {scale}, "
                        f"has more than {MOST_TAPS} taps; leave scales out, or resize in several steps."
                    )


def _quoted(modes: Iterable[Mode]) -> str:
    return " or ".join(f"'{mode}'" for mode in modes)


def _scales(given: Any) -> tuple[float, ...]:
    try:
        found = tuple(given)
        if not all(isinstance(scale, (int, float)) and not isinstance(scale, bool) for scale in found):
            raise TypeError
        return tuple(map(float, found))
    except (TypeError, OverflowError):
        raise InvalidDescriptor(
            f"scales is {shown(given)}; it must be None or a sequence of numbers, such as (2.0, 2.0)."
        ) from None


@dataclass(frozen=True, kw_only=True)
class InterpolateDescriptor(ResizeDescriptor):
    """interpolate."""


@dataclass(frozen=True, kw_only=True)
class InterpolateBackwardDescriptor(ResizeDescriptor):
    """The gradient with respect to the input."""


@arguments
class InterpolateArgs(Args):
    """``input`` is read, ``out`` is written."""

    input: torch.Tensor
    out: Output


@arguments
class InterpolateBackwardArgs(Args):
    """``dout`` is read, ``dinput`` is written, or with ``accumulate`` added to."""

    dout: torch.Tensor
    dinput: Output
    accumulate: bool = False


D = TypeVar("D", bound=ResizeDescriptor)
A = TypeVar("A", bound=Args)


class ResizePlan(Plan[D, A]):
    """Mode and error bound of both directions.

    The error is relative to the exact sum with the weights of the tables, rounded to the compute type. The
    unit is one ULP of the sum of the magnitudes of the terms.
    """

    def mode(self) -> str:
        desc = self.descriptor
        named = [f"{desc.axes}-d {desc.mode}"]
        if desc.mode in AXES:
            named.append(f"{'corners' if desc.align_corners else 'edges'} aligned")
        return ", ".join([*named, *(["antialiased"] if desc.antialias else [])])

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        roundings = sum(table.roundings for table in self._tables())
        if roundings == 0:
            return {self.outputs[0]: 0.0}
        if roundings >= 2.0 ** (desc.compute.precision - 1):
            return {self.outputs[0]: math.inf}  # more additions than the bound holds for
        return {self.outputs[0]: error_in_ulp(roundings, desc.compute, desc.real)}

    def _tables(self) -> tuple[Table, ...]:
        raise NotImplementedError


class InterpolatePlan(ResizePlan[InterpolateDescriptor, InterpolateArgs]):
    """out = the input resized: for each element a weighted sum of input elements."""

    def _tables(self) -> tuple[Table, ...]:
        return self.descriptor.tables()

    def bytes_moved(self) -> int:
        """Input elements that have no tap are not read."""
        desc = self.descriptor
        read = [
            int(np.count_nonzero(table.transposed(size).count))
            for table, size in zip(desc.tables(), reversed(desc.input_size), strict=False)
        ]
        unread = math.prod(desc.input_size) - math.prod(read)
        return super().bytes_moved() - desc.planes * unread * desc.dtype.itemsize


class InterpolateBackwardPlan(ResizePlan[InterpolateBackwardDescriptor, InterpolateBackwardArgs]):
    """dinput = for each input element the weighted sum of dout over the outputs that read it."""

    def _tables(self) -> tuple[Table, ...]:
        return self.descriptor.transposed_tables()
