"""``ordered_all_reduce``: checks, autograd and the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.checks import finite_number, require_memory, require_tensor, whole_number
from holdfast.core.dtypes import FLOATS
from holdfast.core.errors import InvalidArgs
from holdfast.distributed.ordered_sum import NOTHING, Group, ranks_of, sum_over_ranks
from holdfast.nn.sharded import is_sharded

#: Default of ``buffer_bytes``.
BUFFER = 2**26
_ACCEPTED = tuple(record.torch for record in FLOATS.values())


def ordered_all_reduce(
    tensor: torch.Tensor | Sequence[torch.Tensor | None],
    group: Group = None,
    *,
    divisor: float = 1,
    buffer_bytes: int = BUFFER,
) -> torch.Tensor:
    """The sum of ``tensor`` over the ranks of ``group``, in rank order: the same bits on every rank and run.

    The sum is ``round((((t0 + t1) + t2) + ...) / divisor)``. It is computed in float32, or in float64 for
    float64, and rounded once. No bit depends on the backend, the network or the timing. The shape, the dtype,
    ``divisor`` and ``buffer_bytes`` are the same on every rank. The result is a new, contiguous tensor.
    Without an initialized process group there is one rank.

    ``tensor`` may be a list of the shards that this rank holds. Shards are added one by one, rank after rank,
    so the sum does not depend on how many ranks hold them. All lists have the same length; a rank with fewer
    shards passes None for the others.

    As many bytes are sent as in a ring all-reduce, times the length of the list. At most ``buffer_bytes`` of
    the shards are exchanged at a time; this bounds the memory for the pieces and changes no bit.

    The gradient of each shard is the ordered sum of the gradients of the result on all ranks, divided by
    ``divisor``, so all ranks must run the backward pass. ``torch.compile`` breaks the graph here.

    >>> import torch, holdfast as hf
    >>> hf.distributed.ordered_all_reduce([torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])], divisor=2)
    tensor([0.7500, 1.1250])
    """
    if torch.compiler.is_compiling():  # a compiler could fuse the sum, and change its bits
        return torch.compiler.disable(_ordered_all_reduce)(tensor, group, divisor, buffer_bytes)  # type: ignore[no-any-return]
    return _ordered_all_reduce(tensor, group, divisor, buffer_bytes)


def _ordered_all_reduce(tensor: Any, group: Group, divisor: float, buffer_bytes: int) -> torch.Tensor:
    given = [tensor] if isinstance(tensor, torch.Tensor) or not isinstance(tensor, Sequence) else list(tensor)
    like = _checked(given)
    divisor = finite_number("divisor", divisor)
    if divisor == 0:
        raise InvalidArgs("divisor is 0; it must be a number other than 0, such as the number of ranks.")
    buffer_bytes = whole_number("buffer_bytes", buffer_bytes, 1, 2**62)
    ranks_of(group)
    shards = [torch.full_like(like, NOTHING) if shard is None else shard for shard in given]
    return _OrderedAllReduce.apply(group, divisor, buffer_bytes, *shards)  # type: ignore[no-any-return,no-untyped-call]


def _checked(given: list[Any]) -> torch.Tensor:
    """Raise unless these are shards that can be added. Returns one of them."""
    shards = [shard for shard in given if shard is not None]
    if not shards:
        raise InvalidArgs(
            "there is no tensor to reduce; pass a tensor, or a list with at least one. A rank without data "
            "passes torch.full_like(shard, -0.0), which adds nothing."
        )
    for shard in shards:
        require_tensor("tensor", shard)
        if is_sharded(shard):
            raise InvalidArgs("tensor is a DTensor; pass it to hf.distributed.reduce_partial instead.")
        require_memory("tensor", shard)
        if shard.dtype not in _ACCEPTED:
            raise InvalidArgs(
                f"tensor has dtype {shard.dtype}; accepted are {', '.join(map(str, _ACCEPTED))}. For "
                "integers torch.distributed.all_reduce is exact in every order."
            )
        first = shards[0]
        if (shard.shape, shard.dtype, shard.device) != (first.shape, first.dtype, first.device):
            raise InvalidArgs(
                f"the shards {_described(first)} and {_described(shard)} are given; all must have one shape, "
                "dtype and device."
            )
    return shards[0]  # type: ignore[no-any-return]


def _described(shard: torch.Tensor) -> str:
    return f"{tuple(shard.shape)} {shard.dtype} on {shard.device}"


class _OrderedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Group, divisor: float, buffer_bytes: int, *shards: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.divisor, ctx.buffer_bytes = group, divisor, buffer_bytes
        out = torch.empty(shards[0].shape, dtype=shards[0].dtype, device=shards[0].device)
        flat = [shard.reshape(-1) for shard in shards]
        sum_over_ranks(out.view(-1), flat, ranks_of(group), group, divisor, buffer_bytes)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        gradient = ordered_all_reduce(dout, ctx.group, divisor=ctx.divisor, buffer_bytes=ctx.buffer_bytes)
        return None, None, None, *(gradient if needed else None for needed in ctx.needs_input_grad[3:])
