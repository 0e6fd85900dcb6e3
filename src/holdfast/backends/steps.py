"""Triton kernels that run one after another on a stream: the launch of a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from holdfast.backends import interpreted
from holdfast.backends.gpu import EachRun, Launcher, Parameters, parameters_of, prepare
from holdfast.core.last_call import getter_of
from holdfast.core.plan import Args, Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import Region, first_address


@dataclass(frozen=True)
class Part:
    """The slice ``[first : first + size]`` of an operand's first axis. ``Steps`` sets ``offset``, bytes."""

    operand: str
    first: int
    size: int
    offset: int = 0


#: A pointer parameter: the field name of an operand of the args, a ``Part`` of one, a region of the
#: workspace, a tensor that the step keeps, or None for a pointer that the kernel does not use.
StepOperand = str | Part | Region | torch.Tensor | None


def operand_names(kind: type[Args]) -> tuple[str, ...]:
    """The field names of the operands of these args, in the order of ``operands()``."""
    return (*kind.outputs, *kind.inputs)


class _Side(threading.local):
    """A side stream of higher priority, one per device and thread (a thread may be capturing a graph)."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def fork(self, device: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """The side stream, after it waits for all work queued on ``stream``."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1), torch.cuda.Event()
        side, event = self._streams[device]
        event.record(stream)
        side.wait_event(event)
        return side

    def join(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for all work queued on the side stream."""
        side, event = self._streams[device]
        event.record(side)
        stream.wait_event(event)


_side = _Side()

#: The location of an operand: the position of an address in a list, and an offset from it in bytes.
_Place = tuple[int, int]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels take it: one-byte floats as uint8, because kernels convert codes as integers."""
    is_code = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_code else tensor


@dataclass(frozen=True)
class _Step:
    run: Launcher
    operands: tuple[StepOperand, ...]
    places: tuple[_Place, ...] = ()
    each_run: tuple[EachRun, ...] = ()
    beside: bool = False
    on_tensors: bool = False


class Steps:
    """Kernels that run one after another on a stream, on operands of the args and regions of the workspace.

    It is built when a launch is prepared for ``args``. For an operand that is None or a host value, the
    kernel gets the pointer of the first tensor instead.
    """

    def __init__(self, device: torch.device, args: Args) -> None:
        self._device = device
        self._names = operand_names(type(args))
        self._tensors = [
            _bits(operand) if isinstance(operand, torch.Tensor) else None for operand in args.operands()
        ]
        self._first = next(i for i, tensor in enumerate(self._tensors) if tensor is not None)
        self._steps: list[_Step] = []

    def add(
        self,
        kernel: Any,
        programs: int | tuple[int, int],
        /,
        *sources: object,
        num_warps: int,
        registers: int | None = None,
        shared_percent: int | None = None,
        beside: bool = False,
        **parameters: Any,
    ) -> None:
        """Add a launch of ``kernel`` with a grid of ``programs``.

        Every parameter of the kernel is found by its name: in ``parameters``, or else in one of ``sources``
        (mappings and records), or else among the operands of the args. Pointers are ``StepOperand``;
        integers, tuples of integers and constexpr values are given directly. A step that no later step
        depends on can run ``beside`` the later steps.
        """
        constant = parameters_of(kernel.fn)
        parameters = {**self._found(kernel, sources, parameters), **parameters}
        pointers = {
            name: self._settled(value)
            for name, value in parameters.items()
            if not constant.get(name, True) and _is_operand(value)
        }
        given = Parameters.of(
            kernel,
            {name: self._like(pointers[name]) if name in pointers else v for name, v in parameters.items()},
        )
        run = prepare(
            kernel,
            given,
            grid=(programs, 1) if isinstance(programs, int) else programs,
            device=self._device,
            num_warps=num_warps,
            registers=registers,
            shared_percent=shared_percent,
            early=not beside,
        )
        operands = tuple(pointers[name] for name in constant if name in pointers)
        places = tuple(map(self._place, operands))
        self._steps.append(_Step(run, operands, places, given.each_run, beside))

    def _found(self, kernel: Any, sources: Sequence[object], given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of ``kernel`` that are not ``given``. Raises if two sources have the same name."""
        known = [_by_name(source) for source in sources]
        found: dict[str, Any] = {}
        for name, constant in parameters_of(kernel.fn).items():
            if name in given:
                continue
            values = [value for get in known if (value := get(name, ...)) is not ...]
            if len(values) > 1:
                raise TypeError(
                    f"the launch of {kernel.fn.__name__} finds {name} in {len(values)} of its sources; give "
                    f"{name} by name."
                )
            if values:
                found[name] = values[0]
            elif name in self._names and not constant:
                found[name] = name
        return found

    def call(self, function: Callable[..., None], *regions: Region) -> None:
        """Add a call of ``function(*tensors)`` on regions of the workspace, on the caller's stream."""
        device = self._device

        def run(stream: int, tensors: Sequence[torch.Tensor], addresses: Any, scalars: Any) -> None:
            if device.type == "cpu":
                function(*tensors)
            else:
                with torch.cuda.stream(_torch_stream(stream, device)):
                    function(*tensors)

        self._steps.append(_Step(run, regions, on_tensors=True))

    def _position(self, name: str) -> int:
        """The position of an operand among the addresses; that of the first tensor if it is not a tensor."""
        if name not in self._names:
            raise TypeError(
                f"a launch names the operand {name!r}; the args have {', '.join(self._names)}. Name one of "
                "these."
            )
        position = self._names.index(name)
        return self._first if self._tensors[position] is None else position

    def _whole(self, name: str | None) -> torch.Tensor:
        tensor = self._tensors[self._first if name is None else self._position(name)]
        assert tensor is not None
        return tensor

    def _settled(self, operand: StepOperand) -> StepOperand:
        if isinstance(operand, Part):
            whole = self._whole(operand.operand)
            return replace(operand, offset=operand.first * whole.stride(0) * whole.itemsize)
        return operand

    def _like(self, operand: StepOperand) -> torch.Tensor:
        """A tensor of the operand's dtype and alignment."""
        if isinstance(operand, Region):
            return operand.like()
        if isinstance(operand, Part):
            return self._whole(operand.operand)[operand.first : operand.first + operand.size]
        return operand if isinstance(operand, torch.Tensor) else self._whole(operand)

    def _place(self, operand: StepOperand) -> _Place:
        """The location in a list of addresses: those of the operands, then that of the workspace, then 0."""
        args = len(self._tensors)
        if isinstance(operand, Region):
            return args, operand.offset
        if isinstance(operand, Part):
            return self._position(operand.operand), operand.offset
        if isinstance(operand, torch.Tensor):
            return args + 1, operand.data_ptr()
        return (self._first if operand is None else self._position(operand)), 0

    @property
    def launch(self) -> Launch[Any]:
        """Launches all steps in order. It keeps no reference to the args that it was prepared for."""
        steps, device = tuple(self._steps), self._device
        if interpreted():
            return self._interpreted()
        if (
            len(steps) == 1
            and steps[0].places
            and all(position < len(self._tensors) for position, _ in steps[0].places)
        ):
            return _alone(steps[0], len(self._tensors))

        def launch_step(
            step: _Step, handle: int, workspace: Workspace, args: Args, known: Sequence[int]
        ) -> None:
            if step.on_tensors:
                regions = cast(tuple[Region, ...], step.operands)
                step.run(handle, [region.tensor(workspace) for region in regions], (), ())
            else:
                found = [known[position] + offset for position, offset in step.places]
                step.run(handle, (), found, [each.read(args) for each in step.each_run])

        def launch(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
            known, handle = (*addresses, first_address(workspace), 0), stream.handle
            for step in steps:
                launch_step(step, handle, workspace, args, known)

        def launch_beside(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
            known, handle = (*addresses, first_address(workspace), 0), stream.handle
            own = _torch_stream(handle, device)
            for step in steps:
                if step.beside:
                    handle = _side.fork(device, own).cuda_stream
                    launch_step(step, stream.handle, workspace, args, known)
                else:
                    launch_step(step, handle, workspace, args, known)
            _side.join(device, own)

        return launch_beside if any(step.beside for step in steps) else launch

    def _interpreted(self) -> Launch[Any]:
        """``launch`` for the interpreter, which needs tensors instead of addresses."""
        steps, first = tuple(self._steps), self._first
        positions = {name: position for position, name in enumerate(self._names)}

        def launch(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
            operands: Any = args.operands()

            def whole(name: str | None) -> torch.Tensor:
                operand = operands[first if name is None else positions[name]]
                return _bits(operand if isinstance(operand, torch.Tensor) else operands[first])

            def tensor(operand: StepOperand) -> torch.Tensor:
                if isinstance(operand, Region):
                    return operand.tensor(workspace)
                if isinstance(operand, Part):
                    return whole(operand.operand)[operand.first : operand.first + operand.size]
                return operand if isinstance(operand, torch.Tensor) else whole(operand)

            for step in steps:
                scalars = [each.read(args) for each in step.each_run]
                step.run(stream.handle, list(map(tensor, step.operands)), (), scalars)

        return launch


def _by_name(source: object) -> Callable[[str, Any], Any]:
    """A function that gets a value of a mapping or record by its name, or a default."""
    if isinstance(source, Args):
        raise TypeError("a launch takes the operands of its args by itself; name other fields of the args.")
    if isinstance(source, tuple):
        source = source._asdict()  # type: ignore[attr-defined]
    return source.get if isinstance(source, Mapping) else partial(getattr, source)


def _is_operand(value: Any) -> bool:
    return value is None or isinstance(value, str | Part | Region | torch.Tensor)


def _alone(step: _Step, operands: int) -> Launch[Any]:
    """Launches a single step whose pointers are all operands of the args."""
    run, each_run, places = step.run, step.each_run, step.places
    positions = [position for position, _ in places]
    pick = getter_of(positions)

    def launch(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
        run(stream.handle, (), addresses, ())

    def launch_picked(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
        run(stream.handle, (), pick(addresses), [each.read(args) for each in each_run])

    def launch_parts(stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]) -> None:
        found = [addresses[position] + offset for position, offset in places]
        run(stream.handle, (), found, [each.read(args) for each in each_run])

    if any(offset for _, offset in places):
        return launch_parts
    return launch if positions == list(range(operands)) and not each_run else launch_picked


def _torch_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The torch stream of a handle. For handle 0 an ExternalStream would be a stream of torch's pool."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
