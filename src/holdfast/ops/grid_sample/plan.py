"""grid_sample: an image sampled at the coordinates of a grid, and its gradients.

``out[n, c, sample] = image[n, c] at grid[n, sample]``, as ``torch.nn.functional.grid_sample``. Grid
coordinates, x first, go from -1 to 1 on each axis; the padding mode defines what is outside the image.
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
from holdfast.ops.segment_sum.indexed import ordered_additions

#: Maximum size of an axis of the image: its pixel indices are exact in float32.
LONGEST_AXIS = 2**24
#: This many pixels outside the image, no tap hits a pixel, in any mode.
MARGIN = 4
#: Maximum number of pixels, and of corners of all samples, of one image: an int32.
LIMIT = 2**31 - 1
#: Maximum number of channels: sums over them have at most four levels.
MOST_CHANNELS = 2**20
#: Integer sums of dinput have magnitudes below this power of two. The next bit holds a bias, so that sums are
#: positive, and the two bits above mark terms that are inf and -inf.
SUM_BITS = 61


class Mode(StrEnum):
    """Interpolation mode."""

    BILINEAR = "bilinear"
    NEAREST = "nearest"
    BICUBIC = "bicubic"


class Padding(StrEnum):
    """Values outside the image."""

    ZEROS = "zeros"
    BORDER = "border"
    REFLECTION = "reflection"


#: Number of taps of each mode along an axis.
TAPS = {Mode.BILINEAR: 2, Mode.NEAREST: 1, Mode.BICUBIC: 4}


@dataclass(frozen=True, kw_only=True)
class SampleDescriptor(Descriptor):
    """``shape`` is the shape of the image: (N, C, H, W) or (N, C, D, H, W).

    ``output_size`` is (H, W) or (D, H, W) of the output. The grid has shape (N, *output_size, 2 or 3); its
    dtype is the image's, or float32 for an image of 16 bits.
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
        """Number of pixels of one image, in one channel."""
        return math.prod(self.image_size)

    @property
    def samples(self) -> int:
        """Number of samples of one image."""
        return math.prod(self.output_size)

    @property
    def corners(self) -> int:
        """Number of pixels that a sample interpolates."""
        return math.prod((TAPS[self.mode],) * self.axes)

    @property
    def most_terms(self) -> int:
        """Maximum number of terms of a pixel in dinput.

        Several corners of a sample hit one pixel only if cubic taps are clipped or reflected.
        """
        folded = self.mode == Mode.BICUBIC and self.padding_mode != Padding.ZEROS
        return self.samples * (self.corners if folded else 1)

    @property
    def fraction_bits(self) -> int:
        """Bits of a term of dinput: its magnitude is below ``2**fraction_bits`` units, or barely above."""
        return SUM_BITS - 1 - self.most_terms.bit_length()

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
        """The dtype in which coordinates, weights and sums are computed."""
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
                "mode is 'bicubic' and the image is 3-D, (N, C, D, H, W); it must be 'bilinear' or 'nearest'."
            )
        float_dtype(self.grid_dtype, "grid_dtype")
        accepted = (self.real.torch, torch.float32) if self.real.bits == 16 else (self.real.torch,)
        if self.grid_dtype not in accepted:
            raise InvalidDescriptor(
                f"grid_dtype is {self.grid_dtype} and input_dtype is {self.input_dtype}; with this "
                f"input_dtype the grid must be {' or '.join(map(str, accepted))}."
            )


