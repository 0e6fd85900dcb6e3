"""Quantize, dequantize and the gradient of quantize, against torch's quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import torch

from holdfast.core.benchmark import Call, NoPeer, Tensors
from holdfast.core.contract import PlanPreference
from holdfast.core.dtypes import dtype_name
from holdfast.core.granularity import PerChannel, PerTensor
from holdfast.core.registry import plans
from holdfast.core.stream import Stream
from holdfast.ops.affine.benchmark import (
    INT4,
    LAYOUTS,
    ScaledCase,
    ScaledProblem,
    beside,
    fake_quantizer,
    grouped,
    pack,
    unpack,
)
from holdfast.ops.affine.plan import AffinePlan
from holdfast.ops.dequantize.torch_op import dequantize
from holdfast.ops.quantize.torch_op import quantize

OPS = ("quantize", "dequantize", "quantize backward")


@dataclass(frozen=True)
class QuantizeCase(ScaledCase):
    """One row of quantize, dequantize or a gradient."""

    @property
    def name(self) -> str:
        real = "bf16" if self.real == torch.bfloat16 else "f32"
        codes = ("packed " if self.packed else "") + dtype_name(self.codes)
        pair = f"{codes} to {real}" if self.op == "dequantize" else f"{real} to {codes}"
        return f"{'hf.' if self.function else ''}{self.op} {self.label}, {pair}"

    @property
    def backward(self) -> bool:
        return self.op.endswith("backward")

    def problem(self, elements: int, stream: Stream, backend: str | None = None) -> QuantizeProblem:
        op = self.op.split()[0].capitalize()
        plan = plans()[f"{op}{type(self.granularity).__name__}{'Backward' if self.backward else ''}Plan"]
        fields: dict[str, Any] = asdict(cast(Any, self.granularity))
        fields["shape"] = self.shape(elements)
        ends = (self.codes, self.real) if self.op == "dequantize" else (self.real, self.codes)
        fields["input_dtype"], fields["output_dtype"] = ends
        if not self.backward:
            fields["packed"] = self.packed
        preference = PlanPreference(backend=backend, precompile=False)
        selected = plan.select(stream, plan.Descriptor(**fields), preference)
        assert isinstance(selected, AffinePlan)
        return QuantizeProblem(self, selected, stream)


@dataclass(frozen=True)
class QuantizeProblem(ScaledProblem):
    """A case at one size on one device."""

    case: QuantizeCase

    def function(self, tensors: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
        case = self.case
        assert not case.backward
        scale, zero_point, granularity = tensors["scale"], tensors["zero_point"], case.granularity
        if case.op == "quantize":
            return lambda: (
                quantize(
                    tensors["x"], scale, zero_point,
                    dtype=case.codes, granularity=granularity, packed=case.packed,
                ),
            )  # fmt: skip
        return lambda: (
            dequantize(
                tensors["q"], scale, zero_point,
                dtype=case.real, granularity=granularity, code_dtype=case.codes, packed=case.packed,
            ),
        )  # fmt: skip

    def formula(self, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        case, desc = self.case, self.plan.descriptor
        granularity, shape = desc.granularity, desc.shape
        code = case.code
        least, most = code.code_range
        zero_point = tensors["zero_point"]
        scale = beside(tensors["scale"], granularity, len(shape))
        zero = None if zero_point is None else beside(zero_point, granularity, len(shape))

        def quantize(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
            r = torch.round(grouped(x, granularity).float() / s)
            q = torch.clamp(r if z is None else r + z, least, most).to(code.storage).view(shape)
            return pack(q, code) if desc.per_byte > 1 else q

        def dequantize(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
            q = unpack(q, code) if desc.per_byte > 1 else q
            q = grouped(q, granularity).float()
            return ((q if z is None else q - z) * s).to(case.real).view(shape)

        def backward(
            dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None
        ) -> torch.Tensor:
            r = torch.round(grouped(x, granularity).float() / s)
            r = r if z is None else r + z
            dx = grouped(dy, granularity).float() / s
            return torch.where((r >= least) & (r <= most), dx, 0.0).to(case.real).view(shape)

        if case.op == "quantize":
            return quantize, [tensors["x"], scale, zero]
        if case.op == "dequantize":
            return dequantize, [tensors["q"], scale, zero]
        return backward, [tensors["dy"], tensors["x"], scale, zero]

    def torch_op(self, tensors: Tensors) -> Call:
        """torch.quantize_per_tensor and its kin; for the backward, that of torch.fake_quantize."""
        case, granularity = self.case, self.case.granularity
        if not isinstance(granularity, PerTensor | PerChannel):
            raise NoPeer("torch has no operator for this granularity")
        if case.codes != torch.int8:
            raise NoPeer(f"torch has no operator that makes {case.codes}")
        scale, zero_point = tensors["scale"], tensors["zero_point"]
        zero = torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
        if case.backward:
            x = tensors["x"].detach().requires_grad_()
            y = fake_quantizer(granularity, x, scale, zero)()
            return lambda: torch.autograd.grad(y, x, tensors["dy"], retain_graph=True)
        x = tensors["x"] if case.op == "quantize" else torch.randn_like(tensors["y"])
        if x.dtype != torch.float32:
            raise NoPeer("torch quantizes float32 alone")
        if isinstance(granularity, PerTensor):
            s, z = scale.item(), int(zero.item())
            made = partial(torch.quantize_per_tensor, x, s, z, torch.qint8)
        else:
            axis = granularity.axis % x.dim()
            made = partial(torch.quantize_per_channel, x, scale, zero, axis, torch.qint8)
        return made if case.op == "quantize" else made().dequantize


def full_cases() -> list[QuantizeCase]:
    """Every op, layout and dtype pair, symmetric; and the common ones with a zero point."""
    pairs = (
        (torch.float32, torch.int8, False),
        (torch.bfloat16, torch.int8, False),
        (torch.bfloat16, INT4, True),
    )
    symmetric = [QuantizeCase(op, layout, *pair) for op in OPS for layout in LAYOUTS for pair in pairs]
    affine = [
        QuantizeCase(op, layout, real, codes, packed, zero_point=True)
        for op in OPS
        for layout in ("per tensor", "per channel, axis 0")
        for real, codes, packed in (pairs[0], pairs[2])
    ]
    return symmetric + affine


def cpu_cases() -> list[QuantizeCase]:
    """One pair of dtypes at every op and layout; packed codes, a zero point and the functions once per op."""
    f32, bf16, int8 = torch.float32, torch.bfloat16, torch.int8
    plain = [QuantizeCase(op, layout, f32, int8) for op in OPS for layout in LAYOUTS]
    packed = [QuantizeCase(op, "per group of 32", bf16, INT4, packed=True) for op in OPS]
    affine = [QuantizeCase(op, "per channel, axis 0", f32, int8, zero_point=True) for op in OPS]
    functions = [QuantizeCase(op, "per tensor", f32, int8, function=True) for op in OPS[:2]]
    return plain + packed + affine + functions


def quick_cases() -> list[QuantizeCase]:
    return [
        QuantizeCase("quantize", "per tensor", torch.float32, torch.int8),
        QuantizeCase("quantize", "per channel, axis 0", torch.float32, torch.int8),
        QuantizeCase("quantize", "per group of 32", torch.bfloat16, INT4, packed=True),
        QuantizeCase("dequantize", "per channel, axis 0", torch.float32, torch.int8),
        QuantizeCase("quantize backward", "per tensor", torch.float32, torch.int8),
    ]
