"""Keep the operators of holdfast as nodes while torch exports a program to ONNX.

``torch.onnx.export`` calls a translation for each operator of the program. The translations here emit a node
of the domain "holdfast", with the tensors of the call as inputs and its numbers and strings as attributes.
``onnx_lowering`` then replaces these nodes. It sees the whole graph, with the values of the initializers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnxscript
import torch

from holdfast.core.autograd import ARGUMENTS, RESULTS

DOMAIN = "holdfast"
#: The node of ``Tensor.view(dtype)``, which ONNX lacks. A converted model views stored bytes as float codes.
BITCAST = "bitcast"

_Schema = onnx.defs.OpSchema
_ATTRIBUTES = {
    "str": _Schema.AttrType.STRING, "int": _Schema.AttrType.INT, "SymInt": _Schema.AttrType.INT,
    "float": _Schema.AttrType.FLOAT, "bool": _Schema.AttrType.INT,
}  # fmt: skip
_TENSORS = [
    f"tensor({name})"
    for name in ("float", "float16", "bfloat16", "double", "int8", "uint8", "int16", "uint16", "int32",
                 "int64", "float8e4m3fn")
]  # fmt: skip


def translations(names: list[str]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The translation of each operator in ``names``, for ``custom_translation_table``."""
    table: dict[Any, Callable[..., Any]] = {
        getattr(torch.ops.holdfast, name).default: _kept(name) for name in names if name != BITCAST
    }
    bitcast = _node(BITCAST, ["x"], {"to": "int"}, 1)
    table[torch.ops.aten.view.dtype] = lambda x, to: bitcast(x, to=int(to))
    return table


def _kept(operator: str) -> Callable[..., Any]:
    """A translation that emits a node with the name and the arguments of ``operator``."""
    kinds = {name: kind.removesuffix("?") for name, kind in ARGUMENTS[operator].items()}
    tensors = [name for name, kind in kinds.items() if kind == "Tensor"]
    plain = {name: kind for name, kind in kinds.items() if kind != "Tensor"}
    node = _node(operator, tensors, plain, RESULTS[operator])

    def translation(*given: Any) -> Any:
        values = dict(zip(kinds, given, strict=True))
        attributes = {name: values[name] for name in plain if values[name] is not None}
        attributes = {name: int(v) if isinstance(v, bool) else v for name, v in attributes.items()}
        return node(*(values[name] for name in tensors), **attributes)

    return translation


def _node(name: str, tensors: list[str], plain: dict[str, str], outputs: int) -> Any:
    """The function that emits a node with these inputs, attributes and outputs."""
    optional = _Schema.FormalParameterOption.Optional
    results = [f"result{i}" for i in range(outputs)]
    schema = _Schema(
        name, DOMAIN, 1,
        inputs=[_Schema.FormalParameter(tensor, f"T_{tensor}", param_option=optional) for tensor in tensors],
        outputs=[_Schema.FormalParameter(result, f"T_{result}") for result in results],
        type_constraints=[(f"T_{value}", _TENSORS, "") for value in (*tensors, *results)],
        attributes=[_Schema.Attribute(a, _ATTRIBUTES[kind], required=False) for a, kind in plain.items()],
    )  # fmt: skip
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, 1), name, schema)
