"""The scratch of CPU kernels: runs of bytes that the calling thread alone uses.

Between two runs, and after the last, there is a gap that no kernel may write to. It keeps the runs out of
step with the sets of the cache, and it is a guard zone: under ``guarded`` the gaps are filled with a pattern,
and a gap that has changed tells that a kernel has written past the end of a run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

#: Bytes from the end of a run to the next run.
GAP = 192
#: Bytes of the guard zone after the last run: as many as the largest run has, so that nothing else is hit.
_TAIL = 2**17
#: What guarded scratch is filled with: NaN in every floating type, so that a read of it shows too.
_FILL = 0xFF


def step_of(size: int) -> int:
    """Bytes from the beginning of a run of ``size`` bytes to the next run."""
    return size + GAP


@dataclass(frozen=True)
class Runs:
    """``count`` runs of ``size`` bytes. Kernels may write ``spill`` bytes past the end of each."""

    count: int
    size: int
    spill: int = 0

    @property
    def bytes(self) -> int:
        return self.count * step_of(self.size)


class Scratch:
    """The runs that a kernel called ``name`` works in, one after another."""

    def __init__(self, name: str, *runs: Runs) -> None:
        self.name = name
        self.runs = runs
        self.size = sum(group.bytes for group in runs)

    def of_thread(self) -> int:
        """The address of the first run; the calling thread has them all until it asks for scratch again.

        The memory is kept: fresh memory costs a fault for each page. Python forgets what it kept for a thread
        of torch whenever that is done with a part, so that memory is found by the thread's own number.
        """
        if _guards is not None:
            return _guards.hand_out(self)
        thread = threading.get_ident()
        memory = _memory.get(thread)
        if memory is None or memory.numel() < self.size:
            memory = _memory[thread] = torch.empty(self.size, dtype=torch.uint8, device="cpu")
        return memory.data_ptr()


class Guards:
    """The guarded scratch of every thread, and what was written to its gaps."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._handed_out: dict[int, tuple[Scratch, torch.Tensor]] = {}

    def hand_out(self, scratch: Scratch) -> int:
        """Scratch that is full of the pattern. What the thread had before is checked first."""
        thread = threading.get_ident()
        before = self._handed_out.pop(thread, None)
        memory = None
        if before is not None:
            self._found += overruns(*before)
            memory = before[1] if before[1].numel() >= scratch.size + _TAIL else None
        if memory is None:
            memory = torch.empty(scratch.size + _TAIL, dtype=torch.uint8, device="cpu")
        memory.fill_(_FILL)
        self._handed_out[thread] = scratch, memory
        return memory.data_ptr()

    def violations(self) -> list[str]:
        """Every run that was overrun until now, in words. No kernel may be running."""
        for thread in list(self._handed_out):
            self._found += overruns(*self._handed_out.pop(thread))
        return list(self._found)


def overruns(scratch: Scratch, memory: torch.Tensor) -> list[str]:
    """The runs of ``scratch`` in ``memory`` that were written past their end, in words."""
    found, begin, number, total = [], 0, 0, sum(group.count for group in scratch.runs)
    bytes_ = memory.numpy()
    for group in scratch.runs:
        rows = bytes_[begin : begin + group.bytes].reshape(group.count, step_of(group.size))
        room = group.size + group.spill
        written = rows[:, room:] != _FILL
        for run in np.flatnonzero(written.any(axis=1)):
            past = int(np.flatnonzero(written[run])[-1]) + 1
            least = "at least " if past == written.shape[1] else ""
            found.append(
                f"{scratch.name}: scratch run {number + int(run)} of {total}, which has {room} bytes, "
                f"was overrun by {least}{past}"
            )
        begin, number = begin + group.bytes, number + group.count
    if (bytes_[begin:] != _FILL).any():
        past = int(np.flatnonzero(bytes_[begin:] != _FILL)[-1]) + 1
        found.append(f"{scratch.name}: the end of the scratch was overrun by {past}")
    return found


_memory: dict[int, torch.Tensor] = {}
_guards: Guards | None = None


@contextmanager
def guarded() -> Iterator[Guards]:
    """Give kernels guarded scratch meanwhile; ``violations`` of what is yielded says which runs were overrun.

    All scratch is filled with the pattern each time a thread asks for it, so that a kernel that reads what it
    has not written shows as well.
    """
    global _guards
    before, _guards = _guards, Guards()
    try:
        yield _guards
    finally:
        _guards = before
