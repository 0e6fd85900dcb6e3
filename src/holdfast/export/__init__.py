"""The ways out of quantization-aware training: ONNX, compressed-tensors, torchao and PT2E."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from holdfast.export.extras import MissingPackage, require_packages

__all__ = ["MissingPackage", "compressed_tensors", "onnx"]


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
