"""How Triton kernels are compiled and launched.

A kernel is compiled once for each combination of pointer types, alignments and kinds of integers, and the
compiled handle is kept: launching it skips the work that Triton's own dispatch does on every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton

from holdfast.backends import interpreted

#: Launches a prepared kernel: the stream, the pointer operands and their addresses, the leading scalars.
Launcher = Callable[[int, Sequence[torch.Tensor], Sequence[int], tuple[int, ...]], None]

_handles: dict[tuple[Any, ...], Any] = {}


def prepare(
    kernel: Any,
    *,
    grid: tuple[int, int],
    device: torch.device,
    tensors: Sequence[torch.Tensor],
    scalars: tuple[int, ...],
    settled: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
) -> Launcher:
    """A launcher of ``kernel`` on ``device``.

    The kernel's parameters are, in this order: a pointer for each of ``tensors``; ``scalars``, which may
    differ on every launch; ``settled``, integers and tuples of them that do not; the constants.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    if interpreted():

        def interpret(stream: int, tensors: Any, addresses: Any, scalars: tuple[int, ...]) -> None:
            with np.errstate(all="ignore"):
                kernel[grid](*tensors, *scalars, *settled, **constants)

        return interpret

    key = (
        kernel,
        device,
        tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors),
        _kinds(settled),
        tuple(constants.values()),
        num_warps,
    )
    handle = _handles.get(key)
    if handle is None:
        with torch.cuda.device(device):
            handle = kernel.warmup(*tensors, *scalars, *settled, **constants, grid=(1,), **options)
            handle.run  # noqa: B018  (loads the binary on this device)
        _handles[key] = handle
    run, between = _entry(handle)
    tail = (*settled, *constants.values())
    only_device = torch.cuda.device_count() == 1

    def launch(stream: int, tensors: Any, addresses: Sequence[int], scalars: tuple[int, ...]) -> None:
        if only_device or torch.cuda.current_device() == device.index:
            run(*grid, 1, stream, *between, *addresses, *scalars, *tail)
        else:
            with torch.cuda.device(device):
                run(*grid, 1, stream, *between, *addresses, *scalars, *tail)

    return launch


def _entry(handle: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The callable that launches a handle, and what it takes between the stream and the kernel's arguments.

    Triton's own entry works in every version. In 3.6 the C function behind it can be called directly when the
    kernel has no scratch memory, which these never have; that saves a microsecond.
    """
    run, no_hooks = handle.run, (handle.packed_metadata, None, None, None)
    if triton.__version__.startswith("3.6.") and not run.global_scratch_size and not run.profile_scratch_size:
        return run.launch, (
            handle.function,
            run.launch_cooperative_grid,
            run.launch_pdl,
            None,
            None,
            *no_hooks,
        )
    return run, (handle.function, *no_hooks)


def _kinds(values: Any) -> Any:
    """What Triton specialises an integer on: being 1, a multiple of 16, wider than 32 bits."""
    if isinstance(values, tuple):
        return tuple(_kinds(value) for value in values)
    return values == 1, values % 16 == 0, values.bit_length() > 31
