"""Compilation and launch of Triton kernels.

A launch finds every parameter of its kernel by name, and passes them in the order of the kernel's signature.
A kernel is compiled once per combination of pointer types, alignments and kinds of integers. The compiled
handle is cached, and launching it skips Triton's dispatch.
"""

from __future__ import annotations

import inspect
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from holdfast.backends import interpreted, private
from holdfast.core import device_errors

NO_REPORT = tl.constexpr(device_errors.NO_REPORT)
LEAST, MOST = tl.constexpr(device_errors.LEAST), tl.constexpr(device_errors.MOST)
COMPILED = tl.constexpr(not interpreted())

#: A 64-bit integer for compilation.
_WIDE = 2**62
_handles: dict[tuple[Any, ...], Any] = {}
#: Held while a binary is loaded. Triton imports all launchers under one module name: if two threads did so at
#: the same time, one could get the launcher of the other's kernel.
_loading = threading.Lock()


@dataclass(frozen=True)
class EachRun:
    """A 64-bit integer parameter that is read from the args at each run."""

    read: Callable[[Any], int]


@dataclass(frozen=True)
class Launcher:
    """A prepared kernel: ``run(*grid, 1, stream, *between, *pointers, *each_run, *tail)`` launches it.

    In the interpreter, ``run(*tensors, *each_run)`` runs it.
    """

    run: Callable[..., None]
    grid: tuple[int, int] = (1, 1)
    between: tuple[Any, ...] = ()
    tail: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Wide:
    """An integer parameter that is compiled as 64 bits for every value."""

    value: int


@cache
def parameters_of(function: Callable[..., Any]) -> dict[str, bool]:
    """The parameters of a kernel's function in order, and for each whether it is a constexpr."""
    found = inspect.signature(function).parameters
    return {name: "constexpr" in str(parameter.annotation) for name, parameter in found.items()}


def in_order(kernel: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given parameters in the order of the kernel's signature. Raises if any is missing or unknown."""
    names = parameters_of(kernel.fn)
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] if missing else []
        wrong += [f"names {', '.join(unknown)}, which the kernel does not have"] if unknown else []
        raise TypeError(
            f"the launch of {kernel.fn.__name__} {' and '.join(wrong)}; give each of the kernel's parameters "
            f"once, by name: {', '.join(names)}."
        )
    return {name: given[name] for name in names}


@dataclass(frozen=True)
class Parameters:
    """The parameters of a launch, by kind: pointers, ``EachRun`` parameters, integers, constexpr values."""

    tensors: tuple[torch.Tensor, ...]
    each_run: tuple[EachRun, ...]
    #: Integers and tuples of integers, as passed at launch and as given to the compiler.
    settled: tuple[Any, ...]
    compiled: tuple[Any, ...]
    constants: dict[str, Any]

    @classmethod
    def of(cls, kernel: Any, given: Mapping[str, Any]) -> Parameters:
        """Group the given parameters by kind. The kernel's signature must have the kinds in this order."""
        constant = parameters_of(kernel.fn)
        groups: list[dict[str, Any]] = [{}, {}, {}, {}]
        last = 0
        for name, value in in_order(kernel, given).items():
            kind = 0 if isinstance(value, torch.Tensor) else 1 if isinstance(value, EachRun) else 2
            kind = 3 if constant[name] else kind
            if kind < last:
                raise TypeError(
                    f"{name} of {kernel.fn.__name__} comes too late in the kernel's signature; pointers come "
                    "first, then what each run gives, then integers, then constexpr parameters."
                )
            last = kind
            groups[kind][name] = value
        tensors, each_run, integers, constants = groups
        return cls(
            tuple(tensors.values()),
            tuple(each_run.values()),
            tuple(value.value if isinstance(value, Wide) else value for value in integers.values()),
            tuple(_WIDE if isinstance(value, Wide) else value for value in integers.values()),
            constants,
        )


def prepare(
    kernel: Any,
    parameters: Parameters,
    *,
    grid: tuple[int, int],
    device: torch.device,
    num_warps: int,
    registers: int | None = None,
    shared_percent: int | None = None,
    early: bool = True,
) -> Launcher:
    """A launcher of ``kernel`` on ``device``.

    ``registers``: maximum registers per thread; None lets the compiler choose. ``shared_percent``: preferred
    shared-memory carve-out, percent. ``early``: whether a kernel that calls ``follow`` may be launched before
    the previous kernel on the stream has ended.
    """
    settled, constants = parameters.settled, parameters.constants
    if interpreted():

        def interpret(*given: Any) -> None:
            with np.errstate(all="ignore"):
                kernel[grid](*given, *settled, **constants)

        return Launcher(interpret)

    tensors, compiled = parameters.tensors, parameters.compiled
    key = (
        kernel, device, tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors), len(parameters.each_run),
        _kinds(compiled), tuple(constants.values()), num_warps, registers, shared_percent,
    )  # fmt: skip
    handle = _handles.get(key)
    if handle is None:
        options = {"num_warps": num_warps, "enable_fp_fusion": False, "maxnreg": registers}
        scalars = (_WIDE,) * len(parameters.each_run)
        with torch.cuda.device(device):
            handle = kernel.warmup(*tensors, *scalars, *compiled, **constants, grid=(1,), **options)
            with _loading:
                private.load_binary(handle)
            if shared_percent is not None:
                private.prefer_shared_memory(handle, shared_percent)
        _handles[key] = handle
    run, between = private.launcher(handle, early)
    return Launcher(run, grid, between, (*settled, *constants.values()))


def _kinds(values: Any) -> Any:
    """The properties that Triton specializes an integer on: equals 1, divisible by 16, wider than 32 bits."""
    if isinstance(values, tuple):
        return tuple(_kinds(value) for value in values)
    return values == 1, values % 16 == 0, values.bit_length() > 31


def double_bits(value: float) -> int:
    """The bits of a float64. Kernels take floats of the host in this form."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@triton.jit
def follow():
    """Wait for the previous launch to end, and allow the next launch to start. Must be first in a kernel.

    Programs of the next launch are then already on the device when they may begin (programmatic dependent
    launch).
    """
    if COMPILED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def loop_offsets(index, sizes, strides):
    """The offset of each index in elements. The index is split into loop indices, innermost first."""
    offset = tl.zeros(index.shape, tl.int64)
    for d in tl.static_range(len(sizes) - 1, -1, -1):
        if d == 0:
            offset += index.to(tl.int64) * strides[d]
        else:
            offset += (index % sizes[d]).to(tl.int64) * strides[d]
            index = index // sizes[d]
    return offset


@triton.jit
def report(reports, place, position, value, bad):
    """Report the first bad value to the host: write a word of ``core.device_errors`` if any value is bad."""
    if tl.max(bad.to(tl.int32), 0) > 0:
        held = tl.minimum(tl.maximum(value.to(tl.int64), LEAST), MOST)
        word = (position.to(tl.int64) << 32) | (held & 0xFFFFFFFF)
        tl.atomic_min(reports + place, tl.min(tl.where(bad, word, NO_REPORT), 0))
        tl.atomic_max(reports, 1)
