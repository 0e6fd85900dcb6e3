"""Private interfaces of Triton, CUDA, Numba and OpenMP, all in one place.

Each function looks for its interface when it is first needed. If the interface is missing or does not work,
its fallback gives the same results, and takes more time. Those of Numba are in ``private.numba``, which only
the CPU backend imports.
``core.private`` has the private interfaces of torch that every layer uses, since core imports no backend.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from holdfast.core.private import found_by

#: The fallback of each interface, by name.
FALLBACKS: dict[str, Callable[..., Any]] = {}

#: Calls a function, which is given nothing of use, on so many threads.
Team = Callable[[Callable[[object], None], int], None]
#: Launches a compiled kernel: the grid, the stream, then what goes between these and the kernel's arguments.
Entry = tuple[Callable[..., None], tuple[Any, ...]]


def launcher(handle: Any, early: bool) -> Entry:
    """What launches a compiled kernel, and what it takes between the stream and the kernel's arguments.

    A kernel that waits for the one ahead of it may be launched ``early``, where there is a way to.
    """
    return found_by(lambda: _c_launcher(handle, early)) or found_by(lambda: _entry(handle)) or _public(handle)


def _c_launcher(handle: Any, early: bool) -> Entry | None:
    """The C function behind Triton's entry, in 3.6: it saves a microsecond.

    It can be called directly when the kernel has no scratch memory, which these never have.
    """
    import triton

    run = handle.run
    if not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size:
        return None
    waits = "griddepcontrol.wait" in handle.asm["ptx"]
    no_scratch, no_hooks = (None, None), (handle.packed_metadata, None, None, None)
    return run.launch, (handle.function, run.launch_cooperative_grid, early and waits, *no_scratch, *no_hooks)


def _entry(handle: Any) -> Entry:
    """Triton's own entry, without its hooks."""
    return handle.run, (handle.function, handle.packed_metadata, None, None, None)


def _public(handle: Any) -> Entry:
    """The public way to launch a compiled kernel."""

    def run(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        handle[x, y, z](*arguments, stream=stream)

    return run, ()


FALLBACKS["launcher"] = lambda handle, early: _public(handle)


def load_binary(handle: Any) -> None:
    """Load the binary of a compiled kernel on the current device; if not here, its first launch does."""
    with suppress(AttributeError):
        handle.run  # noqa: B018  (a property that loads)


FALLBACKS["load_binary"] = lambda handle: None


def prefer_shared_memory(handle: Any, percent: int) -> None:
    """Prefer a shared-memory carve-out for a kernel that uses none.

    A processor divides its cache anew only when it is idle. So kernels that do use shared memory would have
    to wait for the last program of one that does not. Nothing but time depends on it.
    """
    preferred_carveout = 9
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(handle.function), preferred_carveout, percent
        )


FALLBACKS["prefer_shared_memory"] = lambda handle, percent: None


@cache
def team_of_torch() -> Team | None:
    """Calls a function on so many threads of torch's OpenMP library; None if there is none to be found."""
    return found_by(_find_team)


FALLBACKS["team_of_torch"] = lambda: None

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_team() -> Team | None:
    """The entry of the library that torch has loaded is the one that GCC compiles a parallel region to."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    home = Path(torch.__file__).parents[1]
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    found = [path for path in mapped if Path(path).name.startswith("libgomp")]
    own = [path for path in found if Path(path).is_relative_to(home)]
    (library,) = own if own else found
    parallel = ctypes.CDLL(library).GOMP_parallel
    parallel.argtypes = (_Callback, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None

    def team(work: Callable[[object], None], threads: int) -> None:
        parallel(_Callback(work), None, threads, 0)

    threads, calls = torch.get_num_threads(), list[int]()
    team(lambda _: calls.append(1), threads)
    return team if len(calls) == threads else None


class FunctionCell:
    """Eight bytes with the address of a function without a result that compiled code calls.

    At first that is a Python function. ``kinds`` are the types of its arguments: "int64", "float32" or
    "float64".
    """

    _KINDS: ClassVar[dict[str, Any]] = {
        "int64": ctypes.c_int64,
        "float32": ctypes.c_float,
        "float64": ctypes.c_double,
    }

    def __init__(self, function: Callable[..., None], kinds: Sequence[str]) -> None:
        self._prototype: Any = ctypes.CFUNCTYPE(None, *(self._KINDS[kind] for kind in kinds))
        self._first = self._prototype(function)  # kept: its address stays in use
        self._cell = ctypes.c_void_p(ctypes.cast(self._first, ctypes.c_void_p).value)

    @property
    def address(self) -> int:
        """Where the eight bytes are."""
        return ctypes.addressof(self._cell)

    def point_to(self, function: int) -> Callable[..., None]:
        """Put the address of another function there; return what calls that."""
        self._cell.value = function
        called: Callable[..., None] = self._prototype(function)
        return called
