"""``convert``: replace the weights of a prepared model by their codes."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.core.checks import require_bool
from holdfast.core.errors import HoldfastError, InvalidArgs
from holdfast.nn.sharded import is_sharded
from holdfast.qat.batch_norm import check_folds, finish_fold
from holdfast.qat.dequantizer import Dequantizer, as_laid_out
from holdfast.qat.layers import require_module
from holdfast.qat.quantized import (
    activation_quantizers,
    float_weight,
    parametrized_weights,
    quantized,
    require_quantization,
    without_scale,
)
from holdfast.qat.quantized_tensor import QuantizedTensor
from holdfast.qat.quantizers import WeightQuantizer

Model = TypeVar("Model", bound=nn.Module)


def convert(model: Model, *, for_loading: bool = False) -> Model:
    """Replace the weights of a prepared model by codes and scales, and freeze its activations. In place.

    Codes of less than a byte are packed, unless two groups would share a byte. A layer dequantizes its weight
    when it reads it. The output has the bits of the prepared model in evaluation mode. Weights that layers
    share stay shared.

    ``for_loading`` also accepts a model that has seen no batch, so that a converted ``state_dict`` can be
    loaded into it. An error leaves the model unchanged.

    >>> import torch, holdfast as hf
    >>> model = hf.qat.prepare(torch.nn.Linear(32, 8), hf.qat.preset("w4a16")).eval()
    >>> x = torch.randn(2, 32)
    >>> prepared = model(x)
    >>> hf.qat.convert(model)(x).equal(prepared)
    True
    >>> model.state_dict()["parametrizations.weight.original"].shape
    torch.Size([8, 16])
    """
    require_module(model)
    require_bool("for_loading", for_loading)
    found = [
        (name, parametrizations)
        for name, parametrizations in parametrized_weights(model)
        if isinstance(parametrizations[-1], WeightQuantizer)
    ]
    activations = activation_quantizers(model)
    if not found and all(quantizer.converted for quantizer in activations.values()):
        raise InvalidArgs("the model has no layer to convert; call hf.qat.prepare first, and convert once.")
    check_folds(model)
    converted: dict[int, tuple[nn.Parameter, Dequantizer]] = {}
    if not for_loading:
        require_quantization(model)
    for name, parametrizations in found:
        quantizer, weight = parametrizations[-1], float_weight(parametrizations)
        if is_sharded(weight):
            raise InvalidArgs(
                f"{name} is a DTensor; load the full state_dict into a prepared model of one process, and "
                "convert that. The model is unchanged."
            )
        if id(quantizer) not in converted:
            tensor = _tensor(quantizer, weight, name, for_loading)
            made = Dequantizer(tensor)
            codes = nn.Parameter(made.stored(tensor.codes), requires_grad=False)
            converted[id(quantizer)] = codes, made
    for name, activation in activations.items():
        if not for_loading and not activation.is_set():
            advice = "because only its weight is used, prepare it without an activation quantizer"
            layer = repr(name) if name else "the model"
            raise InvalidArgs(_unobserved(f"the input of {layer}", advice))
    for _, parametrizations in found:
        if isinstance(parametrizations[-1], WeightQuantizer):  # else: under another name of the module
            parametrizations.original, parametrizations[0] = converted[id(parametrizations[-1])]
            del parametrizations[1:]
    finish_fold(model)
    for activation in activations.values():
        activation.finish()
    return model


def _tensor(quantizer: Any, weight: torch.Tensor, name: str, for_loading: bool) -> QuantizedTensor:
    """The codes and scales of a weight; zeros if they will be loaded."""
    if quantizer.is_set():
        try:
            return quantized(quantizer, weight, name)
        except HoldfastError as error:
            raise InvalidArgs(f"{name} cannot be converted: {error}") from error
    if not for_loading:
        raise InvalidArgs(_unobserved(name, 'prepare its weight with another mode than "ema"'))
    record, shape, kept = quantizer.quantizer, tuple(weight.shape), quantizer.fake_quantize
    scale = torch.zeros(
        quantizer.granularity.view(shape).scale_shape, dtype=record.scale_dtype or kept.scale.dtype,
        device=weight.device,
    )  # fmt: skip
    zero_point = None if kept.zero_point is None else torch.zeros_like(scale, dtype=torch.int32)
    codes = as_laid_out(weight, torch.zeros(shape, dtype=record.format.storage, device=weight.device))
    return QuantizedTensor(codes, scale, zero_point, record.format, quantizer.granularity, weight.dtype)


def _unobserved(what: str, advice: str) -> str:
    return (
        f"{without_scale(what)} Train the model, or load its state; to load a converted state, pass "
        f"for_loading=True. If the layer is never called, {advice}. The model is unchanged."
    )
