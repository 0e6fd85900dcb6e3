"""Reads and writes parameters that FSDP shards.

``torch.distributed.fsdp.fully_shard`` keeps a shard of each parameter, a DTensor, and replaces it with the
full tensor while the module runs. Writes to the full tensor are lost when it is freed, so values must also be
written to the shard.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from holdfast.core.errors import Unsupported


def is_sharded(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor. Does not import its module: without it there are no DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_sharded(x: torch.Tensor) -> None:
    """Raise if the batch of an observer is a DTensor."""
    if not torch.compiler.is_compiling() and is_sharded(x):
        raise Unsupported(
            "x is a DTensor, whose scale cannot be kept or joined with those of other processes. Pass a "
            "plain tensor, such as x.full_tensor(), or use mode per_batch with scales per token or group."
        )


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor. A sharded tensor is gathered, so every process must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def write_shard(shard: Any, value: torch.Tensor) -> None:
    """Write this process's part of ``value`` to its shard. All processes must have the same ``value``."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = shard.device_mesh
    replicated = DTensor.from_local(value.to(shard.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
    shard.to_local().copy_(replicated.redistribute(placements=shard.placements).to_local())
    if value.is_cuda:  # FSDP reads shards on its own streams
        torch.cuda.current_stream(value.device).synchronize()


def fill(state: torch.Tensor, value: torch.Tensor | float) -> None:
    """Write ``value`` to a parameter or buffer, which may be sharded."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        state.fill_(float(value))
    elif is_sharded(state):
        write_shard(state, value.to(state.device))
    else:
        state.copy_(value)
