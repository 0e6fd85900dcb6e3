"""How a compiled graph changes the state of its module.

A graph is made once and run for many batches. Whether a batch is rejected, or is one that activation
checkpointing runs again, is known only when it runs, so it is decided in operators that torch does not look
into. They return the next state and what this batch uses, and tell the module what the host must know of it.

A graph cannot hold a module. It holds the module's handle, a number in a tensor: a plain number would be part
of the graph, and each of many equal modules would be compiled again.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import secrets
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch

from holdfast.core.torch_op import define
from holdfast.nn.recomputation import current_pass


class Stateful(Protocol):
    """What the operators tell a module."""

    def note_blended(self, scale: torch.Tensor) -> None:
        """``scale`` is the state from now on."""

    def accepts(self, start: list[torch.Tensor], any_data: torch.Tensor | None) -> bool | None:
        """Whether ``start`` is one to learn from; None if no process had a batch."""

    def note_started(self, start: list[torch.Tensor]) -> None:
        """Learning begins with ``start``."""


_MODULES: WeakValueDictionary[int, Any] = WeakValueDictionary()


def new_handle(module: Stateful) -> torch.Tensor:
    """A number by which a graph finds ``module``. It is random, since graphs are saved and loaded."""
    key = secrets.randbits(62)
    _MODULES[key] = module
    with torch.inference_mode(False):
        return torch.tensor(key, dtype=torch.int64, device="cpu")


def _clones(tensors):
    return [tensor.clone() for tensor in tensors]


def _used(state):
    """The scale, and the zero point if there is one."""
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
    if module is None or current_pass().rerun is not None:
        return _clones(state)
    accepted = module.accepts(start, any_data[0] if any_data else None)
    if accepted is None:
        return _clones(state)
    if not accepted:
        return [*_clones(state[:-1]), state[-1] + 1]
    module.note_started(start)
    return _clones([*start, state[-1]])


def _start_fake(handle, state, start, any_data):
    return [torch.empty_like(tensor) for tensor in state]


_settle_call = define(
    "settle_scale", "(Tensor handle, Tensor[] state, Tensor[] blended) -> Tensor[]", _settle, _settle_fake
)
_start_call = define(
    "start_learning",
    "(Tensor handle, Tensor[] state, Tensor[] start, Tensor[] any_data) -> Tensor[]",
    _start,
    _start_fake,
)


def settle_scale(
    handle: torch.Tensor, state: list[torch.Tensor], blended: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The next state, and the scale and zero point of this batch.

    ``state`` and ``blended`` are a scale and the count of rejected batches; or a scale, the lower end of the
    range, a zero point and that count.
    """
    found = cast(list[torch.Tensor], _settle_call(handle, state, blended))
    return found[: len(state)], found[len(state) :]


def start_learning(
    handle: torch.Tensor, state: list[torch.Tensor], start: list[torch.Tensor], any_data: torch.Tensor | None
) -> list[torch.Tensor]:
    """The next state: the parameters, and the count of rejected batches."""
    call = _start_call(handle, state, start, [] if any_data is None else [any_data])
    return cast(list[torch.Tensor], call)
