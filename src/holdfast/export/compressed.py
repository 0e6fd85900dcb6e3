"""Export to the compressed-tensors format: safetensors and a config.json with ``quantization_config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from holdfast.core.checks import require_choice
from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.export.compressed_layer import LAYOUTS, Layer, stored_layer
from holdfast.qat import activation_quantizers, quantized_weights
from holdfast.qat.layers import require_module
from holdfast.qat.quantized import require_quantization
from holdfast.qat.quantizers import INPUT_QUANTIZER


def write_compressed_tensors(model: torch.nn.Module, directory: Path, layout: str | None) -> None:
    from safetensors.torch import save_file

    require_module(model)
    if layout is not None:
        require_choice("layout", layout, tuple(LAYOUTS))
    require_quantization(model)
    weights, inputs = quantized_weights(model), activation_quantizers(model)
    if not weights:
        raise InvalidArgs(
            "the model has no quantized weight; call hf.qat.prepare first, with a Config that has a weight."
        )
    layers: dict[str, Layer] = {}
    for name, weight in weights.items():
        layer = _layer_name(model, name)
        layers[layer] = stored_layer(name, weight, inputs.pop(layer, None), layout)
    if inputs:
        raise Unsupported(
            f"the inputs of {', '.join(inputs)} are quantized and their weights are not; compressed-tensors "
            "quantizes an input only together with the weight. Give these layers a quantized weight."
        )
    tensors = _other_tensors(model, layers)
    for name, stored in layers.items():
        tensors |= {f"{name}.{local}" if name else local: tensor for local, tensor in stored.tensors.items()}
    config = _config(model, directory) | {"quantization_config": quantization_config(model, layers)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _layer_name(model: torch.nn.Module, name: str) -> str:
    """The name of the layer of a weight. Raise if compressed-tensors has no such layer."""
    layer, _, local = name.rpartition(".")
    if local != "weight" or not isinstance(model.get_submodule(layer), torch.nn.Linear | torch.nn.Embedding):
        raise Unsupported(
            f"{name} is quantized, and it is not the weight of a Linear or an Embedding; compressed-tensors "
            "quantizes only these. Leave the layer alone (None in the config of hf.qat.prepare), or export "
            "to ONNX."
        )
    return layer


def _other_tensors(model: torch.nn.Module, layers: Mapping[str, Layer]) -> dict[str, torch.Tensor]:
    """The state of the model without that of its quantizers. Tensors that share memory are copied."""
    ours = tuple(
        f"{name}." * bool(name) + part
        for name in layers
        for part in ("parametrizations.weight.", f"{INPUT_QUANTIZER}.")
    )
    state = model.state_dict()
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and not name.startswith(ours)
    }


def quantization_config(model: torch.nn.Module, layers: Mapping[str, Layer]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json. Layers with the same scheme are one group.

    A group is named by its layers. If there is only one, of plain linear layers, it is named by their class,
    as is usual, and the other linear layers are ignored.
    """
    groups: dict[str, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(json.dumps(layer.scheme, sort_keys=True), []).append(name)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    plain = all(type_before_parametrizations(model.get_submodule(name)) is torch.nn.Linear for name in layers)
    by_class = plain and len(groups) == 1
    formats = sorted({layer.scheme["format"] for layer in layers.values()})
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": sorted(linear - layers.keys()) if by_class else [],
        "config_groups": {
            f"group_{i}": json.loads(scheme) | {"targets": ["Linear"] if by_class else names}
            for i, (scheme, names) in enumerate(groups.items())
        },
    }


def _config(model: torch.nn.Module, directory: Path) -> dict[str, Any]:
    """The config of a transformers model, the config.json that is there already, or the name of the class."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        return dict(json.loads(config.to_json_string(use_diff=False)))
    known = directory / "config.json"
    if known.is_file():
        return dict(json.loads(known.read_text()))
    return {"architectures": [type_before_parametrizations(model).__name__]}
