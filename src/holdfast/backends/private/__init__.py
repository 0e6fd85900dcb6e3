"""Private interfaces of Triton, CUDA, Numba and OpenMP.

Each function probes its interface when it is first called. If the interface is missing or does not work, a
fallback gives the same results more slowly. Interfaces of Numba are in ``private.numba``, which only the CPU
backend imports. Private interfaces of torch are in ``core.private``, since core imports no backend.
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

#: Launches a compiled kernel; and the arguments to pass between the stream and the kernel's arguments.
Entry = tuple[Callable[..., None], tuple[Any, ...]]


def launcher(handle: Any, early: bool) -> Entry:
    """The function that launches a compiled kernel.

    ``early`` permits the launch before the previous kernel has ended, if the kernel waits for it itself.
    Fallbacks ignore it.
    """
    return found_by(lambda: _c_launcher(handle, early)) or found_by(lambda: _entry(handle)) or _public(handle)


def _c_launcher(handle: Any, early: bool) -> Entry | None:
    """The C function that Triton 3.6 calls; calling it directly saves a microsecond.

    This is possible for kernels without Triton scratch memory. Kernels of this library have none.
    """
    import triton

    run = handle.run
    if not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size:
        return None
    waits = "griddepcontrol.wait" in handle.asm["ptx"]
    no_scratch, no_hooks = (None, None), (handle.packed_metadata, None, None, None)
    return run.launch, (handle.function, run.launch_cooperative_grid, early and waits, *no_scratch, *no_hooks)


def _entry(handle: Any) -> Entry:
    """Triton's launch function, without hooks."""
    return handle.run, (handle.function, handle.packed_metadata, None, None, None)


def _public(handle: Any) -> Entry:
    """Triton's public interface for launching a compiled kernel."""

    def run(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        handle[x, y, z](*arguments, stream=stream)

    return run, ()


FALLBACKS["launcher"] = lambda handle, early: _public(handle)


def load_binary(handle: Any) -> None:
    """Load the binary of a compiled kernel on the current device. Otherwise its first launch loads it."""
    with suppress(AttributeError):
        handle.run  # noqa: B018  (a property that loads)


FALLBACKS["load_binary"] = lambda handle: None


def prefer_shared_memory(handle: Any, percent: int) -> None:
    """Set the preferred shared-memory carve-out, percent, of a kernel that uses no shared memory.

    A multiprocessor changes its carve-out only when it is idle. Without this, a kernel with shared memory
    would wait for the last program of a kernel without. It affects speed only.
    """
    preferred_carveout = 9
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(handle.function), preferred_carveout, percent
        )


FALLBACKS["prefer_shared_memory"] = lambda handle, percent: None


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
#: A function that ignores the pointer that it gets.
_Work = ctypes.CFUNCTYPE(None)


def task_of(count: int) -> Any:
    """The type of a task: ``count`` numbers of type int64 in memory. It is called with the first of them."""
    return ctypes.c_int64 * count


def task_bytes(*numbers: int) -> bytes:
    """The numbers of a task as bytes. A task that is copied from them is made sooner than one of numbers."""
    return bytes(task_of(len(numbers))(*numbers))


class TaskFunction:
    """A C function at an address that takes a pointer to a task."""

    def __init__(self, address: int) -> None:
        self.address = address
        #: Calls the function, without holding Python's lock.
        self.call: Callable[[Any], None] = _Callback(address)


class Team:
    """Calls functions on threads of an OpenMP library."""

    def __init__(self, library: Any) -> None:
        # ``GOMP_parallel`` is what GCC calls for a parallel region. Each item is a new object of ctypes.
        self._of_python, self._of_c = library["GOMP_parallel"], library["GOMP_parallel"]
        self._of_python.argtypes = (_Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._of_c.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._of_python.restype = self._of_c.restype = None

    def __call__(self, work: Callable[[], Any], threads: int) -> None:
        """Call ``work`` on this many threads. What it raises is lost."""
        self._of_python(_Work(work), None, threads, 0)

    def call(self, function: TaskFunction, task: Any, threads: int) -> None:
        """Call a function on this many threads with the same task."""
        self._of_c(function.address, task, threads, 0)


@cache
def team_of_torch() -> Team | None:
    """The threads of torch's OpenMP library; None if the library is not found."""
    return found_by(_find_team)


FALLBACKS["team_of_torch"] = lambda: None


def _find_team() -> Team | None:
    """Find the library that torch has loaded."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    home = Path(torch.__file__).parents[1]
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    found = [path for path in mapped if Path(path).name.startswith("libgomp")]
    own = [path for path in found if Path(path).is_relative_to(home)]
    (library,) = own if own else found
    team, threads, calls = Team(ctypes.CDLL(library)), torch.get_num_threads(), list[int]()
    team(lambda: calls.append(1), threads)
    return team if len(calls) == threads else None


class FunctionCell:
    """A function pointer in memory, which compiled code calls. The function returns nothing.

    At first it points to a Python function. ``kinds`` are the types of its arguments: "int64", "float32" or
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
        """The address of the function pointer."""
        return ctypes.addressof(self._cell)

    def point_to(self, function: int) -> Callable[..., None]:
        """Store the address of another function; return a Python callable for it."""
        self._cell.value = function
        called: Callable[..., None] = self._prototype(function)
        return called
