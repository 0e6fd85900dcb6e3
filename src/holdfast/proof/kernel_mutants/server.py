"""The server process that forks one child per mutant. It has imported torch and the compilers, but no kernel.

Forking saves each mutant the imports. The server reads a request as JSON from stdin and writes one line of
JSON per trial to stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.core.mutant import KernelMutant
from holdfast.proof.kernel_mutants.trial import Trial, attempt

#: Interval between polls of the children, in seconds.
_PAUSE = 0.02


@dataclass(frozen=True)
class Request:
    """Mutants by label, the search to use, parallel jobs, time limit per mutant in seconds, work folder."""

    mutants: dict[str, KernelMutant]
    by: str
    jobs: int
    limit: float
    folder: str

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Request:
        mutants = {label: KernelMutant(**mutant) for label, mutant in fields["mutants"].items()}
        return cls(**{**fields, "mutants": mutants})


@dataclass(frozen=True)
class _Child:
    label: str
    folder: Path
    began: float


def serve(request: Request, tell: Callable[[Trial], None]) -> None:
    """Run every mutant of the request. Calls ``tell`` with each trial when it is done."""
    waiting, running = list(request.mutants), dict[int, _Child]()
    while waiting or running:
        while waiting and len(running) < request.jobs:
            pid, child = _fork(waiting.pop(0), len(waiting), request)
            running[pid] = child
        time.sleep(_PAUSE)
        for pid, child in list(running.items()):
            if time.monotonic() - child.began > request.limit:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                tell(_outcome(child, status, request))


def _fork(label: str, number: int, request: Request) -> tuple[int, _Child]:
    folder = Path(request.folder) / str(number)
    folder.mkdir()
    pid = os.fork()
    if pid == 0:
        try:
            trial = attempt(label, request.mutants[label], request.by, folder)
            (folder / "trial.json").write_text(json.dumps(asdict(trial)))
        finally:
            os._exit(0)  # skip the exit handlers of the parent
    return pid, _Child(label, folder, time.monotonic())


def _outcome(child: _Child, status: int, request: Request) -> Trial:
    result, seconds = child.folder / "trial.json", time.monotonic() - child.began
    if result.exists():
        return Trial.from_json(json.loads(result.read_text()))
    error = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended without a result"
    if seconds > request.limit:
        error = f"not done within {request.limit:.0f} s"
    return Trial(child.label, request.by, seconds, error=error)


def main() -> None:
    """Serve one request."""
    import numba
    import triton.language  # noqa: F401

    numba.njit(lambda x: x)(0)  # initializes Numba before the fork
    request = Request.from_json(json.load(sys.stdin))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of kernels out of the JSON

    def tell(trial: Trial) -> None:
        print(json.dumps(asdict(trial)), file=out, flush=True)

    serve(request, tell)


if __name__ == "__main__":
    main()
