"""Repeated calls of an operator, which skip everything that their first call has settled.

Reading shapes and dtypes, selecting a plan and checking the args take several times as long as a launch. All
of it depends only on the values that are not tensors and on the metadata of the tensors: dtype, shape,
strides, device. If both are those of an earlier call, its launch is repeated on new outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch

from holdfast.core import private
from holdfast.core.autograd import Recorder
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
        kept, workspace = workspace_of(plan)
        plan.run(current_stream(plan.device), workspace, self.args)
        if kept:
            _cached.workspace = kept, workspace
        return self.result


#: The result for the arguments of a call, by the launch of an earlier call. None if this is another call: a
#: value or the metadata of a tensor differs, a tensor is aligned otherwise or was freed, or the values of the
#: tensors need another launch.
Repetition = Callable[..., Any]


def repetition_of(
    arguments: Sequence[Any], work: Work, records: bool, recorder: Recorder | None
) -> Repetition | None:
    """``work`` prepared for repetition; None if it cannot be. ``arguments`` are those of its call.

    ``records``: whether gradients are enabled in the call. If autograd records it, there is a ``recorder``.
    """
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    with torch.set_grad_enabled(records):
        matches = private.guard_of(tensors)
    launch = work.plan.prepared(work.args)
    if matches is None or launch is None or launch.launch is None:
        return None
    return _written_out(arguments, work, launch, matches, recorder, records)


def _written_out(
    arguments: Sequence[Any],
    work: Work,
    launch: PreparedLaunch[Any],
    matches: Callable[..., bool],
    recorder: Recorder | None,
    records: bool,
) -> Repetition | None:
    """The repetition, written out: loops over the arguments and operands take longer than the launch."""
    plan, args, result = work
    results = result if isinstance(result, tuple) else (result,)
    tensors = {i: argument for i, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)}
    names = {id(made): f"out{i}" for i, made in enumerate(results)}
    names |= {id(tensor): f"in{i}" for i, tensor in tensors.items()}
    if len(names) < len(results) + len(tensors):  # one tensor has two names
        return None
    device = plan.device
    known = {
        "plan": plan, "device": device, "make": type(args).of, "misalignment": launch.misalignment,
        "stream_on": current_stream, "workspace_of": workspace_of, "cached": _cached,
        "raise_reported": raise_reported,
        "misalignment_of": misalignment_of, "raw_stream": private.raw_stream, "matches": matches,
        "current_device": private.current_device, "grad_enabled": torch.is_grad_enabled,
        "threads": torch.get_num_threads,
    }  # fmt: skip
    same = [_equality(f"in{i}", value, known) for i, value in enumerate(arguments) if i not in tensors]
    for i, tensor in tensors.items():
        known[f"in{i}_type"] = type(tensor)
        same.append(f"type(in{i}) is in{i}_type and not in{i}.is_nested")  # guards abort for nested tensors
    if any(tensor.requires_grad for tensor in tensors.values()):  # guards do not compare the gradient mode
        same.append(f"grad_enabled() is {records}")
    same.append(f"matches({', '.join(f'in{i}' for i in tensors)})")
    threads = getattr(plan.kernel, "made_for_threads", None)
    if threads is not None:
        same.append(f"threads() == {threads}")
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        same.append(f"current_device() == {device.index}")
    lines = [f"if not ({' and '.join(same)}):", "    return None"]
    given, addresses = [*map(repr, args.options())], []
    for i, made in enumerate(results):
        known[f"empty{i}"] = allocation(made)
        lines.append(f"out{i} = empty{i}()")
    extents = {position: (extent, itemsize) for position, extent, itemsize in launch.extents.of_tensors}
    known_tensors = {f"out{i}": made for i, made in enumerate(results)}
    known_tensors |= {f"in{i}": tensor for i, tensor in tensors.items()}
    read = set()
    for position, operand in enumerate(args.operands()):
        name = names.get(id(operand), f"value{position}")
        expression = name
        if isinstance(operand, torch.Tensor) and name.startswith("value"):
            viewed = _viewed(operand, known_tensors)
            if viewed is None:
                return None
            name, expression = viewed
        written, new = position < len(plan.outputs), name.startswith("out")
        if isinstance(operand, torch.Tensor) and written != new:
            return None
        given.append(expression)
        read.add(name)
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
    if any(made.numel() and f"out{i}" not in read for i, made in enumerate(results)):
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
        lines += [
            f"args = make({', '.join(given)})",
            "kept, workspace = workspace_of(plan)",
            f"launch(stream_on(device), workspace, args, ({', '.join(addresses)},))",
            "if kept:",
            "    cached.workspace = kept, workspace",
        ]
    else:
        known["launch"] = bound(args)
        if size:
            known["empty"] = partial(private.empty_on(device), (size,), (1,), torch.uint8)
            lines += [
                "workspace = empty()",
                f"workspace_at = -(-workspace.data_ptr() // {ALIGNMENT}) * {ALIGNMENT}",
            ]
        handle = f"raw_stream({device.index})" if device.type == "cuda" else "0"
        lines += [
            f"if launch({handle}, {'workspace_at' if size else '0'}, {', '.join(addresses)}) is False:",
            "    return None",
        ]
    found = "out0"
    if isinstance(result, tuple):
        found = f"({''.join(f'out{i}, ' for i, _ in enumerate(results))})"
    parameters = ", ".join(f"in{i}" for i, _ in enumerate(arguments))
    if recorder is not None:
        known["record"], known["rest"] = recorder.record, tuple(arguments[recorder.leading :])
        recorded = "".join(f"in{i}, " for i in range(recorder.leading))
        found = f"record({recorded}(rest, ({found},)))"
    lines.append(f"return {found}")
    exec(f"def run({parameters}):\n    " + "\n    ".join(lines), known)
    return cast(Repetition, known["run"])


def _viewed(operand: torch.Tensor, tensors: dict[str, torch.Tensor]) -> tuple[str, str] | None:
    """The name of the one tensor that ``operand`` is a view of, from its first element on; the view of it."""
    address = operand.data_ptr()
    found = [
        name
        for name, tensor in tensors.items()
        if address and tensor.dtype == operand.dtype and tensor.data_ptr() == address
    ]
    if len(found) != 1:
        return None
    return found[0], f"{found[0]}.as_strided({tuple(operand.shape)}, {tuple(operand.stride())})"


def _equality(name: str, value: Any, known: dict[str, Any]) -> str:
    """An expression: whether the variable ``name`` has the type and the value of ``value``.

    1, 1.0 and True are equal. The comparison of a value of another type may raise.
    """
    if value is None or isinstance(value, bool):
        return f"{name} is {value}"
    known |= {f"{name}_type": type(value), f"{name}_value": value}
    return f"type({name}) is {name}_type and {name} == {name}_value"


class Calls:
    """The calls of one operator, whose kernel takes its arguments and returns ``Work`` or the result."""

    #: Maximum number of keys, and of calls with one key. All keys are dropped when there are too many.
    _MOST_KEYS, _MOST_CALLS = 1024, 4
    #: Maximum number of recent repetitions.
    _MOST_RECENT = 4

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        #: The repetitions of the calls with each key.
        self.known: dict[Any, tuple[Repetition, ...]] = {}
        #: The last repetitions. Most calls are repeated by one of them, without a look-up of their key.
        self.recent: tuple[Repetition, ...] = ()

    def repeat(self, key: Any, arguments: Sequence[Any]) -> Any:
        """The result by an earlier call with this key, which is not recent; None if there is none."""
        for run in self.known.get(key, ()):
            found = run(*arguments)
            if found is not None:
                self.recent = (run, *self.recent[: self._MOST_RECENT - 1])
                return found
        return None

    def run(
        self,
        key: Any,
        arguments: Sequence[Any],
        records: bool,
        recorder: Recorder | None = None,
    ) -> Any:
        """Run the kernel, with ``records`` and ``recorder`` as for ``repetition_of``.

        The second call with a key is prepared for repetition: many keys occur once.
        """
        work = self._kernel(*arguments)
        if not isinstance(work, Work):
            return work
        result, known = work.run(), self.known.get(key)
        if known is None:
            if len(self.known) >= self._MOST_KEYS:
                self.known.clear()
            self.known[key] = ()
        elif len(known) < self._MOST_CALLS and not any(map(_is_zero, arguments)):
            made = repetition_of(arguments, work, records, recorder)
            self.known[key] = known if made is None else (*known, made)
        return result

    def forget(self) -> None:
        """Forget all calls."""
        self.known.clear()
        self.recent = ()


def _is_zero(argument: Any) -> bool:
    """Whether this is 0.0 or -0.0, which are equal as keys."""
    return type(argument) is float and argument == 0.0


def current_stream(device: torch.device) -> Stream:
    """torch's current stream on ``device``. Every call needs it, so it avoids torch.cuda's Python layer."""
    if device == CPU_STREAM.device:
        return CPU_STREAM
    return _stream(device, private.raw_stream(device.index))


_stream = lru_cache(maxsize=256)(Stream)


#: ``workspace``: the bytes of a CPU workspace, and the workspace, since new memory costs page faults.
_cached = threading.local()
#: CPU workspaces of up to this many bytes are cached per thread.
_CACHED_BYTES = 2**26


def workspace_of(plan: Plan[Any, Any]) -> tuple[int, Workspace]:
    """A workspace for a run of ``plan`` in this thread; before it, its bytes if the caller is to cache both.

    It is not in the cache during the run: the handler of a signal may call this library, too.
    """
    size, device = plan.kernel.workspace_size, plan.device
    if not size:
        return 0, NO_WORKSPACE
    if device.type != "cpu" or size > _CACHED_BYTES:
        return 0, Workspace.allocate(size, device)
    found: tuple[int, Workspace] = _cached.__dict__.pop("workspace", (0, NO_WORKSPACE))
    return found if found[0] >= size else (size, Workspace.allocate(size, device))
