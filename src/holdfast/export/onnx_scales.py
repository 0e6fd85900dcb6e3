"""Scales and zero points as inputs of QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from holdfast.core.errors import Unsupported
from holdfast.core.formats import Format
from holdfast.core.granularity import Granularity, PerGroup, PerTensor, PerToken
from holdfast.export.onnx_formats import Layout, layout_of
from holdfast.export.onnx_graph import FLOAT, Call, code_array, constant, onnx_type, shape_of
from holdfast.ops.choose_scale.plan import SCALE_FLOOR, ScaleOfData


@dataclass
class Scales:
    """The scale and zero point inputs, and the attributes ``axis`` and ``block_size``.

    ``tensors`` are the scale and the zero point, if they are constants.
    """

    scale: ir.Value
    zero_point: ir.Value | None
    attributes: Mapping[str, int]
    tensors: tuple[torch.Tensor, torch.Tensor] | None = None


def scales_of(call: Call, kind: Format, granularity: Granularity, shape: tuple[Any, ...]) -> Scales:
    """The scales of a call with the arguments scale, scale_value, zero_point and zero_value."""
    scale, zero_point = call.input(1), call.input(2)
    scales, zeros = constant(scale), constant(zero_point)
    if scale is None:
        scales = torch.tensor(call.arguments["scale_value"])
    if zero_point is None:
        zeros = torch.tensor(call.arguments["zero_value"], dtype=torch.int32)
    if scales is not None and zeros is not None:
        return constant_scales(call, kind, granularity, shape, scales, zeros)
    if scale is None or (zero_point is None and call.arguments["zero_value"]):
        raise Unsupported(
            f"{call.name!r} computes its scale or its zero point, and the other one is a number; in ONNX "
            "both must be computed, or both must be constants."
        )
    return computed_scales(call, kind, layout_of(granularity, shape), scale, zero_point)


def constant_scales(
    call: Call, kind: Format, granularity: Granularity, shape: tuple[Any, ...], scale: torch.Tensor,
    zero_point: torch.Tensor,
) -> Scales:  # fmt: skip
    """Scales and zero points as initializers.

    The zero points are written even if they are 0: some passes of onnxruntime fail without them.
    """
    if scale.dtype == torch.float64:
        raise Unsupported(f"{call.name!r} has a scale of float64; ONNX quantizes in float32.")
    zeros = whole(zero_point)
    lowest, highest = kind.code_range
    if zeros.numel() and not lowest <= int(zeros.min()) <= int(zeros.max()) <= highest:
        raise Unsupported(
            f"{call.name!r} has zero points from {int(zeros.min())} to {int(zeros.max())}; in ONNX a zero "
            f"point is a code, here from {lowest} to {highest}. Choose zero points in this range."
        )
    layout, tensors = _placed(granularity, shape, scale.float(), zeros)
    codes = tensors[1].to(torch.float32).to(kind.storage) if kind.is_float else tensors[1]
    return Scales(
        call.initializer("scale", tensors[0].numpy()),
        call.initializer("zero_point", code_array(codes, kind)),
        layout.attributes, tensors,
    )  # fmt: skip


def whole(zero_point: torch.Tensor) -> torch.Tensor:
    """Zero points as integers; learned ones are rounded, as the forward does."""
    if not zero_point.is_floating_point():
        return zero_point
    return zero_point.float().nan_to_num(0.0).clamp(-(2**23), 2**23).round().to(torch.int32)


def _placed(
    granularity: Granularity, shape: tuple[Any, ...], *tensors: torch.Tensor
) -> tuple[Layout, tuple[torch.Tensor, torch.Tensor]]:
    """The layout, and each of the tensors in the shape that it asks for."""
    if all(tensor.numel() == 1 for tensor in tensors):
        return Layout({}, ()), tuple(tensor.reshape(()) for tensor in tensors)  # type: ignore[return-value]
    layout = layout_of(granularity, shape)
    scale_shape = granularity.view(shape).scale_shape
    placed = [
        t.reshape(scale_shape) if t.numel() != 1 else t.reshape(()).expand(scale_shape) for t in tensors
    ]
    if isinstance(granularity, PerToken):
        placed = [tensor.unsqueeze(-1) for tensor in placed]
    return layout, tuple(tensor.contiguous() for tensor in placed)  # type: ignore[return-value]


def computed_scales(
    call: Call, kind: Format, layout: Layout, scale: ir.Value, zero_point: ir.Value | None
) -> Scales:
    """Scales that the graph computes. Without a zero point, ``output_dtype`` tells the type of the codes."""
    shape = call.sizes(*layout.scale_shape)
    placed = call.op("Reshape", call.cast(scale, FLOAT), shape)
    if zero_point is not None:
        zero_point = call.op("Cast", call.op("Reshape", zero_point, shape), to=int(onnx_type(kind)))
    elif not layout.attributes:
        zero_point = call.initializer("zero_point", code_array(torch.zeros((), dtype=kind.storage), kind))
    elif call.opset < 21:
        raise Unsupported(
            f"{call.name!r} computes a scale for each index of an axis, which is in ONNX from opset 21 on; "
            f"the opset is {call.opset}. Pass opset=21."
        )
    return Scales(placed, zero_point, layout.attributes)


def scale_of_data(
    call: Call, x: ir.Value, ends: tuple[int, int], rule: ScaleOfData
) -> tuple[ir.Value, ir.Value | None]:
    """The scale and zero point of ``choose_scale``, with its operations in its order."""
    x, axes = _split(call, call.cast(x, FLOAT), rule.granularity)
    zero, floor = call.number(0.0), call.number(SCALE_FLOOR)
    low = call.op("Min", call.op("ReduceMin", x, *axes, keepdims=0), zero)
    high = call.op("Max", call.op("ReduceMax", x, *axes, keepdims=0), zero)
    lowest, highest = rule.ends(*ends)
    if rule.symmetric:
        up, down = call.op("Div", high, call.number(highest)), call.op("Div", low, call.number(lowest))
        return _float(call.op("Max", up, down, floor)), None
    half = call.number(0.5)
    width = call.op("Sub", call.op("Mul", high, half), call.op("Mul", low, half))
    step = call.op("Mul", call.op("Div", width, call.number(highest - lowest)), call.number(2.0))
    scale = _float(call.op("Max", step, floor))
    code = call.op("Sub", call.number(lowest), call.op("Round", call.op("Div", low, scale)))
    clipped = call.op("Clip", code, call.number(lowest), call.number(highest))
    return scale, call.op("Cast", clipped, to=int(ir.DataType.INT32))


def _split(call: Call, x: ir.Value, granularity: Granularity) -> tuple[ir.Value, list[ir.Value]]:
    """``x`` with its groups on an axis of their own, and the axes that share a scale; none means all."""
    shape = shape_of(x)
    rank = len(shape)
    if isinstance(granularity, PerTensor) or (isinstance(granularity, PerToken) and rank == 1):
        return x, []
    if isinstance(granularity, PerToken):
        return x, [call.sizes(rank - 1)]
    if (
        isinstance(granularity, PerGroup)
        and granularity.axis % rank == rank - 1
        and isinstance(shape[-1], int)
    ):
        groups = call.sizes(*(0,) * (rank - 1), shape[-1] // granularity.group_size, granularity.group_size)
        return call.op("Reshape", x, groups), [call.sizes(rank)]
    raise Unsupported(
        f"{call.name!r} finds scales of the data with {granularity} of shape {shape}; in ONNX they can be "
        "per tensor, per token, and per group along a last axis of fixed size."
    )


def _float(value: ir.Value) -> ir.Value:
    value.dtype = FLOAT
    return value


def limits(scales: Scales, ends: tuple[int, int], rank: int) -> tuple[Any, Any] | None:
    """The values of the codes ``ends``, in shapes that broadcast; None for scales per group or computed ones.

    The value of a code is rounded once. So is its quotient by the scale, which therefore rounds to that code.
    So a tensor clipped to these values has the codes from ends[0] to ends[1].
    """
    if scales.tensors is None or "block_size" in scales.attributes:
        return None
    scale, zeros = scales.tensors
    after = rank - 1 - scales.attributes.get("axis", rank - 1)
    found = [((end - zeros) * scale).reshape(-1, *[1] * after) for end in ends]
    return tuple(np.asarray(limit.numpy(), np.float32) for limit in found)  # type: ignore[return-value]
