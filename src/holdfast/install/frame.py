"""Registers kernels for torch's operators and removes them."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from holdfast.core import fork
from holdfast.core.errors import HoldfastError, InvalidIndex
from holdfast.core.private import untraced
from holdfast.install import private, tracing
from holdfast.install.catalogue import catalogue
from holdfast.install.counts import Counts
from holdfast.install.operators import Operator
from holdfast.install.serving import PassOn, Serve

#: Held while kernels are registered or removed.
lock = threading.RLock()
fork.wait_for(lock)


def devices() -> tuple[str, ...]:
    """The dispatch keys of this build of torch."""
    return ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)


class Frame:
    """The kernels that are registered for a choice of operators."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.counts: dict[tuple[str, str], Counts] = {}
        #: The kernels are not freed while they are in this list.
        self._kernels: list[Any] = []
        self._library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                for name in names:
                    for key in set(devices()) & set(catalogue()[name].devices):
                        self._register(catalogue()[name], key)
        except BaseException:
            private.destroy(self._library)
            raise
        self._restore_tracing = tracing.replace(names)

    def _register(self, operator: Operator, key: str) -> None:
        counts = self.counts[operator.name, key] = Counts()
        name = f"aten::{operator.name}"
        kernel = _kernel(operator.serve, torch.library.get_kernel(name, key), counts)
        self._library.impl(name, kernel, key, with_keyset=True, **_OPTIONS)
        self._kernels.append(torch.library.get_kernel(name, key))

    def remove(self) -> None:
        self._restore_tracing()
        private.destroy(self._library)
        surplus = len(_removed) + 1 - MOST_REMOVED
        _removed[:] = [frame for n, frame in enumerate(_removed) if n >= surplus or frame._is_running()]
        _removed.append(self)

    def _is_running(self) -> bool:
        return any(counts.running for counts in self.counts.values())


#: Number of frames that are kept after their removal, because a thread may be about to call their kernels.
#: Frames whose kernels are running are kept as well.
MOST_REMOVED = 64
_removed: list[Frame] = []
#: Later versions of torch refuse to replace a kernel without this option, earlier ones do not have it.
_OPTIONS: dict[str, Any] = (
    {"allow_override": True}
    if "allow_override" in inspect.signature(torch.library.Library.impl).parameters
    else {}
)


def _kernel(serve: Serve, original: Any, counts: Counts) -> Callable[..., Any]:
    """The kernel for one dispatch key. ``original`` is torch's."""
    running = counts.running

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        running.append(None)
        try:
            return serve_or_pass_on(keys, *arguments, **options)
        finally:
            running.pop()

    def serve_or_pass_on(keys: Any, *arguments: Any, **options: Any) -> Any:
        try:
            found = serve(*arguments, **options)
        except PassOn as reason:
            why = str(reason)
        except InvalidIndex:  # of this call, or of an earlier one on CUDA
            raise
        except HoldfastError as error:
            why = str(error)
        else:
            counts.serve()
            return found
        counts.pass_on(why)
        return original.call_boxed(keys, *arguments, **options)

    return untraced(kernel)
