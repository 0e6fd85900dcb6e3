"""For training on several processes: sums in rank order, and sharding rules for DTensors.

Importing this package does not import ``torch.distributed.tensor``. The sharding rules are registered when a
function of holdfast first gets a DTensor, or by ``register_sharding_rules``.
"""

from __future__ import annotations

from holdfast.distributed.all_reduce import ordered_all_reduce
from holdfast.distributed.ddp import ordered_hook
from holdfast.distributed.dtensor import register_if_imported, register_sharding_rules
from holdfast.distributed.fsdp import OrderedReduceScatter
from holdfast.distributed.partial import reduce_partial

__all__ = [
    "OrderedReduceScatter",
    "ordered_all_reduce",
    "ordered_hook",
    "reduce_partial",
    "register_sharding_rules",
]

register_if_imported()
