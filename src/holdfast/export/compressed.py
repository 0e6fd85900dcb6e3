"""Export to the compressed-tensors format: safetensors and a config.json with ``quantization_config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from holdfast.core.checks import require_choice
from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.core.formats import INTEGERS, Format
from holdfast.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from holdfast.export.signed_codes import signed_codes, zero_point_code
from holdfast.ops.packing.torch_op import pack
from holdfast.qat import ActivationQuantizer, QuantizedTensor, activation_quantizers, quantized_weights

#: The layouts, and whether each packs codes into words of 32 bits.
LAYOUTS = {"pack-quantized": True, "int-quantized": False, "naive-quantized": False, "float-quantized": False}

Scheme = dict[str, Any]


@dataclass
class Layer:
    """A layer as it is stored: its tensors by local name, and the scheme that describes them."""

    tensors: dict[str, torch.Tensor]
    scheme: Scheme


def write_compressed_tensors(model: torch.nn.Module, directory: Path, layout: str | None) -> None:
    from safetensors.torch import save_file

    if layout is not None:
        require_choice("layout", layout, tuple(LAYOUTS))
    weights, inputs = quantized_weights(model), activation_quantizers(model)
    if not weights:
        raise InvalidArgs("the model has no quantized weight; call hf.qat.prepare first.")
    layers: dict[str, Layer] = {}
    for name, weight in weights.items():
        module = _module(model, name)
        layer = name.rpartition(".")[0]
        layers[layer] = stored_layer(name, weight, inputs.pop(layer, None), layout)
        layers[layer].scheme["type"] = type_before_parametrizations(module)
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


def _module(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The layer of a weight. Raise if compressed-tensors has no such layer."""
    layer, _, local = name.rpartition(".")
    module = model.get_submodule(layer)
    if local != "weight" or not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        raise Unsupported(
            f"{name} is quantized and is no weight of a Linear or an Embedding; compressed-tensors has only "
            "these. Leave the layer alone (None in the config of hf.qat.prepare), or export to ONNX."
        )
    return module


def stored_layer(
    name: str, weight: QuantizedTensor, activation: ActivationQuantizer | None, layout: str | None
) -> Layer:
    """The tensors and the scheme of a layer, in ``layout`` or in the one that loaders expect."""
    chosen = layout or _usual_layout(weight.format, activation)
    if (chosen == "float-quantized") != weight.format.is_float and chosen != "naive-quantized":
        fitting = "float-quantized" if weight.format.is_float else "pack-quantized or int-quantized"
        raise Unsupported(f"{name} has codes of {weight.format.torch}, which need the layout {fitting}.")
    if weight.format.bits > 8:
        raise Unsupported(
            f"{name} has codes of {weight.format.torch}; compressed-tensors has at most 8 bits."
        )
    codes, scale, zero_point, described = signed_weight(name, weight)
    tensors = {"weight_scale": scale}
    if LAYOUTS[chosen]:
        tensors["weight_packed"] = packed_words(codes, weight.format.bits)
        tensors["weight_shape"] = torch.tensor(codes.shape)
    else:
        tensors["weight"] = codes
    if zero_point is not None:
        packs = LAYOUTS[chosen] and described["strategy"] != "tensor"
        tensors["weight_zero_point"] = (
            packed_words(zero_point.T, weight.format.bits).T.contiguous() if packs else zero_point
        )
    scheme: Scheme = {"format": chosen, "weights": described, "input_activations": None}
    if activation is not None:
        found, scheme["input_activations"] = stored_input(name, activation, weight.dtype)
        tensors |= found
    return Layer({local: tensor.cpu().contiguous() for local, tensor in tensors.items()}, scheme)


def _usual_layout(codes: Format, activation: ActivationQuantizer | None) -> str:
    if codes.is_float:
        return "float-quantized"
    return "int-quantized" if codes.bits == 8 and activation is not None else "pack-quantized"


