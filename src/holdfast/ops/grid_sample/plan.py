"""grid_sample: an image read at places that lie between its pixels, and the gradients of that.

``out[n, c, place] = image[n, c] at grid[n, place]``, in the meaning of ``torch.nn.functional.grid_sample``.
The grid counts each axis from -1 to 1, x first; what there is beside the image is a matter of the padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import torch

from holdfast.core.checks import shown
from holdfast.core.contract import error_in_ulp
from holdfast.core.declaration import Implementation, Output, arguments, on_backends
from holdfast.core.descriptor import Descriptor, Expected, whole_numbers
from holdfast.core.dtypes import Float, dtype_name, float_dtype
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.plan import Args, DescribedKernel, Plan
from holdfast.ops.segment_sum.indexed import ordered_additions, summing_ulp

#: The longest axis of an image: float32 counts its pixels without a gap.
LONGEST_AXIS = 2**24
#: So many pixels beside the image no tap is in it, in any mode.
BESIDE = 4
#: The pixels and the corners of all samples of one image are counted in 31 bits.
LIMIT = 2**31 - 1
#: The most channels: sums over them have no more than four levels.
MOST_CHANNELS = 2**20


class Mode(StrEnum):
    """How a value between pixels is made of those around it."""

    BILINEAR = "bilinear"
    NEAREST = "nearest"
    BICUBIC = "bicubic"


class Padding(StrEnum):
    """What is beside the image."""

    ZEROS = "zeros"
    BORDER = "border"
    REFLECTION = "reflection"


#: How many pixels each mode looks at along an axis.
TAPS = {Mode.BILINEAR: 2, Mode.NEAREST: 1, Mode.BICUBIC: 4}


@dataclass(frozen=True, kw_only=True)
class SampleDescriptor(Descriptor):
    """``shape`` is that of the image: (N, C, H, W) or (N, C, D, H, W).

    ``output_size`` is (H, W) or (D, H, W) of what is sampled. The grid has shape (N, *output_size, 2 or 3);
    its dtype is the image's, or float32 for an image in 16 bits.
    """

    output_size: tuple[int, ...]
    mode: Mode = Mode.BILINEAR
    padding_mode: Padding = Padding.ZEROS
    align_corners: bool = False
    input_dtype: torch.dtype = torch.float32
    grid_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        size = whole_numbers("output_size", self.output_size, (64, 64))
        object.__setattr__(self, "output_size", size)
        object.__setattr__(self, "mode", _member(Mode, "mode", self.mode))
        object.__setattr__(self, "padding_mode", _member(Padding, "padding_mode", self.padding_mode))

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def image_size(self) -> tuple[int, ...]:
        """(H, W) or (D, H, W) of the image."""
        return self.shape[2:]

    @property
    def axes(self) -> int:
        """2 or 3."""
        return len(self.output_size)

    @property
    def pixels(self) -> int:
        """The pixels of one image, in one channel."""
        return math.prod(self.image_size)

    @property
    def samples(self) -> int:
        """The samples taken of one image."""
        return math.prod(self.output_size)

    @property
    def corners(self) -> int:
        """The pixels that a sample is made of."""
        return math.prod((TAPS[self.mode],) * self.axes)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.shape[:2], *self.output_size)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        return (self.batch, *self.output_size, self.axes)

    @property
    def real(self) -> Float:
        return float_dtype(self.input_dtype, "input_dtype")

    @property
    def compute(self) -> Float:
        """What coordinates, weights and sums are computed in."""
        grid = float_dtype(self.grid_dtype, "grid_dtype").compute
        return max(self.real.compute, grid, key=lambda dtype: dtype.bits)

    @property
    def named_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.input_dtype, self.input_dtype

    def expected(self, name: str) -> Expected | None:
        if name in ("grid", "dgrid"):
            return self.grid_shape, self.grid_dtype
        return self.shape if name in ("input", "dinput") else self.output_shape, self.input_dtype

    def validate(self) -> None:
        super().validate()
        if len(self.shape) not in (4, 5):
            raise InvalidDescriptor(
                f"shape is {self.shape}; accepted are images of shape (N, C, H, W) or (N, C, D, H, W)."
            )
        if len(self.output_size) != len(self.image_size):
            raise InvalidDescriptor(
                f"output_size is {self.output_size} and the image has shape {self.shape}; it must have one "
                f"size for each of the last {len(self.image_size)} axes."
            )
        if any(size < 0 for size in self.output_size):
            raise InvalidDescriptor(
                f"output_size {self.output_size} has a negative size; sizes count from 0."
            )
        if not all(0 < size <= LONGEST_AXIS for size in self.image_size):
            raise InvalidDescriptor(
                f"the image has shape {self.shape}; each of its last {len(self.image_size)} axes must have "
                f"from 1 to {LONGEST_AXIS} pixels."
            )
        for what, count in (("pixels", self.pixels), ("corners of samples", self.samples * self.corners)):
            if count > LIMIT:
                raise InvalidDescriptor(
                    f"there are {count} {what} to an image; at most {LIMIT} are accepted. Split them up."
                )
        if self.channels > MOST_CHANNELS:
            raise InvalidDescriptor(
                f"there are {self.channels} channels; at most {MOST_CHANNELS} are accepted. Split them up."
            )
        self._validate_kind()

    def _validate_kind(self) -> None:
        if self.mode == Mode.BICUBIC and self.axes == 3:
            raise InvalidDescriptor(
                "mode is 'bicubic' for an image with 3 axes; there it must be 'bilinear' or 'nearest'."
            )
        float_dtype(self.grid_dtype, "grid_dtype")
        accepted = (self.real.torch, torch.float32) if self.real.bits == 16 else (self.real.torch,)
        if self.grid_dtype not in accepted:
            raise InvalidDescriptor(
                f"grid_dtype is {self.grid_dtype} and input_dtype is {self.input_dtype}; with such an image "
                f"the grid must be {' or '.join(map(str, accepted))}."
            )


def _member(kind: type[StrEnum], name: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        accepted = ", ".join(repr(member.value) for member in kind)
        raise InvalidDescriptor(f"{name} is {shown(value)}; accepted are {accepted}.") from None


@dataclass(frozen=True, kw_only=True)
class GridSampleDescriptor(SampleDescriptor):
    """Samples of an image."""

    @property
    def empty(self) -> bool:
        return 0 in self.output_shape


@dataclass(frozen=True, kw_only=True)
class GridSampleBackwardDescriptor(SampleDescriptor):
    """The gradients with respect to the image and the grid, each only if it is needed."""

    needs_dinput: bool = True
    needs_dgrid: bool = True

    @property
    def empty(self) -> bool:
        # Without samples dinput is zeros, and without channels dgrid is: they are written all the same.
        written = (("dinput", self.shape), ("dgrid", self.grid_shape))
        return all(0 in shape for name, shape in written if getattr(self, f"needs_{name}"))

    def expected(self, name: str) -> Expected | None:
        if name == "dinput" and not self.needs_dinput:
            return None
        if name in ("input", "dgrid") and not self.needs_dgrid:
            return None
        return super().expected(name)

    def validate(self) -> None:
        super().validate()
        if not (self.needs_dinput or self.needs_dgrid):
            raise InvalidDescriptor(
                "needs_dinput and needs_dgrid are both False; there is nothing to compute."
            )


@arguments
class GridSampleArgs(Args):
    """``input`` and ``grid`` are read, ``out`` is written."""

    input: torch.Tensor
    grid: torch.Tensor
    out: Output


@arguments
class GridSampleBackwardArgs(Args):
    """``dout`` and the forward's ``grid`` are read, and its ``input`` if there is a ``dgrid`` to compute.

    ``dinput`` and ``dgrid`` are written, or with ``accumulate`` added to; each is None if it is not needed.
    """

    dout: torch.Tensor
    input: torch.Tensor | None = None
    grid: torch.Tensor
    dinput: Output | None = None
    dgrid: Output | None = None
    accumulate: bool = False


D = TypeVar("D", bound=SampleDescriptor)
A = TypeVar("A", bound=Args)


class SampleKernel(DescribedKernel[D]):
    """A kernel of grid_sample, on any backend."""


class SamplePlan(Plan[D, A]):
    """The statements that both directions make.

    The error is counted from the place that a sample has once its coordinates are rounded. The unit is the
    last place of a sum of magnitudes: of the pixels that a sample is made of (out), of dout over all samples
    that a pixel is part of (dinput), and of dout times pixel over all pixels of a sample and all channels,
    times what the coordinate moves by when the grid moves by 1 (dgrid).
    """

    def mode(self) -> str:
        desc = self.descriptor
        where = f"{desc.padding_mode}, {'corners' if desc.align_corners else 'edges'} aligned"
        return f"{desc.axes}-d {desc.mode}, {where}, {dtype_name(desc.grid_dtype)} grid"

    def bytes_moved(self) -> int:
        """Of the image, only the pixels under samples are read."""
        desc, moved = self.descriptor, super().bytes_moved()
        if "input" in self.inputs and desc.expected("input") is not None:
            unread = max(desc.pixels - desc.samples * desc.corners, 0)
            moved -= desc.batch * desc.channels * unread * desc.input_dtype.itemsize
        return moved


# The errors of weights and slopes, in units of 2^-p where p is the precision of the compute type. They are
# absolute: a weight is 1 at most. A number below 1, 2, 4 or 8 is rounded by at most 1/2, 1, 2 or 4 units.
#
# A sample lies at t from 0 to 1 past its first tap. t and 1 - t are each off by 1/2 at most: t is rounded
# only just left of the first pixel, and there 1 - t is exact. So is a linear weight.
#
# Cubic taps are u away. u is t or 1 - t for the near taps, off by 1/2; it is one more for the far taps, and
# off by 3/2. With the roundings of each operation in turn, and Sterbenz's lemma where a difference is exact:
#   near weight  ((5/4 u - 9/4) u) u + 1            2.1 u, + 1, times u, + 1/2, + 1/2, + 1.35 / 2    < 5
#   far weight   ((15/4 - 3/4 u) u - 6) u + 3       3 u, + 4, times u, + 2; largest at u = 2         <= 22
#   near slope   (15/4 u - 9/2) u                   at u = 1: 2 u, + 1/2, + 3 / 2                    <= 4
#   far slope    (15/2 - 9/4 u) u - 6               at u = 1: 6 u, + 4, + 3 * 3 / 2                  < 15
# Near weights are at most 1, far ones 4/27; near slopes 1.35, far ones 3/4. A product of two, rounded once,
# is worst where the far weight's error meets the largest near factor.
CUBIC_WEIGHT_ERROR = 24.0  # 22 + 4/27 * 5 + 1/2
CUBIC_SLOPE_ERROR = 31.0  # 1.35 * 22 + 4/27 * 4 + 1/2
CUBIC_SLOPE = 1.35


def weight_error(desc: SampleDescriptor) -> float:
    """The error of a corner's weight, in units of 2^-p: one factor along each axis, and their products."""
    if desc.mode == Mode.NEAREST:
        return 0.0
    return CUBIC_WEIGHT_ERROR if desc.mode == Mode.BICUBIC else desc.axes - 0.5


