"""Export after quantization-aware training, to ONNX, compressed-tensors, torchao and PT2E.

Each takes the codes and the scales of the model; no other program computes them. The package of a target is
imported when its function is called.
"""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from holdfast.core.checks import require_choice
from holdfast.export.extras import MissingPackage, require_packages

if TYPE_CHECKING:
    import onnxruntime

    from holdfast.export.onnx_check import CheckedQuantizer

__all__ = [
    "MissingPackage", "PT2EFakeQuantize", "PT2EPerChannelFakeQuantize", "TorchaoConfig", "check_onnx",
    "compressed_tensors", "onnx", "onnx_session_options", "torchao",
]  # fmt: skip

Model = TypeVar("Model", bound=torch.nn.Module)


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
    """Write ``model`` to the ONNX file ``path``.

    The model is prepared or converted, or calls the functions and modules of holdfast itself. It is exported
    by ``torch.onnx.export``, with the example arguments ``args`` and ``kwargs``. Quantized weights become
    integers with DequantizeLinear, fake quantization becomes QuantizeLinear and DequantizeLinear. The model
    does not change: if it is prepared, a copy of it is converted first.

    ``opset`` is the version of the ONNX operators: at least 19 for int8, 21 for int4 and scales per group or
    token, 25 for int2. The default is 21, 22 for a bfloat16 model, or what the formats need. After an error
    there is no file.

    Needs the extra "onnx".

    >>> import tempfile, torch, holdfast as hf
    >>> model = hf.qat.prepare(torch.nn.Linear(32, 8), hf.qat.preset("w4a16-g32")).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hf.export.onnx(model, (torch.randn(2, 32),), f"{folder}/model.onnx")
    """
    require_packages("onnx", "onnx", "onnxscript", "ml_dtypes")
    from holdfast.export.onnx_file import write_onnx

    write_onnx(
        model, args, path, opset, kwargs=kwargs, dynamic_shapes=dynamic_shapes, input_names=input_names,
        output_names=output_names,
    )  # fmt: skip


def onnx_session_options() -> onnxruntime.SessionOptions:
    """Options of onnxruntime that keep QuantizeLinear and DequantizeLinear as they are in the file.

    Other optimizations fuse them with the operators around them, which changes results.
    """
    require_packages("onnxruntime", "onnx", "onnxruntime")
    from holdfast.export.onnx_check import session_options

    return session_options()


def check_onnx(
    path: str | PathLike[str], args: tuple[torch.Tensor, ...] | None = None
) -> list[CheckedQuantizer]:
    """Run an ONNX file in onnxruntime on ``args``, and compare every quantizer with the kernels.

    For an activation, the codes of onnxruntime are compared with those that ``hf.quantize`` gives for the
    same input; for a weight, its values with those of ``hf.dequantize``. Each record of the result has the
    name of the tensor, its kind, the number of elements, and the number of those with different bits. Without
    ``args`` only weights are compared, and no layer is run.
    """
    require_packages("onnxruntime", "onnx", "onnxruntime")
    from holdfast.export import onnx_check

    return onnx_check.check_onnx(path, args)


def compressed_tensors(
    model: torch.nn.Module, directory: str | PathLike[str], *, layout: str | None = None
) -> None:
    """Write a prepared or converted model to ``directory`` in the compressed-tensors format.

    The files are ``model.safetensors`` and ``config.json``. The quantized weights must be those of linear
    layers and embeddings, with one scale, a scale per row or a scale per group along a row. The inputs of
    these layers may be quantized too. Scales are stored in the dtype of the weight.

    ``layout``: "pack-quantized" packs codes into words of 32 bits. "int-quantized" and "naive-quantized" have
    one code per int8, "float-quantized" has float8 codes. The default is "int-quantized" for 8-bit weights of
    layers with quantized inputs, and "pack-quantized" for other integers.

    Needs the extra "compressed-tensors".
    """
    require_packages("compressed-tensors", "safetensors")
    from holdfast.export.compressed import write_compressed_tensors

    write_compressed_tensors(model, Path(directory), layout)


def torchao(model: Model, *, tensor: str = "intx") -> Model:
    """Replace the quantized weights of a prepared or converted model by torchao tensors. In place.

    ``tensor``: "intx" makes an ``IntxUnpackedToInt8Tensor`` of a weight of a linear layer, a Conv2d or an
    embedding, with codes of 2 to 8 bits. The model then computes what it did before, in every bit. "int8"
    makes an ``Int8Tensor`` of an 8-bit weight. Its values are the same, but torchao multiplies by the scale
    after the matrix product, which rounds differently.

    Quantized inputs stay as they are. A prepared model is converted first. An error leaves the model
    unchanged. Needs the extra "torchao".
    """
    require_choice("tensor", tensor, ("intx", "int8"))
    require_packages("torchao", "torchao")
    from holdfast.export.torchao_tensors import to_torchao

    return to_torchao(model, tensor)


#: Classes that inherit from classes of torchao, and the modules that define them.
_CLASSES = {
    "PT2EFakeQuantize": "pt2e", "PT2EPerChannelFakeQuantize": "pt2e", "TorchaoConfig": "torchao_config",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'holdfast.export' has no attribute {name!r}")
    require_packages("torchao", "torchao")
    return getattr(importlib.import_module(f"holdfast.export.{_CLASSES[name]}"), name)
