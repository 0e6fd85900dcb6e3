"""The ways out of quantization-aware training: ONNX, compressed-tensors, torchao and PT2E."""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast.core.checks import require_choice
from holdfast.export.extras import MissingPackage, require_packages

Model = TypeVar("Model", bound=torch.nn.Module)

__all__ = [
    "MissingPackage",
    "PT2EFakeQuantize",
    "PT2EPerChannelFakeQuantize",
    "TorchaoConfig",
    "compressed_tensors",
    "onnx",
    "torchao",
]


def onnx(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | PathLike[str],
    *,
    opset: int | None = None,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
) -> None:
    """Write ``model`` to the ONNX file ``path``, with integer weights."""
    require_packages("onnx", "onnx", "onnxscript")
    from holdfast.export.onnx_file import write_onnx

    write_onnx(
        model, args, path, opset, kwargs=kwargs, dynamic_shapes=dynamic_shapes, input_names=input_names,
        output_names=output_names,
    )  # fmt: skip


def compressed_tensors(
    model: torch.nn.Module, directory: str | PathLike[str], *, layout: str | None = None
) -> None:
    """Write ``model`` to ``directory`` in the compressed-tensors format."""
    require_packages("compressed-tensors", "safetensors")
    from holdfast.export.compressed import write_compressed_tensors

    write_compressed_tensors(model, Path(directory), layout)


def torchao(model: Model, *, tensor: str = "intx") -> Model:
    """Replace the quantized weights of ``model`` by torchao tensors."""
    require_choice("tensor", tensor, ("intx", "int8"))
    require_packages("torchao", "torchao")
    from holdfast.export.torchao_tensors import to_torchao

    return to_torchao(model, tensor)


#: Classes that inherit from classes of optional packages, and the modules that define them.
_CLASSES = {
    "PT2EFakeQuantize": "pt2e", "PT2EPerChannelFakeQuantize": "pt2e", "TorchaoConfig": "torchao_config",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'holdfast.export' has no attribute {name!r}")
    require_packages("torchao", "torchao")
    return getattr(importlib.import_module(f"holdfast.export.{_CLASSES[name]}"), name)
