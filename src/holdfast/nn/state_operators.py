"""Operators with which a compiled graph reads and updates the state of its module.

Whether a batch is rejected, or belongs to a recomputation by activation checkpointing, is only known when the
graph runs. Opaque operators decide it. They return the next state and the scale of this batch, and notify the
module.

A graph cannot refer to a module. It takes the module's handle, an integer in a tensor. A Python int would be
a constant of the graph, and torch.compile would compile each of several equal modules again.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import secrets
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch

from holdfast.core.torch_op import by_sample, define, register_vmap
from holdfast.nn.recomputation import current_pass, in_backward


class Stateful(Protocol):
    """The methods of a module that the operators call."""

    def note_blended(self, scale: torch.Tensor) -> None:
        """``scale`` is the new state."""

    def accepts(self, start: list[torch.Tensor], any_data: torch.Tensor | None) -> bool | None:
        """Whether learning may start from ``start``; None if no process had data."""

    def note_started(self, start: list[torch.Tensor]) -> None:
        """Learning starts from ``start``."""

    def _has_scale(self) -> bool:
        """Whether the scale is set."""


_MODULES: WeakValueDictionary[int, Any] = WeakValueDictionary()


def new_handle(module: Stateful) -> torch.Tensor:
    """A handle of ``module`` for graphs. It is random because graphs can be saved and loaded."""
    key = secrets.randbits(62)
    _MODULES[key] = module
    with torch.inference_mode(False):
        return torch.tensor(key, dtype=torch.int64, device="cpu")


def _clones(tensors):
    return [tensor.clone() for tensor in tensors]


def _used(state):
    """The scale, and the zero point if the state has one."""
    return [state[0], state[2]] if len(state) == 4 else [state[0]]


def _settle(handle, state, blended):
    key, here = int(handle), current_pass()
    if here.rerun is not None:
        found = here.recall(key)
        used = _used(state) if found is None else [part for part in found if part is not None]
        return _clones(state) + _clones(used)
    used = _used(blended)
    if here.first:
        parts = _clones(used)
        here.keep(key, (parts[0], parts[1] if len(parts) == 2 else None))
    module = _MODULES.get(key)
    if module is not None:
        module.note_blended(blended[0])
    return _clones(blended) + _clones(used)


def _settle_fake(handle, state, blended):
    return [torch.empty_like(tensor) for tensor in (*state, *_used(state))]


def _start(handle, state, start, any_data):
    module = _MODULES.get(int(handle))
    # The module has a scale if an earlier call in this graph has set it, or if its state was written.
    if module is None or current_pass().rerun is not None or module._has_scale():
        return _clones(state)
    accepted = module.accepts(start, any_data[0] if any_data else None)
    if accepted is None:
        return _clones(state)
    if not accepted:
        return [*_clones(state[:-1]), state[-1] + 1]
    module.note_started(start[:-1])
    return _clones([*start, state[-1]])


def _start_fake(handle, state, start, any_data):
    return [torch.empty_like(tensor) for tensor in state]


def _count(handle, name, counts):
    count, added = counts
    here, key = current_pass(), (int(handle), name)
    if here.rerun is not None or in_backward():
        found = here.recall(key)
        return [count.clone(), count - added if found is None else found[0].clone()]
    if here.first:
        here.keep(key, (count.clone(), None))
    return [count + added, count.clone()]


def _count_fake(handle, name, counts):
    return [torch.empty_like(counts[0]), torch.empty_like(counts[0])]


def _before(buffer):
    here, key = current_pass(), ("buffer", buffer.data_ptr())
    known = here.recall(key)
    if known is None and here.first:
        here.keep(key, (buffer.clone(), None))
    return buffer.clone() if known is None else known[0].clone()


# The handle is on the CPU. The other tensors are in lists, since they may be on another device.
_settle_call = define(
    "settle_scale", "(Tensor handle, Tensor[] state, Tensor[] blended) -> Tensor[]", _settle, _settle_fake
)
_start_call = define(
    "start_learning", "(Tensor handle, Tensor[] state, Tensor[] start, Tensor[] any_data) -> Tensor[]",
    _start, _start_fake,
)  # fmt: skip

_count_call = define(
    "count_events", "(Tensor handle, str name, Tensor[] counts) -> Tensor[]", _count, _count_fake
)

_before_call = define("state_before", "(Tensor buffer) -> Tensor", _before, torch.empty_like)
register_vmap("state_before", by_sample(_before_call))


def settle_scale(
    handle: torch.Tensor, state: list[torch.Tensor], blended: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The next state, and the scale and zero point of this batch.

    ``state`` and ``blended`` are lists: scale and count of rejected batches; or scale, lower end of the
    range, zero point and count.
    """
    found = cast(list[torch.Tensor], _settle_call(handle, state, blended))
    return found[: len(state)], found[len(state) :]


def start_learning(
    handle: torch.Tensor, state: list[torch.Tensor], start: list[torch.Tensor], any_data: torch.Tensor | None
) -> list[torch.Tensor]:
    """The next state: the parameters, the floor and the count of rejected batches. A set scale stays.

    ``start`` has the first values of the parameters and of the floor.
    """
    call = _start_call(handle, state, start, [] if any_data is None else [any_data])
    return cast(list[torch.Tensor], call)


def count_events(
    handle: torch.Tensor, name: str, count: torch.Tensor, added: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The count after this call, and before it.

    The second run of a checkpoint changes no count. Its count before is that of the first run.
    """
    after, before = _count_call(handle, name, [count, added])
    return after, before


def state_before(buffer: torch.Tensor) -> torch.Tensor:
    """A copy of a buffer that the module changes later in this call.

    The second run of a checkpoint gets the copy of the first run. The backward pass of a compiled graph gets
    the copy, too. Without it, torch may compute functions of the buffer again there, after the change.
    """
    return cast(torch.Tensor, _before_call(buffer))
