"""A log message when the compilation of a kernel takes long.

It is a warning of the logger ``holdfast``, which is printed to stderr unless the program configures logging.
``logging.getLogger("holdfast").setLevel(logging.ERROR)`` disables it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds

_logger = logging.getLogger("holdfast")
_told: set[str] = set()


def op_of(module: str) -> str:
    """The op of a kernel's module: ``grid_sample`` for ``holdfast.ops.grid_sample.cpu``.

    For a module outside ``ops`` it is the package: ``numerics`` for ``holdfast.numerics.cpu``.
    """
    *_, package, _ = ("", *module.replace("holdfast.ops.", "holdfast.").split("."))
    return package or module


@contextmanager
def compiling(module: str, *, cached: bool) -> Iterator[None]:
    """Context in which a kernel of ``module`` compiles. Logs after ``PATIENCE`` seconds, once per op."""
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
