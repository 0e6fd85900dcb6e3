"""Whether a forward pass is one that activation checkpointing runs again, and what the first one used.

``torch.utils.checkpoint`` runs a part of the model twice: once forward, and once more in the backward pass.
The second run must use the scales of the first, and must not change the state again. torch says neither that
a call belongs to a second run nor to which first run, so the Python stack is read: torch keeps one object for
both runs of a checkpoint, and it is a local variable of the function that makes each run. What the first run
used is kept for as long as that object lives, which is as long as the graph.

The names of these functions and variables are torch's own and may change. Then there is a fallback: a call
within a backward pass takes the state as it is and does not change it. That is right where a module is called
once before each backward pass. ``tests/test_nn_checkpoint.py`` tests both.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

#: What a call used: a scale, and a zero point if there is one.
Used = tuple[torch.Tensor, torch.Tensor | None]

_FILE, _bindings = checkpoint.__file__, torch._C

#: The functions that run the first pass, by qualified name: reentrant, and not.
_REENTRANT_FIRST, _FIRST = "CheckpointFunction.forward", "checkpoint"

#: The functions that run the second.
_REENTRANT_SECOND, _SECOND = "CheckpointFunction.backward", "_checkpoint_hook.__init__.<locals>.unpack_hook"


class _Calls:
    """What each call of each module used in the first run of a checkpoint, in order."""

    def __init__(self) -> None:
        self.used: dict[int, list[Used]] = {}
        #: How many calls of a module each second run has made so far.
        self.made: dict[tuple[Hashable, int], int] = {}


_CALLS: WeakKeyDictionary[Any, _Calls] = WeakKeyDictionary()


class Pass:
    """The checkpoints that the caller runs in.

    ``first``: those whose first run this is. ``again``: the innermost one that is run again, with the
    identity of that run; None if there is none.
    """

    def __init__(self, first: list[Any], rerun: tuple[Any, Hashable] | None) -> None:
        self.first, self.rerun = first, rerun

    def recall(self, module: int) -> Used | None:
        """What this call of ``module`` used in the first run; None if that is not known."""
        if self.rerun is None:
            return None
        checkpointed, run = self.rerun
        calls = _CALLS.get(checkpointed)
        if calls is None:
            return None
        call = calls.made.get((run, module), 0)
        calls.made[run, module] = call + 1
        used = calls.used.get(module, [])
        if call >= len(used):
            return None
        self.keep(module, used[call])  # a checkpoint within a checkpoint starts here
        return used[call]

    def keep(self, module: int, used: Used) -> None:
        """Remember what this call of ``module`` used, for the second run."""
        for checkpointed in self.first:
            _CALLS.setdefault(checkpointed, _Calls()).used.setdefault(module, []).append(used)


def current_pass() -> Pass:
    """The checkpoints on the stack, from the caller outwards to the first one that is run again."""
    first: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            name, local = frame.f_code.co_qualname, frame.f_locals
            if name == _SECOND and "frame" in local and "gid" in local:
                return Pass(first, (local["frame"], local["gid"]))
            if name == _REENTRANT_SECOND and "ctx" in local:
                return Pass(first, (local["ctx"], _backward_pass()))
            if name == _REENTRANT_FIRST and "ctx" in local:
                first.append(local["ctx"])
            elif name == _FIRST and "gen" in local:
                generator = getattr(local["gen"], "gi_frame", None)
                if generator is not None and "new_frame" in generator.f_locals:
                    first.append(generator.f_locals["new_frame"])
        frame = frame.f_back
    return Pass(first, None)


_OUTSIDE = -1


def _backward_pass() -> int:
    """The number of the backward pass that this thread is in."""
    current = getattr(_bindings, "_current_graph_task_id", None)
    return _OUTSIDE if current is None else int(current())


def in_backward() -> bool:
    """Whether this thread is in a backward pass; False where torch does not tell."""
    return _backward_pass() != _OUTSIDE
