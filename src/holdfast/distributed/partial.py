"""Sums of ``Partial`` DTensors in rank order."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.checks import kind_of
from holdfast.core.errors import InvalidArgs
from holdfast.distributed.all_reduce import ordered_all_reduce
from holdfast.nn.sharded import is_sharded


def reduce_partial(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor with its ``Partial`` sums added in rank order, by ``ordered_all_reduce``, to ``Replicate``.

    Other placements stay. Over a mesh of several dimensions the last one is summed first.
    Differentiable as ``DTensor.redistribute``: the gradient of a term is the gradient of the sum.
    """
    if not is_sharded(tensor):
        raise InvalidArgs(
            f"tensor is {kind_of(tensor)}; it must be a DTensor. For plain tensors there is "
            "hf.distributed.ordered_all_reduce."
        )
    from torch.distributed.tensor import Partial

    dtensor: Any = tensor
    summed = [dim for dim, place in enumerate(dtensor.placements) if place == Partial("sum")]
    if not summed or not dtensor.is_floating_point():  # torch's sums of integers are exact
        return tensor
    return _ReducePartial.apply(tensor, summed)  # type: ignore[no-any-return,no-untyped-call]


class _ReducePartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, summed: list[int]) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        mesh, placements, local = tensor.device_mesh, list(tensor.placements), tensor.to_local()
        for dim in reversed(summed):
            local = ordered_all_reduce(local, mesh.get_group(dim))
            placements[dim] = Replicate()
        ctx.mesh, ctx.placements = mesh, placements
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        return gradient.redistribute(ctx.mesh, ctx.placements), None
