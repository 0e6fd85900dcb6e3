"""Sums over processes in an order that no communication library decides.

Collectives only move elements here. all_to_all gives each rank one piece of every shard, the rank adds them
in rank order, and all_gather distributes the sums. This moves as many bytes as a ring all-reduce.

The sum of shards s0, s1, s2, ... is ``round((((s0 + s1) + s2) + ...) / divisor)``. It is computed in float32
for float16 and bfloat16, else in the dtype of the shards, and rounded once to that dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from holdfast.core.checks import shown
from holdfast.core.dtypes import float_dtype
from holdfast.core.errors import InvalidArgs
from holdfast.nn.collectives import world_size

#: A ``torch.distributed.ProcessGroup``, or None for the default group.
Group = Any

#: Adding it changes no value: x + -0.0 is x, also for x = 0.0 and x = -0.0.
NOTHING = -0.0


def ranks_of(group: Group) -> int:
    """The number of ranks of ``group``. Raise unless this process is one of them."""
    if not distributed.is_available():
        return 1
    outside = group is distributed.GroupMember.NON_GROUP_MEMBER
    if group is not None and not outside and not isinstance(group, distributed.ProcessGroup):
        raise InvalidArgs(
            f"group is {shown(group)}; it must be a process group of torch.distributed, or None for the "
            "default group."
        )
    if outside or world_size(group) < 1:
        raise InvalidArgs(
            "this process is not in the process group that is given; call this on the ranks of the group "
            "alone, or give another group."
        )
    return world_size(group)


def add_in_order(terms: Iterable[torch.Tensor], divisor: float) -> torch.Tensor:
    """The sum of ``terms`` in their order, divided by ``divisor`` and rounded to their dtype."""
    first, *others = terms
    total = first.to(float_dtype(first.dtype, "tensor").compute.torch, copy=True)
    for term in others:
        total.add_(term)
    if divisor != 1:
        # A tensor, because torch divides by a Python number with a multiplication on CUDA.
        total.div_(torch.full((), divisor, dtype=total.dtype, device=total.device))
    return total.to(first.dtype)


def exchanged(pieces: torch.Tensor, group: Group) -> torch.Tensor:
    """Send ``pieces[r]`` to each rank r; return what was received, by the rank of the sender."""
    pieces = pieces.contiguous()
    received = torch.empty_like(pieces)
    distributed.all_to_all_single(received, pieces, group=group)
    return received


def all_gathered(out: torch.Tensor, piece: torch.Tensor, group: Group) -> None:
    """Write the ``piece`` of every rank to ``out``, in the order of ranks."""
    # torch 2.13 renamed this function and warns of the old name.
    gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, piece, group=group)


def sum_over_ranks(
    out: torch.Tensor,
    shards: Sequence[torch.Tensor],
    ranks: int,
    group: Group,
    divisor: float,
    buffer_bytes: int,
) -> None:
    """Write the sum of the shards of all ranks to ``out``. Every tensor is 1-D and of the same size.

    ``out`` may be one of the shards. At most ``buffer_bytes`` of the shards are exchanged at a time.
    """
    if ranks == 1:
        out.copy_(add_in_order(shards, divisor))
        return
    piece = max(1, buffer_bytes // (len(shards) * out.element_size() * ranks))
    for begin in range(0, out.numel(), piece * ranks):
        part = out[begin : begin + piece * ranks]
        size = -(-part.numel() // ranks)  # the last piece may have to be padded
        sent = [_in_pieces(shard[begin : begin + part.numel()], ranks, size) for shard in shards]
        received = exchanged(sent[0] if len(sent) == 1 else torch.stack(sent, 1), group)
        mine = add_in_order(received.view(-1, size).unbind(), divisor)
        if part.numel() == size * ranks:
            all_gathered(part, mine, group)
        else:
            padded = out.new_empty(size * ranks)
            all_gathered(padded, mine, group)
            part.copy_(padded[: part.numel()])


def _in_pieces(part: torch.Tensor, ranks: int, size: int) -> torch.Tensor:
    """``part`` as one row for each rank, padded if necessary."""
    if part.numel() == ranks * size:
        return part.view(ranks, size)
    return torch.nn.functional.pad(part, (0, ranks * size - part.numel())).view(ranks, size)
