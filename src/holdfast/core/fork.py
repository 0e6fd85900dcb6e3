"""What must not be halfway when the process forks.

A child has one thread, the one that forked. What another thread was in the middle of, an import or a
compilation, would stay unfinished there for ever, and its lock held. So forking waits for these locks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

#: Held while a kernel's module is imported. It is taken first, since such a module adds locks of its own.
importing = threading.RLock()

_locks: list[Any] = []
_in_child: list[Callable[[], None]] = []
_held: list[Any] = []


def wait_for(lock: Any) -> None:
    """Take ``lock`` before the process forks, and release it on both sides afterwards."""
    _locks.append(lock)


def in_child(call: Callable[[], None]) -> None:
    """Call this in every child, before anything else there."""
    _in_child.append(call)


def _before() -> None:
    importing.acquire()
    for lock in _locks:
        lock.acquire()
        _held.append(lock)


def _after_in_parent() -> None:
    while _held:
        _held.pop().release()
    importing.release()


def _after_in_child() -> None:
    for call in _in_child:
        call()
    _after_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
