"""How Triton kernels are compiled and launched.

A kernel is compiled once for each combination of pointer types, alignments and kinds of integers, and the
compiled handle is kept: launching it skips the work that Triton's own dispatch does on every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from holdfast.backends import interpreted
from holdfast.core import deferred
from holdfast.core.pieces import Piece, first_address
from holdfast.core.plan import Args, Launch
from holdfast.core.stream import Stream, Workspace

#: Launches a prepared kernel: the stream, the pointer operands and their addresses, the leading scalars.
Launcher = Callable[[int, Sequence[torch.Tensor], Sequence[int], tuple[int, ...]], None]

NOTHING = tl.constexpr(deferred.NOTHING)
LEAST, MOST = tl.constexpr(deferred.LEAST), tl.constexpr(deferred.MOST)

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
    registers: int | None = None,
) -> Launcher:
    """A launcher of ``kernel`` on ``device``.

    The kernel's parameters are, in this order: a pointer for each of ``tensors``; ``scalars``, which may
    differ on every launch; ``settled``, integers and tuples of them that do not; the constants. A thread may
    have so many ``registers``, or what the compiler thinks best.
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


class Steps:
    """Kernels that run one after another on a stream, on operands of the args and pieces of the workspace.

    Made while a launch is prepared for ``args``. An operand that is not there needs a pointer all the same,
    and gets the first one.
    """

    def __init__(self, device: torch.device, args: Args) -> None:
        self._device = device
        self._args, self._like = args, _present(args)
        self._steps: list[tuple[Launcher, tuple[StepOperand, ...], Scalars]] = []

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
    ) -> None:
        """``programs`` programs of ``kernel``, whose threads have so many ``registers`` if it matters.

        Its parameters are the operands, what ``scalars`` makes of the args of each launch (in 64 bits each),
        ``settled``, the constants.
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
        )
        self._steps.append((run, tuple(map(self._settled, operands)), scalars))

    def call(self, function: Callable[..., None], *pieces: Piece) -> None:
        """Call ``function`` on pieces of the workspace as tensors, with the stream made torch's own."""

        device = self._device

        def run(stream: int, tensors: Sequence[torch.Tensor], addresses: Any, scalars: Any) -> None:
            if device.type == "cpu":
                function(*tensors)
            else:
                with torch.cuda.stream(_torch_stream(stream, device)):
                    function(*tensors)

        self._steps.append((_OnTensors(run), pieces, no_scalars))

    def _settled(self, operand: StepOperand) -> StepOperand:
        if isinstance(operand, Part):
            whole = self._like[operand.operand]
            return replace(operand, offset=operand.first * whole.stride(0) * whole.itemsize)
        return operand

    def _described(self, operand: StepOperand) -> torch.Tensor:
        return operand.like() if isinstance(operand, Piece) else _tensor(operand, None, self._like)

    @property
    def launch(self) -> Launch[Any]:
        """What launches every step, in order. It does not hold on to the args that it was prepared for."""
        steps, interpreting = tuple(self._steps), interpreted()

        def launch(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
            base = first_address(workspace)
            for run, operands, scalars in steps:
                if interpreting or isinstance(run, _OnTensors):
                    present = _present(args)
                    run(stream.handle, [_tensor(o, workspace, present) for o in operands], (), scalars(args))
                else:
                    run(stream.handle, (), [_address(o, base, addresses) for o in operands], scalars(args))

        return launch


def _torch_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of a handle. To torch, an external stream of handle 0 is any stream of its pool."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


class _OnTensors:
    """A step that needs tensors, not addresses."""

    def __init__(self, run: Launcher) -> None:
        self._run = run

    def __call__(self, *given: Any) -> None:
        self._run(*given)


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


def _address(operand: StepOperand, base: int, addresses: Sequence[int]) -> int:
    if isinstance(operand, Piece):
        return base + operand.offset
    if isinstance(operand, Part):
        return addresses[operand.operand] + operand.offset
    return operand.data_ptr() if isinstance(operand, torch.Tensor) else addresses[operand] or addresses[0]
