"""Locks that are taken before the process forks.

A forked child has one thread. If another thread holds a lock at the time of the fork, because it imports or
compiles, the lock is never released in the child. So ``os.fork`` waits for these locks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

#: Held while a kernel's module is imported. It is taken first, since such a module may add other locks.
importing = threading.RLock()

_locks: list[Any] = []
_in_child: list[Callable[[], None]] = []
_held: list[Any] = []


def wait_for(lock: Any) -> None:
    """Take ``lock`` before the process forks, and release it on both sides afterwards."""
    _locks.append(lock)


def in_child(call: Callable[[], None]) -> None:
    """Call ``call`` in every child, before the locks are released."""
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
