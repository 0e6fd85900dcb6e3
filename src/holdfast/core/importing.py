"""Imports of kernel modules and their compilers, protected from interrupts.

If an import fails, Python drops that module but keeps the modules that it had already imported. After such a
partial import Numba cannot be imported again. So an interrupt is delayed until the import has ended.
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


def load(entry_point: str) -> Any:
    """Import the object at ``entry_point``, which is "module:name"."""
    module, _, name = entry_point.partition(":")
    with fork.importing:
        if module in sys.modules:
            return getattr(importlib.import_module(module), name)
        with interrupts_wait():
            return getattr(importlib.import_module(module), name)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay SIGINT until the end of the block. Only the main thread handles signals."""
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
