"""Shared by the benchmarks of the quantization ops: layouts, random inputs and plain torch formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch

from holdfast.core import formats
from holdfast.core.benchmark import Case, Described, NoPeer, Problem, Tensors
from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import INTEGERS, Format
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from holdfast.core.registry import plans
from holdfast.ops.affine.plan import AffinePlan

INT4 = formats.INT4.torch

#: The row length of per-token and per-group cases: the width of a transformer layer.
ROW = 4096


def _square(elements: int) -> tuple[int, ...]:
    rows = 2 ** ((elements.bit_length() - 1) // 2)
    return rows, max(elements // rows, 1)


def _middle_channels(elements: int) -> tuple[int, ...]:
    outer = min(16, elements)
    return outer, *_square(elements // outer)


def _rows(elements: int) -> tuple[int, ...]:
    return max(elements // ROW, 1), ROW


#: Granularity, and the shape of a tensor with a given number of elements, by layout name.
LAYOUTS: dict[str, tuple[Granularity, Callable[[int], tuple[int, ...]]]] = {
    "per tensor": (PerTensor(), _square),
    "per channel, axis 0": (PerChannel(0), _square),
    "per channel, middle": (PerChannel(1), _middle_channels),
    "per channel, last": (PerChannel(-1), _square),
    "per token": (PerToken(), _rows),
    "per group of 32": (PerGroup(32), _rows),
    "per group of 128": (PerGroup(128), _rows),
}


@dataclass(frozen=True)
class ScaledCase(Case):
    """``variant`` is a key of ``LAYOUTS``. A gradient is ``packed`` if the codes of its forward are."""

    codes: torch.dtype
    packed: bool = False
    zero_point: bool = False

    @property
    def label(self) -> str:
        return self.variant + (", zero point" if self.zero_point else "")

    @property
    def dtypes(self) -> str:
        return f"{dtype_name(self.real)}, {'packed ' if self.packed else ''}{dtype_name(self.codes)}"

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "code_dtype": dtype_name(self.codes), "packed": self.packed}

    @property
    def granularity(self) -> Granularity:
        return LAYOUTS[self.variant][0]

    @property
    def code(self) -> Format:
        return INTEGERS[dtype_name(self.codes)]

    def shape(self, elements: int) -> tuple[int, ...]:
        """The shape of a tensor with ``elements`` elements."""
        return LAYOUTS[self.variant][1](elements)


@dataclass(frozen=True)
class ScaledProblem(Problem):
    case: ScaledCase
    plan: AffinePlan[Any, Any]

    @property
    def special_inputs(self) -> tuple[str, ...]:
        inputs = (name for name in self.plan.tensors if name not in self.plan.outputs)
        return tuple(name for name in inputs if self.plan.descriptor.expected(name)[1].is_floating_point)

    def draw(self) -> Tensors:
        """Random tensors. About one in twenty values is out of range."""
        device = self.stream.device
        random: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(20)}
        view = self.plan.descriptor.view
        least, most = self.case.code.code_range
        tensors: Tensors = {}
        for name in self.plan.tensors:
            shape, dtype = self.plan.descriptor.expected(name)
            if name in self.plan.outputs:
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            elif dtype.is_floating_point:
                tensors[name] = torch.randn(shape, dtype=dtype, **random)
            else:
                low, high = (0, 256) if self.case.packed else (least, most + 1)
                tensors[name] = torch.randint(low, high, shape, dtype=dtype, **random)
        tensors["zero_point"] = None
        if "scale" in self.plan.outputs:
            shape, dtype = self.plan.descriptor.expected("scale")
            return {**tensors, "scale": torch.empty(shape, dtype=dtype, device=device)}
        spread = torch.rand(view.scale_shape, **random)
        tensors["scale"] = (1.5 + spread) / most
        if self.case.zero_point:
            tensors["zero_point"] = torch.randint(-2, 3, view.scale_shape, dtype=torch.int32, **random)
        return tensors

    def broadcast_scales(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scale and the zero point in a shape that broadcasts against the tensor, after ``grouped``."""
        granularity, rank = self.case.granularity, len(self.plan.descriptor.shape)
        zero = tensors["zero_point"]
        broadcast = None if zero is None else broadcastable(zero, granularity, rank)
        return broadcastable(tensors["scale"], granularity, rank), broadcast


def broadcastable(values: torch.Tensor, granularity: Granularity, rank: int) -> torch.Tensor:
    """Scales in a shape that broadcasts against the tensor, after ``grouped``."""
    if isinstance(granularity, PerChannel):
        axis = granularity.axis % rank
        return values.view([-1 if d == axis else 1 for d in range(rank)])
    return values[..., None] if isinstance(granularity, PerToken | PerGroup) else values


