"""``prepare``: attach quantizers to the layers of a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from holdfast.core import private
from holdfast.core.checks import kind_of
from holdfast.core.dtypes import FLOATS
from holdfast.core.errors import HoldfastError, InvalidArgs
from holdfast.nn.sharded import is_sharded
from holdfast.qat.batch_norm import BatchNorm, FoldedWeight, Folds, find_folds, fold
from holdfast.qat.config import Config
from holdfast.qat.dequantizer import Dequantizer
from holdfast.qat.layers import expected_scale_shape, require_module, stored_granularity
from holdfast.qat.own_class import give_own_class
from holdfast.qat.quantizers import INPUT_QUANTIZER, ActivationQuantizer, WeightQuantizer
from holdfast.qat.targets import Target, find_targets

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    model: Model,
    config: Config | Mapping[Any, Config | None],
    *,
    fold_batch_norm: bool | Sequence[tuple[str, str]] = False,
) -> Model:
    """Quantize the weights and inputs of the layers of ``model`` in training and evaluation. In place.

    A ``Config`` quantizes all layers. A mapping has patterns as keys, and a ``Config`` or None as values. The
    first pattern that matches a layer decides. Layers that no pattern matches stay in float. A pattern is

    - a qualified module name, in which ``*`` stands for any characters, dots included;
    - a type of modules;
    - a function of a module's name and the module, that returns whether it matches.

    A name or a type matches a module and everything inside it.

    Layers are Linear, Conv and ConvTranspose of one to three dimensions, Embedding, EmbeddingBag,
    MultiheadAttention, transformers' Conv1D, their subclasses, and modules for which the ``Config`` names the
    ``parameters``. Weights are quantized by ``torch.nn.utils.parametrize``, inputs by a forward pre-hook.
    Weights that layers share stay shared.

    ``fold_batch_norm`` folds each BatchNorm into the Conv before it, if that is quantized: True for all that
    ``torch.fx`` finds, or pairs of names, such as ``[("conv1", "bn1")]``. Training normalizes by the
    statistics of the batch, and quantizes the weight folded with the running statistics.

    An error leaves the model unchanged.

    >>> import torch, holdfast as hf
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> _ = hf.qat.prepare(model, {"2": None, torch.nn.Linear: hf.qat.preset("w4a16")})
    >>> list(hf.qat.quantized_weights(model))
    ['0.weight']
    """
    require_module(model)
    _refuse_fsdp(model)
    targets = find_targets(model, config)
    quantized = {target.module for target in targets if target.config.weight is not None}
    folds = find_folds(model, quantized, fold_batch_norm)
    weights = _weight_quantizers(model, targets, folds)
    inputs = [_input_quantizer(target) for target in targets]
    for owner, *_ in weights:
        give_own_class(owner)
    for convolution, norm in folds.items():
        fold(convolution, norm)
    for owner, name, quantizer in weights:
        # unsafe: torch would call the quantizer, which would count as a batch.
        parametrize.register_parametrization(owner, name, quantizer, unsafe=True)
        parametrizations: Any = owner.parametrizations
        parametrizations[name].register_load_state_dict_pre_hook(_refuse_other_stage)
        if isinstance(owner, nn.RNNBase):
            type(owner).__deepcopy__ = private.copied_recurrent  # type: ignore[attr-defined]  # a class of its own
    for target, made in zip(targets, inputs, strict=True):
        if made is not None:
            target.module.add_module(INPUT_QUANTIZER, made.train(target.module.training))
            target.module.register_forward_pre_hook(_quantize_inputs, with_kwargs=True)
    return model


def _refuse_fsdp(model: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        raise InvalidArgs("the model is sharded by fully_shard already; call hf.qat.prepare before it.")


def _quantize_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward pre-hook of a layer. The quantizer is found in the module, so a copy uses its own."""
    quantizer: ActivationQuantizer = getattr(module, INPUT_QUANTIZER)
    return quantizer.quantized_arguments(args, kwargs)


