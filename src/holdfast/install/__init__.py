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
    """Put holdfast's kernels behind torch's own operators, on the CPU and on CUDA.

    ``include`` and ``exclude`` name operators, or families such as "interpolate" and "embedding"; without
    ``include`` all are replaced. A call that holdfast has no kernel for goes to torch's own kernel;
    ``status()`` counts these calls. A second call replaces the choice of the first. Call ``install`` before
    ``torch.compile``, and before threads that use torch are started.

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
    """Give every operator its own kernel back. Without an earlier ``install`` nothing happens."""
    _choose(None)


@contextmanager
def installed(
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    fake_quantize: bool = False,
) -> Iterator[None]:
    """``install`` for the length of a ``with`` block. It holds for all threads.

    Of several blocks that are open, the one that began last decides.
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
    """The operators that can be replaced: which are, and how many of their calls were served.

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
