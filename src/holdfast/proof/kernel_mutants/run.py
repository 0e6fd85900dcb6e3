"""Kernel mutants tried, in processes that begin without a kernel."""

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

#: Seconds after which a mutant is given up: it hangs, and is not caught.
LIMIT = 300.0
#: Numba optimises little, which takes half of the time: what is wrong stays wrong.
_SETTINGS = {"NUMBA_OPT": "1"}
#: Where there is no GPU, Triton's kernels run in its interpreter.
_WITHOUT_GPU = {"TRITON_INTERPRET": "1"}


def trials(
    mutants: Mapping[str, KernelMutant], *, by: str = "cases", jobs: int = 2, limit: float = LIMIT
) -> Iterator[Trial]:
    """Try mutants, which come by their labels, ``jobs`` side by side, and give each as it is done."""
    with TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        request = server.Request(dict(mutants), by, jobs, limit, folder)
        with subprocess.Popen(
            [sys.executable, "-m", server.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_SETTINGS, **({} if torch.cuda.is_available() else _WITHOUT_GPU)},
            start_new_session=True,  # so that it ends with all of its children
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
