"""Runs a test in two processes. Each runs the file of the test with its rank and saves its results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def run_two_processes(file: str, folder: Path, seconds: float) -> list[Any]:
    """Run ``python file RANK FOLDER`` for ranks 0 and 1 in parallel. Returns the saved ``RANK.pt`` files."""
    ranks = [
        subprocess.Popen([sys.executable, file, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=seconds)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()  # no process is left behind
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
