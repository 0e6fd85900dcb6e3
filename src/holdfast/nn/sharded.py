"""Parameters that FSDP shards, from the module's point of view.

``torch.distributed.fsdp.fully_shard`` keeps a shard of each parameter, a DTensor, and puts the whole one
in its place while the module runs. What is written to the whole one is lost when it is freed, so a value that
is to stay is written to the shard as well.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor. Without importing the module: only who has imported it has one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; a sharded one is gathered, for which every process must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def write_shard(shard: Any, value: torch.Tensor) -> None:
    """Let the shard hold this process's part of ``value``, which all processes have."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = shard.device_mesh
    everywhere = DTensor.from_local(value.to(shard.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
    shard.to_local().copy_(everywhere.redistribute(placements=shard.placements).to_local())
    if value.is_cuda:  # FSDP reads shards on streams of its own
        torch.cuda.current_stream(value.device).synchronize()


def fill(state: torch.Tensor, value: torch.Tensor | float) -> None:
    """Write ``value`` to a parameter or buffer, of which this process may hold a shard."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        state.fill_(float(value))
    elif is_sharded(state):
        write_shard(state, value.to(state.device))
    else:
        state.copy_(value)
