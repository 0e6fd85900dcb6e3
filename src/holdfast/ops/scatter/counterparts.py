"""The maximum of ``segment_reduce``, which has no plan, as a counterpart of ``embedding_bag``."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Inexpressible
from holdfast.ops.scatter import torch_op


def other_bits(op: str, desc: Any) -> tuple[str, ...]:
    """The gradients with other bits than ``embedding_bag``: the rows of segments are in another order."""
    return "gradient of weight", "dweight"


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None,
    *,
    mode: str,
    padding_idx: int | None,
    include_last_offset: bool,
    **how: Any,
) -> torch.Tensor:
    """The maxima of bags. Each bag is a segment, and the rows of all segments are mixed."""
    rows = weight.shape[0]
    if mode != "max" or padding_idx is not None or bool(((input < 0) | (input >= rows)).any()):
        raise Inexpressible
    if offsets is None:
        bags = input.shape[0]
        sizes = torch.full((bags,), input.shape[1], device=input.device)
    else:
        ends = torch.cat([offsets.long(), torch.full((1,), len(input), device=input.device)])
        sizes = ends.diff()[: -1 if include_last_offset else None]
        bags = len(sizes)
        if not bags or int(ends[0]) or bool((ends.diff() < 0).any()):
            raise Inexpressible
    segments = torch.repeat_interleave(torch.arange(bags, device=input.device), sizes)
    flat = input.reshape(-1)[: len(segments)]
    starts = sizes.cumsum(0) - sizes
    order = (torch.arange(len(segments), device=input.device) - starts[segments]).sort(stable=True).indices
    data = torch_op.index_select(weight, 0, flat[order])
    return torch_op.segment_reduce(data, segments[order], bags, reduce="max")