def _member(kind: type[StrEnum], name: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        accepted = ", ".join(repr(member.value) for member in kind)
        raise InvalidDescriptor(f"{name} is {shown(value)}; accepted are {accepted}.") from None


@dataclass(frozen=True, kw_only=True)
class GridSampleDescriptor(SampleDescriptor):
    """grid_sample."""

    @property
    def empty(self) -> bool:
        return 0 in self.output_shape


@dataclass(frozen=True, kw_only=True)
class GridSampleBackwardDescriptor(SampleDescriptor):
    """The gradients with respect to the image and the grid, each only if needed."""

    needs_dinput: bool = True
    needs_dgrid: bool = True

    @property
    def empty(self) -> bool:
        # Without samples, dinput is zeros; without channels, dgrid is zeros. Both must still be written.
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
    """``dout`` and the forward's ``grid`` are read, and its ``input`` if ``dgrid`` is needed.

    ``dinput`` and ``dgrid`` are written, or with ``accumulate`` added to; each is None if not needed.
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
    """Mode, error bound and bytes moved of both directions.

    The error is relative to the exact result at the rounded coordinates. The unit is one ULP of a sum of
    magnitudes: of the pixels of a sample (out); of dout over all samples that use a pixel (dinput); of dout
    times pixel over the pixels of a sample and all channels, times the derivative of the coordinate by the
    grid (dgrid).

    Terms of dinput are integer multiples of a unit, which is ``per_term`` of the largest finite magnitude of
    dout in the plane (one image, one channel). Each term adds an error of at most that much.
    """

    def mode(self) -> str:
        desc = self.descriptor
        where = f"{desc.padding_mode}, {'corners' if desc.align_corners else 'edges'} aligned"
        return f"{desc.axes}-d {desc.mode}, {where}, {dtype_name(desc.grid_dtype)} grid"

    def bytes_moved(self) -> int:
        """At most the corners of the samples are read of the image."""
        desc, moved = self.descriptor, super().bytes_moved()
        if "input" in self.inputs and desc.expected("input") is not None:
            unread = max(desc.pixels - desc.samples * desc.corners, 0)
            moved -= desc.batch * desc.channels * unread * desc.input_dtype.itemsize
        return moved


# Absolute errors of weights and slopes, in units of 2^-p, where p is the precision of the compute type.
# Weights are at most 1. Rounding a number below 1, 2, 4 or 8 has an error of at most 1/2, 1, 2 or 4 units.
#
# A sample is at t from 0 to 1 past its first tap. t and 1 - t each have an error of at most 1/2: t is rounded
# only just left of the first pixel, and there 1 - t is exact. Linear weights are t and 1 - t.
#
# A cubic tap is at distance u. For near taps u is t or 1 - t, with an error of 1/2; for far taps it is one
# more, with an error of 3/2. The roundings of each operation in turn, with Sterbenz's lemma for exact
# differences, give:
#   near weight  ((5/4 u - 9/4) u) u + 1            2.1 u, + 1, times u, + 1/2, + 1/2, + 1.35 / 2    < 5
#   far weight   ((15/4 - 3/4 u) u - 6) u + 3       3 u, + 4, times u, + 2; largest at u = 2         <= 22
#   near slope   (15/4 u - 9/2) u                   at u = 1: 2 u, + 1/2, + 3 / 2                    <= 4
#   far slope    (15/2 - 9/4 u) u - 6               at u = 1: 6 u, + 4, + 3 * 3 / 2                  < 15
# Near weights are at most 1, far weights 4/27; near slopes 1.35, far slopes 3/4. The error of a product of
# two, rounded once, is largest for the error of a far weight times the largest near factor.
CUBIC_WEIGHT_ERROR = 24.0  # 22 + 4/27 * 5 + 1/2
CUBIC_SLOPE_ERROR = 31.0  # 1.35 * 22 + 4/27 * 4 + 1/2
CUBIC_SLOPE = 1.35


def weight_error(desc: SampleDescriptor) -> float:
    """Error of a corner's weight, in units of 2^-p: one factor per axis, and their products."""
    if desc.mode == Mode.NEAREST:
        return 0.0
    return CUBIC_WEIGHT_ERROR if desc.mode == Mode.BICUBIC else desc.axes - 0.5


def slope_error(desc: SampleDescriptor) -> float:
    """Error of a corner's slope in the same units. A linear slope is 1 or -1 times the other weights."""
    return CUBIC_SLOPE_ERROR if desc.mode == Mode.BICUBIC else desc.axes - 1.5


def lean(backend: str, kernel: str) -> Implementation:
    """A slower kernel with the same bits and less workspace, for a limited workspace."""
    return Implementation(backend, f".{backend}:{kernel}", "lean")


class GridSamplePlan(SamplePlan[GridSampleDescriptor, GridSampleArgs]):
    """out = the image at the coordinates of the grid: weighted sums of the corners of each sample."""

    kernels = (*on_backends("GridSample"), lean("cpu", "LeanGridSample"))

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        if desc.mode == Mode.NEAREST:
            return {"out": 0.0}
        # Besides the weight: the product with the pixel, and the sum of the products.
        return {"out": error_in_ulp(weight_error(desc) + desc.corners, desc.compute, desc.real)}


class GridSampleBackwardPlan(SamplePlan[GridSampleBackwardDescriptor, GridSampleBackwardArgs]):
    """dinput and dgrid: the gradients of grid_sample by the image and by the grid."""

    kernels = (
        *on_backends("GridSampleBackward"),
        lean("cpu", "LeanGridSampleBackward"),
        lean("gpu", "LeanGridSampleBackward"),
    )

    numerics_version = 2

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        # Besides the weight: the product with dout, and the conversion of the sum; of two words in float64.
        rounded = weight_error(desc) + (desc.mode != Mode.NEAREST) + (3 if desc.compute.bits == 64 else 1)
        found = {"dinput": error_in_ulp(rounded, desc.compute, desc.real)} if desc.needs_dinput else {}
        return found | ({"dgrid": self._ulp_of_dgrid()} if desc.needs_dgrid else {})

    def _ulp_of_dgrid(self) -> float:
        desc = self.descriptor
        if desc.mode == Mode.NEAREST:
            return 0.0
        # Besides the slope: the product of dout and the pixel, the sum over channels, the product with the
        # slope, the sum over corners, and the product with the scale.
        steps = desc.corners + 2 + ordered_additions(desc.channels)
        largest = CUBIC_SLOPE if desc.mode == Mode.BICUBIC else 1.0
        rounded = slope_error(desc) + largest * steps
        return error_in_ulp(rounded, desc.compute, float_dtype(desc.grid_dtype, "grid_dtype"))

    def per_term(self) -> dict[str, float]:
        words = 2 if self.descriptor.compute.bits == 64 else 1
        unit = 2.0 ** (1 - words * self.descriptor.fraction_bits)
        return {"dinput": unit} if self.descriptor.needs_dinput else {}
