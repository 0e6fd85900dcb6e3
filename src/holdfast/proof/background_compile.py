"""Compiles kernels in other processes. Compiled kernels are shared through the caches on disk.

Numba compiles one kernel at a time per process, and Triton does most of its work in Python. CPU kernels are
compiled while the main process verifies plans: it starts with the first plan and the background processes
start with the last. Triton kernels are compiled before the first plan is verified.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from holdfast.core.registry import plans
from holdfast.proof.conformance import cases_of, execute, select_on

#: Minimum number of plans that is worth the start-up time of background processes.
MIN_PLANS = 5
#: Maximum number of background processes. Each one imports torch and Numba.
MAX_PROCESSES = 4
#: Number of cases that is worth the start-up time of a process that compiles Triton kernels.
CASES_PER_PROCESS = 10


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


def compile_for_gpu(part: int, parts: int, names: Sequence[str]) -> None:
    """Run every case of a part of the plans' cases once on CUDA. Errors are ignored here, as above."""
    start_compiler_process()
    every = [(plans()[name], case) for name in names for case in cases_of(plans()[name])]
    for plan, case in every[part::parts]:
        with suppress(Exception):
            execute(plan, case, case.make(), select_on("gpu"), "cuda")


_GPU_PROGRAM = (
    f"import sys; from {__name__} import compile_for_gpu; "
    "compile_for_gpu(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])"
)


def compile_in_processes(names: Sequence[str], cases: int, progress: Callable[[str, int, int], None]) -> None:
    """Compile the Triton kernels of the plans called ``names``, which have ``cases`` cases, on all CPUs."""
    parts = max(min(os.cpu_count() or 1, cases // CASES_PER_PROCESS), 1)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _GPU_PROGRAM, str(part), str(parts), *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(parts)
    ]
    try:
        for number, process in enumerate(processes):
            progress("compiling for the GPU", number, parts)
            process.wait()
    finally:
        for process in processes:
            process.terminate()
            process.wait()


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
