"""Says that a kernel is being compiled, where that takes longer than a moment.

The line goes to the logger ``holdfast`` as a warning, so that it is on stderr unless the program configures
logging. ``logging.getLogger("holdfast").setLevel(logging.ERROR)`` turns it off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds of compiling before the line is written.
PATIENCE = 1.0

_logger = logging.getLogger("holdfast")
_told: set[str] = set()


def op_of(module: str) -> str:
    """The op that a kernel's module belongs to: ``grid_sample`` for ``holdfast.ops.grid_sample.cpu``.

    For what ops share it is the package: ``numerics`` for ``holdfast.numerics.cpu``.
    """
    *_, package, _ = ("", *module.replace("holdfast.ops.", "holdfast.").split("."))
    return package or module


@contextmanager
def compiling(module: str, *, cached: bool) -> Iterator[None]:
    """While a kernel of ``module`` is compiled: after ``PATIENCE`` seconds, say so once for each op."""
    op = op_of(module)
    if op in _told:
        yield
        return

    def tell() -> None:
        _told.add(op)
        once = (
            "once (cached afterwards)" if cached else "in every process (there is no folder to cache it in)"
        )
        _logger.warning("holdfast: compiling %s for this machine, %s …", op, once)

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
