"""Errors that a device finds out about when the host has long gone on.

A kernel that meets a value it cannot use leaves a report in memory that the host can read without asking the
device: pinned memory, a few words for each device. Nothing waits for it. The next run of any plan looks at
one word, and raises if there is a report; ``check_errors`` waits for the device first.

A report is one word: where the value stood in its upper half, and the value itself, as far as 32 bits hold
it, in its lower half. Kernels keep the least, so of many bad values the first is reported.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from holdfast.core.errors import HoldfastError

#: What a word holds as long as nothing was reported in it.
NO_REPORT = 2**63 - 1
#: How many kinds of complaint a device can keep apart. Any more share the last word.
KINDS = 1023
#: The values that a report can hold; what lies beyond is reported as the nearest of them.
LEAST, MOST = -(2**31), 2**31 - 1


class ErrorKind(Protocol):
    """What a bad value was bad for. Hashable: complaints that are equal share a word."""

    def error(self, position: int, value: int) -> HoldfastError:
        """The error to raise. It names the value as ``reported`` does: every backend uses the same words."""
        ...


class Reports:
    """The words of one device. The first is 1 when there is a report in any other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.words = torch.full(
            (1 + KINDS,), NO_REPORT, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        self.words[0] = 0
        self.kinds: dict[ErrorKind, int] = {}
        #: The same memory, for quick looks at the first word.
        self._memory = self.words.numpy().data

    def word(self, kind: ErrorKind) -> int:
        """Which word reports of this kind go to."""
        with _lock:
            return self.kinds.setdefault(kind, min(1 + len(self.kinds), KINDS))

    def raise_reported(self) -> None:
        """Raise what was reported, if anything was, and forget it."""
        if not self._memory[0]:
            return
        for complaint, place in self.kinds.items():
            report = int(self.words[place])
            if report != NO_REPORT:
                self.words[place] = NO_REPORT
                self.words[0] = (self.words[1:] != NO_REPORT).any()
                raise complaint.error(report >> 32, ((report & 0xFFFFFFFF) ^ 2**31) - 2**31)


def reported(value: int) -> str:
    """A bad value in words, as far as a report can hold it."""
    if value <= LEAST:
        return f"{LEAST} or less"
    return f"{MOST} or more" if value >= MOST else str(value)


_lock = threading.Lock()
_all_reports: tuple[Reports, ...] = ()


def reports_on(device: torch.device) -> Reports:
    """Where kernels on ``device`` leave their reports. Made when the first plan asks, never by a run."""
    global _all_reports
    with _lock:
        for found in _all_reports:
            if found.device == device:
                return found
        made = Reports(device)
        _all_reports = (*_all_reports, made)
        return made


def raise_reported() -> None:
    """Raise the first error that a device has reported by now, if any. Does not wait for any device."""
    for found in _all_reports:
        found.raise_reported()


def check_errors() -> None:
    """Wait for the devices that have work of this library, then raise the first error they reported, if any.

    On CUDA a bad index does not stop a kernel, and nothing waits to hear of it: the error is raised by the
    next call into this library, or here.
    """
    for found in _all_reports:
        if found.device.type == "cuda":
            torch.cuda.synchronize(found.device)
    raise_reported()
