"""Imports of kernel modules and their compilers, protected from handlers of signals, which may raise.

If an import fails, Python drops that module but keeps the modules that it had already imported. After such a
partial import Numba cannot be imported again. So handlers are delayed until the import has ended: those of
interrupts, and those of timers and of requests to terminate.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from holdfast.core import fork

#: The signals that arrived, and the frames that they interrupted.
Waiting = dict[int, FrameType | None]


def load(entry_point: str) -> Any:
    """Import the object at ``entry_point``, which is "module:name"."""
    module, _, name = entry_point.partition(":")
    with fork.importing:
        if module in sys.modules:
            return getattr(importlib.import_module(module), name)
        with signals_wait():
            return getattr(importlib.import_module(module), name)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Delay the handlers of signals until the end of the block, in the order of arrival."""
    waiting: Waiting = {}
    try:
        with noting_signals() as waiting:
            yield
    finally:
        with ExitStack() as last_first:  # all are called, even if one raises
            for number, frame in reversed(waiting.items()):
                handler = signal.getsignal(number)
                if callable(handler):
                    last_first.callback(handler, number, frame)


@contextmanager
def noting_signals() -> Iterator[Waiting]:
    """Only note signals inside the block. Only the main thread handles signals."""
    waiting: Waiting = {}
    if threading.current_thread() is not threading.main_thread():
        yield waiting
        return

    def note(number: int, frame: FrameType | None) -> None:
        waiting.setdefault(number, frame)

    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield waiting
    finally:
        _restore(handlers, note)


def _restore(handlers: Mapping[signal.Signals, Any], note: Any) -> None:
    """Restore the handlers of signals. If a restored one raises meanwhile, the others are restored too."""
    left, raised = list(handlers.items()), None
    while left:
        try:
            number, handler = left[-1]
            if signal.getsignal(number) is note:  # else: the block has set another handler
                signal.signal(number, handler)
            left.pop()
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised
