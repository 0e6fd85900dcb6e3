"""Run an exported file in onnxruntime, and compare the result of each quantizer with that of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from holdfast.core.checks import shown
from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import FLOAT_FORMATS, INTEGERS, Format
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerTensor
from holdfast.ops.dequantize.torch_op import dequantize
from holdfast.ops.quantize.torch_op import quantize

_FORMATS: dict[int, Format] = {
    getattr(TensorProto, name.replace("_", "").upper()): kind
    for name, kind in (INTEGERS | FLOAT_FORMATS).items()
}


@dataclass(frozen=True)
class CheckedQuantizer:
    """A quantizer of an ONNX file: how many codes or values of onnxruntime are not those of the kernels."""

    name: str
    kind: str
    elements: int
    different: int


def session_options() -> onnxruntime.SessionOptions:
    """Options with which onnxruntime keeps QuantizeLinear and DequantizeLinear as they are in the file."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # It moves a Transpose to the codes of a weight, which onnxruntime 1.31 cannot store if they have 2 bits.
    options.add_session_config_entry("optimization.disable_specified_optimizers", "TransposeOptimizer")
    return options


def check_onnx(path: str | PathLike[str], args: tuple[torch.Tensor, ...] | None) -> list[CheckedQuantizer]:
    _check_args(args)
    model = onnx.load(path)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [node for node in model.graph.node if _is_checked(node, constants, args is not None)]
    shown = [name for node in nodes for name in (*node.input, *node.output) if name and name not in constants]
    results = _run(model, args, list(dict.fromkeys(shown)))
    results |= {name: _torch(numpy_helper.to_array(tensor)) for name, tensor in constants.items()}
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    kinds |= {name: tensor.data_type for name, tensor in constants.items()}
    return [_checked(node, results, _FORMATS[kinds[_codes(node)]]) for node in nodes]


def _check_args(args: Any) -> None:
    if args is not None and not (isinstance(args, tuple | list) and all(map(torch.is_tensor, args))):
        raise InvalidArgs(f"args is {shown(args)}; it must be a tuple of tensors, such as (x,), or None.")


def _is_checked(node: onnx.NodeProto, constants: dict[str, Any], activations: bool) -> bool:
    """Whether the node dequantizes a weight or, with ``activations``, quantizes an activation."""
    weight = node.op_type == "DequantizeLinear" and node.input[0] in constants
    return weight or (activations and node.op_type == "QuantizeLinear")


def _codes(node: onnx.NodeProto) -> str:
    """The name of the codes that a node reads or writes."""
    return str(node.output[0] if node.op_type == "QuantizeLinear" else node.input[0])


def _checked(node: onnx.NodeProto, results: dict[str, torch.Tensor], codes: Format) -> CheckedQuantizer:
    x, scale, zero_point = (results.get(name) for name in (*node.input, "", "")[:3])
    assert x is not None and scale is not None
    found, granularity = results[node.output[0]], _granularity(node, scale)
    zeros = None if zero_point is None or codes.is_float else zero_point.to(torch.int32)
    if node.op_type == "QuantizeLinear":
        kind = "activation"
        ours = quantize(x, scale, zeros, dtype=codes.torch, granularity=granularity).float()
    else:
        kind, stored = "weight", x.to(codes.storage)
        ours = dequantize(stored, scale, zeros, granularity=granularity, code_dtype=codes.torch)
    same = found.view(torch.int32) == ours.view(torch.int32)
    name = _codes(node).removesuffix("_quantized").removesuffix("_codes")
    return CheckedQuantizer(name, kind, same.numel(), int((~same).sum()))


def _granularity(node: onnx.NodeProto, scale: torch.Tensor) -> Granularity:
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if attributes.get("block_size"):
        return PerGroup(attributes["block_size"], attributes["axis"])
    return PerChannel(attributes.get("axis", 1)) if scale.dim() else PerTensor()


def _run(
    model: onnx.ModelProto, args: tuple[torch.Tensor, ...] | None, names: list[str]
) -> dict[str, torch.Tensor]:
    """The values of ``names``, each cast to float32, which holds all codes exactly.

    Only the part of the model that they depend on is run.
    """
    shown = [f"{name}:float" for name in names]
    inputs = [] if args is None else [value.name for value in model.graph.input]
    given = () if args is None else args
    if len(inputs) != len(given):
        raise InvalidArgs(f"the file has {len(inputs)} inputs, and {len(given)} tensors are given.")
    part = _part(model, inputs, dict(zip(names, shown, strict=True)))
    session = onnxruntime.InferenceSession(part.SerializeToString(), session_options())
    values = {name: _ort_value(x) for name, x in zip(inputs, given, strict=True)}
    found = session.run_with_ort_values(shown, values)
    return {name: _torch(value.numpy()) for name, value in zip(names, found, strict=True)}


def _part(model: onnx.ModelProto, inputs: list[str], shown: dict[str, str]) -> onnx.ModelProto:
    """The part of the model that computes the keys of ``shown``. Its outputs are their casts to float32."""
    graph, wanted, nodes = model.graph, set(shown), list[onnx.NodeProto]()
    for node in reversed(graph.node):
        if not wanted.isdisjoint(node.output):
            nodes.append(node)
            wanted.update(_reads(node))
    casts = [helper.make_node("Cast", [name], [out], to=TensorProto.FLOAT) for name, out in shown.items()]
    made = helper.make_graph(
        [*reversed(nodes), *casts],
        graph.name,
        [value for value in graph.input if value.name in inputs],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None) for output in shown.values()],
        [tensor for tensor in graph.initializer if tensor.name in wanted],
        value_info=graph.value_info,
    )
    return helper.make_model(
        made, opset_imports=model.opset_import, functions=model.functions, ir_version=model.ir_version
    )


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, also inside its subgraphs, as those of a Loop."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _reads(inner)


def _ort_value(x: torch.Tensor) -> Any:
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        return make(x.view(torch.int16).numpy(), TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())


def _torch(array: Any) -> torch.Tensor:
    """An array as a tensor: small integers as int32, float formats as float32."""
    if array.dtype.kind in "iuf" and array.dtype.itemsize in (1, 2, 4, 8):
        return torch.from_numpy(np.array(array))
    return torch.from_numpy(np.array(array).astype(np.float32))
