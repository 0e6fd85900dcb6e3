"""Runs a test in several processes, which are forked from one, so that they share the import of torch.

    python ranks.py FILE RANKS FOLDER

imports a test and calls its ``main(rank, folder)`` in every process. The results are files in the folder.
Kernels are compiled by one process at a time; the others then load what is on disk.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def run(file: str, folder: Path, ranks: int, seconds: float) -> None:
    """Run ``main`` of a test in ``ranks`` processes in parallel."""
    command = [sys.executable, __file__, file, str(ranks), str(folder)]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = started.communicate(timeout=seconds)
        assert started.returncode == 0, errors
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # no process is left behind
        started.communicate()


def run_two_processes(file: str, folder: Path, seconds: float) -> list[Any]:
    """Run ``main`` of a test on ranks 0 and 1. Returns the ``RANK.pt`` files that they save."""
    run(file, folder, 2, seconds)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def run_checks(file: str, folder: Path, ranks: int, seconds: float) -> list[dict[str, str]]:
    """Run ``main`` of a test, which calls ``check_all``. Returns the failures of each rank."""
    run(file, folder, ranks, seconds)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_passed(name: str, failures: list[dict[str, str]]) -> None:
    """Show what failed on each rank. Ranks that lost the connection to another one come last."""
    found = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if of_rank[name]]
    assert not found, "\n".join(sorted(found, key=lambda text: "closed by peer" in text))


def check_all(
    checks: Mapping[str, Callable[[], None]],
    rank: int,
    ranks: int,
    folder: Path,
    waiting: timedelta = timedelta(seconds=60),
) -> None:
    """Run the checks on one rank. Every check runs on all ranks, in the same order.

    For each check the process saves "", or the traceback of its failure, which ends it.
    """
    torch.set_num_threads(1)
    meeting = (folder.resolve() / "rendezvous").as_uri()
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=waiting)
    failures = dict.fromkeys(checks, "an earlier check failed, so this one did not run")
    try:
        for name, check in checks.items():
            check()
            failures[name] = ""
        distributed.barrier()
        distributed.destroy_process_group()
    except BaseException:  # the test shows it, and the other ranks notice that this one is gone
        failures[name] = traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps(failures))


#: A module that every rank imports. It and the ``IMPORTS`` of a test are imported once, before the fork.
SHARED = "holdfast.backends.cpu"
#: The ``IMPORTS`` of a test that shards and compiles.
OF_COMPILERS = ("torch._inductor.pattern_matcher", "torch.distributed.fsdp", "torch.distributed.tensor")


class _OneAtATime:
    """A reentrant lock of the threads of a rank that is a lock of all ranks, too."""

    def __init__(self, lock: Any, file: Path) -> None:
        self._lock, self._file, self._depth = lock, file.open("w"), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._lock.release()


def _compile_one_at_a_time(folder: Path) -> None:
    from holdfast.backends import cpu

    cpu._compiling = _OneAtATime(cpu._compiling, folder / "compiling")  # type: ignore[assignment]


def _fork(file: str, ranks: int, folder: Path) -> None:
    test = importlib.import_module(Path(file).stem)
    for name in (SHARED, *getattr(test, "IMPORTS", ())):
        with suppress(ImportError):  # another version of torch has another module
            importlib.import_module(name)
    forked = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            _compile_one_at_a_time(folder)
            test.main(rank, folder)
            return
        forked.append(process)
    sys.exit(any([os.waitpid(process, 0)[1] for process in forked]))


if __name__ == "__main__":
    _fork(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
