"""``torch.vmap`` rules of the quantization operators.

The batch becomes an axis of the tensors, and one launch covers all samples. A tensor of the maximum rank has
no room for another axis; then each sample is a launch.
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
from holdfast.core.torch_op import by_sample


def batched(
    call: Callable[..., torch.Tensor],
    info: Any,
    in_dims: Sequence[int | None],
    tensors: Sequence[torch.Tensor],
    shared: Sequence[Any],
    granularity: str,
    static: Sequence[Any],
) -> tuple[torch.Tensor, int]:
    """``call(*tensors, *shared, granularity, *static)`` of every sample, and the batch axis of the result.

    ``shared`` is (scale tensor, scale value, zero point tensor, zero point value), as in ``SHARED_SCHEMA``.
    ``in_dims`` has the batch axis of each argument, or None for an argument without one. ``info`` is that of
    ``torch.library.register_vmap``.
    """
    batch_size: int = info.batch_size
    scale, scale_value, zero_point, zero_value = shared
    scale_dim, zero_dim = in_dims[len(tensors)], in_dims[len(tensors) + 2]
    batches = [_batch_first(tensor, in_dims[i], batch_size) for i, tensor in enumerate(tensors)]
    shape, form = tuple(batches[0].shape[1:]), granularity_named(granularity)
    # Scales that vary within a sample need an entry per sample. Unbatched scales are expanded, not copied.
    per_sample = scale_dim is not None or zero_dim is not None or isinstance(form, (PerToken, PerGroup))
    if per_sample:
        scale_shape = form.view(shape).scale_shape
        scale = _per_sample(scale, scale_dim, batch_size, scale_shape)
        zero_point = _per_sample(zero_point, zero_dim, batch_size, scale_shape)

    def apply(batches: Sequence[torch.Tensor], form: Granularity) -> torch.Tensor:
        return call(*batches, scale, scale_value, zero_point, zero_value, form.name, *static)

    if len(shape) == MAX_RANK:

        def of_sample(scale: Any, zero_point: Any, *tensors: torch.Tensor) -> torch.Tensor:
            return call(*tensors, scale, scale_value, zero_point, zero_value, granularity, *static)

        dims = [0 if per_sample and values is not None else None for values in (scale, zero_point)]
        return by_sample(of_sample)(info, [*dims, *[0] * len(batches)], scale, zero_point, *batches)
    if per_sample and isinstance(form, PerChannel):
        # Each (sample, channel) has its own scale: flatten a channel to a row and use one scale per token.
        axis = form.axis % len(shape)
        rest = [size for d, size in enumerate(shape) if d != axis]
        rows = [batch.movedim(axis + 1, 1).reshape(batch_size, shape[axis], prod(rest)) for batch in batches]
        return apply(rows, PerToken()).reshape(batch_size, shape[axis], *rest).movedim(1, axis + 1), 0
    if per_sample and (isinstance(form, PerTensor) or not shape):
        return apply(batches, PerChannel(0)), 0
    if isinstance(form, PerGroup):
        return apply(batches, PerGroup(form.group_size, form.axis + (form.axis >= 0))), 0
    if isinstance(form, PerChannel):
        return apply(batches, PerChannel(form.axis + (form.axis >= 0))), 0
    return apply(batches, form), 0


def _batch_first(tensor: torch.Tensor, dim: int | None, batch_size: int) -> torch.Tensor:
    return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _per_sample(
    values: torch.Tensor | None, dim: int | None, batch_size: int, scale_shape: tuple[int, ...]
) -> torch.Tensor | None:
    """Scales or zero points in shape (batch_size, *scale_shape)."""
    if values is None:
        return None
    if dim is None:
        return values.reshape(scale_shape).expand(batch_size, *scale_shape)
    return values.movedim(dim, 0).reshape(batch_size, *scale_shape)
