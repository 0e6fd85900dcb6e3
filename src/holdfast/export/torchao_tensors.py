"""torchao tensors made of the codes of a model."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.nn.utils.parametrize import remove_parametrizations
from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor

from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.core.granularity import Granularity, PerChannel, PerGroup, PerToken
from holdfast.export.prepared import is_prepared
from holdfast.export.signed_codes import signed_codes, zero_point_code
from holdfast.qat import QuantizedTensor, convert, quantized_weights
from holdfast.qat.layers import require_module
from holdfast.qat.own_class import give_own_class
from holdfast.qat.quantized import parametrized_weights

Model = TypeVar("Model", bound=torch.nn.Module)

#: The layers whose functions torchao implements for its tensors.
_LAYERS = {
    "intx": (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Embedding),
    "int8": (torch.nn.Linear, torch.nn.Embedding),
}
TENSORS = tuple(_LAYERS)
_REAL = (torch.float32, torch.bfloat16, torch.float16)


def to_torchao(model: Model, tensor: str) -> Model:
    """Replace the quantized weights of ``model`` by torchao tensors, in place."""
    require_module(model)
    weights = quantized_weights(model)
    if not weights:
        raise InvalidArgs(
            "the model has no quantized weight; call hf.qat.prepare first, with a Config that has a weight."
        )
    made: dict[str, torch.nn.Parameter] = {}
    shared: dict[int, torch.nn.Parameter] = {}
    for name, parametrizations in parametrized_weights(model):
        if name in weights:
            _require_layer(model, name, tensor)
            original = id(parametrizations.original)
            if original not in shared:
                found = torchao_tensor(name, weights[name], tensor)
                shared[original] = torch.nn.Parameter(found, requires_grad=False)
            made[name] = shared[original]
    if is_prepared(model):
        convert(model)
    for name, parameter in made.items():
        layer, _, local = name.rpartition(".")
        module = model.get_submodule(layer)
        if local in getattr(module, "parametrizations", {}):  # else: done under another name of the module
            give_own_class(module)
            remove_parametrizations(module, local, leave_parametrized=False)
        setattr(module, local, parameter)
    return model


def _require_layer(model: torch.nn.Module, name: str, tensor: str) -> None:
    layer, _, local = name.rpartition(".")
    module = model.get_submodule(layer)
    if local != "weight" or not isinstance(module, _LAYERS[tensor]):
        accepted = ", ".join(kind.__name__ for kind in _LAYERS[tensor])
        raise Unsupported(
            f"{name} is quantized, and torchao has its {tensor!r} tensors for weights of {accepted}. Leave "
            "the layer alone (None in the config of hf.qat.prepare), or export to ONNX."
        )


def torchao_tensor(name: str, weight: QuantizedTensor, tensor: str) -> Any:
    """``weight`` as an ``IntxUnpackedToInt8Tensor`` ("intx") or an ``Int8Tensor`` ("int8")."""
    bits = weight.format.bits
    if weight.format.is_float or bits > 8 or (tensor == "int8" and bits != 8):
        accepted = "8" if tensor == "int8" else "2 to 8"
        raise Unsupported(
            f"{name} has codes of {weight.format.torch}; {tensor!r} tensors of torchao have integer codes of "
            f"{accepted} bits."
        )
    if weight.dtype not in _REAL:
        raise Unsupported(f"{name} is {weight.dtype}; torchao has float32, bfloat16 and float16.")
    block = block_size(weight.granularity, tuple(weight.codes.shape))
    if 0 in block:
        raise Unsupported(
            f"{name} has no elements, of which torchao cannot make a tensor. Leave the layer alone (None in "
            "the config of hf.qat.prepare)."
        )
    blocks = [size // part for size, part in zip(weight.codes.shape, block, strict=True)]
    codes, zero_point = signed_codes(weight)
    scale = weight.scale.reshape(blocks)
    if zero_point is not None:
        zero_point = zero_point_code(name, zero_point.reshape(blocks), weight.format, "torchao")
    if tensor == "int8":
        several = isinstance(weight.granularity, PerGroup) and block[-1] < weight.codes.shape[-1]
        if zero_point is not None and not several:
            raise Unsupported(
                f"{name}, of shape {tuple(weight.codes.shape)}, has zero points and {weight.granularity}; "
                "torchao ignores such zero points of an Int8Tensor in its linear function, unless a row has "
                "several groups. Pass tensor='intx'."
            )
        return Int8Tensor(codes, scale, block, weight.dtype, zero_point=zero_point)
    zeros = torch.zeros_like(scale, dtype=torch.int8) if zero_point is None else zero_point
    target = getattr(torch, f"int{bits}")
    return IntxUnpackedToInt8Tensor(codes, scale, zeros, target, tuple(block), weight.dtype, None)


def block_size(granularity: Granularity, shape: tuple[int, ...]) -> list[int]:
    """The shape of the elements that share a scale."""
    if isinstance(granularity, PerChannel):
        return [1 if axis == granularity.axis % len(shape) else size for axis, size in enumerate(shape)]
    if isinstance(granularity, PerGroup):
        grouped = granularity.axis % len(shape)
        return [granularity.group_size if axis == grouped else 1 for axis in range(len(shape))]
    if isinstance(granularity, PerToken):
        return [*(1 for _ in shape[:-1]), shape[-1]]
    return list(shape)
