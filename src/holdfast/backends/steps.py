"""Triton kernels that run one after another on a stream: the launch of a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from holdfast.backends import interpreted
from holdfast.backends.gpu import EachRun, Launcher, Parameters, parameters_of, prepare
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
    """A launch, or a call of ``function`` on regions of the workspace."""

    launcher: Launcher | None
    operands: tuple[StepOperand, ...]
    places: tuple[_Place, ...] = ()
    each_run: tuple[EachRun, ...] = ()
    beside: bool = False
    function: Callable[..., None] | None = None

    def call(self, stream: Stream, workspace: Workspace) -> None:
        """Call the function on torch's stream."""
        assert self.function is not None
        regions = cast(tuple[Region, ...], self.operands)
        tensors = [region.tensor(workspace) for region in regions]
        with _on_torch_stream(stream):
            self.function(*tensors)


class Steps:
    """Kernels that run one after another on a stream, on operands of the args and regions of the workspace.

    It is built when a launch is prepared for ``args``. For an operand that is None or a host value, the
    kernel gets the pointer of the first tensor instead.
    """

    def __init__(self, device: torch.device, args: Args) -> None:
        self.device = device
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
        launcher = prepare(
            kernel,
            given,
            grid=(programs, 1) if isinstance(programs, int) else programs,
            device=self.device,
            num_warps=num_warps,
            registers=registers,
            shared_percent=shared_percent,
            early=not beside,
        )
        operands = tuple(pointers[name] for name in constant if name in pointers)
        places = tuple(map(self._place, operands))
        self._steps.append(_Step(launcher, operands, places, given.each_run, beside))

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
        self._steps.append(_Step(None, regions, function=function))

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
        if interpreted():
            return self._interpreted()
        launch, device = self._written_out(), self.device
        if torch.cuda.device_count() == 1:
            return launch

        def launch_on_device(
            stream: Stream, workspace: Workspace, args: Args, addresses: Sequence[int]
        ) -> None:
            if torch.cuda.current_device() == device.index:
                launch(stream, workspace, args, addresses)
            else:
                with torch.cuda.device(device):
                    launch(stream, workspace, args, addresses)

        if hasattr(launch, "bound"):
            launch_on_device.bound = launch.bound  # type: ignore[attr-defined]
        return launch_on_device

    def _written_out(self) -> Launch[Any]:
        """``launch`` with all its launches written out: loops over parameters take as long as a launch."""
        names: dict[str, Any] = {"first_address": first_address, "torch_stream": _torch_stream}
        names |= {"device": self.device, "fork": _side.fork, "join": _side.join}
        operands = (operand for step in self._steps for operand in step.operands)
        names["kept"] = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        places = sorted({place for step in self._steps for place in step.places})
        known = [*(f"operand{i}" for i, _ in enumerate(self._tensors)), "workspace_at", "0"]
        pointers = {place: f"at{i}" if place[1] else known[place[0]] for i, place in enumerate(places)}
        beside = any(step.beside for step in self._steps)

        def named(value: Any) -> str:
            if _is_literal(value):
                return repr(value)
            names[f"value{len(names)}"] = value
            return f"value{len(names) - 1}"

        each_run: list[str] = []
        lines = [
            "later_at = stream_at",
            *(f"{pointers[place]} = {known[place[0]]} + {place[1]}" for place in places if place[1]),
            *(["own = torch_stream(stream_at, device)"] if beside else []),
        ]
        for step in self._steps:
            if step.launcher is None:
                lines.append(f"{named(step.call)}(stream, workspace)")
                continue
            if step.beside:
                lines.append("later_at = fork(device, own).cuda_stream")
            run = step.launcher
            given = [*run.grid, 1, "stream_at" if step.beside else "later_at", *map(named, run.between)]
            given += [pointers[place] for place in step.places]
            for each in step.each_run:
                given.append(f"each{len(each_run)}")
                each_run.append(f"each{len(each_run)} = {named(each.read)}(args)")
            lines.append(f"{named(run.run)}({', '.join(map(str, [*given, *map(named, run.tail)]))})")
        lines += ["join(device, own)"] if beside else []
        uses_workspace = any(position == len(self._tensors) for position, _ in places)
        first = [
            "stream_at = stream.handle",
            f"{', '.join(known[:-2])}, = addresses",
            *(["workspace_at = first_address(workspace)"] if uses_workspace else []),
        ]
        _define(names, "launch(stream, workspace, args, addresses)", [*first, *each_run, *lines])
        launch = cast(Launch[Any], names["launch"])
        if all(step.launcher for step in self._steps):
            bound = [f"def launch(stream_at, workspace_at, {', '.join(known[:-2])}):"]
            bound += [f"    {line}" for line in lines]
            _define(names, "bound(args)", [*each_run, *bound, "return launch"])
            launch.bound = names["bound"]  # type: ignore[attr-defined]
        return launch

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
                if step.launcher is None:
                    step.call(stream, workspace)
                else:
                    scalars = [each.read(args) for each in step.each_run]
                    step.launcher.run(*map(tensor, step.operands), *scalars)

        return launch


def _define(names: dict[str, Any], signature: str, lines: Sequence[str]) -> None:
    """Define the function of these lines in ``names``."""
    exec(f"def {signature}:\n    " + "\n    ".join(lines), names)


def _is_literal(value: Any) -> bool:
    """Whether ``value`` can be written as a literal, which is faster to load than a variable."""
    if type(value) is tuple:
        return all(map(_is_literal, value))
    return value is None or type(value) in (int, bool)


def _by_name(source: object) -> Callable[[str, Any], Any]:
    """A function that gets a value of a mapping or record by its name, or a default."""
    if isinstance(source, Args):
        raise TypeError("a launch takes the operands of its args by itself; name other fields of the args.")
    if isinstance(source, tuple):
        source = source._asdict()  # type: ignore[attr-defined]
    return source.get if isinstance(source, Mapping) else partial(getattr, source)


def _is_operand(value: Any) -> bool:
    return value is None or isinstance(value, str | Part | Region | torch.Tensor)


def _on_torch_stream(stream: Stream) -> AbstractContextManager[Any]:
    if stream.device.type == "cpu":
        return nullcontext()
    return torch.cuda.stream(_torch_stream(stream.handle, stream.device))


def _torch_stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    """The torch stream of a handle. For handle 0 an ExternalStream would be a stream of torch's pool."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
