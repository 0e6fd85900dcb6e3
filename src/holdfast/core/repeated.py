"""Repeated calls of an operator, which skip everything that their first call has settled.

Reading shapes and dtypes, selecting a plan and checking the args take several times as long as a launch. All
of it depends only on the values that are not tensors and on the metadata of the tensors: dtype, shape,
strides, device. If both are those of an earlier call, its launch is repeated on new outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self, cast

import torch

from holdfast.core import private
from holdfast.core.device_errors import raise_reported
from holdfast.core.huge_pages import allocation
from holdfast.core.operands import misalignment_of
from holdfast.core.plan import Plan, PreparedLaunch
from holdfast.core.stream import CPU_STREAM, NO_WORKSPACE, Stream, Workspace
from holdfast.core.workspace_layout import ALIGNMENT


class Work(NamedTuple):
    """A run of ``plan`` on ``args`` that writes ``result``: one or several tensors that were just allocated.

    A tensor of the result that the plan does not write has no elements.
    """

    plan: Plan[Any, Any]
    args: Any
    result: torch.Tensor | tuple[torch.Tensor, ...]

    def run(self) -> Any:
        """Run the plan on torch's current stream; return the result."""
        plan = self.plan
        plan.run(current_stream(plan.device), workspace_of(plan), self.args)
        return self.result


class Repeated:
    """The launch of an earlier call, for calls with equal values and tensors of equal metadata."""

    __slots__ = "matches", "recorded", "run"

    def __init__(self, matches: Callable[..., bool], recorded: bool, run: Callable[..., Any]) -> None:
        #: Whether tensors have the metadata of the earlier call, and are recorded by autograd if those were.
        self.matches = matches
        #: Whether autograd records the call.
        self.recorded = recorded
        #: Returns the result for these tensors; None if their memory is aligned otherwise or was freed, or if
        #: their values need another launch.
        self.run = run

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], work: Work, recorded: bool) -> Self | None:
        """``work`` prepared for repetition; None if it cannot be. ``tensors`` are arguments of the call."""
        with torch.set_grad_enabled(recorded):
            matches = private.guard_of(tensors)
        launch = work.plan.prepared(work.args)
        if matches is None or launch is None or launch.launch is None:
            return None
        run = _written_out(tensors, work, launch)
        return None if run is None else cls(matches, recorded, run)


