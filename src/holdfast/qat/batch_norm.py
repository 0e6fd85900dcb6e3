"""Folding of BatchNorm into the convolution before it.

With the running statistics, ``factor = gamma / sqrt(variance + eps)``. The folded convolution has the weight
``factor * weight``, which is quantized, and the bias ``beta + factor * (bias - mean)``.

In evaluation the convolution is the folded one, and the BatchNorm returns its input. In training the
convolution has the folded weight and the bias ``factor * bias``; the BatchNorm divides its input by the
factor, and then normalizes by the statistics of the batch. So the quantizer sees the weight that is
deployed, and the statistics are those of the unfolded output.

All decisions follow the mode of the BatchNorm: after its ``eval()``, training uses the running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from holdfast.core.checks import kind_of, shown
from holdfast.core.errors import InvalidArgs
from holdfast.nn.state_operators import state_before

__all__ = ["BatchNorm", "FoldedWeight", "Folds", "check_folds", "find_folds", "finish_fold", "fold"]

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm

#: Convolutions, with the BatchNorm that is folded into each.
Folds = dict[nn.Module, BatchNorm]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def factor_of(norm: BatchNorm, training: bool) -> torch.Tensor:
    """The factor of each channel. In training, gamma = 0 counts as 1: it is divided by."""
    deviation = (_variance(norm, training) + norm.eps).sqrt()
    gamma = torch.ones_like(deviation) if norm.weight is None else norm.weight
    return (torch.where(gamma == 0, 1.0, gamma) if training else gamma) / deviation


def _variance(norm: BatchNorm, training: bool) -> torch.Tensor:
    """The running variance. In training it is that before the BatchNorm updates it."""
    assert norm.running_var is not None
    return state_before(norm.running_var) if training else norm.running_var


class _Folded(nn.Module):
    """A parametrization by a BatchNorm, which is no submodule: it belongs to the model already."""

    def __init__(self, norm: BatchNorm) -> None:
        super().__init__()
        self._norm = (norm,)

    @property
    def norm(self) -> BatchNorm:
        return self._norm[0]


class FoldedWeight(_Folded):
    """The parametrization of the weight of a folded convolution."""

    def forward(self, weight: torch.Tensor, training: bool | None = None) -> torch.Tensor:
        factor = factor_of(self.norm, self.norm.training if training is None else training)
        return (weight * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)


class FoldedBias(_Folded):
    """The parametrization of the bias of a folded convolution."""

    def forward(self, bias: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        factor = factor_of(norm, norm.training)
        if norm.training:
            return (bias * factor).to(bias.dtype)
        assert norm.running_mean is not None
        folded = (bias - norm.running_mean) * factor
        return (folded if norm.bias is None else folded + norm.bias).to(bias.dtype)


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The input of a BatchNorm, given by position or by name."""
    return args[0] if args else kwargs["input"]  # type: ignore[no-any-return]


