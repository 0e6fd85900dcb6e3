"""What the processes that share a batch make of it together.

The magnitudes of a range are compared as the integers that their bits are, where NaN is above all: so a
maximum over integers, which every communication library gets right, joins ranges in every bit. A process
whose part of the batch is empty adds nothing; ``told`` says whether any process had more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

#: A ``torch.distributed.ProcessGroup``, which not every build of torch has; None is the default group.
Group = Any


def processes(group: Group) -> int:
    """How many processes share a batch."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size(group)


def joined_range(
    low: torch.Tensor, high: torch.Tensor, tells: bool, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The range over all processes, from each one's own; NaN where one of them is. And ``told``."""
    magnitudes = _bits(torch.stack([low, high]))
    magnitudes = magnitudes & torch.iinfo(magnitudes.dtype).max
    if not tells:
        magnitudes = torch.full_like(magnitudes, -1)  # below every magnitude
    distributed.all_reduce(magnitudes, distributed.ReduceOp.MAX, group)
    below, above = magnitudes.clamp_min(0).view(low.dtype).unbind()
    return 0.0 - below, above, (magnitudes >= 0).all()


def first_of(
    tensors: Sequence[torch.Tensor], tells: bool, group: Group
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the first process of the group that has a batch has, everywhere. And ``told``."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    first = torch.full((), rank if tells else size, dtype=torch.int64, device=tensors[0].device)
    distributed.all_reduce(first, distributed.ReduceOp.MIN, group)
    everywhere = []
    for tensor in tensors:
        # A sum with zeros is exact where the terms are integers.
        bits = torch.where(first == rank, _bits(tensor), 0)
        distributed.all_reduce(bits, distributed.ReduceOp.SUM, group)
        everywhere.append(bits.view(tensor.dtype))
    return everywhere, first < size


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A float32, float64 or int32 tensor as integers of the same width."""
    return tensor.contiguous().view(torch.int64 if tensor.element_size() == 8 else torch.int32)
