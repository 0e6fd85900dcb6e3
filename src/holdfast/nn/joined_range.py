"""The range of a batch that is spread over several processes.

The magnitudes of a range are compared as the integers that their bits are, where NaN is above all: so a
maximum over integers, which every communication library gets right, joins ranges in every bit.
"""

from __future__ import annotations

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


def joined_range(low: torch.Tensor, high: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The range over all processes, from each one's own; NaN where one of them is."""
    whole = torch.int64 if low.dtype == torch.float64 else torch.int32
    magnitudes = torch.stack([low, high]).view(whole) & torch.iinfo(whole).max
    distributed.all_reduce(magnitudes, distributed.ReduceOp.MAX, group)
    below, above = magnitudes.view(low.dtype).unbind()
    return 0.0 - below, above


def first_of(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """What the first process of the group has, everywhere."""
    everywhere = tensor.contiguous()
    distributed.broadcast(everywhere, group=group, group_src=0)
    return everywhere