def signed_weight(
    name: str, weight: QuantizedTensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """Codes, scale and zero point as they are stored, and the arguments that describe them."""
    granularity, codes = weight.granularity, weight.format
    described: dict[str, Any] = {"num_bits": codes.bits, "type": "float" if codes.is_float else "int"}
    shape: tuple[int, ...]
    if isinstance(granularity, PerTensor):
        strategy, shape = "tensor", (1,)
    elif isinstance(granularity, PerToken) or granularity == PerChannel(0):
        strategy, shape = "channel", (weight.codes.shape[0], 1)
    elif isinstance(granularity, PerGroup) and granularity.axis == 1:
        strategy, shape = "group", tuple(weight.scale.shape)
        described["group_size"] = granularity.group_size
    else:
        raise Unsupported(
            f"{name} has scales of {granularity}; compressed-tensors has one scale, one for each row "
            "(PerChannel(0)), or one for each group along a row (PerGroup(size))."
        )
    scale = stored_scale(name, weight.scale, weight.dtype).reshape(shape)
    shifted, zero_point = signed_codes(weight)
    described |= {"strategy": strategy, "symmetric": zero_point is None, "dynamic": False}
    if zero_point is not None:
        zero_point = zero_point_code(name, zero_point.reshape(shape), codes, "compressed-tensors")
    return shifted, scale, zero_point, described


def stored_scale(name: str, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale in the dtype of the model, to which loaders cast it. Raise if that changes it."""
    cast = scale.to(dtype)
    if not torch.equal(cast.double(), scale.double()):
        raise Unsupported(
            f"{name} has a scale of {scale.dtype} that {dtype}, the dtype of the weight, does not hold, and "
            "loaders of compressed-tensors cast the scale to it, which would change weights. Train with "
            f"scale_dtype={dtype} in the hf.qat.Quantizer."
        )
    return cast


def packed_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes plus half of their number, along the last axis of int32 words, low bits first."""
    unsigned = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    packed = unsigned if bits == 8 else pack(unsigned, INTEGERS[f"uint{bits}"].torch)
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)


def stored_input(
    name: str, activation: ActivationQuantizer, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the description of the quantized input of a layer."""
    codes, granularity = activation.format, activation.granularity
    if activation.quantizer.code_range != codes.code_range or not (codes.signed and codes.bits <= 8):
        raise Unsupported(
            f"the input of {name} has the codes {activation.quantizer.code_range} of {codes.torch}; "
            "compressed-tensors uses all codes of a signed format of at most 8 bits. Leave out range, or "
            "choose torch.int8."
        )
    described: dict[str, Any] = {"num_bits": codes.bits, "type": "float" if codes.is_float else "int"}
    described |= {"symmetric": activation.quantizer.symmetric, "dynamic": activation.mode == "batch"}
    if isinstance(granularity, PerTensor):
        described["strategy"] = "tensor"
    elif isinstance(granularity, PerToken) and described["dynamic"]:
        described["strategy"] = "token"
    elif isinstance(granularity, PerGroup) and described["dynamic"]:
        described |= {"strategy": "group", "group_size": granularity.group_size}
    else:
        raise Unsupported(
            f"the input of {name} has scales of {granularity}; compressed-tensors has one fixed scale, or "
            "scales of the data per tensor, token or group."
        )
    scale, zero_point = activation.scale(), activation.zero_point()
    if scale is None:
        return {}, described
    tensors = {"input_scale": stored_scale(f"the input of {name}", scale, dtype).reshape(1)}
    if zero_point is not None:
        what = f"the input of {name}"
        tensors["input_zero_point"] = zero_point_code(
            what, zero_point.reshape(1), codes, "compressed-tensors"
        )
    return tensors, described


def _other_tensors(model: torch.nn.Module, layers: Mapping[str, Layer]) -> dict[str, torch.Tensor]:
    """The state of the model without that of its quantizers. Tensors that share memory are copied."""
    ours = tuple(
        f"{name}." * bool(name) + part
        for name in layers
        for part in ("parametrizations.weight.", "input_quantizer.")
    )
    state = model.state_dict()
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and not name.startswith(ours)
    }


def quantization_config(model: torch.nn.Module, layers: Mapping[str, Layer]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json. Layers with the same scheme are one group."""
    groups: dict[str, tuple[Scheme, list[str]]] = {}
    for name, layer in layers.items():
        scheme = {key: value for key, value in layer.scheme.items() if key != "type"}
        groups.setdefault(json.dumps(scheme, sort_keys=True), (scheme, []))[1].append(name)
    linear = [name for name, layer in layers.items() if layer.scheme["type"] is torch.nn.Linear]
    only_linear = len(groups) == 1 and len(linear) == len(layers)
    ignored = [
        name
        for name, module in model.named_modules()
        if only_linear and type_before_parametrizations(module) is torch.nn.Linear and name not in layers
    ]
    formats = {scheme["format"] for scheme, _ in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {
            f"group_{i}": scheme | {"targets": ["Linear"] if only_linear else names}
            for i, (scheme, names) in enumerate(groups.values())
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
