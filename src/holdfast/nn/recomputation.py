"""Detects recomputation by activation checkpointing, and stores the scales of the first run.

``torch.utils.checkpoint`` runs a part of the model twice: in the forward pass, and again in the backward
pass. The second run must use the scales of the first run and must not change the state. torch does
not tell whether a call is a recomputation, or of which run, so this module inspects the Python stack: torch
keeps one object for both runs of a checkpoint, a local variable of the function that starts each run.
The scales of the first run are stored as long as this object lives, which is as long as the graph.

These names of functions and variables are private to torch and may change. The fallback is: a call within a
backward pass uses the current state and does not change it. This is right if a module is called once before
each backward pass. ``tests/test_nn_checkpoint.py`` tests both.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

from holdfast.core import private

#: The scale that a call used, and its zero point or None.
Used = tuple[torch.Tensor, torch.Tensor | None]

_FILE = checkpoint.__file__

#: Qualified names of the functions that start the first run: reentrant and non-reentrant.
_REENTRANT_FIRST, _FIRST = "CheckpointFunction.forward", "checkpoint"

#: Qualified names of the functions that start the second run.
_REENTRANT_SECOND, _SECOND = "CheckpointFunction.backward", "_checkpoint_hook.__init__.<locals>.unpack_hook"


class _Calls:
    """The scales of the first run of a checkpoint: by module, in the order of its calls."""

    def __init__(self) -> None:
        self.used: dict[Hashable, list[Used]] = {}
        #: Number of calls so far, by second run and module.
        self.made: dict[tuple[Hashable, Hashable], int] = {}


_CALLS: WeakKeyDictionary[Any, _Calls] = WeakKeyDictionary()


class Pass:
    """The checkpoints around the current call.

    ``first``: the checkpoints in their first run. ``rerun``: the innermost checkpoint in a second run and the
    identity of this run, or None.
    """

    def __init__(self, first: list[Any], rerun: tuple[Any, Hashable] | None) -> None:
        self.first, self.rerun = first, rerun

    def recall(self, module: Hashable) -> Used | None:
        """The scales of this call of ``module`` in the first run; None if unknown."""
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
        self.keep(module, used[call])  # for a nested checkpoint this is the first run
        return used[call]

    def keep(self, module: Hashable, used: Used) -> None:
        """Store the scales of this call of ``module`` for the second run."""
        for checkpointed in self.first:
            _CALLS.setdefault(checkpointed, _Calls()).used.setdefault(module, []).append(used)


def current_pass() -> Pass:
    """The checkpoints on the stack, from the caller outwards to the innermost second run."""
    first: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            name, local = frame.f_code.co_qualname, frame.f_locals
            if name == _SECOND and "frame" in local and "gid" in local:
                return Pass(first, (local["frame"], local["gid"]))
            if name == _REENTRANT_SECOND and "ctx" in local:
                return Pass(first, (local["ctx"], private.backward_pass()))
            if name == _REENTRANT_FIRST and "ctx" in local:
                first.append(local["ctx"])
            elif name == _FIRST and "gen" in local:
                generator = getattr(local["gen"], "gi_frame", None)
                if generator is not None and "new_frame" in generator.f_locals:
                    first.append(generator.f_locals["new_frame"])
        frame = frame.f_back
    return Pass(first, None)


def in_backward() -> bool:
    """Whether this thread runs a backward pass; False if torch does not report it."""
    return private.backward_pass() >= 0
