"""Parallel work on the CPU, on torch's OpenMP threads if possible.

After a torch operator, torch's threads spin for a while and occupy all processors. Other threads would
compete with them, and work that follows an operator would take as long as on one thread. So work runs on
torch's own threads, through the OpenMP library that torch has loaded. A thread pool is used instead if there
is no such library, in a forked child (it has none of the parent's threads), and for work that needs fewer
threads, because OpenMP ends the threads that a smaller team does not use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise, repeat
from typing import Any

import torch

from holdfast.backends import private
from holdfast.core import fork

#: Minimum elements per thread, and per range: waking a thread or taking a range takes about as long as these.
ELEMENTS_PER_THREAD = 2**19
#: Maximum number of ranges per thread.
_RANGES = 8

#: Minimum elements for more than one thread, and minimum elements per thread.
_least, _per_thread = 2 * ELEMENTS_PER_THREAD, ELEMENTS_PER_THREAD
#: How many times less work is worth a thread in ``run_together``.
_QUICKER = 8
_forked = False
_pool: ThreadPoolExecutor | None = None
_pool_threads = 0
_pool_lock = threading.Lock()


def parallel(part: Callable[[int, int], None], count: int, elements: int) -> None:
    """Call ``part(first, last)`` on ranges that cover ``range(count)``, on ``threads_for(elements)`` threads.

    A thread that ends a range takes the next one, so slow threads do not delay the others. The calling thread
    works too, and never waits for other callers.
    """
    threads = min(threads_for(elements), count)
    if threads <= 1:
        part(0, count)
        return
    number = max(threads, min(_RANGES * threads, count, elements // _per_thread))
    bounds = [count * i // number for i in range(number + 1)]
    ranges = iter(list(pairwise(bounds)))
    failures: list[BaseException] = []

    def call() -> Iterator[None]:
        try:
            yield
            for first, last in ranges:
                part(first, last)
        except BaseException as failure:  # raised by the caller below: it cannot pass through OpenMP
            failures.append(failure)

    # At the start of a function Python runs signal handlers, before any ``try``. What they raise would be
    # lost in OpenMP. A generator that has yielded continues inside its ``try``.
    calls = [call() for _ in range(threads)]
    for started in calls:
        next(started)
    work = map(next, calls, repeat(None)).__next__  # continues one of them

    whole = threads == torch.get_num_threads()
    team = private.team_of_torch() if whole and not _forked else None
    if team is None:
        _on_pool(work, threads)
    else:
        team(work, threads)
    if failures:
        raise failures[0]


def run_together(function: private.TaskFunction, task: Any, elements: int) -> None:
    """Call ``function(task)`` on several threads if there are enough elements.

    The function takes parts of the work from the task, until none is left. So it does not matter how many
    threads call it. Python is not involved, so threads start sooner than those of ``parallel``, and less work
    is worth a thread. As in torch's own operators, all threads are started.
    """
    threads = threads_together(elements)
    if threads <= 1:
        function.call(task)
        return
    team = None if _forked else private.team_of_torch()
    if team is None:
        _on_pool(lambda: function.call(task), threads_for(elements * _QUICKER))
    else:
        team.call(function, task, threads)


def threads_together(elements: int) -> int:
    """The maximum number of threads on which ``run_together`` calls a function: 1 or torch's number."""
    return torch.get_num_threads() if elements * _QUICKER >= _least else 1


def threads_for(elements: int) -> int:
    """The number of threads for this many elements, at most torch's number of threads."""
    return min(torch.get_num_threads(), elements // _per_thread) if elements >= _least else 1


@contextmanager
def shared_finely(least: int = 2**15, worth: int = 2**12) -> Iterator[None]:
    """Use several threads for small work too: small cases then show if a result depends on the ranges."""
    global _least, _per_thread
    before = _least, _per_thread
    _least, _per_thread = least, worth
    try:
        yield
    finally:
        _least, _per_thread = before


class _Shift:
    """Work that threads of the pool join, and that its caller ends."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False
        self._left = threading.Event()

    def join(self) -> None:
        """Work, unless the shift has ended."""
        with self._lock:
            if self._closed:
                return
            self._inside += 1
        try:
            self._work()
        finally:
            with self._lock:
                self._inside -= 1
                if self._closed and not self._inside:
                    self._left.set()

    def end(self) -> None:
        """Let nobody join, and wait until all have left. If a signal handler raises, it is raised then."""
        raised: BaseException | None = None
        while not self._left.is_set():
            try:
                with self._lock:
                    self._closed = True
                    if not self._inside:
                        self._left.set()
                self._left.wait()
            except BaseException as error:  # the others still use memory that the caller frees afterwards
                raised = error
        if raised is not None:
            raise raised


def _on_pool(work: Callable[[], None], threads: int) -> None:
    shift = _Shift(work)
    try:
        with suppress(RuntimeError):  # no thread can be started: there are too many, or the interpreter ends
            for _ in range(threads - 1):
                _submit(shift.join, threads)
        work()
    finally:
        shift.end()


def _submit(work: Callable[[], None], threads: int) -> None:
    global _pool, _pool_threads
    with _pool_lock:
        if _pool is None or _pool_threads < threads - 1:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool_threads = threads - 1
            _pool = ThreadPoolExecutor(_pool_threads, thread_name_prefix="holdfast")
        _pool.submit(work)


def _without_threads() -> None:
    global _forked, _pool
    _forked = True
    _pool = None  # its threads exist in the parent only


fork.wait_for(_pool_lock)
fork.in_child(_without_threads)
