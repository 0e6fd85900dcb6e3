"""Counts of the calls that were served and passed on."""

from __future__ import annotations

import threading
from collections import Counter

from holdfast.core import fork

#: Maximum number of reasons that are kept for an operator. Further ones count as "other reasons".
MOST_REASONS = 16

_lock = threading.Lock()
fork.wait_for(_lock)


class Counts:
    """Calls of one operator on one device."""

    def __init__(self) -> None:
        self.served = 0
        #: One element for each call that has not returned. A list, because its changes need no lock.
        self.running: list[None] = []
        self.reasons = Counter[str]()

    def serve(self) -> None:
        with _lock:
            self.served += 1

    def pass_on(self, reason: str) -> None:
        with _lock:
            known = reason in self.reasons or len(self.reasons) < MOST_REASONS
            self.reasons[reason if known else "other reasons"] += 1
