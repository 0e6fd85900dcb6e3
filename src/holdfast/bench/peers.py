"""What a user has today: torch's own operators, and the plain formula, eager and compiled.

A peer allocates what it returns, as its users let it; a plan writes where it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from holdfast.bench.cases import Case, Problem, Tensors
from holdfast.core.dtypes import Code
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken

Call = Callable[[], object]

PEERS = ("torch op", "eager", "compiled")


class NoPeer(Exception):
    """torch has nothing to compare with; the message says why."""


def peer(kind: str, problem: Problem, tensors: Tensors) -> Call:
    """The peer's way to do the work of ``problem`` on ``tensors``."""
    if kind == "torch op":
        return _torch_op(problem, tensors)
    formula, inputs = plain_formula(problem, tensors)
    if kind == "compiled":
        torch._dynamo.reset()
        formula = torch.compile(formula, dynamic=False)
    return lambda: formula(*inputs)


def plain_formula(problem: Problem, tensors: Tensors) -> tuple[Callable[..., torch.Tensor], list[Any]]:
    """The op in a few lines of torch, as one would write it, and its inputs."""
    case, desc = problem.case, problem.plan.descriptor
    granularity, shape = desc.granularity, desc.shape
    code = desc.codes
    assert isinstance(code, Code)
    least, most = code.code_range
    scale = _beside(tensors["scale"], granularity, len(shape))
    zero = None if tensors["zero_point"] is None else _beside(tensors["zero_point"], granularity, len(shape))

    def quantize(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        r = torch.round(_grouped(x, granularity).float() / s)
        q = torch.clamp(r if z is None else r + z, least, most).to(code.storage).view(shape)
        return _pack(q, code) if desc.per_byte > 1 else q

    def dequantize(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        q = _unpack(q, code) if desc.per_byte > 1 else q
        q = _grouped(q, granularity).float()
        return ((q if z is None else q - z) * s).to(case.real).view(shape)

    def backward(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        r = torch.round(_grouped(x, granularity).float() / s)
        r = r if z is None else r + z
        dx = _grouped(dy, granularity).float() / s
        return torch.where((r >= least) & (r <= most), dx, 0.0).to(case.real).view(shape)

    if case.op == "quantize":
        return quantize, [tensors["x"], scale, zero]
    if case.op == "dequantize":
        return dequantize, [tensors["q"], scale, zero]
    return backward, [tensors["dy"], tensors["x"], scale, zero]


def _beside(values: torch.Tensor, granularity: Granularity, rank: int) -> torch.Tensor:
    """Scales in a shape that broadcasts against the (grouped) tensor."""
    if isinstance(granularity, PerChannel):
        axis = granularity.axis % rank
        return values.view([-1 if d == axis else 1 for d in range(rank)])
    return values[..., None] if isinstance(granularity, PerToken | PerGroup) else values


def _grouped(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    if not isinstance(granularity, PerGroup):
        return x
    return x.view(*x.shape[:-1], x.shape[-1] // granularity.group_size, granularity.group_size)


def _pack(codes: torch.Tensor, code: Code) -> torch.Tensor:
    places = codes.view(torch.uint8) & (2**code.bits - 1)
    packed: torch.Tensor = places[..., :: code.per_byte]
    for place in range(1, code.per_byte):
        packed = packed | (places[..., place :: code.per_byte] << (place * code.bits))
    return packed


def _unpack(packed: torch.Tensor, code: Code) -> torch.Tensor:
    spare = 8 - code.bits
    if code.signed:  # to the top of the byte and back down, so that the sign comes along
        places = [(packed << (spare - p * code.bits)).view(torch.int8) >> spare for p in range(code.per_byte)]
    else:
        places = [(packed >> (p * code.bits)) & (2**code.bits - 1) for p in range(code.per_byte)]
    return torch.stack(places, dim=-1).flatten(-2)


def _torch_op(problem: Problem, tensors: Tensors) -> Call:
    """torch.quantize_per_tensor and its kin; for the backward, that of torch.fake_quantize."""
    case: Case = problem.case
    granularity = problem.plan.descriptor.granularity
    if not isinstance(granularity, PerTensor | PerChannel):
        raise NoPeer("torch has no operator for this granularity")
    if case.codes != torch.int8:
        raise NoPeer(f"torch has no operator that makes {case.codes}")
    scale, zero_point = tensors["scale"], tensors["zero_point"]
    zero = torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
    if case.backward:
        return _fake_quantize_backward(granularity, tensors, scale, zero)
    x: torch.Tensor = tensors["x"] if case.op == "quantize" else torch.randn_like(tensors["y"])
    if x.dtype != torch.float32:
        raise NoPeer("torch quantizes float32 alone")
    if isinstance(granularity, PerTensor):
        s, z = scale.item(), int(zero.item())
        quantize = partial(torch.quantize_per_tensor, x, s, z, torch.qint8)
    else:
        axis = granularity.axis % x.dim()
        quantize = partial(torch.quantize_per_channel, x, scale, zero, axis, torch.qint8)
    return quantize if case.op == "quantize" else quantize().dequantize


def _fake_quantize_backward(
    granularity: Granularity, tensors: Tensors, scale: torch.Tensor, zero: torch.Tensor
) -> Call:
    x = tensors["x"].detach().requires_grad_()
    if isinstance(granularity, PerChannel):
        axis = granularity.axis % x.dim()
        y = torch.fake_quantize_per_channel_affine(x, scale, zero, axis, -128, 127)
    else:
        y = torch.fake_quantize_per_tensor_affine(x, scale.item(), int(zero.item()), -128, 127)
    return lambda: torch.autograd.grad(y, x, tensors["dy"], retain_graph=True)