def _written_out(
    tensors: Sequence[torch.Tensor], work: Work, launch: PreparedLaunch[Any]
) -> Callable[..., Any] | None:
    """The function ``Repeated.run``, written out: loops over the operands take longer than the launch."""
    plan, args, result = work
    results = result if isinstance(result, tuple) else (result,)
    names = {id(made): f"out{i}" for i, made in enumerate(results)}
    names |= {id(tensor): f"in{i}" for i, tensor in enumerate(tensors)}
    if len(names) < len(results) + len(tensors):  # one tensor has two names
        return None
    known = {
        "plan": plan, "device": plan.device, "make": type(args).of, "misalignment": launch.misalignment,
        "stream_on": current_stream, "workspace_of": workspace_of, "raise_reported": raise_reported,
        "misalignment_of": misalignment_of, "raw_stream": private.raw_stream,
    }  # fmt: skip
    lines, given, addresses = [], [*map(repr, args.options())], []
    for i, made in enumerate(results):
        known[f"empty{i}"] = allocation(made)
        lines.append(f"out{i} = empty{i}()")
    extents = {position: (extent, itemsize) for position, extent, itemsize in launch.extents.of_tensors}
    for position, operand in enumerate(args.operands()):
        name = names.get(id(operand), f"value{position}")
        written, new = position < len(plan.outputs), name.startswith("out")
        if isinstance(operand, torch.Tensor) and (name.startswith("value") or written != new):
            return None
        given.append(name)
        if not isinstance(operand, torch.Tensor):
            known[name] = operand
            addresses.append("0")
            continue
        extent, itemsize = extents[position]
        lines.append(f"at{position} = {name}.data_ptr()")
        addresses.append(f"at{position}")
        if not new:
            room = f"{name}.untyped_storage().nbytes()"
            lines.append(f"if not at{position} or {name}.storage_offset() * {itemsize} + {extent} > {room}:")
            lines.append("    return None")
    if any(made.numel() and f"out{i}" not in given for i, made in enumerate(results)):
        return None
    aligned = f"({' | '.join(addresses)}) & 15"
    differs = (
        f"misalignment_of(({', '.join(addresses)},)) != misalignment" if launch.misalignment else aligned
    )
    lines += [f"if {differs}:", "    return None", "raise_reported()"]
    bound = getattr(launch.launch, "bound", None)
    size = plan.kernel.workspace_size if getattr(launch.launch, "bound_uses_workspace", True) else 0
    if bound is None:
        known["launch"] = launch.launch
        lines.append(f"args = make({', '.join(given)})")
        lines.append(f"launch(stream_on(device), workspace_of(plan), args, ({', '.join(addresses)},))")
    else:
        known["launch"] = bound(args)
        if size:
            known["empty"] = partial(torch.empty, size, dtype=torch.uint8, device=plan.device)
            lines += [
                "workspace = empty()",
                f"workspace_at = -(-workspace.data_ptr() // {ALIGNMENT}) * {ALIGNMENT}",
            ]
        handle = f"raw_stream({plan.device.index})" if plan.device.type == "cuda" else "0"
        lines += [
            f"if launch({handle}, {'workspace_at' if size else '0'}, {', '.join(addresses)}) is False:",
            "    return None",
        ]
    several = f"({''.join(f'out{i}, ' for i, _ in enumerate(results))})"
    lines.append(f"return {several if isinstance(result, tuple) else 'out0'}")
    parameters = ", ".join(f"in{i}" for i, _ in enumerate(tensors))
    exec(f"def run({parameters}):\n    " + "\n    ".join(lines), known)
    return cast(Callable[..., Any], known["run"])


class Calls:
    """The calls of one operator, whose kernel takes its arguments and returns ``Work`` or the result."""

    #: Maximum number of keys, and of calls with one key. All keys are dropped when there are too many.
    _MOST_KEYS, _MOST_CALLS = 1024, 4

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        #: The earlier calls with each key.
        self.known: dict[Any, tuple[Repeated, ...]] = {}

    def run(self, key: Any, tensors: Sequence[torch.Tensor], arguments: Sequence[Any], recorded: bool) -> Any:
        """Run the kernel. The second call with a key is prepared for repetition: many keys occur once."""
        work = self._kernel(*arguments)
        if not isinstance(work, Work):
            return work
        result, known = work.run(), self.known.get(key)
        if known is None:
            if len(self.known) >= self._MOST_KEYS:
                self.known.clear()
            self.known[key] = ()
        elif len(known) < self._MOST_CALLS and not any(map(_is_zero, arguments)):
            made = Repeated.of(tensors, work, recorded)
            self.known[key] = known if made is None else (*known, made)
        return result


def _is_zero(argument: Any) -> bool:
    """Whether this is 0.0 or -0.0, which are equal as keys."""
    return type(argument) is float and argument == 0.0


def current_stream(device: torch.device) -> Stream:
    """torch's current stream on ``device``. Every call needs it, so it avoids torch.cuda's Python layer."""
    if device == CPU_STREAM.device:
        return CPU_STREAM
    return _stream(device, private.raw_stream(device.index))


_stream = lru_cache(maxsize=256)(Stream)


_cached = threading.local()
#: CPU workspaces of up to this many bytes are cached per thread, since fresh memory costs page faults.
_CACHED_BYTES = 2**26


def workspace_of(plan: Plan[Any, Any]) -> Workspace:
    """A workspace for a run of ``plan`` in this thread, valid until the next call."""
    size, device = plan.kernel.workspace_size, plan.device
    if not size:
        return NO_WORKSPACE
    if device.type != "cpu" or size > _CACHED_BYTES:
        return Workspace.allocate(size, device)
    cached: Workspace = getattr(_cached, "workspace", NO_WORKSPACE)
    if cached.size < size:
        cached = _cached.workspace = Workspace.allocate(size, device)
    return cached
