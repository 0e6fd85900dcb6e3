"""CPU kernels compiled by processes beside the one that checks them.

Numba compiles one kernel at a time in a process. What is compiled is shared through the cache on disk: the
checks begin with the first plan, the others with the last, and nobody waits.
"""

from __future__ import annotations

import os
import subprocess
import sys
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


_PROGRAM = f"import sys; from {__name__} import compile_all; compile_all(sys.argv[1:])"


@contextmanager
def compiling_ahead(names: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """While others compile for the plans called ``names``, from the last to the first."""
    number = min((os.cpu_count() or 1) - 1, MOST) if len(names) >= FEWEST else 0
    others = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *list(names)[::-1][first::number]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for first in range(number)
    ]
    try:
        yield others
    finally:
        for other in others:
            other.terminate()
            other.wait()