def grouped(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """The tensor with its last axis split into groups, if the granularity is per group."""
    if not isinstance(granularity, PerGroup):
        return x
    return x.view(*x.shape[:-1], x.shape[-1] // granularity.group_size, granularity.group_size)


def pack(codes: torch.Tensor, code: Format) -> torch.Tensor:
    """Pack codes into bytes in plain torch."""
    fields = codes.view(torch.uint8) & (2**code.bits - 1)
    packed: torch.Tensor = fields[..., :: code.per_byte]
    for p in range(1, code.per_byte):
        packed = packed | (fields[..., p :: code.per_byte] << (p * code.bits))
    return packed


def unpack(packed: torch.Tensor, code: Format) -> torch.Tensor:
    """Undo ``pack``."""
    spare = 8 - code.bits
    if code.signed:  # shift to the top of the byte and back, which extends the sign
        fields = [(packed << (spare - p * code.bits)).view(torch.int8) >> spare for p in range(code.per_byte)]
    else:
        fields = [(packed >> (p * code.bits)) & (2**code.bits - 1) for p in range(code.per_byte)]
    return torch.stack(fields, dim=-1).flatten(-2)


def fake_quantizer(
    granularity: Granularity, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """torch's fake quantization of ``x`` to 8 bits."""
    if isinstance(granularity, PerChannel):
        axis = granularity.axis % x.dim()
        return lambda: torch.fake_quantize_per_channel_affine(x, scale, zero, axis, -128, 127)
    s, z = scale.item(), int(zero.item())
    return lambda: torch.fake_quantize_per_tensor_affine(x, s, z, -128, 127)


@dataclass(frozen=True)
class CodesCase(ScaledCase):
    """A benchmark row of quantize, dequantize or a gradient. ``op`` names the plan."""

    @property
    def name(self) -> str:
        real = "bf16" if self.real == torch.bfloat16 else "f32"
        codes = ("packed " if self.packed else "") + dtype_name(self.codes)
        pair = f"{codes} to {real}" if self.op == "dequantize" else f"{real} to {codes}"
        return f"{'hf.' if self.function else ''}{self.op} {self.label}, {pair}"

    @property
    def backward(self) -> bool:
        return self.op.endswith("backward")

    def described(self, elements: int) -> Described:
        op = self.op.split()[0].capitalize()
        plan = plans()[f"{op}{type(self.granularity).__name__}{'Backward' if self.backward else ''}Plan"]
        fields: dict[str, Any] = asdict(cast(Any, self.granularity))
        fields["shape"] = self.shape(elements)
        dtypes = (self.codes, self.real) if self.op == "dequantize" else (self.real, self.codes)
        fields["input_dtype"], fields["output_dtype"] = dtypes
        if not self.backward:
            fields["packed"] = self.packed
        return plan, fields


def quantizer(case: ScaledCase, x: torch.Tensor, tensors: Tensors) -> Callable[[], torch.Tensor]:
    """torch's quantization of ``x`` to a quantized tensor. Raises ``NoPeer`` where torch has none."""
    granularity = case.granularity
    if x.dtype != torch.float32:
        raise NoPeer("torch quantizes float32 alone")
    scale, zero = tensors["scale"], torch_zero_point(case, tensors)
    if isinstance(granularity, PerTensor):
        return partial(torch.quantize_per_tensor, x, scale.item(), int(zero.item()), torch.qint8)
    assert isinstance(granularity, PerChannel)
    return partial(torch.quantize_per_channel, x, scale, zero, granularity.axis % x.dim(), torch.qint8)


def torch_zero_point(case: ScaledCase, tensors: Tensors) -> torch.Tensor:
    """The zero point for torch's operators. Raises ``NoPeer`` where torch has no operator."""
    if not isinstance(case.granularity, PerTensor | PerChannel):
        raise NoPeer("torch has no operator for this granularity")
    if case.codes != torch.int8:
        raise NoPeer(f"torch has no operator that makes {case.codes}")
    given: torch.Tensor | None = tensors["zero_point"]
    return torch.zeros_like(tensors["scale"], dtype=torch.int32) if given is None else given


#: Timed dtypes: real dtype, code dtype, whether the codes are packed.
PAIRS = (
    (torch.float32, torch.int8, False),
    (torch.bfloat16, torch.int8, False),
    (torch.bfloat16, INT4, True),
)


def full_rows(make: Callable[..., Case], op: str) -> list[Any]:
    """Every layout with every dtype pair without a zero point; common ones with a zero point."""
    symmetric = [make(op, layout, *pair) for layout in LAYOUTS for pair in PAIRS]
    affine = [
        make(op, layout, real, codes, packed, zero_point=True)
        for layout in ("per tensor", "per channel, axis 0")
        for real, codes, packed in (PAIRS[0], PAIRS[2])
    ]
    return symmetric + affine


def cpu_rows(make: Callable[..., Case], op: str) -> list[Any]:
    """Every layout with one dtype pair; one row with packed codes and one with a zero point."""
    f32, bf16, int8 = torch.float32, torch.bfloat16, torch.int8
    plain = [make(op, layout, f32, int8) for layout in LAYOUTS]
    packed = make(op, "per group of 32", bf16, INT4, packed=True)
    return [*plain, packed, make(op, "per channel, axis 0", f32, int8, zero_point=True)]
