"""The reduce-scatter for ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from holdfast.core.errors import Unsupported
from holdfast.distributed.ordered_sum import Group, add_in_order, exchanged, ranks_of


class OrderedReduceScatter:
    """Averages gradients in rank order: ``layer.set_custom_reduce_scatter(OrderedReduceScatter())``.

    The gradient is ``round((((g0 + g1) + g2) + ...) / ranks)``, computed in float32 for 16-bit gradients and
    rounded once; see ``ordered_all_reduce``. The method is called on every module that ``fully_shard`` was
    called on.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gradients."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Group,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's piece of the sum of ``input_tensor`` over the ranks to ``output_tensor``."""
        ranks = ranks_of(group)
        if async_op or op not in (distributed.ReduceOp.SUM, distributed.ReduceOp.AVG):
            raise Unsupported(
                f"op is {op} and async_op is {async_op}; accepted are the sum and the average, "
                "synchronously. With a gradient divide factor, call set_force_sum_reduction_for_comms(True)."
            )
        divisor = ranks if op == distributed.ReduceOp.AVG else 1
        received = exchanged(input_tensor.view(ranks, -1), group)
        output_tensor.view(-1).copy_(add_in_order(received.unbind(), divisor))
