"""Compiles CPU kernels in background processes while the main process verifies plans.

Numba compiles one kernel at a time per process. Compiled kernels are shared through the cache on disk. The
main process starts with the first plan and the background processes start with the last.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from holdfast.core.registry import plans
from holdfast.proof.conformance import cases_of, execute, select_on

#: Minimum number of plans that is worth the start-up time of background processes.
MIN_PLANS = 5
#: Maximum number of background processes. Each one imports torch and Numba.
MAX_PROCESSES = 4


def start_compiler_process() -> None:
    """Set up a process that only compiles: one torch thread, no progress messages."""
    torch.set_num_threads(1)
    logging.getLogger("holdfast").setLevel(logging.ERROR)


def compile_all(names: Sequence[str]) -> None:
    """Run every case of the plans once. Errors are ignored here: verification raises them again."""
    start_compiler_process()
    for name in names:
        for case in cases_of(plans()[name]):
            with suppress(Exception):
                execute(plans()[name], case, case.make(), select_on("cpu"))


_PROGRAM = f"import sys; from {__name__} import compile_all; compile_all(sys.argv[1:])"


@contextmanager
def compile_in_background(names: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Background processes that compile the plans called ``names``, in reverse order."""
    count = min((os.cpu_count() or 1) - 1, MAX_PROCESSES) if len(names) >= MIN_PLANS else 0
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *list(names)[::-1][first::count]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for first in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
            process.wait()
