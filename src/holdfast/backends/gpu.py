"""How Triton kernels are compiled and launched.

A kernel is compiled once for each combination of pointer types, alignments and kinds of integers, and the
compiled handle is kept: launching it skips the work that Triton's own dispatch does on every call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from holdfast.backends import interpreted
from holdfast.core import deferred
from holdfast.core.pieces import Piece, first_address
from holdfast.core.plan import Args, Launch
from holdfast.core.stream import Stream, Workspace

#: Launches a prepared kernel: the stream, the pointer operands and their addresses, the leading scalars.
Launcher = Callable[[int, Sequence[torch.Tensor], Sequence[int], tuple[int, ...]], None]

NOTHING = tl.constexpr(deferred.NOTHING)
LEAST, MOST = tl.constexpr(deferred.LEAST), tl.constexpr(deferred.MOST)
COMPILED = tl.constexpr(not interpreted())

_handles: dict[tuple[Any, ...], Any] = {}
#: Held while a binary is loaded. Triton loads launchers as modules of one name: of two threads that do so at
#: once, one may get the other's launcher, which reads the arguments of its kernel as those of another.
_loading = threading.Lock()


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
    registers: int | None = None,
    left_percent: int | None = None,
    early: bool = True,
) -> Launcher:
    """A launcher of ``kernel`` on ``device``.

    The kernel's parameters are, in this order: a pointer for each of ``tensors``; ``scalars``, which may
    differ on every launch; ``settled``, integers and tuples of them that do not; the constants. A thread may
    have so many ``registers``, or what the compiler thinks best. So much of a processor's cache is
    ``left_percent`` to others as shared memory. A kernel that follows others by ``follow`` may be brought to
    the device ``early``.
    """
    options = {"num_warps": num_warps, "enable_fp_fusion": False, "maxnreg": registers}
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
        registers,
        left_percent,
    )
    handle = _handles.get(key)
    if handle is None:
        with torch.cuda.device(device):
            handle = kernel.warmup(*tensors, *scalars, *settled, **constants, grid=(1,), **options)
            with _loading:
                handle.run  # noqa: B018  (loads the binary on this device)
            if left_percent is not None:
                _leave_shared_memory(handle, left_percent)
        _handles[key] = handle
    run, between = _entry(handle, early)
    tail = (*settled, *constants.values())
    only_device = torch.cuda.device_count() == 1

    def launch(stream: int, tensors: Any, addresses: Sequence[int], scalars: tuple[int, ...]) -> None:
        if only_device or torch.cuda.current_device() == device.index:
            run(*grid, 1, stream, *between, *addresses, *scalars, *tail)
        else:
            with torch.cuda.device(device):
                run(*grid, 1, stream, *between, *addresses, *scalars, *tail)

    return launch


def _leave_shared_memory(handle: Any, percent: int) -> None:
    """Have so much of the cache as shared memory while a kernel runs that uses none.

    A processor divides its cache anew only when it is idle. So kernels that do use shared memory would have
    to wait for the last program of one that does not. This is a wish; nothing depends on it but time.
    """
    preferred_carveout = 9
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
            ctypes.c_void_p(handle.function), preferred_carveout, percent
        )


def _entry(handle: Any, early: bool) -> tuple[Callable[..., None], tuple[Any, ...]]:
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


def _kinds(values: Any) -> Any:
    """What Triton specialises an integer on: being 1, a multiple of 16, wider than 32 bits."""
    if isinstance(values, tuple):
        return tuple(_kinds(value) for value in values)
    return values == 1, values % 16 == 0, values.bit_length() > 31


@triton.jit
def follow():
    """Wait for the launch before this one to end, and let the next one come: first thing in a kernel.

    The programs of a launch are then on the device by the time they may begin.
    """
    if COMPILED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def loop_offsets(index, sizes, strides):
    """Where each index lies, in elements: its number taken apart into the loops, innermost first."""
    offset = tl.zeros(index.shape, tl.int64)
    for d in tl.static_range(len(sizes) - 1, -1, -1):
        if d == 0:
            offset += index.to(tl.int64) * strides[d]
        else:
            offset += (index % sizes[d]).to(tl.int64) * strides[d]
            index = index // sizes[d]
    return offset


@triton.jit
def report(box, place, position, value, bad):
    """Tell the host of the first bad value, in a word of ``core.deferred``. Costs nothing if none is bad."""
    if tl.max(bad.to(tl.int32), 0) > 0:
        held = tl.minimum(tl.maximum(value.to(tl.int64), LEAST), MOST)
        word = (position.to(tl.int64) << 32) | (held & 0xFFFFFFFF)
        tl.atomic_min(box + place, tl.min(tl.where(bad, word, NOTHING), 0))
        tl.atomic_max(box, 1)


@dataclass(frozen=True)
class Part:
    """Of an operand of the args, ``size`` indices of its first axis from ``first`` on.

    ``offset`` is where they begin, in bytes; the steps fill it in.
    """

    operand: int
    first: int
    size: int
    offset: int = 0


#: What a step works on: an operand of the args by its position, or a part of it; a piece of the workspace; or
#: a kept tensor.
StepOperand = int | Part | Piece | torch.Tensor
#: What a step takes from the args of a launch besides operands.
Scalars = Callable[[Any], tuple[int, ...]]
#: Stands for such a scalar while a kernel is compiled: it needs 64 bits.
_WIDE = 2**62


def no_scalars(args: Args) -> tuple[int, ...]:
    """Nothing, for kernels that need nothing of the kind."""
    return ()


class _Side(threading.local):
    """Streams beside those of callers, one for each device: of each thread, for one may be capturing.

    What is launched there goes first where the device has to choose.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def fork(self, device: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """The side stream, which waits for all that is on ``stream`` so far."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1), torch.cuda.Event()
        side, event = self._streams[device]
        event.record(stream)
        side.wait_event(event)
        return side

    def join(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait for all that is on the side stream so far."""
        side, event = self._streams[device]
        event.record(side)
        stream.wait_event(event)


_side = _Side()


@dataclass(frozen=True)
class _Step:
    run: Launcher
    operands: tuple[StepOperand, ...]
    scalars: Scalars
    beside: bool = False
    #: Whether it needs tensors. If not, of each operand: which address it is found from, and how far from it.
    on_tensors: bool = False
    found_from: tuple[tuple[int, int], ...] = ()


class Steps:
    """Kernels that run one after another on a stream, on operands of the args and pieces of the workspace.

    Made while a launch is prepared for ``args``. An operand that is not there needs a pointer all the same,
    and gets the first one. A long step that none after it depends on can run ``beside`` those, which then go
    first wherever there is room: most of them are short, and wait most of the time.
    """

    def __init__(self, device: torch.device, args: Args) -> None:
        self._device = device
        self._args, self._like = args, _present(args)
        self._steps: list[_Step] = []

    def add(
        self,
        kernel: Any,
        programs: int,
        operands: Sequence[StepOperand],
        settled: tuple[Any, ...],
        constants: dict[str, Any],
        num_warps: int,
        scalars: Scalars = no_scalars,
        registers: int | None = None,
        left_percent: int | None = None,
        beside: bool = False,
    ) -> None:
        """``programs`` programs of ``kernel``, with so many ``registers`` and so much cache ``left_percent``.

        Its parameters are the operands, what ``scalars`` makes of the args of each launch (in 64 bits each),
        ``settled``, the constants. One step can run ``beside`` all that are added later.
        """
        run = prepare(
            kernel,
            grid=(programs, 1),
            device=self._device,
            tensors=[self._described(operand) for operand in operands],
            scalars=(_WIDE,) * len(scalars(self._args)),
            settled=settled,
            constants=constants,
            num_warps=num_warps,
            registers=registers,
            left_percent=left_percent,
            early=not beside,
        )
        settled_operands = tuple(map(self._settled, operands))
        found_from = tuple(map(self._found_from, settled_operands))
        self._steps.append(_Step(run, settled_operands, scalars, beside, found_from=found_from))

    def call(self, function: Callable[..., None], *pieces: Piece) -> None:
        """Call ``function`` on pieces of the workspace as tensors, with the stream made torch's own."""

        device = self._device

        def run(stream: int, tensors: Sequence[torch.Tensor], addresses: Any, scalars: Any) -> None:
            if device.type == "cpu":
                function(*tensors)
            else:
                with torch.cuda.stream(_torch_stream(stream, device)):
                    function(*tensors)

        self._steps.append(_Step(run, pieces, no_scalars, on_tensors=True))

    def _settled(self, operand: StepOperand) -> StepOperand:
        if isinstance(operand, Part):
            whole = self._like[operand.operand]
            return replace(operand, offset=operand.first * whole.stride(0) * whole.itemsize)
        return operand

    def _found_from(self, operand: StepOperand) -> tuple[int, int]:
        """Addresses are those of the operands of the args, then that of the workspace, then 0."""
        args = len(self._like)
        if isinstance(operand, Piece):
            return args, operand.offset
        if isinstance(operand, Part):
            return operand.operand, operand.offset
        return (args + 1, operand.data_ptr()) if isinstance(operand, torch.Tensor) else (operand, 0)

    def _described(self, operand: StepOperand) -> torch.Tensor:
        return operand.like() if isinstance(operand, Piece) else _tensor(operand, None, self._like)

    @property
    def launch(self) -> Launch[Any]:
        """What launches every step, in order. It does not hold on to the args that it was prepared for."""
        steps, device, interpreting = tuple(self._steps), self._device, interpreted()

        def launch_step(
            step: _Step, handle: int, workspace: Workspace, args: Args, addresses: Sequence[int]
        ) -> None:
            if interpreting or step.on_tensors:
                present = _present(args)
                tensors = [_tensor(operand, workspace, present) for operand in step.operands]
                step.run(handle, tensors, (), step.scalars(args))
            else:
                found = [addresses[number] + offset for number, offset in step.found_from]
                step.run(handle, (), found, step.scalars(args))

        def launch(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
            known = _known(addresses, workspace)
            for step in steps:
                launch_step(step, stream.handle, workspace, args, known)

        def launch_beside(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
            known, handle = _known(addresses, workspace), stream.handle
            own = _torch_stream(handle, device)
            for step in steps:
                if step.beside:
                    handle = _side.fork(device, own).cuda_stream
                    launch_step(step, stream.handle, workspace, args, known)
                else:
                    launch_step(step, handle, workspace, args, known)
            _side.join(device, own)

        return launch_beside if any(step.beside for step in steps) and not interpreting else launch


def _known(addresses: Sequence[int], workspace: Workspace) -> list[int]:
    """What operands are found from. One that is not there gets the address of the first."""
    first = addresses[0]
    return [*(address or first for address in addresses), first_address(workspace), 0]


def _torch_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of a handle. To torch, an external stream of handle 0 is any stream of its pool."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def _present(args: Args) -> list[torch.Tensor]:
    operands = args.operands()
    return [operand if isinstance(operand, torch.Tensor) else operands[0] for operand in operands]  # type: ignore[misc]


def _tensor(
    operand: StepOperand, workspace: Workspace | None, present: Sequence[torch.Tensor]
) -> torch.Tensor:
    if isinstance(operand, Piece):
        assert workspace is not None
        return operand.tensor(workspace)
    if isinstance(operand, Part):
        return present[operand.operand][operand.first : operand.first + operand.size]
    return operand if isinstance(operand, torch.Tensor) else present[operand]
