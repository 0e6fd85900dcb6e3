"""Runs checks in several processes of one group. Every check runs on all ranks, in the same order.

``run`` starts the processes. Each runs the file of the test, which calls ``main`` with the checks. For each
check the process saves "", or the traceback of its failure, which ends it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed


def run(file: str, folder: Path, ranks: int, seconds: float) -> list[dict[str, str]]:
    """Run ``python file RANK RANKS FOLDER`` for every rank in parallel. Returns the failures of each."""
    commands = [[sys.executable, file, str(rank), str(ranks), str(folder)] for rank in range(ranks)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in running:
            _, errors = process.communicate(timeout=seconds)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
            process.communicate()  # no process is left behind
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_passed(name: str, failures: list[dict[str, str]]) -> None:
    """Show what failed on each rank. Ranks that lost the connection to another one come last."""
    found = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if of_rank[name]]
    assert not found, "\n".join(sorted(found, key=lambda text: "closed by peer" in text))


def main(checks: Mapping[str, Callable[[], None]], waiting: timedelta = timedelta(seconds=60)) -> None:
    """The process of one rank."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
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
