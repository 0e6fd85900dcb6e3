"""Work on several threads: those that torch itself computes on, where they can be had.

After an operator of torch its threads stay awake for a while, each on a processor of its own, to be there for
the next one. Anybody else's threads would have to share the processors with them: what follows an operator
would take as long as on one thread. So work goes to the same threads, by way of the OpenMP library that torch
has loaded. A pool of our own stands in where there is no such library; in a forked child, where the parent's
threads do not exist; and for work that is not worth them all, since OpenMP ends the threads that a smaller
team leaves out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import torch

from holdfast.backends import private
from holdfast.core import fork

#: As many elements are worth a thread, or one more range: waking it, or taking turns with the others to start
#: it, takes about as long as they do.
WORTH_A_THREAD = 2**19
#: Into how many ranges work is cut for each thread at most.
_RANGES = 8

#: The fewest elements that are shared out, and how many are worth a thread.
_least, _worth = 2 * WORTH_A_THREAD, WORTH_A_THREAD
_forked = False
_pool: ThreadPoolExecutor | None = None
_pool_threads = 0
_pool_lock = threading.Lock()


def parallel(part: Callable[[int, int], None], count: int, elements: int) -> None:
    """Call ``part(first, last)`` for ranges that together are ``range(count)``, on ``threads_for(elements)``.

    Each thread takes the next range when it is done with one, so that it does not matter when it wakes or
    what holds it up. The caller works too, and never waits behind other callers.
    """
    threads = min(threads_for(elements), count)
    if threads <= 1:
        part(0, count)
        return
    number = max(threads, min(_RANGES * threads, count, elements // _worth))
    bounds = [count * i // number for i in range(number + 1)]
    ranges = iter(list(pairwise(bounds)))
    failures: list[BaseException] = []

    def work(_: object = None) -> None:
        try:
            for first, last in ranges:
                part(first, last)
        except BaseException as failure:  # it has a way to the caller, but not through the library
            failures.append(failure)

    whole = threads == torch.get_num_threads()
    team = private.team_of_torch() if whole and not _forked else None
    if team is None:
        _on_pool(work, threads)
    else:
        team(work, threads)
    if failures:
        raise failures[0]


def threads_for(elements: int) -> int:
    """How many threads work on so many elements is worth, of those that torch has."""
    return min(torch.get_num_threads(), elements // _worth) if elements >= _least else 1


@contextmanager
def shared_finely(least: int = 2**15, worth: int = 2**12) -> Iterator[None]:
    """Share out small work as well: if anything depended on how it is cut, small cases would show it."""
    global _least, _worth
    before = _least, _worth
    _least, _worth = least, worth
    try:
        yield
    finally:
        _least, _worth = before


def _on_pool(work: Callable[[], None], threads: int) -> None:
    futures = [_submit(work, threads) for _ in range(threads - 1)]
    work()
    for future in futures:
        if not future.cancel():
            future.result()


def _submit(work: Callable[[], None], threads: int) -> Future[None]:
    global _pool, _pool_threads
    with _pool_lock:
        if _pool is None or _pool_threads < threads - 1:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool_threads = threads - 1
            _pool = ThreadPoolExecutor(_pool_threads, thread_name_prefix="holdfast")
        return _pool.submit(work)


def _without_threads() -> None:
    global _forked, _pool
    _forked = True
    _pool = None  # its threads stayed in the parent


fork.wait_for(_pool_lock)
fork.in_child(_without_threads)
