"""The tensors of a quantized layer in the compressed-tensors format, and the scheme that describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.core.formats import INTEGERS, Format
from holdfast.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from holdfast.export.signed_codes import signed_codes, zero_point_code
from holdfast.ops.packing.torch_op import pack
from holdfast.qat import ActivationQuantizer, QuantizedTensor
from holdfast.qat.quantized import without_scale

#: The layouts, and whether each packs codes into words of 32 bits.
LAYOUTS = {"pack-quantized": True, "int-quantized": False, "naive-quantized": False, "float-quantized": False}

Scheme = dict[str, Any]


@dataclass
class Layer:
    """A layer as it is stored: its tensors by local name, and the scheme that describes them."""

    tensors: dict[str, torch.Tensor]
    scheme: Scheme


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
    if LAYOUTS[chosen] and not weight.codes.numel():
        raise Unsupported(
            f"{name} has no elements, and the reader of compressed-tensors fails on packed weights without "
            "elements. Leave the layer alone (None in the config of hf.qat.prepare)."
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
    # Copies: safetensors takes no tensors that share memory, as those of shared layers do.
    copied = {
        local: tensor.cpu().clone(memory_format=torch.contiguous_format) for local, tensor in tensors.items()
    }
    return Layer(copied, scheme)


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
    if not activation.is_set():
        raise InvalidArgs(f"{without_scale(f'the input of {name}')} Train the model, or load its state.")
    if not activation.fake_quantize.quantizes:
        raise Unsupported(
            f"the quantizer of the input of {name} is switched off, which compressed-tensors cannot say. "
            "Call enable_fake_quant() of its hf.nn.FakeQuantize, or prepare the layer without activation=."
        )
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
