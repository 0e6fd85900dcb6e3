"""Imports of kernels, with the compilers behind them: an interrupt cannot leave one half done.

Python forgets a module whose import fails, but keeps those that it had imported by then. Numba cannot be
imported on top of its own remains. So an interrupt waits until the import is over.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from holdfast.core import fork


def load(place: str) -> Any:
    """What ``place``, "module:name", stands for."""
    module, _, name = place.partition(":")
    with fork.importing:
        if module in sys.modules:
            return getattr(importlib.import_module(module), name)
        with interrupts_wait():
            return getattr(importlib.import_module(module), name)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hand SIGINT to its handler only at the end. It is the main thread alone that handles signals."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[0])