def _refuse_other_stage(parametrizations: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
    """A hook of loading: a float weight is no codes, and codes are no float weight. Both have one name."""
    given, errors = state_dict.get(f"{prefix}original"), rest[-1]
    has_codes = any(isinstance(part, Dequantizer) for part in parametrizations)
    if not isinstance(given, torch.Tensor) or given.is_floating_point() != has_codes:
        return
    weight = "".join(prefix.removesuffix(".").rsplit("parametrizations.", 1))
    errors.append(
        f"{weight} in the state is a float weight, and this model is converted; load the state into a "
        "prepared model, and convert it afterwards."
        if has_codes
        else f"{weight} in the state is codes of a converted model; load the state into a model converted by "
        "hf.qat.convert(model, for_loading=True)."
    )


def _input_quantizer(target: Target) -> ActivationQuantizer | None:
    """The quantizer of the inputs of a layer; None if there is nothing to quantize."""
    if target.config.activation is None or not target.layer.inputs:
        return None
    if hasattr(target.module, INPUT_QUANTIZER):
        if isinstance(getattr(target.module, INPUT_QUANTIZER), ActivationQuantizer):
            raise InvalidArgs(f"the input of {target} is quantized already; a layer is prepared once.")
        raise InvalidArgs(
            f"{target} has an attribute {INPUT_QUANTIZER} of its own, and hf.qat.prepare gives its quantizer "
            "this name; rename the attribute."
        )
    tensors = (*target.module.parameters(), *target.module.buffers())
    device = tensors[0].device if tensors else torch.get_default_device()
    activation = target.config.activation
    shape = expected_scale_shape(activation.granularity, target.module)
    return ActivationQuantizer(activation, target.layer.inputs, device, shape, target.name)


def _weight_quantizers(
    model: nn.Module, targets: list[Target], folds: Folds
) -> list[tuple[nn.Module, str, WeightQuantizer]]:
    """The owner, name and quantizer of each weight. Layers that share a weight share its quantizer."""
    names = _names_of_parameters(model)
    found: list[tuple[nn.Module, str, WeightQuantizer]] = []
    known: dict[int, tuple[str, WeightQuantizer, BatchNorm | None]] = {}
    for target in targets:
        for name in _weights_of(target):
            label, weight = target.label(name), target.module.get_parameter(name)
            norm = folds.get(target.module)
            made = _weight_quantizer(target, label, weight, norm)
            first, quantizer, first_norm = known.setdefault(id(weight), (label, made, norm))
            if quantizer.quantizer != made.quantizer or first_norm is not norm:
                raise InvalidArgs(
                    f"{first} and {label} are one weight that is to be quantized in two ways; configure both "
                    "layers alike, or give one its own weight."
                )
            names[id(weight)].discard(label)
            found.append((target.module, name, quantizer))
    for weight_id, (label, *_) in known.items():
        if names[weight_id]:
            others = ", ".join(sorted(names[weight_id]))
            raise InvalidArgs(
                f"{label} is shared with {others}, which is not to be quantized; configure all layers of a "
                "shared weight alike, or give one its own weight."
            )
    return found


def _weight_quantizer(target: Target, label: str, weight: Any, norm: BatchNorm | None) -> WeightQuantizer:
    """The quantizer of one weight. ``norm`` is folded into it."""
    if isinstance(weight, nn.UninitializedParameter):
        raise InvalidArgs(f"{label} has no shape yet; run one batch through the model first.")
    if weight.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidArgs(
            f"{label} was made in torch.inference_mode and cannot be trained; make or load the model outside "
            "of it. The model is unchanged."
        )
    if weight.dtype not in {record.torch for record in FLOATS.values()}:
        raise InvalidArgs(f"{label} is {weight.dtype}; accepted are {', '.join(FLOATS)}.")
    config = target.config.weight
    assert config is not None
    if is_sharded(weight) and config.mode != "batch":
        raise InvalidArgs(
            f'{label} is a DTensor, which is quantized in mode "batch" only; the mode is "{config.mode}". '
            "The model is unchanged."
        )
    value = weight.detach() if norm is None else FoldedWeight(norm)(weight, training=False).detach()
    try:
        granularity = stored_granularity(config.granularity, weight, target.layer.transposed)
        return WeightQuantizer(replace(config, granularity=granularity), value)
    except HoldfastError as error:
        raise InvalidArgs(f"{label} cannot be quantized as configured: {error}") from error


def _names_of_parameters(model: nn.Module) -> dict[int, set[str]]:
    """The qualified names of each parameter, by its id. A module with several names counts once."""
    found: dict[int, set[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), set()).add(name)
    return found


def _weights_of(target: Target) -> list[str]:
    """The names of the weights of a layer that are to be quantized."""
    if target.config.weight is None:
        return []
    for option in ("max_norm", "sparse"):
        if getattr(target.module, option, None):
            raise InvalidArgs(
                f"{target} is an embedding with {option}, which a quantized table does not support; "
                f"make it without {option}, or leave it in float (None in the config)."
            )
    for name in target.parameters:
        if parametrize.is_parametrized(target.module, name):
            parametrizations: Any = target.module.parametrizations
            last = parametrizations[name][-1]
            if isinstance(last, (WeightQuantizer, Dequantizer)):
                raise InvalidArgs(f"{target.label(name)} is quantized already; a layer is prepared once.")
            raise InvalidArgs(
                f"{target.label(name)} has the parametrization {type(last).__name__}; remove it first by "
                "torch.nn.utils.parametrize.remove_parametrizations, which keeps the computed weight."
            )
    own = dict(target.module.named_parameters(recurse=False, remove_duplicate=False))
    found = [name for name in target.parameters if name in own]
    missing = target.config.parameters and set(target.config.parameters) - set(found)
    if missing or not found:
        named = ", ".join(sorted(missing or target.parameters))
        computed = [name for name in target.parameters if name in vars(target.module)]
        if computed:
            raise InvalidArgs(
                f"{target.label(computed[0])} is no parameter: a hook computes it, such as those of "
                "weight_norm, spectral_norm and prune in torch.nn.utils. Make it a parameter first, by "
                "remove_weight_norm, remove_spectral_norm or prune.remove."
            )
        raise InvalidArgs(
            f"{target}, {kind_of(target.module)}, has no parameter {named}; it has "
            f"{', '.join(own) or 'none'}."
        )
    return found
