"""affine_grid: a grid for grid_sample from affine matrices, and its gradient.

``grid[n, place] = theta[n] @ (coordinates of the place, 1)``, as ``torch.nn.functional.affine_grid``. The
coordinates, x first, go from -1 to 1 on each axis: between the centres of the outermost pixels with
``align_corners``, or else between the outer edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

from holdfast.core.contract import error_in_ulp
from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Descriptor, Expected, whole_numbers
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.plan import Args, Plan
from holdfast.ops.tree_sum.blocks import rounding_errors

#: Maximum size of an axis of the grid: the numerators 2 * i - (size - 1) are exact in float32.
LONGEST_AXIS = 2**24
#: Maximum number of places of one grid, an int32.
LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class MapDescriptor(Descriptor):
    """``shape`` is that of theta, (N, 2, 3) or (N, 3, 4); ``output_size`` is (H, W) or (D, H, W)."""

    output_size: tuple[int, ...]
    align_corners: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        size = whole_numbers("output_size", self.output_size, (64, 64))
        object.__setattr__(self, "output_size", size)

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def axes(self) -> int:
        """2 or 3."""
        return len(self.output_size)

    @property
    def places(self) -> int:
        """Number of places of one grid."""
        return math.prod(self.output_size)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        return (self.batch, *self.output_size, self.axes)

    def expected(self, name: str) -> Expected:
        return self.shape if name.endswith("theta") else self.grid_shape, self.dtype

    def validate(self) -> None:
        super().validate()
        if len(self.output_size) not in (2, 3):
            raise InvalidDescriptor(f"output_size is {self.output_size}; it must be (H, W) or (D, H, W).")
        if self.shape[1:] != (self.axes, self.axes + 1) or len(self.shape) != 3:
            raise InvalidDescriptor(
                f"shape is {self.shape}; for an output_size of {self.axes} numbers theta must have shape "
                f"(N, {self.axes}, {self.axes + 1})."
            )
        if not all(0 <= size <= LONGEST_AXIS for size in self.output_size) or self.places > LIMIT:
            raise InvalidDescriptor(
                f"output_size is {self.output_size}; its numbers must be from 0 to {LONGEST_AXIS}, and their "
                f"product at most {LIMIT}."
            )


@dataclass(frozen=True, kw_only=True)
class AffineGridDescriptor(MapDescriptor):
    """One grid for each theta."""

    @property
    def empty(self) -> bool:
        return 0 in self.grid_shape


@dataclass(frozen=True, kw_only=True)
class AffineGridBackwardDescriptor(MapDescriptor):
    """The gradient with respect to theta."""

    @property
    def empty(self) -> bool:
        return self.batch == 0  # without places, dtheta is zeros and must still be written


@arguments
class AffineGridArgs(Args):
    """``theta`` is read, ``grid`` is written."""

    theta: torch.Tensor
    grid: Output


@arguments
class AffineGridBackwardArgs(Args):
    """``dgrid`` is read, ``dtheta`` is written, or with ``accumulate`` added to."""

    dgrid: torch.Tensor
    dtheta: Output
    accumulate: bool = False


D = TypeVar("D", bound=MapDescriptor)
A = TypeVar("A", bound=Args)


class MapPlan(Plan[D, A]):
    """Mode and error bound of both directions."""

    def mode(self) -> str:
        desc = self.descriptor
        return f"{desc.axes}-d, {'corners' if desc.align_corners else 'edges'} aligned"

    def ulp(self) -> dict[str, float]:
        """The unit is one ULP of the sum of the magnitudes of the terms."""
        desc = self.descriptor
        return {self.outputs[0]: error_in_ulp(self._roundings(), desc.compute, desc.real)}

    def _roundings(self) -> int:
        """Maximum number of roundings between a term and the result."""
        raise NotImplementedError


class AffineGridPlan(MapPlan[AffineGridDescriptor, AffineGridArgs]):
    """grid[n, place] = theta[n] @ (coordinates of the place, 1)."""

    def _roundings(self) -> int:
        return 2 + self.descriptor.axes  # the coordinate, its product with theta, and the sum


class AffineGridBackwardPlan(MapPlan[AffineGridBackwardDescriptor, AffineGridBackwardArgs]):
    """dtheta[n] = the sum over places of the outer product of dgrid[n, place] and (coordinates, 1)."""

    def _roundings(self) -> int:
        return 2 + rounding_errors(self.descriptor.places)  # the coordinate, its product, and the sum
