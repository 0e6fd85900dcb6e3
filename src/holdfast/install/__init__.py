"""Deterministic kernels behind torch's own operators, so that an unchanged model is reproducible."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.core.checks import require_bool
from holdfast.install.catalogue import chosen
from holdfast.install.frame import Frame, lock
from holdfast.install.report import OperatorStatus, Status, status_of

__all__ = ["OperatorStatus", "Status", "install", "installed", "status", "uninstall"]

_frame: Frame | None = None


@dataclass(eq=False)
class _Choice:
    """The operators that ``install`` or a ``with`` block replaces; None for no operators."""

    names: frozenset[str] | None


#: That of ``install``, then those of the open ``with`` blocks in the order of their begins. The last one
#: holds. Blocks of several threads may end in any order.
_choices = [_Choice(None)]


def install(
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    fake_quantize: bool = False,
) -> None:
    """Make torch's own operators run holdfast's kernels, on the CPU and on CUDA.

    ``include`` and ``exclude`` name operators, or families such as "interpolate" and "embedding". Without
    ``include`` all are replaced, fake_quantize only with ``fake_quantize=True``. If holdfast has no kernel
    for a call, torch's own kernel runs; ``status()`` counts these calls. A second call of ``install``
    replaces the choice of the first. Call ``install`` before ``torch.compile``, and before you start threads
    that use torch.

    >>> import torch, holdfast as hf
    >>> hf.install(include=["interpolate"])
    >>> x = torch.ones(1, 1, 4, 4, requires_grad=True)
    >>> torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear").sum().backward()
    >>> hf.status()["upsample_bilinear2d_backward"].served
    1
    >>> hf.uninstall()
    """
    _choose(_checked(include, exclude, fake_quantize))


def uninstall() -> None:
    """Restore torch's own kernels. Does nothing if holdfast is not installed."""
    _choose(None)


@contextmanager
def installed(
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    fake_quantize: bool = False,
) -> Iterator[None]:
    """``install`` for a ``with`` block. It applies to all threads.

    If several blocks are open, the one that was opened last decides.
    """
    choice = _Choice(_checked(include, exclude, fake_quantize))
    with lock:
        _use(choice.names)
        _choices.append(choice)
    try:
        yield
    finally:
        with lock:
            _choices.remove(choice)
            _use(_choices[-1].names)


def status() -> Status:
    """The operators that can be replaced, whether each is replaced, and how many calls holdfast served.

    ``print(hf.status())`` shows a table. The counts begin with ``install``.
    """
    with lock:
        return status_of(_frame)


def _checked(include: object, exclude: object, fake_quantize: bool) -> frozenset[str]:
    require_bool("fake_quantize", fake_quantize)
    return chosen(include, exclude, fake_quantize)


def _choose(names: frozenset[str] | None) -> None:
    """Replace the choice that holds."""
    with lock:
        _use(names)
        _choices[-1].names = names


def _use(names: frozenset[str] | None) -> None:
    """Replace these operators and no others."""
    global _frame
    with lock:
        if _frame and _frame.names == names:
            return
        if _frame:
            _frame.remove()
            _frame = None
        if names is not None:
            _frame = Frame(names)
