"""Descriptors, argument checks and iteration space of the quantization ops.

All of them map between real numbers and codes by ``real = (code - zero_point) * scale``. The operands of
every kernel are in this order: outputs, other tensors, scale, zero point.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

import torch

from holdfast.core.checks import kind_of, shown
from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Descriptor, Expected
from holdfast.core.dtypes import ZERO_POINT_LIMIT, Float, float_dtype
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.formats import Format, format_of
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken, ScaleView
from holdfast.core.operands import Operand, refused_dtype, refused_tensor
from holdfast.core.plan import Args, DescribedKernel, Plan
from holdfast.core.strided import Space, coalesce

Scale = torch.Tensor | float
ZeroPoint = torch.Tensor | int | None


def clamp_zero_point(zero_point: int | None) -> int:
    """A Python zero point, saturated as in the kernels; None is 0."""
    return min(max(zero_point or 0, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)


@dataclass(frozen=True, kw_only=True)
class ScaledDescriptor(Descriptor):
    """A tensor with scales."""

    input_dtype: torch.dtype = torch.float32

    @property
    def granularity(self) -> Granularity:
        raise NotImplementedError

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the result. Codes may be stored in a wider dtype."""
        raise NotImplementedError

    @property
    def named_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.input_dtype, self.output_dtype

    @property
    def real(self) -> Float:
        """The dtype of the real numbers. It determines the compute type."""
        return float_dtype(self.input_dtype, "input_dtype")

    @property
    def codes(self) -> Format:
        """The format of the codes."""
        raise NotImplementedError

    @property
    def code_range(self) -> tuple[int, int]:
        """The least and the greatest code."""
        return self.codes.code_range

    @property
    def per_byte(self) -> int:
        """Codes per byte; 1 if they are not packed."""
        return 1

    @property
    def view(self) -> ScaleView:
        return self.granularity.view(self.shape)

    def expected(self, name: str) -> Expected:
        return self.shape, self.input_dtype

    def validate(self) -> None:
        super().validate()
        self.granularity.view(self.shape)


@dataclass(frozen=True, kw_only=True)
class AffineDescriptor(ScaledDescriptor):
    """A map between a real tensor and its codes. Subclasses define ``real`` and ``codes``."""

    output_dtype: torch.dtype = torch.int8

    @property
    def is_packed(self) -> bool:
        return False

    @property
    def per_byte(self) -> int:
        return self.codes.per_byte if self.is_packed else 1

    @property
    def code_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that stores the codes."""
        if self.per_byte == 1:
            return self.shape
        return (*self.shape[:-1], -(-self.shape[-1] // self.per_byte))

    @property
    def code_storage(self) -> torch.dtype:
        """The dtype of the tensor that stores the codes."""
        return torch.uint8 if self.per_byte > 1 else self.codes.storage

    @property
    def gradient_of_codes(self) -> torch.dtype:
        """The dtype of gradients with respect to the codes."""
        return self.codes.torch if self.codes.carried else self.real.torch

    def validate(self) -> None:
        super().validate()
        real, codes = self.real, self.codes
        if codes.carried and (real.bits == 64) != (codes.bits == 64) and codes.bits != 32:
            accepted = " or ".join(dict.fromkeys(("torch.float32", str(real.torch))))
            raise InvalidDescriptor(
                f"codes carried as {codes.torch} with {real.torch} values would round twice; use {accepted} "
                "for the codes."
            )
        if self.is_packed:
            self._validate_packing()

    def _validate_packing(self) -> None:
        if self.per_byte == 1:
            raise InvalidDescriptor(
                f"packed=True with {self.codes.torch}: only 2-bit and 4-bit codes share a byte. "
                "Use torch.int2, uint2, int4 or uint4, or leave packed out."
            )
        if not self.shape:
            raise InvalidDescriptor("a tensor of rank 0 has no last axis to pack; reshape it to (1,).")
        split = self.view.split
        if split is not None and split[0] == len(self.shape) - 1 and split[1] % self.per_byte:
            raise InvalidDescriptor(
                f"packed codes put {self.per_byte} neighbours in a byte, and group_size {split[1]} would let "
                f"two groups share one; choose a multiple of {self.per_byte}."
            )


class ToCodesDescriptor(AffineDescriptor):
    """A map from real numbers to codes of ``output_dtype`` in the range q_min to q_max."""

    q_min: int | None
    q_max: int | None

    @property
    def codes(self) -> Format:
        return format_of(self.output_dtype, "output_dtype")

    @property
    def code_range(self) -> tuple[int, int]:
        """q_min and q_max; the defaults are those of the format."""
        return range_of(self.codes, self.q_min, self.q_max)

    def validate(self) -> None:
        super().validate()
        if self.codes.carried and (self.q_min is None or self.q_max is None):
            raise InvalidDescriptor(
                f"codes carried as {self.output_dtype} have no range of their own; give q_min and q_max."
            )
        validate_range(self.codes, self.q_min, self.q_max, f"{self.output_dtype} holds")


@arguments
class StraightThroughArgs(Args):
    """Reads ``dy`` and the forward's ``x``. Writes ``dx``, or adds to it with ``accumulate``."""

    dy: torch.Tensor
    x: torch.Tensor
    scale: Scale
    dx: Output
    zero_point: ZeroPoint = None
    accumulate: bool = False