def slope_error(desc: SampleDescriptor) -> float:
    """The error of a corner's slope in the same units. A linear one is 1 or -1 times the other weights."""
    return CUBIC_SLOPE_ERROR if desc.mode == Mode.BICUBIC else desc.axes - 1.5


def lean(backend: str, kernel: str) -> Implementation:
    """A kernel with the same bits that needs less workspace, and more time: for a limited workspace."""
    return Implementation(backend, f".{backend}:{kernel}", "lean")


class GridSamplePlan(SamplePlan[GridSampleDescriptor, GridSampleArgs]):
    """out = the image at the places of the grid; each place is a weighted sum of the pixels around it."""

    kernels = (*on_backends("GridSample"), lean("cpu", "LeanGridSample"))

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        if desc.mode == Mode.NEAREST:
            return {"out": 0.0}
        # After the weights: a product with the pixel, and the sum of the products.
        return {"out": error_in_ulp(weight_error(desc) + desc.corners, desc.compute, desc.real)}


class GridSampleBackwardPlan(SamplePlan[GridSampleBackwardDescriptor, GridSampleBackwardArgs]):
    """dinput = each pixel's share of dout; dgrid = how dout changes as the places move."""

    kernels = (
        *on_backends("GridSampleBackward"),
        lean("cpu", "LeanGridSampleBackward"),
        lean("gpu", "LeanGridSampleBackward"),
    )

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        if desc.mode == Mode.NEAREST:
            return {"dinput": summing_ulp(desc.real, desc.samples), "dgrid": 0.0}
        # Only where cubic taps are clipped or mirrored do several corners of a sample lie on one pixel.
        folded = desc.mode == Mode.BICUBIC and desc.padding_mode != Padding.ZEROS
        terms = desc.samples * (desc.corners if folded else 1)
        # Besides the slope: the products of dout with the pixel, of their sum over channels with the slope,
        # of the sum over corners with the scale, and both sums.
        steps = desc.corners + 2 + ordered_additions(desc.channels)
        largest = CUBIC_SLOPE if desc.mode == Mode.BICUBIC else 1.0
        rounded = slope_error(desc) + largest * steps
        return {
            "dinput": summing_ulp(desc.real, terms, more=weight_error(desc) + 1),
            "dgrid": error_in_ulp(rounded, desc.compute, float_dtype(desc.grid_dtype, "grid_dtype")),
        }
