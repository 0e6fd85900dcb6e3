"""Scratch memory of CPU kernels: contiguous runs of bytes, private to a thread.

Each run is followed by a gap that kernels must not write to. Gaps avoid conflicts of runs in the same cache
sets, and they are guard zones: under ``guarded`` they are filled with a pattern, and a changed gap shows that
a kernel wrote past the end of a run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

#: Bytes from the end of a run to the start of the next.
GAP = 192
#: Bytes of the guard zone after the last run: the size of the largest run, to protect other memory.
_TAIL = 2**17
#: Fill byte of guarded scratch. It is NaN in every floating type, so reads of unwritten scratch show too.
_FILL = 0xFF


def step_of(size: int) -> int:
    """Bytes from the start of a run of ``size`` bytes to the start of the next."""
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
    """The scratch runs of the kernel ``name``, in order."""

    def __init__(self, name: str, *runs: Runs) -> None:
        self.name = name
        self.runs = runs
        self.size = sum(group.bytes for group in runs)

    def of_thread(self) -> int:
        """The address of the first run, for one call of a kernel in this thread.

        The memory is cached, because new memory costs page faults. It is found by thread id: thread-local
        variables of OpenMP threads are lost when a call into Python returns. Memory that has become too small
        is kept: before the kernel starts, the handler of a signal may run another one.
        """
        if _guards is not None:
            return _guards.hand_out(self)
        thread = threading.get_ident()
        size, address = _places.get(thread, (0, 0))
        if size >= self.size:
            return address
        size = max(self.size, 2 * size)  # so that it grows a few times only
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        _memory.append(memory)
        _places[thread] = size, memory.data_ptr()
        return memory.data_ptr()

    def of_team(self, threads: int) -> int:
        """The address of the scratch of several threads, ``size`` bytes each, as ``of_thread``."""
        return self.of_thread() if threads == 1 else _for_team(self, threads).of_thread()


@cache
def _for_team(scratch: Scratch, threads: int) -> Scratch:
    return Scratch(scratch.name, *scratch.runs * threads)


class Guards:
    """The guarded scratch of all threads, and the overruns found in it."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._handed_out: dict[int, tuple[Scratch, torch.Tensor]] = {}

    def hand_out(self, scratch: Scratch) -> int:
        """Scratch filled with the pattern. The previous scratch of the thread is checked first."""
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
        """Messages about all overruns so far. No kernel may be running."""
        for thread in list(self._handed_out):
            self._found += overruns(*self._handed_out.pop(thread))
        return list(self._found)


def overruns(scratch: Scratch, memory: torch.Tensor) -> list[str]:
    """Messages about the runs of ``scratch`` in ``memory`` that were written past their end."""
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


#: All scratch memory; and the size and the address of the memory of each thread.
_memory: list[torch.Tensor] = []
_places: dict[int, tuple[int, int]] = {}
_guards: Guards | None = None


@contextmanager
def guarded() -> Iterator[Guards]:
    """Use guarded scratch inside the block. ``violations()`` of the yielded object lists the overruns.

    All scratch is filled with the pattern each time a thread asks for it, so that a read of unwritten scratch
    shows in the result.
    """
    global _guards
    before, _guards = _guards, Guards()
    try:
        yield _guards
    finally:
        _guards = before