class _Over:
    """Base of descriptors of one granularity, whose fields are those of the granularity."""

    kind: ClassVar[type[Granularity]]

    @property
    def granularity(self) -> Granularity:
        given = {field.name: getattr(self, field.name) for field in fields(cast(Any, self.kind))}
        return self.kind(**given)


@dataclass(frozen=True, kw_only=True)
class OverTensor(_Over):
    """One scale for the whole tensor."""

    kind = PerTensor


@dataclass(frozen=True, kw_only=True)
class OverChannels(_Over):
    """One scale for each index of ``axis``."""

    kind = PerChannel
    axis: int


@dataclass(frozen=True, kw_only=True)
class OverTokens(_Over):
    """One scale for each row of the last axis."""

    kind = PerToken


@dataclass(frozen=True, kw_only=True)
class OverGroups(_Over):
    """One scale for each ``group_size`` neighbours along ``axis``."""

    kind = PerGroup
    group_size: int
    axis: int = -1


def define_granularities(plan: type[AffinePlan[Any, Any]]) -> None:
    """Define the descriptor, args and plan of each granularity in the module of ``plan``.

    For ``QuantizeBackwardPlan`` the plans are ``QuantizePerTensorBackwardPlan`` and so on.
    """
    op, backward = plan.__name__.removesuffix("Plan"), ""
    if op.endswith("Backward"):
        op, backward = op.removesuffix("Backward"), "Backward"
    for over in (OverTensor, OverChannels, OverTokens, OverGroups):
        name = f"{op}{over.kind.__name__}{backward}"
        about = {"__module__": plan.__module__, "__doc__": f"{op}{backward}, {str(over.__doc__).lower()}"}
        descriptor: Any = type(f"{name}Descriptor", (over, plan.Descriptor), dict(about))
        descriptor = dataclass(frozen=True, kw_only=True)(descriptor)
        made = type(f"{name}Plan", (plan,), {**about, "Descriptor": descriptor})
        for spelling, kind in (("Descriptor", descriptor), ("Args", plan.Args), ("Plan", made)):
            setattr(sys.modules[plan.__module__], name + spelling, kind)


D = TypeVar("D", bound=ScaledDescriptor)
A = TypeVar("A", bound=Args)


class AffineKernel(DescribedKernel[D]):
    """A kernel of an affine op, on any backend."""


#: Operands with one value per scale. All others have the shape of the tensor.
PER_SCALE = frozenset(("scale", "zero_point", "dscale", "dzero_point", "low", "high"))


