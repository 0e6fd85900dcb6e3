"""Calls under ``torch.vmap``: the samples become an axis of the tensor, and one launch does all of them.

Where they cannot, there is a launch for each sample.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from holdfast.core.descriptor import MAX_RANK
from holdfast.core.granularity import (
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    granularity_named,
)


def batched(
    call: Callable[..., torch.Tensor],
    samples: int,
    in_dims: Sequence[int | None],
    tensors: Sequence[torch.Tensor],
    shared: Sequence[Any],
    granularity: str,
    settled: Sequence[Any],
) -> tuple[torch.Tensor, int]:
    """``call(*tensors, *shared, granularity, *settled)`` of every sample, and the axis of the samples.

    ``shared`` are a scale and its value, a zero point and its value, as operators take them. ``in_dims`` says
    along which axis each argument has the samples, if it has them.
    """
    scale, scale_value, zero_point, zero_value = shared
    scale_dim, zero_dim = in_dims[len(tensors)], in_dims[len(tensors) + 2]
    whole = [_samples_first(tensor, in_dims[i], samples) for i, tensor in enumerate(tensors)]
    shape, form = tuple(whole[0].shape[1:]), granularity_named(granularity)
    # Scales that vary within a sample are given for each sample, if only as a view of those that all share.
    each = scale_dim is not None or zero_dim is not None or isinstance(form, (PerToken, PerGroup))
    if each:
        scales = form.view(shape).scale_shape
        scale = _of_samples(scale, scale_dim, samples, scales)
        zero_point = _of_samples(zero_point, zero_dim, samples, scales)

    def apply(whole: Sequence[torch.Tensor], form: Granularity) -> torch.Tensor:
        return call(*whole, scale, scale_value, zero_point, zero_value, form.name, *settled)

    if len(shape) == MAX_RANK:
        apart = [
            call(
                *(tensor[i] for tensor in whole),
                scale[i] if each and scale is not None else scale,
                scale_value,
                zero_point[i] if each and zero_point is not None else zero_point,
                zero_value,
                granularity,
                *settled,
            )
            for i in range(samples)
        ]
        return torch.stack(apart), 0
    if each and isinstance(form, PerChannel):
        # A channel of a sample has its own scale, as a token has.
        axis = form.axis % len(shape)
        rest = [size for d, size in enumerate(shape) if d != axis]
        rows = [tensor.movedim(axis + 1, 1).reshape(samples, shape[axis], prod(rest)) for tensor in whole]
        return apply(rows, PerToken()).reshape(samples, shape[axis], *rest).movedim(1, axis + 1), 0
    if each and (isinstance(form, PerTensor) or not shape):
        return apply(whole, PerChannel(0)), 0
    if isinstance(form, PerGroup):
        return apply(whole, PerGroup(form.group_size, form.axis + (form.axis >= 0))), 0
    if isinstance(form, PerChannel):
        return apply(whole, PerChannel(form.axis + (form.axis >= 0))), 0
    return apply(whole, form), 0


def _samples_first(tensor: torch.Tensor, dim: int | None, samples: int) -> torch.Tensor:
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _of_samples(
    shared: torch.Tensor | None, dim: int | None, samples: int, scales: tuple[int, ...]
) -> torch.Tensor | None:
    """What elements share, in the shape ``scales`` for each sample."""
    if shared is None:
        return None
    if dim is None:
        return shared.reshape(scales).expand(samples, *scales)
    return shared.movedim(dim, 0).reshape(samples, *scales)
