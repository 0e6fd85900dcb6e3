"""CPU kernels compiled by processes beside the one that checks them.

Numba compiles one kernel at a time in a process. What is compiled is shared through the cache on disk: the
checks begin with the first plan, the others with the last, and nobody waits.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from holdfast.core.registry import plans
from holdfast.proof.conformance import cases_of, execute, selected

#: Fewer plans than this are compiled before another process has begun.
FEWEST = 5
#: Processes at most, for each has torch and Numba to load.
MOST = 4


def compile_all(names: Sequence[str]) -> None:
    """Run every case of the plans once on one thread. What fails here fails again when it is checked."""
    torch.set_num_threads(1)
    for name in names:
        for case in cases_of(plans()[name]):
            with suppress(Exception):
                execute(plans()[name], case, case.make(), selected("cpu"))


@contextmanager
def compiling_ahead(names: Sequence[str]) -> Iterator[None]:
    """While others compile for the plans called ``names``, from the last to the first."""
    number = min((os.cpu_count() or 1) - 1, MOST) if len(names) >= FEWEST else 0
    spawned = multiprocessing.get_context("spawn")
    others = [
        spawned.Process(target=compile_all, args=(list(names)[::-1][first::number],), daemon=True)
        for first in range(number)
    ]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()
