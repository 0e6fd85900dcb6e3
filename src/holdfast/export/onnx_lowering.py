"""Replace the operators of holdfast in an ONNX graph by QuantizeLinear and DequantizeLinear.

All arithmetic is float32, as in the kernels: f16 and bf16 are cast, which is exact, and the result is rounded
once, by the last cast. Constant tensors become integer initializers. Their codes are those of the model or of
``hf.quantize``; no other program computes a code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from holdfast.core.dtypes import parse_dtype
from holdfast.core.errors import Unsupported
from holdfast.core.formats import FLOAT_FORMATS, Format
from holdfast.export.onnx_formats import codes_of, granularity_of, layout_of
from holdfast.export.onnx_graph import (
    FLOAT,
    REAL,
    Call,
    code_array,
    constant,
    onnx_type,
    real_dtype,
    shape_of,
)
from holdfast.export.onnx_operators import BITCAST, DOMAIN
from holdfast.export.onnx_scales import (
    Scales,
    computed_scales,
    constant_scales,
    limits,
    scale_of_data,
    scales_of,
    whole,
)
from holdfast.ops.choose_scale.plan import ScaleOfData
from holdfast.ops.choose_scale.torch_op import choose_scale
from holdfast.ops.packing.torch_op import unpack
from holdfast.ops.quantize.torch_op import quantize


def _quantized(call: Call, kind: Format, ends: tuple[int, int], scales: Scales) -> ir.Value:
    """The codes of the input, which the graph computes, by QuantizeLinear."""
    real_dtype(call)
    x = call.cast(call.x, FLOAT)
    # onnxruntime gives a 2-bit quotient of 2**31 or more the lowest code; clipped values have none.
    if ends != kind.code_range or kind.bits == 2:
        values = limits(scales, ends, len(shape_of(x)))
        if values is None and ends != kind.code_range:
            raise Unsupported(
                f"{call.name!r} uses the codes {ends[0]} to {ends[1]} of {kind.torch}, with scales per token "
                "or group or of the data; in ONNX they use all codes. Leave out q_min and q_max, or "
                "the range of the hf.qat.Quantizer."
            )
        if values is not None:
            x = call.op("Max", x, call.initializer("lowest", values[0]))
            x = call.op("Min", x, call.initializer("highest", values[1]))
    typed = {} if scales.zero_point is not None else {"output_dtype": int(onnx_type(kind))}
    codes = call.op("QuantizeLinear", x, scales.scale, scales.zero_point, **scales.attributes, **typed)
    call.name_codes(codes)
    codes.dtype, codes.shape = onnx_type(kind), call.x.shape
    return codes


def _dequantized(call: Call, codes: ir.Value, scales: Scales, real: torch.dtype) -> ir.Value:
    """The values of codes, by DequantizeLinear."""
    if real not in REAL:
        raise Unsupported(
            f"{call.name!r} dequantizes to {real}; ONNX has float32, float16 and bfloat16. Cast the model to "
            "float32."
        )
    values = call.op("DequantizeLinear", codes, scales.scale, scales.zero_point, **scales.attributes)
    values.dtype, values.shape = FLOAT, codes.shape
    return call.cast(values, REAL[real])


def _weight(call: Call, codes: torch.Tensor, kind: Format, scales: Scales, real: torch.dtype) -> ir.Value:
    return _dequantized(call, call.initializer("quantized", code_array(codes, kind)), scales, real)


def _dequantize(call: Call) -> list[ir.Value]:
    kind, _ = codes_of(call.arguments)
    shape, real = shape_of(call.node.outputs[0]), parse_dtype(call.arguments["dtype"])
    codes, scales = constant(call.x), scales_of(call, kind, granularity_of(call.arguments), shape)
    if codes is not None:
        if call.arguments.get("length") is not None:
            codes = unpack(codes, kind.torch, length=call.arguments["length"])
        return [_weight(call, codes, kind, scales, real)]
    return [_dequantized(call, call.cast(call.x, onnx_type(kind)), scales, real)]


def _quantize(call: Call) -> list[ir.Value]:
    kind, ends = codes_of(call.arguments)
    if call.arguments.get("packed"):
        raise Unsupported(f"{call.name!r} packs its codes; in ONNX the type packs them. Leave out packed.")
    codes = _quantized(
        call, kind, ends, scales_of(call, kind, granularity_of(call.arguments), shape_of(call.x))
    )
    stored = (ir.DataType.INT8 if kind.signed else ir.DataType.UINT8) if kind.bits < 8 else onnx_type(kind)
    return [call.cast(codes, stored)]


def _range(kind: Format, ends: tuple[int, int]) -> dict[str, Any]:
    """The arguments q_min and q_max, which float formats do not take."""
    return {} if kind.is_float else {"q_min": ends[0], "q_max": ends[1]}


def _fake_quantize(call: Call) -> list[ir.Value]:
    kind, ends = codes_of(call.arguments)
    granularity, weight = granularity_of(call.arguments), constant(call.x)
    scales = scales_of(call, kind, granularity, shape_of(call.x))
    if weight is None or scales.tensors is None:
        return [_dequantized(call, _quantized(call, kind, ends, scales), scales, real_dtype(call))]
    scale, zero_point = constant(call.input(1)), constant(call.input(2))
    codes = quantize(
        weight, call.arguments["scale_value"] if scale is None else scale,
        call.arguments["zero_value"] if zero_point is None else whole(zero_point),
        dtype=kind.torch, granularity=granularity, **_range(kind, ends),
    )  # fmt: skip
    return [_weight(call, codes, kind, scales, weight.dtype)]


def _dynamic_fake_quantize(call: Call) -> list[ir.Value]:
    (kind, ends), rule, weight = codes_of(call.arguments), _rule(call), constant(call.x)
    if weight is not None:
        return _weight_with_scale_of_data(call, weight, kind, ends, rule)
    scale, zero_point = scale_of_data(call, call.x, ends, rule)
    scales = computed_scales(call, kind, layout_of(rule.granularity, shape_of(call.x)), scale, zero_point)
    codes = _quantized(call, kind, ends, scales)
    results = [_dequantized(call, codes, scales, real_dtype(call)), scale]
    return results if zero_point is None else [*results, zero_point]


def _rule(call: Call) -> ScaleOfData:
    narrow = call.arguments.get("narrow")
    return ScaleOfData(
        granularity=granularity_of(call.arguments),
        symmetric=not call.node.op_type.endswith("affine"),
        narrow=None if narrow is None else bool(narrow),
    )


def _scale_of_constant(
    weight: torch.Tensor, kind: Format, ends: tuple[int, int], rule: ScaleOfData
) -> tuple[torch.Tensor, ...]:
    found = choose_scale(
        weight, dtype=kind.torch, granularity=rule.granularity, symmetric=rule.symmetric, narrow=rule.narrow,
        **_range(kind, ends),
    )  # fmt: skip
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def _weight_with_scale_of_data(
    call: Call, weight: torch.Tensor, kind: Format, ends: tuple[int, int], rule: ScaleOfData
) -> list[ir.Value]:
    scale, *zero_point = found = _scale_of_constant(weight, kind, ends, rule)
    zeros = zero_point[0] if zero_point else torch.zeros_like(scale, dtype=torch.int32)
    scales = constant_scales(call, kind, rule.granularity, tuple(weight.shape), scale, zeros)
    codes = quantize(
        weight, scale, *zero_point, dtype=kind.torch, granularity=rule.granularity, **_range(kind, ends)
    )  # fmt: skip
    results = [call.initializer(f"found_{i}", tensor.numpy()) for i, tensor in enumerate(found)]
    return [_weight(call, codes, kind, scales, weight.dtype), *results]


def _choose_scale(call: Call) -> list[ir.Value]:
    (kind, ends), rule, weight = codes_of(call.arguments), _rule(call), constant(call.x)
    if weight is None:
        return [value for value in scale_of_data(call, call.x, ends, rule) if value is not None]
    found = _scale_of_constant(weight, kind, ends, rule)
    return [call.initializer(f"found_{i}", tensor.numpy()) for i, tensor in enumerate(found)]


def _scale_in_use(call: Call) -> list[ir.Value]:
    """The floor of a scale and its rounding. The operator itself computes those of a constant."""
    scale, floor, name = constant(call.x), constant(call.input(1)), call.arguments.get("dtype")
    if scale is not None:
        return [call.initializer("in_use", torch.ops.holdfast.scale_in_use(scale, floor, name).numpy())]
    used = call.x
    if call.input(1) is not None:
        raise Unsupported(f"{call.name!r} has a floor for a scale of the data; only a learned scale has one.")
    if name is not None and (stored := parse_dtype(name)) != torch.float32:
        limits = torch.finfo(stored)
        least, most = call.number(limits.smallest_normal * limits.eps), call.number(limits.max)
        clipped = call.op("Clip", used, least, most)
        used = call.op("Cast", call.op("Cast", clipped, to=int(REAL[stored])), to=int(FLOAT))
    return [call.op("Identity", used)]


def _bitcast(call: Call) -> list[ir.Value]:
    raw, kind = constant(call.x), FLOAT_FORMATS["float8_e4m3fn"]
    if raw is None or call.arguments["to"] != onnx_type(kind):
        raise Unsupported(
            f"{call.name!r} views a tensor as another dtype, which ONNX cannot do. Leave it out."
        )
    return [call.initializer(BITCAST, code_array(raw.view(kind.torch), kind))]


def _embedding(call: Call) -> list[ir.Value]:
    return [call.op("Gather", call.input(1), call.x, axis=0)]


RULES: dict[str, Callable[[Call], list[ir.Value]]] = {
    "dequantize": _dequantize,
    "quantize": _quantize,
    "fake_quantize": _fake_quantize,
    "dynamic_fake_quantize": _dynamic_fake_quantize,
    "dynamic_fake_quantize_affine": _dynamic_fake_quantize,
    "choose_scale": _choose_scale,
    "choose_scale_affine": _choose_scale,
    "scale_in_use": _scale_in_use,
    BITCAST: _bitcast,
    "embedding": _embedding,
}


def lower(model: ir.Model, opset: int) -> None:
    """Replace every node of the domain of holdfast in ``model``."""
    graph, taken = model.graph, set[str]()
    for node in [node for node in graph if node.domain == DOMAIN]:
        call = Call(graph, node, opset, taken)
        results = RULES[node.op_type](call)
        graph.insert_before(node, call.tape.nodes)
        for old, new in zip(node.outputs, results, strict=True):
            new.type, new.shape = old.type, old.shape
            named = old.is_graph_output() or not new.is_initializer()
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            if named:
                old.name, new.name = f"{old.name}_replaced", old.name
        graph.remove(node, safe=True)
    model.opset_imports.pop(DOMAIN, None)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
