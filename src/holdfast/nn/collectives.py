"""Collective operations of the processes that share a batch.

Ranges are reduced exactly: magnitudes are compared as integers, by their bit patterns, where NaN is the
largest. Every communication library computes a maximum of integers exactly. A process with an empty batch
contributes nothing. ``any_data`` tells whether any process had a batch that is not empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed

from holdfast.core import private
from holdfast.core.errors import CollectiveFailed

#: A ``torch.distributed.ProcessGroup``, or None for the default group. Not every torch has this class.
Group = Any


class Collective(NamedTuple):
    """A collective operation of ``group`` for ``module``. ``first``: the first one since ``train()``."""

    group: Group
    module: torch.nn.Module
    first: bool


def world_size(group: Group) -> int:
    """The number of processes that share a batch."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size(group)


def all_reduce_range(
    low: torch.Tensor, high: torch.Tensor, has_data: bool, collective: Collective
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The range over all processes, NaN where any process has NaN; and ``any_data``."""
    magnitudes = _bits(torch.stack([low, high]))
    magnitudes = magnitudes & torch.iinfo(magnitudes.dtype).max
    if not has_data:
        magnitudes = torch.full_like(magnitudes, -1)  # below every magnitude
    _all_reduce(magnitudes, distributed.ReduceOp.MAX, collective)
    below, above = magnitudes.clamp_min(0).view(low.dtype).unbind()
    return 0.0 - below, above, (magnitudes >= 0).all()


def broadcast_from_first(
    tensors: Sequence[torch.Tensor], has_data: bool, collective: Collective
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The tensors of the first process of the group that has data; and ``any_data``."""
    rank, size = distributed.get_rank(collective.group), distributed.get_world_size(collective.group)
    first = torch.full((), rank if has_data else size, dtype=torch.int64, device=tensors[0].device)
    _all_reduce(first, distributed.ReduceOp.MIN, collective)
    received = []
    for tensor in tensors:
        # A sum of integers with zeros is exact.
        bits = torch.where(first == rank, _bits(tensor), 0)
        _all_reduce(bits, distributed.ReduceOp.SUM, collective)
        received.append(bits.view(tensor.dtype))
    return received, first < size


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a float32, float64 or int32 tensor as integers of the same width."""
    return tensor.contiguous().view(torch.int64 if tensor.element_size() == 8 else torch.int32)


def _all_reduce(tensor: torch.Tensor, op: Any, collective: Collective) -> None:
    """In-place ``all_reduce``. Raises ``CollectiveFailed`` if another process does not take part.

    gloo waits on the host and raises when the group times out. NCCL waits on the device, and its watchdog
    kills the process on a timeout, before Python can raise. Therefore the host waits for the first collective
    after ``train()``, which detects a process that is alone in training mode. Later ones do not wait.
    """
    if torch.compiler.is_compiling():
        distributed.all_reduce(tensor, op, collective.group)
        return
    try:
        if collective.first and _waits_on_device(tensor):
            work = distributed.all_reduce(tensor, op, collective.group, async_op=True)
            if work is not None:
                work.wait(_host_timeout(collective.group, tensor.device))
        else:
            distributed.all_reduce(tensor, op, collective.group)
    except RuntimeError as error:
        rank, size = distributed.get_rank(collective.group), distributed.get_world_size(collective.group)
        reason = str(error).strip().splitlines()[-1].rpartition("] ")[2].rstrip(".!")
        raise CollectiveFailed(
            f"{collective.module} is in training mode on process {rank} of {size} and joins the range of its "
            f"batch with the other processes, which did not all take part: {reason}. Every process of the "
            "group must call the module in training mode, and equally often. Call train() and eval() on all "
            "of them together, or pass process_group= with those that train."
        ) from error


def _waits_on_device(tensor: torch.Tensor) -> bool:
    """Whether ``all_reduce`` of this tensor is asynchronous to the host."""
    return tensor.is_cuda and not torch.cuda.is_current_stream_capturing()


def _host_timeout(group: Group, device: torch.device) -> timedelta:
    """90 % of the timeout of the group, so that the host raises before the watchdog kills the process."""
    group = distributed.group.WORLD if group is None else group
    return 0.9 * private.timeout_of(group, device)
