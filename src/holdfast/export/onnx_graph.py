"""Read constants from an ONNX graph, and record the nodes that replace a node of holdfast."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from holdfast.core.errors import Unsupported
from holdfast.core.formats import Format
from holdfast.export.onnx_operators import BITCAST
from holdfast.qat.quantizers import INPUT_QUANTIZER

FLOAT = ir.DataType.FLOAT
#: The ONNX type of a real tensor. Those of 16 bits are cast to float32 around QuantizeLinear, which is exact.
REAL = {
    torch.float32: FLOAT, torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16,
}  # fmt: skip
_ARRAYS = {
    "int2": ml_dtypes.int2, "uint2": ml_dtypes.uint2, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4,
    "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
_NOT_IN_NUMPY = (
    (ml_dtypes.bfloat16, np.int16, torch.bfloat16),
    (ml_dtypes.float8_e4m3fn, np.uint8, torch.float8_e4m3fn),
)


def onnx_type(kind: Format) -> ir.DataType:
    """The ONNX type of the codes of a format."""
    return ir.DataType.from_numpy(np.dtype(_ARRAYS[kind.name]))


def code_array(codes: torch.Tensor, kind: Format) -> Any:
    """Codes, one per element, as an array of their ONNX type."""
    if kind.is_float:
        return codes.cpu().contiguous().view(torch.uint8).numpy().view(_ARRAYS[kind.name])
    return codes.cpu().contiguous().numpy().astype(_ARRAYS[kind.name])


@dataclass
class Call:
    """A node of an operator of holdfast, and the nodes recorded to replace it."""

    graph: ir.Graph
    node: ir.Node
    opset: int
    taken: set[str] = field(default_factory=set)
    tape: ir.tape.Tape = field(default_factory=ir.tape.Tape)

    @property
    def arguments(self) -> dict[str, Any]:
        return {name: attribute.value for name, attribute in self.node.attributes.items()}

    @property
    def x(self) -> ir.Value:
        """The first input."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    def input(self, position: int) -> ir.Value | None:
        return self.node.inputs[position] if position < len(self.node.inputs) else None

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.tape.op(kind, list(inputs), attributes)

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        if value.dtype == to:
            return value
        result = self.op("Cast", value, to=int(to))
        result.dtype, result.shape = to, value.shape
        return result

    def number(self, value: float) -> ir.Value:
        """A float32 constant."""
        return self.op("Constant", value=ir.tensor(np.float32(value)))

    def sizes(self, *sizes: int) -> ir.Value:
        return self.op("Constant", value=ir.tensor(np.array(sizes, np.int64)))

    def name_codes(self, codes: ir.Value) -> None:
        """Name the codes that a QuantizeLinear gives."""
        name = f"{self.name}_codes"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        codes.name = name

    @property
    def name(self) -> str:
        """The name of the quantized tensor: that of the parameter, or of the layer whose input it is."""
        if not self.x.is_initializer():
            return _input_of_layer(self.node) or str(self.node.outputs[0].name)
        name = str(self.x.name).removesuffix(f"_{BITCAST}").removesuffix(".original")
        return name.replace("parametrizations.", "")

    def initializer(self, suffix: str, array: Any) -> ir.Value:
        """An initializer of the graph. Calls with the same tensor share it."""
        name = f"{self.name}_{suffix}"
        while (known := self.graph.initializers.get(name)) is not None:
            if known.const_value is not None and _equal(known.const_value.numpy(), array):
                return known
            name += "_"
        value = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            const_value=ir.tensor(array, name=name),
        )  # fmt: skip
        self.graph.register_initializer(value)
        return value


def _input_of_layer(node: ir.Node) -> str | None:
    """ "LAYER.input" if the node belongs to the quantizer of the input of a layer."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    found = [scope for scope in scopes if scope.rpartition(".")[2] == INPUT_QUANTIZER]
    return found[-1].removesuffix("_quantizer") if found else None


def _equal(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def constant(value: ir.Value | None) -> torch.Tensor | None:
    """The tensor of an initializer or a constant, also behind casts to a real type. None: it is computed."""
    if value is None:
        return None
    if value.const_value is not None:
        return _torch(value.const_value)
    producer = value.producer()
    if producer is None or producer.op_type != "Cast":
        return None
    given = constant(producer.inputs[0])
    kind = next((kind for kind, onnx in REAL.items() if onnx == value.dtype), None)
    return None if given is None or kind is None else given.to(kind)


def _torch(tensor: Any) -> torch.Tensor:
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor):
        return raw.detach().cpu()
    array = np.array(tensor.numpy())
    for own, raw, kind in _NOT_IN_NUMPY:
        if array.dtype == own:
            return torch.from_numpy(array.view(raw)).view(kind)
    return torch.from_numpy(array)


def shape_of(value: ir.Value) -> tuple[Any, ...]:
    """The sizes of a value: ints, and symbols where a size is dynamic."""
    if value.shape is None:
        raise Unsupported(f"the rank of {value.name!r} is not known, so its quantizer cannot be exported.")
    return tuple(value.shape)


def real_dtype(call: Call) -> torch.dtype:
    """The torch dtype of the first input, which is real."""
    found = next((kind for kind, onnx in REAL.items() if onnx == call.x.dtype), None)
    if found is None:
        raise Unsupported(
            f"{call.name!r} has the type {call.x.dtype}; ONNX quantizes float32, float16 and bfloat16. Cast "
            "the model to float32."
        )
    return found
