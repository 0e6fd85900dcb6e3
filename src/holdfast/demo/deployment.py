"""Deploys a trained model: converts it, writes it to ONNX, runs it in onnxruntime, and compares the bits."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import holdfast as hf
from holdfast.core.bits import canonical

#: The suffixes of the names that an ONNX file gives to the codes and the scales of a weight.
CODES, SCALES = "_quantized", "_scale"


@dataclass(frozen=True)
class Deployment:
    """A converted model. ``missing`` says which package is missing, if onnxruntime was not run.

    ``quantizers`` is the number of quantized weights and inputs in the file, with ``elements`` elements in
    all. ``different`` counts the elements with other bits. ``same_class`` counts the test images that
    onnxruntime gives the class that torch gives.
    """

    different: int
    missing: str = ""
    quantizers: int = 0
    elements: int = 0
    file_size: int = 0
    same_class: int = 0

    @property
    def equal(self) -> bool:
        """Whether every comparison found the same bits."""
        return self.different == 0


@torch.no_grad()
def deploy(model: nn.Module, images: torch.Tensor) -> Deployment:
    """Convert ``model`` in place, and compare it in torch and in onnxruntime on ``images``."""
    prepared = model(images)
    hf.qat.convert(model)
    converted = model(images)
    different = _different(prepared, converted)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            hf.export.onnx(model, (images,), path)
            different += _different_in_file(model, path)
            checked = hf.export.check_onnx(path, (images,))
            classes = _output(path, images).argmax(1)
            file_size = path.stat().st_size
    except hf.export.MissingPackage as error:
        return Deployment(different, missing=str(error))
    different += sum(quantizer.different for quantizer in checked)
    return Deployment(
        different, quantizers=len(checked), file_size=file_size,
        elements=sum(quantizer.elements for quantizer in checked),
        same_class=int((classes == converted.argmax(1)).sum()),
    )  # fmt: skip


def _different(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((canonical(one) != canonical(other)).sum())


def _different_in_file(model: nn.Module, path: Path) -> int:
    """The number of codes and scales in an ONNX file that are not those of the model."""
    import onnx
    from onnx import numpy_helper

    stored = {
        tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).astype("float32"))
        for tensor in onnx.load(path).graph.initializer
        if tensor.name.endswith((CODES, SCALES))
    }
    return sum(
        _different(weight.codes.float(), stored[name + CODES])
        + _different(weight.scale, stored[name + SCALES])
        for name, weight in hf.qat.quantized_weights(model).items()
    )


def _output(path: Path, images: torch.Tensor) -> torch.Tensor:
    """The output of the file in onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, hf.export.onnx_session_options())
    (output,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(output)