class AffinePlan(Plan[D, A]):
    """The argument checks, mode and bytes of every affine plan."""

    #: Operands with the shape of the tensor, in kernel order. Codes may be packed.
    tensors: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, abstract: bool = False) -> None:
        super().__init_subclass__(abstract)
        cls.tensors = tuple(name for name in getattr(cls, "operands", ()) if name not in PER_SCALE)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._scale_floor, self._scale_ceiling = _scale_limits(self.descriptor.real.compute)

    def mode(self) -> str:
        desc = self.descriptor
        return desc.granularity.name.partition(":")[0] + ("_packed" if desc.per_byte > 1 else "")

    def bytes_moved(self) -> int:
        expected = map(self.descriptor.expected, self.tensors)
        moved = sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected)
        return moved + 4 * self.descriptor.view.scale_count

    def _refused_operand(self, name: str, operand: Any) -> str:
        shape, dtype = self.descriptor.expected(name)
        if name not in PER_SCALE:
            return refused_tensor(name, operand, (shape, dtype)) or self._refused_packing(name, operand)
        if name in self.outputs:
            return refused_dtype(name, operand, dtype) or self._refused_per_scale(name, operand)
        return self._refused_scale(operand) if name == "scale" else self._refused_zero_point(operand)

    def _refused_packing(self, name: str, tensor: torch.Tensor) -> str:
        packed = self.descriptor.per_byte > 1 and tensor.dtype == torch.uint8
        if packed and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return (
                f"{name} has strides {tuple(tensor.stride())}; packed codes must lie side by side along the "
                "last axis. Make it contiguous first."
            )
        return ""

    def _refused_scale(self, scale: Any) -> str:
        real = self.descriptor.real
        if isinstance(scale, (int, float)) and not isinstance(scale, bool):
            # A Python int may be larger than any float64, which is what the kernel takes.
            return self._refused_number(scale) if abs(scale) > sys.float_info.max else ""
        if not isinstance(scale, torch.Tensor):
            return f"scale is {kind_of(scale)}; it must be a tensor or a Python float."
        dtypes = self.descriptor.codes.scales.accepted(real.torch)
        if scale.dtype not in dtypes:
            accepted = " or ".join(map(str, dtypes))
            return f"scale has dtype {scale.dtype}; accepted is {accepted}, or a Python float."
        return self._refused_per_scale("scale", scale)

    def _refused_zero_point(self, zero_point: Any) -> str:
        if zero_point is None or (isinstance(zero_point, int) and not isinstance(zero_point, bool)):
            return self._refused_offset(zero_point) if zero_point else ""
        if not isinstance(zero_point, torch.Tensor):
            return f"zero_point is {kind_of(zero_point)}; it must be an int32 tensor, an int or None."
        accepted = self._zero_point_dtypes()
        if zero_point.dtype not in accepted:
            named = ", ".join(map(str, accepted))
            return f"zero_point has dtype {zero_point.dtype}; accepted is {named}, an int or None."
        return self._refused_offset("a tensor") or self._refused_per_scale("zero_point", zero_point)

    def _refused_offset(self, zero_point: Any) -> str:
        codes = self.descriptor.codes
        if codes.zero_point:
            return ""
        return f"zero_point is {zero_point}; {codes.torch} has no zero point. Leave it out."

    def _zero_point_dtypes(self) -> tuple[torch.dtype, ...]:
        """Accepted dtypes of a zero point tensor."""
        return (torch.int32,)

    def _refused_per_scale(self, name: str, tensor: torch.Tensor) -> str:
        view = self.descriptor.view
        if view.scale_strides(tensor.shape, tensor.stride()) is None:
            return (
                f"{name} has shape {tuple(tensor.shape)}; {self.descriptor.granularity} of a tensor of shape "
                f"{self.descriptor.shape} takes {view.scale_count} in shape "
                f"{' or '.join(map(str, view.accepted_scale_shapes))}."
            )
        return ""

    def _refused_values(self, args: A) -> str:
        scale = args.scale  # type: ignore[attr-defined]
        if isinstance(scale, torch.Tensor) or self._scale_floor < scale < self._scale_ceiling:
            return ""
        return self._refused_number(scale)

    def _refused_number(self, scale: float) -> str:
        return (
            f"scale is {shown(scale)}; it must be a positive number that "
            f"{self.descriptor.real.compute.torch}, in which the kernel computes, can hold."
        )


def range_of(codes: Format, q_min: int | None, q_max: int | None) -> tuple[int, int]:
    """q_min and q_max; the defaults are those of the format."""
    least, most = codes.code_range
    return least if q_min is None else q_min, most if q_max is None else q_max


def validate_range(codes: Format, q_min: int | None, q_max: int | None, holder: str) -> None:
    """Raise unless q_min to q_max is a range within the format. ``holder`` names the format in the error."""
    limits = codes.code_range
    if codes.is_float and (q_min is not None or q_max is not None):
        raise InvalidDescriptor(
            f"q_min or q_max is given with {codes.torch}, whose range is always {limits[0]} to {limits[1]}; "
            "leave both out."
        )
    q_min, q_max = range_of(codes, q_min, q_max)
    if q_min > q_max:
        raise InvalidDescriptor(f"q_min {q_min} is greater than q_max {q_max}; swap them.")
    if q_min < limits[0] or q_max > limits[1]:
        raise InvalidDescriptor(
            f"the range {q_min} to {q_max} is wider than {holder}, {limits[0]} to {limits[1]}; "
            "narrow it or choose a wider dtype."
        )


def _scale_limits(compute: Float) -> tuple[float, float]:
    """The open interval of Python scales that are positive and finite after rounding to ``compute``."""
    if compute.bits == 64:
        return 0.0, math.inf
    return 2.0**-150, (2.0 - 2.0**-24) * 2.0**127


def one_rounding_ulp(out: Float, compute: Float) -> float:
    """Error bound, in ULP of ``out``, of one operation rounded to ``compute`` and then to ``out``."""
    return 0.5 if out is compute else 0.5 + 2.0 ** (out.precision - compute.precision - 1)


def affine_space(
    desc: ScaledDescriptor,
    tensors: Sequence[torch.Tensor],
    shared: Sequence[Operand],
    *,
    packed: int | None = None,
) -> Space:
    """The iteration space over ``tensors``, outputs first, and ``shared``: the scale and the zero point.

    ``packed`` is the position of the tensor that holds packed codes. Its strides are counted in codes.
    """
    view = desc.view
    strides: list[tuple[int, ...]] = []
    for position, tensor in enumerate(tensors):
        own = tensor.stride()
        if position == packed:
            own = (*(step * desc.per_byte for step in own[:-1]), 1)
        strides.append(view.tensor_strides(own))
    for operand in shared:
        steps = None
        if isinstance(operand, torch.Tensor):
            steps = view.scale_strides(operand.shape, operand.stride())
        strides.append(steps or (0,) * len(view.shape))
    return coalesce(view.shape, strides, keep_order=packed is not None)
