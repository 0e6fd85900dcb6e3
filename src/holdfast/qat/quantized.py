"""The quantized tensors of a prepared or converted model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from holdfast.core.errors import InvalidArgs
from holdfast.nn.sharded import full_tensor
from holdfast.ops.quantize.torch_op import quantize
from holdfast.qat.batch_norm import FoldedWeight
from holdfast.qat.dequantizer import Dequantizer
from holdfast.qat.layers import require_module
from holdfast.qat.quantized_tensor import QuantizedTensor
from holdfast.qat.quantizers import INPUT_QUANTIZER, ActivationQuantizer, WeightQuantizer, whole_zero_point

__all__ = ["QuantizedTensor", "activation_quantizers", "quantized_weights"]


@torch.no_grad()
def quantized(quantizer: WeightQuantizer, weight: torch.Tensor, name: str) -> QuantizedTensor:
    """The codes and the scales of ``weight``. ``name`` is for errors."""
    weight, made, record = full_tensor(weight.detach()), quantizer.fake_quantize, quantizer.quantizer
    if not weight.is_meta and bool(weight.isnan().any()):
        raise InvalidArgs(f"{name} has NaN in it, which has no code; repair the weight first.")
    if not quantizer.is_set():
        raise InvalidArgs(f"{without_scale(name)} Train the model, or load its state.")
    scale, zero_point = made.evaluation_scale(weight)
    shape = made.granularity.view(tuple(weight.shape)).scale_shape
    # Copies: the scale may be a parameter, and training changes it while the codes stay as they are.
    scale = scale.detach().reshape(shape).clone()
    if zero_point is not None:
        zero_point = whole_zero_point(zero_point.detach()).reshape(shape).clone()
    q_min, q_max = record.range or (None, None)
    codes = quantize(
        weight, scale, zero_point, dtype=record.format.torch, granularity=made.granularity, q_min=q_min,
        q_max=q_max,
    )  # fmt: skip
    stored = scale.to(record.scale_dtype or scale.dtype)
    return QuantizedTensor(codes, stored, zero_point, record.format, made.granularity, weight.dtype)


def without_scale(what: str) -> str:
    """The begin of an error for a weight or an input without a scale."""
    return f"{what} has no scale: its quantizer has seen no training batch that it could use."


def parametrized_weights(model: nn.Module) -> Iterator[tuple[str, ParametrizationList]]:
    """Qualified names of parametrized tensors, with their parametrizations. Shared ones come repeatedly.

    Raises if a quantizer is not the last one: the layer would not compute with quantized values.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        found: Any = module.parametrizations if is_parametrized(module) else {}
        for name, parametrizations in found.items():
            label = f"{prefix}.{name}" if prefix else name
            *others, last = parametrizations
            if any(isinstance(other, (WeightQuantizer, Dequantizer)) for other in others):
                raise InvalidArgs(
                    f"{label} has the parametrization {type(last).__name__} after its quantizer, so it is "
                    f"not quantized; remove it first, for example by `del layer.parametrizations.{name}[-1]`."
                )
            yield label, parametrizations


def require_quantization(model: nn.Module) -> None:
    """Raise if ``disable_fake_quant`` is in force for a weight: the layer computes with the float weight."""
    for name, parametrizations in parametrized_weights(model):
        last = parametrizations[-1]
        if isinstance(last, WeightQuantizer) and not last.fake_quantize.quantizes:
            raise InvalidArgs(
                f"the quantizer of {name} is switched off, so the model computes with the float weight; call "
                f"enable_fake_quant() of {name}'s hf.nn.FakeQuantize first. The model is unchanged."
            )


def float_weight(parametrizations: ParametrizationList) -> torch.Tensor:
    """The weight that the quantizer gets in evaluation."""
    weight, first = parametrizations.original, parametrizations[0]
    return first(weight, training=False) if isinstance(first, FoldedWeight) else weight


def quantized_weights(model: nn.Module) -> dict[str, QuantizedTensor]:
    """The quantized weights of a prepared or converted model, by qualified parameter name.

    A weight that several layers share appears under each of its names.
    """
    require_module(model)
    found: dict[str, QuantizedTensor] = {}
    for name, parametrizations in parametrized_weights(model):
        last = parametrizations[-1]
        if isinstance(last, WeightQuantizer):
            found[name] = quantized(last, float_weight(parametrizations), name)
        elif isinstance(last, Dequantizer):
            found[name] = last.quantized_tensor(parametrizations.original.detach())
    return found


def activation_quantizers(model: nn.Module) -> dict[str, ActivationQuantizer]:
    """The modules that quantize the inputs of layers, by the qualified name of the layer."""
    require_module(model)
    return {
        name.removesuffix(INPUT_QUANTIZER).removesuffix("."): module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ActivationQuantizer)
    }
