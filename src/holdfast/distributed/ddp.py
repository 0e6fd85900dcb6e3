"""The communication hook for DistributedDataParallel."""

# DDP compares the annotations of a hook with classes, so they must not be strings: no annotations import.

from functools import cache
from typing import Any

import torch

from holdfast.core.errors import Unsupported
from holdfast.distributed.all_reduce import BUFFER
from holdfast.distributed.ordered_sum import ranks_of, sum_over_ranks

if torch.distributed.is_available():
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
else:  # a build of torch without distributed
    GradBucket = Any  # type: ignore[misc,assignment]


def ordered_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in rank order: ``ddp.register_comm_hook(None, hf.distributed.ordered_hook)``.

    The gradient is ``round((((g0 + g1) + g2) + ...) / ranks)``, computed in float32 for 16-bit gradients and
    rounded once; see ``ordered_all_reduce``. How parameters are put into buckets changes no bit. ``state`` is
    the process group, None for the default one; pass the one that DDP was given.

    On CUDA the collectives run on a stream of their own, beside the backward pass. On the CPU the hook
    returns when they are done.
    """
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise Unsupported(
            "a gradient is sparse, and ordered_hook sums dense ones; use sparse=False in the embedding."
        )
    ranks = ranks_of(state)
    if not buffer.is_cuda:
        sum_over_ranks(buffer, [buffer], ranks, state, ranks, BUFFER)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future
    stream = _stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    with torch.cuda.stream(stream):
        sum_over_ranks(buffer, [buffer], ranks, state, ranks, BUFFER)
        future = torch.futures.Future(devices=[buffer.device])
        future.set_result(buffer)
    return future


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the collectives of all hooks on a device."""
    return torch.cuda.Stream(device)
