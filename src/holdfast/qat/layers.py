"""The layers that ``prepare`` knows: their weights, how these are laid out, and their inputs."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from holdfast.core.checks import kind_of
from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import Granularity, PerChannel, PerGroup


@dataclass(frozen=True)
class Layer:
    """``parameters``: names of the weights. ``transposed``: axis 0 is the input channel and axis 1 the output
    channel. ``inputs``: names of the first arguments of ``forward`` that are activations.
    """

    parameters: tuple[str, ...] = ("weight",)
    transposed: bool = False
    inputs: tuple[str, ...] = ("input",)


_TRANSPOSED = Layer(transposed=True)

LAYERS: dict[type[nn.Module], Layer] = {
    nn.Linear: Layer(),
    # MultiheadAttention reads the weight of this Linear and never calls it.
    NonDynamicallyQuantizableLinear: Layer(inputs=()),
    nn.Conv1d: Layer(), nn.Conv2d: Layer(), nn.Conv3d: Layer(),
    nn.ConvTranspose1d: _TRANSPOSED, nn.ConvTranspose2d: _TRANSPOSED, nn.ConvTranspose3d: _TRANSPOSED,
    nn.Embedding: Layer(inputs=()), nn.EmbeddingBag: Layer(inputs=()),
    nn.MultiheadAttention: Layer(
        ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        inputs=("query", "key", "value"),
    ),
}  # fmt: skip


def require_module(model: Any) -> None:
    """Raise unless this is a module."""
    if not isinstance(model, nn.Module):
        raise InvalidArgs(f"model is {kind_of(model)}; it must be a torch.nn.Module.")


def layer_of(module: nn.Module) -> Layer | None:
    """The record of a known layer or of a subclass; None for other modules."""
    for kind in type(module).__mro__:
        if kind in LAYERS:
            layer = LAYERS[kind]
            return replace(
                layer,
                inputs=inputs_of(module, layer.inputs),
                transposed=layer.transposed and not _is_depthwise(module),
            )
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and isinstance(module, transformers.Conv1D):
        return Layer(transposed=True, inputs=("x",))
    return None


def _is_depthwise(convolution: Any) -> bool:
    """Whether axis 0 of the weight is the input channel and the output channel, and axis 1 has size 1."""
    sizes = {convolution.groups, convolution.in_channels, convolution.out_channels}
    return convolution.groups > 1 and len(sizes) == 1


def inputs_of(module: nn.Module, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the activations among the arguments of ``forward``: ``usual``, or those of a subclass.

    Those of a subclass have no default: arguments with one are options, such as a mask.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [*takewhile(lambda parameter: parameter.kind in kinds, parameters)][: len(usual)]
    names = tuple(parameter.name for parameter in named)
    if names == usual[: len(names)]:
        return usual
    return tuple(each.name for each in named if each.default is inspect.Parameter.empty) or names[:1]


def expected_scale_shape(granularity: Granularity, module: nn.Module) -> tuple[int] | None:
    """The shape of the scales of the input of a layer, with a scale for each of its channels; else None.

    The rank of the input is not known: axis 1 is that of the channels of images and of rows of features.
    """
    if not isinstance(granularity, PerChannel):
        return None
    channels = getattr(module, "in_channels", None)
    axes = 1, -1 - len(getattr(module, "kernel_size", ()))
    if channels is None:
        channels, axes = getattr(module, "in_features", getattr(module, "embed_dim", None)), (1, -1)
    return (channels,) if type(channels) is int and granularity.axis in axes else None


def stored_granularity(granularity: Granularity, weight: torch.Tensor, transposed: bool) -> Granularity:
    """The granularity in the axes of the stored weight, counted from 0."""
    rank = weight.dim()
    if isinstance(granularity, (PerChannel, PerGroup)) and -rank <= granularity.axis < rank:
        axis = granularity.axis % rank
        granularity = replace(granularity, axis=1 - axis if transposed and axis < 2 else axis)
    granularity.view(tuple(weight.shape))  # raises if it does not fit
    return granularity
