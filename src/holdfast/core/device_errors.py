"""Asynchronous errors: bad values that a kernel finds after the host has continued.

A kernel that reads a bad value writes a report to pinned host memory. The host does not wait for it. The next
run of any plan reads one word of this memory and raises if there is a report; ``check_errors`` synchronizes
first.

A report is one 64-bit word: the position of the value in the upper half, the value, clamped to 32 bits, in
the lower half. Kernels store the minimum, so the bad value with the lowest position is reported.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from holdfast.core.errors import HoldfastError

#: Content of a word without a report.
NO_REPORT = 2**63 - 1
#: Number of error kinds with a word of their own on a device. Further kinds share the last word.
KINDS = 1023
#: The range of values in a report. Values outside are clamped.
LEAST, MOST = -(2**31), 2**31 - 1


class ErrorKind(Protocol):
    """Turns a report into an error. Hashable: equal kinds share a word."""

    def error(self, position: int, value: int) -> HoldfastError:
        """The error to raise. It shows the value by ``reported``, so messages are equal on all backends."""
        ...


class Reports:
    """The report words of one device, in pinned memory. Word 0 is 1 if any other word holds a report."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.words = torch.full(
            (1 + KINDS,), NO_REPORT, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        self.words[0] = 0
        self.kinds: dict[ErrorKind, int] = {}
        #: The same memory as a buffer, for fast reads of word 0.
        self.memory = self.words.numpy().data

    def word(self, kind: ErrorKind) -> int:
        """The index of the word for reports of this kind."""
        with _lock:
            return self.kinds.setdefault(kind, min(1 + len(self.kinds), KINDS))

    def raise_reported(self) -> None:
        """Raise the first reported error, if any, and clear its word."""
        for kind, index in self.kinds.items():
            report = int(self.words[index])
            if report != NO_REPORT:
                self.words[index] = NO_REPORT
                self.words[0] = (self.words[1:] != NO_REPORT).any()
                raise kind.error(report >> 32, ((report & 0xFFFFFFFF) ^ 2**31) - 2**31)


def reported(value: int) -> str:
    """The text of a bad value. Values outside the range of a report are given as a bound."""
    if value <= LEAST:
        return f"{LEAST} or less"
    return f"{MOST} or more" if value >= MOST else str(value)


_lock = threading.Lock()
_all_reports: tuple[Reports, ...] = ()


def reports_on(device: torch.device) -> Reports:
    """The reports of kernels on ``device``. They are created when a kernel is prepared, not by a run."""
    global _all_reports
    with _lock:
        for found in _all_reports:
            if found.device == device:
                return found
        made = Reports(device)
        _all_reports = (*_all_reports, made)
        return made


def raise_reported() -> None:
    """Raise the first error that any device has reported so far. Does not synchronize."""
    for found in _all_reports:
        if found.memory[0]:
            found.raise_reported()


def check_errors() -> None:
    """Synchronize the devices that this library has used, then raise the first error they reported, if any.

    On CUDA a bad index does not stop a kernel, and the host does not wait for the kernel to end. The error is
    raised by the next call into this library, or here.
    """
    for found in _all_reports:
        if found.device.type == "cuda":
            torch.cuda.synchronize(found.device)
    raise_reported()
