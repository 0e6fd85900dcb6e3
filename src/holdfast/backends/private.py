"""Private interfaces of Triton, CUDA, Numba and OpenMP, all in one place.

Each is used for speed only. Each has a probe, which finds out whether the interface is there and behaves, and
a fallback through public interfaces that gives the same results. Compilers are imported when they are needed.
Private interfaces of torch that every layer uses are in ``core.private``, since core imports no backend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import triton


def load_binary(handle: Any) -> None:
    """Load the binary of a compiled kernel on the current device."""
    handle.run  # noqa: B018  (a property that loads)


def prefer_shared_memory(handle: Any, percent: int) -> None:
    """Have so much of the cache as shared memory while a kernel runs that uses none.

    A processor divides its cache anew only when it is idle. So kernels that do use shared memory would have
    to wait for the last program of one that does not. This is a wish; nothing depends on it but time.
    """
    preferred_carveout = 9
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(handle.function), preferred_carveout, percent
        )


def launcher(handle: Any, early: bool) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The callable that launches a handle, and what it takes between the stream and the kernel's arguments.

    Triton's own entry works in every version. In 3.6 the C function behind it can be called directly when the
    kernel has no scratch memory, which these never have; that saves a microsecond. And only there a kernel
    is launched before the one that it follows has ended: if it is found to wait for it.
    """
    run, no_hooks = handle.run, (handle.packed_metadata, None, None, None)
    if triton.__version__.startswith("3.6.") and not run.global_scratch_size and not run.profile_scratch_size:
        waits = "griddepcontrol.wait" in handle.asm["ptx"]
        return run.launch, (
            handle.function,
            run.launch_cooperative_grid,
            early and waits,
            None,
            None,
            *no_hooks,
        )
    return run, (handle.function, *no_hooks)
