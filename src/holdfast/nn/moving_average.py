"""The moving average of a scale, as operators.

The operations are elementary, each rounded on its own: the same bits on any device. They are operators of
their own so that it stays so when a module is compiled. A state that is NaN is not set, and takes the first
batch; a batch whose scale is not finite is rejected: it changes nothing, and is counted. Where ``told`` is
false, no process had a batch: nothing changes, and nothing is counted.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import cast

import torch

from holdfast.core.torch_op import define


def _next(state, observed, accepted, momentum):
    blended = state * (1 - momentum) + observed * momentum
    return torch.where(accepted, torch.where(state.isnan(), observed, blended), state)


def _finite(observed):
    """Whether all scales are: they are positive, so that the largest one tells."""
    return observed.amax() < float("inf") if observed.numel() else observed.new_ones((), dtype=torch.bool)


def _verdict(observed, told, rejected):
    """Whether the batch is accepted, and the next count of rejected ones."""
    accepted = _finite(observed)
    if told is None:
        return accepted, rejected + ~accepted
    return accepted & told, rejected + (told & ~accepted)


def _blend_scale(scale, rejected, observed, told, momentum):
    observed = observed.to(scale.dtype)
    accepted, rejected = _verdict(observed, told, rejected)
    return _next(scale, observed, accepted, momentum), rejected


def _blend_scale_fake(scale, rejected, observed, told, momentum):
    return torch.empty_like(scale), torch.empty_like(rejected)


def _blend_affine(scale, low, rejected, observed, observed_low, told, momentum, lowest, highest):
    observed, observed_low = observed.to(scale.dtype), observed_low.to(low.dtype)
    # A finite scale is that of a finite range.
    accepted, rejected = _verdict(observed, told, rejected)
    scale, low = _next(scale, observed, accepted, momentum), _next(low, observed_low, accepted, momentum)
    r = torch.round(low / scale)
    zero_point = (lowest - torch.where(r == r, r, 0)).clamp(lowest, highest)
    # Without a scale it is 0, as at the beginning.
    return scale, low, torch.where(scale.isnan(), 0, zero_point).to(torch.int32), rejected


def _blend_affine_fake(scale, low, rejected, observed, observed_low, told, momentum, lowest, highest):
    zero_point = torch.empty_like(scale, dtype=torch.int32)
    return torch.empty_like(scale), torch.empty_like(low), zero_point, torch.empty_like(rejected)


_scale = define(
    "blend_scale",
    "(Tensor scale, Tensor rejected, Tensor observed, Tensor? told, float momentum) -> (Tensor, Tensor)",
    _blend_scale,
    _blend_scale_fake,
)
_affine = define(
    "blend_scale_affine",
    "(Tensor scale, Tensor low, Tensor rejected, Tensor observed, Tensor observed_low, Tensor? told, "
    "float momentum, int lowest, int highest) -> (Tensor, Tensor, Tensor, Tensor)",
    _blend_affine,
    _blend_affine_fake,
)


def blend_scale(
    scale: torch.Tensor,
    rejected: torch.Tensor,
    observed: torch.Tensor,
    told: torch.Tensor | None,
    momentum: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next scale, and the next count of rejected batches."""
    return cast(tuple[torch.Tensor, torch.Tensor], _scale(scale, rejected, observed, told, momentum))


def blend_scale_affine(
    scale: torch.Tensor,
    low: torch.Tensor,
    rejected: torch.Tensor,
    observed: torch.Tensor,
    observed_low: torch.Tensor,
    told: torch.Tensor | None,
    momentum: float,
    ends: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next scale, lower end of the range, zero point, and count of rejected batches."""
    found = _affine(scale, low, rejected, observed, observed_low, told, momentum, *ends)
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], found)
