"""Replace the operators of holdfast in an ONNX graph by QuantizeLinear and DequantizeLinear.

All arithmetic is float32, as in the kernels: f16 and bf16 are cast, which is exact, and the result is rounded
once, by the last cast. Constant tensors become integer initializers. Their codes are those of the model or of
``hf.quantize``; no other program computes a code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from holdfast.core.dtypes import parse_dtype
from holdfast.core.errors import Unsupported
from holdfast.core.formats import Format
from holdfast.core.granularity import Granularity, PerGroup, PerTensor, PerToken
from holdfast.export.onnx_formats import Layout, codes_of, granularity_of, layout_of
from holdfast.export.onnx_operators import DOMAIN
from holdfast.ops.affine.plan import clamp_zero_point
from holdfast.ops.choose_scale.plan import SCALE_FLOOR, ScaleOfData
from holdfast.ops.choose_scale.torch_op import choose_scale
from holdfast.ops.packing.torch_op import unpack
from holdfast.ops.quantize.torch_op import quantize

_FLOAT = ir.DataType.FLOAT
_REAL = {
    torch.float32: _FLOAT, torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16,
}  # fmt: skip
_CODES = {
    "int2": (ir.DataType.INT2, ml_dtypes.int2), "uint2": (ir.DataType.UINT2, ml_dtypes.uint2),
    "int4": (ir.DataType.INT4, ml_dtypes.int4), "uint4": (ir.DataType.UINT4, ml_dtypes.uint4),
    "int8": (ir.DataType.INT8, np.int8), "uint8": (ir.DataType.UINT8, np.uint8),
    "int16": (ir.DataType.INT16, np.int16), "uint16": (ir.DataType.UINT16, np.uint16),
    "float8_e4m3fn": (ir.DataType.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn),
}  # fmt: skip


@dataclass
class Call:
    """One node of an operator of holdfast, and the tape that records its replacement."""

    graph: ir.Graph
    node: ir.Node

    @cached_property
    def tape(self) -> ir.tape.Tape:
        return ir.tape.Tape()

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return {name: attribute.value for name, attribute in self.node.attributes.items()}

    @property
    def name(self) -> str:
        return str(self.node.outputs[0].name)

    def input(self, position: int) -> ir.Value | None:
        return self.node.inputs[position] if position < len(self.node.inputs) else None

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.tape.op(kind, list(inputs), attributes)

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        return value if value.dtype == to else self.op("Cast", value, to=int(to))

    def number(self, value: float) -> ir.Value:
        """A float32 constant."""
        return self.op("Constant", value=ir.tensor(np.float32(value)))

    def sizes(self, *sizes: int) -> ir.Value:
        return self.op("Constant", value=ir.tensor(np.array(sizes, np.int64)))

    def initializer(self, suffix: str, array: Any) -> ir.Value:
        name = f"{self.name}_{suffix}"
        value = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            const_value=ir.tensor(array, name=name),
        )  # fmt: skip
        self.graph.register_initializer(value)
        return value


def constant(value: ir.Value | None) -> torch.Tensor | None:
    """The tensor of an initializer or a constant, possibly behind a cast; None if the value is computed."""
    if value is None:
        return None
    if value.const_value is not None:
        raw = getattr(value.const_value, "raw", None)
        return raw.detach() if isinstance(raw, torch.Tensor) else _torch(value.const_value)
    producer = value.producer()
    if producer is None or producer.op_type not in ("Cast", "Identity"):
        return None
    given = constant(producer.inputs[0])
    kinds = {onnx: kind for kind, onnx in _REAL.items()}
    if given is None or producer.op_type == "Identity" or value.dtype not in kinds:
        return None if producer.op_type == "Cast" else given
    return given.to(kinds[value.dtype])


def _torch(tensor: Any) -> torch.Tensor:
    array = tensor.numpy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def shape_of(value: ir.Value) -> tuple[Any, ...]:
    if value.shape is None:
        raise Unsupported(f"the rank of {value.name!r} is not known, so its quantizer cannot be exported.")
    return tuple(value.shape)


def stored(codes: torch.Tensor, kind: Format) -> Any:
    """Codes, one per element, as an array of the ONNX type."""
    raw = codes.view(torch.uint8) if kind.is_float else codes
    array = raw.cpu().contiguous().numpy()
    dtype = _CODES[kind.name][1]
    return array.view(dtype) if kind.is_float else array.astype(dtype)


@dataclass
class Scales:
    """The scale and zero point inputs of QuantizeLinear and DequantizeLinear; ``zero`` None means 0."""

    scale: ir.Value
    zero: ir.Value | None
    attributes: Mapping[str, int]
    constant: bool


def constant_scales(
    call: Call, kind: Format, granularity: Granularity, shape: tuple[Any, ...], scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> Scales:  # fmt: skip
    layout = layout_of(granularity, shape)
    if scale.dtype == torch.float64:
        raise Unsupported(f"{call.name!r} has a scale of float64; ONNX quantizes in float32.")
    if scale.numel() == 1 and (zero is None or zero.numel() == 1):
        layout = Layout({}, ())
    scale, own = torch.broadcast_tensors(scale, zero if zero is not None else scale)
    placed = call.initializer("scale", _placed(scale.float(), layout, granularity, shape))
    if zero is None:
        return Scales(placed, None, layout.attributes, True)
    zeros = torch.tensor([clamp_zero_point(z) for z in own.nan_to_num().round().long().flatten().tolist()])
    lowest, highest = kind.code_range
    if zeros.numel() and (zeros.min() < lowest or zeros.max() > highest):
        raise Unsupported(
            f"{call.name!r} has zero points from {zeros.min()} to {zeros.max()}; in ONNX a zero point is a "
            f"code, here from {lowest} to {highest}. Choose zero points in this range."
        )
    codes = _placed(zeros.reshape(own.shape), layout, granularity, shape).astype(_CODES[kind.name][1])
    return Scales(placed, call.initializer("zero_point", codes), layout.attributes, True)


def _placed(
    scale: torch.Tensor, layout: Layout, granularity: Granularity, shape: tuple[Any, ...]
) -> np.ndarray[Any, Any]:
    if isinstance(granularity, PerToken | PerGroup) and layout.attributes:
        scale = scale.reshape(granularity.view(shape).scale_shape)
        scale = scale.unsqueeze(-1) if isinstance(granularity, PerToken) else scale
    else:
        scale = scale.reshape(layout.scale_shape)
    return scale.cpu().contiguous().numpy()


def scales_of(call: Call, kind: Format, shape: tuple[Any, ...]) -> Scales:
    """The scales of a call with the arguments scale, scale_value, zero_point and zero_value."""
    granularity = granularity_of(call.arguments)
    scale, zero = call.input(1), call.input(2)
    scale_tensor, zero_tensor = constant(scale), constant(zero)
    if scale is None:
        scale_tensor = torch.tensor(call.arguments["scale_value"])
    if zero is None and call.arguments["zero_value"]:
        zero_tensor = torch.tensor(call.arguments["zero_value"])
    if scale_tensor is not None and (zero is None or zero_tensor is not None):
        return constant_scales(call, kind, granularity, shape, scale_tensor, zero_tensor)
    if scale is None or (zero is None and zero_tensor is not None):
        raise Unsupported(
            f"{call.name!r} mixes a computed scale or zero point with a fixed one; compute both, or fix both."
        )
    return computed_scales(call, kind, layout_of(granularity, shape), scale, zero)


def computed_scales(
    call: Call, kind: Format, layout: Layout, scale: ir.Value, zero: ir.Value | None
) -> Scales:
    """Scales that the graph computes."""
    shape = call.sizes(*layout.scale_shape)
    placed = call.op("Reshape", call.cast(scale, _FLOAT), shape)
    if zero is not None:
        zero = call.op("Reshape", call.op("Cast", zero, to=int(_CODES[kind.name][0])), shape)
    return Scales(placed, zero, layout.attributes, False)


def quantized(call: Call, x: ir.Value, kind: Format, ends: tuple[int, int], scales: Scales, opset: int) -> ir.Value:
    """The codes of a computed tensor, by QuantizeLinear."""
    if x.dtype == ir.DataType.DOUBLE:
        raise Unsupported(
            f"{call.name!r} quantizes float64, and ONNX has QuantizeLinear for float32, float16 and bfloat16; "
            "cast the model to float32."
        )
    x = call.cast(x, _FLOAT)
    if ends != kind.code_range:
        x = _clipped(call, x, kind, ends, scales)
    zero, attributes = scales.zero, dict(scales.attributes)
    if zero is None and opset >= 21:
        attributes["output_dtype"] = int(_CODES[kind.name][0])
    elif zero is None:
        if not scales.constant and scales.attributes:
            raise Unsupported(f"{call.name!r} computes its scales, which needs opset 21; the opset is {opset}.")
        shape = constant(scales.scale).shape if scales.constant else ()  # type: ignore[union-attr]
        zero = call.initializer("zero_point", np.zeros(shape, _CODES[kind.name][1]))
    codes = call.op("QuantizeLinear", x, scales.scale, zero, **attributes)
    codes.name, codes.type = f"{call.name}_codes", ir.TensorType(_CODES[kind.name][0])
    codes.shape = x.shape
    return codes


def _clipped(call: Call, x: ir.Value, kind: Format, ends: tuple[int, int], scales: Scales) -> ir.Value:
    """``x`` limited to the values of the codes from ends[0] to ends[1].

    The value of a code is rounded once, and so is its quotient by the scale, which therefore rounds to that
    code. So the limits hold for the codes, too.
    """
    scale, zero = constant(scales.scale), constant(scales.zero)
    if scale is None or (scales.zero is not None and zero is None) or "block_size" in scales.attributes:
        raise Unsupported(
            f"{call.name!r} uses the codes {ends[0]} to {ends[1]} of {kind.torch}, with scales per token or "
            "group or of the data; for them ONNX has only the full range. Leave out q_min and q_max."
        )
    zeros = torch.zeros_like(scale) if zero is None else zero.float()
    for kind_of_limit, end in (("Max", ends[0]), ("Min", ends[1])):
        limit = (end - zeros) * scale
        if scales.attributes:
            after = len(shape_of(x)) - 1 - scales.attributes["axis"]
            limit = limit.reshape(-1, *[1] * after)
        x = call.op(kind_of_limit, x, call.initializer(kind_of_limit.lower(), limit.numpy()))
    return x


def dequantized(call: Call, codes: ir.Value, scales: Scales, real: torch.dtype) -> ir.Value:
    """The values of codes, by DequantizeLinear."""
    if real not in _REAL:
        raise Unsupported(
            f"{call.name!r} dequantizes to {real}; ONNX computes in float32, float16 and bfloat16. Cast the "
            "model to float32."
        )
    values = call.op("DequantizeLinear", codes, scales.scale, scales.zero, **scales.attributes)
    values.dtype = _FLOAT
    return call.cast(values, _REAL[real])


def _weight(call: Call, codes: torch.Tensor, kind: Format, scales: Scales, real: torch.dtype) -> ir.Value:
    return dequantized(call, call.initializer("codes", stored(codes, kind)), scales, real)


def _dequantize(call: Call, opset: int) -> list[ir.Value]:
    (kind, _), q = codes_of(call.arguments), call.input(0)
    assert q is not None
    shape, real = shape_of(call.node.outputs[0]), parse_dtype(call.arguments["dtype"])
    codes, scales = constant(q), scales_of(call, kind, shape)
    if codes is None:
        if kind.bits < 8:
            q = call.op("Cast", q, to=int(_CODES[kind.name][0]))
        return [dequantized(call, q, scales, real)]
    if call.arguments.get("length") is not None:
        codes = unpack(codes, kind.torch, length=call.arguments["length"])
    return [_weight(call, codes, kind, scales, real)]


def _quantize(call: Call, opset: int) -> list[ir.Value]:
    (kind, ends), x = codes_of(call.arguments), call.input(0)
    assert x is not None
    if call.arguments.get("packed"):
        raise Unsupported(f"{call.name!r} packs its codes; ONNX packs 2-bit and 4-bit types by itself.")
    codes = quantized(call, x, kind, ends, scales_of(call, kind, shape_of(x)), opset)
    storage = ir.DataType.INT8 if kind.signed else ir.DataType.UINT8
    return [call.cast(codes, storage) if kind.bits < 8 else codes]


def _fake_quantize(call: Call, opset: int) -> list[ir.Value]:
    (kind, ends), x = codes_of(call.arguments), call.input(0)
    assert x is not None
    shape, granularity = shape_of(x), granularity_of(call.arguments)
    weight, scales = constant(x), scales_of(call, kind, shape)
    if weight is None or not scales.constant:
        return [dequantized(call, quantized(call, x, kind, ends, scales, opset), scales, _dtype_of(x))]
    scale, zero = constant(call.input(1)), constant(call.input(2))
    codes = quantize(
        weight, call.arguments["scale_value"] if scale is None else scale,
        call.arguments["zero_value"] if zero is None else _whole(zero), dtype=kind.torch,
        granularity=granularity, q_min=ends[0], q_max=ends[1],
    )  # fmt: skip
    return [_weight(call, codes, kind, scales, weight.dtype)]


def _whole(zero: torch.Tensor) -> torch.Tensor:
    """A learned zero point as the forward uses it."""
    return zero.nan_to_num().round().to(torch.int32) if zero.is_floating_point() else zero


def _dtype_of(x: ir.Value) -> torch.dtype:
    return next((kind for kind, onnx in _REAL.items() if onnx == x.dtype), torch.float64)


def _dynamic_fake_quantize(call: Call, opset: int) -> list[ir.Value]:
    (kind, ends), x = codes_of(call.arguments), call.input(0)
    assert x is not None
    granularity, weight = granularity_of(call.arguments), constant(x)
    rule = ScaleOfData(
        granularity=granularity, symmetric=not call.node.op_type.endswith("affine"),
        narrow=_switch(call.arguments.get("narrow")),
    )  # fmt: skip
    if weight is not None:
        found = choose_scale(
            weight, dtype=kind.torch, granularity=granularity, symmetric=rule.symmetric, q_min=ends[0],
            q_max=ends[1], narrow=rule.narrow,
        )  # fmt: skip
        scale, zero = found if isinstance(found, tuple) else (found, None)
        codes = quantize(weight, scale, zero, dtype=kind.torch, granularity=granularity, q_min=ends[0], q_max=ends[1])
        scales = constant_scales(call, kind, granularity, tuple(weight.shape), scale, zero)
        found = [call.initializer("found_scale", scale.numpy())]
        found += [] if zero is None else [call.initializer("found_zero_point", zero.numpy())]
        return [_weight(call, codes, kind, scales, weight.dtype), *found]
    scale, zero = _scale_of_data(call, x, kind, ends, rule)
    scales = computed_scales(call, kind, layout_of(granularity, shape_of(x)), scale, zero)
    codes = quantized(call, x, kind, ends, scales, opset)
    results = [dequantized(call, codes, scales, _dtype_of(x)), scale]
    return results if zero is None else [*results, zero]


def _switch(given: int | None) -> bool | None:
    return None if given is None else bool(given)


def _scale_of_data(
    call: Call, x: ir.Value, kind: Format, ends: tuple[int, int], rule: ScaleOfData
) -> tuple[ir.Value, ir.Value | None]:
    """The operations of ``choose_scale``, each rounded on its own, with the same result."""
    x, rank = call.cast(x, _FLOAT), len(shape_of(x))
    axes: list[int] | None = None
    if isinstance(rule.granularity, PerToken):
        axes = [rank - 1]
    elif isinstance(rule.granularity, PerGroup):
        axis, shape = rule.granularity.axis % rank, shape_of(x)
        if axis != rank - 1 or not isinstance(shape[-1], int):
            raise Unsupported(
                f"{call.name!r} finds scales per group along axis {axis} of {shape}; in ONNX that axis must be "
                "the last one, with a fixed size."
            )
        size = rule.granularity.group_size
        x, axes = call.op("Reshape", x, call.sizes(*(0,) * (rank - 1), shape[-1] // size, size)), [rank]
    elif not isinstance(rule.granularity, PerTensor):
        raise Unsupported(f"{call.name!r} finds scales of {rule.granularity}; exported are PerTensor(), PerToken() and PerGroup(size).")
    over = [] if axes is None else [call.sizes(*axes)]
    nothing = call.number(0.0)
    low = call.op("Min", call.op("ReduceMin", x, *over, keepdims=0), nothing)
    high = call.op("Max", call.op("ReduceMax", x, *over, keepdims=0), nothing)
    lowest, highest = rule.ends(*ends)
    floor = call.number(SCALE_FLOOR)
    if rule.symmetric:
        ratios = [call.op("Div", high, call.number(highest)), call.op("Div", low, call.number(lowest))]
        return _typed(call.op("Max", *ratios, floor)), None
    half = call.number(0.5)
    width = call.op("Sub", call.op("Mul", high, half), call.op("Mul", low, half))
    step = call.op("Mul", call.op("Div", width, call.number(highest - lowest)), call.number(2.0))
    scale = _typed(call.op("Max", step, floor))
    code = call.op("Sub", call.number(lowest), call.op("Round", call.op("Div", low, scale)))
    zero = call.op("Clip", code, call.number(lowest), call.number(highest))
    return scale, call.op("Cast", zero, to=int(ir.DataType.INT32))


def _typed(value: ir.Value) -> ir.Value:
    value.dtype = _FLOAT
    return value


def _embedding(call: Call, opset: int) -> list[ir.Value]:
    indices, weight = call.node.inputs[:2]
    return [call.op("Gather", weight, indices, axis=0)]


RULES: dict[str, Callable[[Call, int], list[ir.Value]]] = {
    "dequantize": _dequantize,
    "quantize": _quantize,
    "fake_quantize": _fake_quantize,
    "dynamic_fake_quantize": _dynamic_fake_quantize,
    "dynamic_fake_quantize_affine": _dynamic_fake_quantize,
    "embedding": _embedding,
}


def lower(model: ir.Model, opset: int) -> None:
    """Replace every node of the domain of holdfast in ``model``."""
    graph = model.graph
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        call = Call(graph, node)
        results = RULES[node.op_type](call, opset)
        _replace(graph, node, call.tape.nodes, results)
    model.opset_imports.pop(DOMAIN, None)
    _drop_unused_initializers(graph)


def _replace(graph: ir.Graph, node: ir.Node, made: Sequence[ir.Node], results: list[ir.Value]) -> None:
    graph.insert_before(node, made)
    for old, new in zip(node.outputs, results, strict=True):
        new.type, new.shape, name = old.type, old.shape, old.name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = f"{name}_replaced"
        new.name = name
    graph.remove(node, safe=True)


def _drop_unused_initializers(graph: ir.Graph) -> None:
    outputs = set(graph.outputs)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs:
            del graph.initializers[name]
