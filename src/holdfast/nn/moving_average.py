"""The moving average of a scale, as operators.

Each elementary operation is rounded on its own, so the bits are the same on any device. They are registered
as torch operators so that torch.compile does not fuse them. A NaN state is unset and takes the first batch. A
batch whose scale is not finite is rejected: only the count of rejected batches changes. Where ``any_data`` is
False, no process had data, and nothing changes.
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
    """Whether all scales are finite: scales are positive, so the largest decides."""
    return observed.amax() < float("inf") if observed.numel() else observed.new_ones((), dtype=torch.bool)


def _verdict(observed, any_data, rejected):
    """Whether the batch is accepted, and the next count of rejected batches."""
    accepted = _finite(observed)
    if any_data is None:
        return accepted, rejected + ~accepted
    return accepted & any_data, rejected + (any_data & ~accepted)


def _blend_scale(scale, rejected, observed, any_data, momentum):
    observed = observed.to(scale.dtype)
    accepted, rejected = _verdict(observed, any_data, rejected)
    return _next(scale, observed, accepted, momentum), rejected


def _blend_scale_fake(scale, rejected, observed, any_data, momentum):
    return torch.empty_like(scale), torch.empty_like(rejected)


def _blend_affine(scale, low, rejected, observed, observed_low, any_data, momentum, lowest, highest):
    observed, observed_low = observed.to(scale.dtype), observed_low.to(low.dtype)
    # A finite scale implies a finite range.
    accepted, rejected = _verdict(observed, any_data, rejected)
    scale, low = _next(scale, observed, accepted, momentum), _next(low, observed_low, accepted, momentum)
    r = torch.round(low / scale)
    zero_point = (lowest - torch.where(r == r, r, 0)).clamp(lowest, highest)
    # The zero point is 0 while the scale is unset.
    return scale, low, torch.where(scale.isnan(), 0, zero_point).to(torch.int32), rejected


def _blend_affine_fake(scale, low, rejected, observed, observed_low, any_data, momentum, lowest, highest):
    zero_point = torch.empty_like(scale, dtype=torch.int32)
    return torch.empty_like(scale), torch.empty_like(low), zero_point, torch.empty_like(rejected)


_scale = define(
    "blend_scale",
    "(Tensor scale, Tensor rejected, Tensor observed, Tensor? any_data, float momentum) -> (Tensor, Tensor)",
    _blend_scale, _blend_scale_fake,
)  # fmt: skip
_affine = define(
    "blend_scale_affine",
    "(Tensor scale, Tensor low, Tensor rejected, Tensor observed, Tensor observed_low, Tensor? any_data, "
    "float momentum, int lowest, int highest) -> (Tensor, Tensor, Tensor, Tensor)",
    _blend_affine,
    _blend_affine_fake,
)


def blend_scale(
    scale: torch.Tensor,
    rejected: torch.Tensor,
    observed: torch.Tensor,
    any_data: torch.Tensor | None,
    momentum: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next scale, and the next count of rejected batches."""
    return cast(tuple[torch.Tensor, torch.Tensor], _scale(scale, rejected, observed, any_data, momentum))


def blend_scale_affine(
    scale: torch.Tensor,
    low: torch.Tensor,
    rejected: torch.Tensor,
    observed: torch.Tensor,
    observed_low: torch.Tensor,
    any_data: torch.Tensor | None,
    momentum: float,
    ends: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next scale, lower end of the range, zero point, and count of rejected batches."""
    found = _affine(scale, low, rejected, observed, observed_low, any_data, momentum, *ends)
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], found)
