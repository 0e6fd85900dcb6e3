"""Tests that need two processes: each runs the test's own file with its rank, and leaves what it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def found_by_both(file: str, folder: Path, seconds: float) -> list[Any]:
    """What ``python file RANK FOLDER`` saves as ``RANK.pt`` in the folder, for ranks 0 and 1 side by side."""
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
            rank.communicate()  # so that nothing of it is left
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
