"""Runs kernel mutants in a server process that has not imported any kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from tempfile import TemporaryDirectory

import torch

from holdfast.core.mutant import KernelMutant
from holdfast.proof.kernel_mutants import server
from holdfast.proof.kernel_mutants.trial import Trial

#: Time limit of one mutant in seconds. A mutant that exceeds it counts as not caught.
LIMIT = 300.0
#: A low optimization level halves the compile time of Numba.
_SETTINGS = {"NUMBA_OPT": "1"}
#: Without a GPU, Triton kernels run in the interpreter.
_WITHOUT_GPU = {"TRITON_INTERPRET": "1"}


def trials(
    mutants: Mapping[str, KernelMutant], *, by: str = "cases", jobs: int = 2, limit: float = LIMIT
) -> Iterator[Trial]:
    """Run ``mutants``, given by label, ``jobs`` at a time. Yields each trial when it is done."""
    with TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        request = server.Request(dict(mutants), by, jobs, limit, folder)
        with subprocess.Popen(
            [sys.executable, "-m", server.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_SETTINGS, **({} if torch.cuda.is_available() else _WITHOUT_GPU)},
            start_new_session=True,  # so that killpg also ends its children
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(asdict(request)))
                process.stdin.close()
                for line in process.stdout:
                    yield Trial.from_json(json.loads(line))
                if process.wait():
                    raise RuntimeError(f"the process that tries mutants ended with {process.returncode}.")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