def _unfold_input(norm: BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward pre-hook of the BatchNorm: its input without the factor."""
    if not norm.training:
        return None
    x = _input_of(args, kwargs)
    return ((x / factor_of(norm, True).reshape(1, -1, *[1] * (x.dim() - 2))).to(x.dtype),), {}


def _return_input(
    norm: BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor | None:
    """The forward hook of the BatchNorm: in evaluation it is folded already."""
    return None if norm.training else _input_of(args, kwargs)


def fold(convolution: Any, norm: BatchNorm) -> None:
    """Fold ``norm`` into ``convolution``, whose weight is not parametrized yet."""
    if convolution.bias is None:
        del convolution.bias
        convolution.register_buffer("bias", convolution.weight.new_zeros(convolution.out_channels))
    parametrize.register_parametrization(convolution, "weight", FoldedWeight(norm), unsafe=True)
    parametrize.register_parametrization(convolution, "bias", FoldedBias(norm), unsafe=True)
    norm.register_forward_pre_hook(_unfold_input, with_kwargs=True)
    norm.register_forward_hook(_return_input, with_kwargs=True)


def check_folds(model: nn.Module) -> None:
    """Raise if a folded BatchNorm is not in the model: then no hook undoes or replaces its normalization."""
    known = set(model.modules())
    for name, owner, biases in _folded_biases(model):
        if biases[0].norm not in known:
            raise InvalidArgs(
                f"the BatchNorm that is folded into {name or type(owner).__name__!r} is not in the model. "
                "Replace BatchNorms before hf.qat.prepare, as by SyncBatchNorm.convert_sync_batchnorm, and "
                "convert convolutions together with their BatchNorms. The model is unchanged."
            )


def _folded_biases(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """The name of each folded convolution, the convolution, and the parametrizations of its bias."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module, "bias"):
            owner: Any = module
            biases = owner.parametrizations["bias"]
            if isinstance(biases[0], FoldedBias):
                yield name, owner, biases


@torch.no_grad()
def finish_fold(model: nn.Module) -> None:
    """Write the folded biases to the convolutions, and replace the folded BatchNorms by Identity."""
    gone: set[nn.Module] = set()
    for _, owner, biases in list(_folded_biases(model)):
        gone.add(biases[0].norm.eval())
        biases.original.copy_(owner.bias)
        # Not removed: torch would remove it from the copies of the module as well.
        biases[0] = nn.Identity()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in gone:
                setattr(module, name, nn.Identity())


def find_folds(model: nn.Module, quantized: set[nn.Module], given: Any) -> Folds:
    """The BatchNorm of each quantized convolution: ``given`` pairs of names, or True for a trace."""
    if given is False:
        return {}
    found: Folds = {}
    for first, second in _traced(model) if given is True else _checked(given):
        convolution, norm = (_module(model, name) for name in (first, second))
        if not isinstance(convolution, _CONVOLUTIONS) or not isinstance(norm, BatchNorm):
            kinds = f"{kind_of(convolution)} and {kind_of(norm)}"
            raise InvalidArgs(f"{first!r} and {second!r} are {kinds}; they must be a Conv and a BatchNorm.")
        if norm.running_var is None or norm.num_features != convolution.out_channels:
            raise InvalidArgs(
                f"{second!r} cannot be folded into {first!r}: it needs running statistics of the "
                f"{convolution.out_channels} output channels."
            )
        if parametrize.is_parametrized(convolution, "bias"):
            raise InvalidArgs(
                f"{second!r} cannot be folded into {first!r}, whose bias has a parametrization; remove it "
                "first by torch.nn.utils.parametrize.remove_parametrizations, or do not fold the pair."
            )
        if convolution in found or norm in found.values():
            raise InvalidArgs(f"fold_batch_norm has {first!r} or {second!r} twice; each is in one pair.")
        if convolution in quantized:
            found[convolution] = norm
    if not found:
        raise InvalidArgs(
            "fold_batch_norm finds nothing to fold: there is no Conv with a quantized weight whose output "
            "only a BatchNorm reads."
        )
    return found


def _checked(given: Any) -> list[tuple[str, str]]:
    try:
        pairs = [(first, second) for first, second in given]
    except (TypeError, ValueError):
        pairs = []
    if not pairs or not all(isinstance(name, str) for pair in pairs for name in pair):
        raise InvalidArgs(
            f"fold_batch_norm is {shown(given)}; it must be True, False, or pairs of names such as "
            "[('conv1', 'bn1')]."
        )
    return pairs


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise InvalidArgs(f"fold_batch_norm names {name!r}, which the model does not have.") from None


def _traced(model: nn.Module) -> list[tuple[str, str]]:
    """The names of each Conv and of the BatchNorm that alone takes its output."""
    try:
        nodes = list(torch.fx.symbolic_trace(model).graph.nodes)
    except Exception as error:  # torch.fx raises errors of many types
        raise InvalidArgs(
            "fold_batch_norm=True needs a model that torch.fx can trace; pass pairs of names instead, such "
            f"as [('conv1', 'bn1')]. torch.fx said: {error}"
        ) from error
    calls = [node for node in nodes if node.op == "call_module"]
    once = [node for node in calls if sum(other.target == node.target for other in calls) == 1]
    modules = dict(model.named_modules())
    fed = [(node.args[0] if node.args else node.kwargs.get("input"), node) for node in once]
    return [
        (first.target, node.target)
        for first, node in fed
        if isinstance(modules[node.target], BatchNorm)
        and first in once
        and isinstance(modules[first.target], _CONVOLUTIONS)
        and len(first.users) == 1
    ]
