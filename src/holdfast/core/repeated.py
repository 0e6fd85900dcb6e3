"""Repeated calls of an operator, which skip everything that their first call has settled.

Reading shapes and dtypes, selecting a plan and checking the args take several times as long as a launch. All
of it depends only on the values that are not tensors and on the metadata of the tensors: dtype, shape,
strides, device. If both are those of an earlier call, its launch is repeated on new outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch

from holdfast.core import device_errors, private
from holdfast.core.huge_pages import on_huge_pages, wants_huge_pages
from holdfast.core.last_call import getter_of
from holdfast.core.operands import hold_all, misalignment_of
from holdfast.core.plan import Plan
from holdfast.core.stream import CPU_STREAM, NO_WORKSPACE, Stream, Workspace

_address = torch.Tensor.data_ptr


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

    __slots__ = (
        "_allocate", "_args", "_hosts", "_inputs", "_launch", "_misalignment", "_operands", "_plan",
        "_single", "_values", "matches", "recorded",
    )  # fmt: skip

    #: Whether tensors have the metadata of the earlier call. This includes whether autograd records them.
    matches: Callable[..., bool]

    #: Whether autograd records the call.
    recorded: bool

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], work: Work, recorded: bool) -> Self | None:
        """``work`` prepared for repetition; None if it cannot be. ``tensors`` are arguments of the call."""
        plan, args, result = work
        results = result if isinstance(result, tuple) else (result,)
        with torch.set_grad_enabled(recorded):
            matches = private.guard_of(tensors)
        launch = plan.prepared(args)
        if launch is None or launch.launch is None or matches is None:
            return None
        operands = args.operands()
        pool, values = [*tensors, *results], list[Any]()
        order, inputs = list[int](), list[tuple[int, int, int]]()
        for position, operand in enumerate(operands):
            if not isinstance(operand, torch.Tensor):
                values.append(operand)
                order.append(len(pool) + len(values) - 1)
                continue
            found = [i for i, tensor in enumerate(pool) if tensor is operand]
            if not found or (found[0] >= len(tensors)) != (position < len(plan.outputs)):
                return None
            order.append(found[0])
            if found[0] < len(tensors):
                inputs.append(found[0])
        written = [operand for operand in operands[: len(plan.outputs)] if operand is not None]
        if any(made.numel() and all(made is not one for one in written) for made in results):
            return None
        self = cls()
        self.matches, self.recorded = matches, recorded
        self._plan, self._launch, self._misalignment = plan, launch.launch, launch.misalignment
        self._args = partial(type(args).of, *args.options())
        self._operands, self._values, self._hosts = getter_of(order), values, len(values)
        self._inputs = getter_of(inputs), launch.inputs
        self._allocate = tuple(map(_allocation, results))
        self._single = not isinstance(result, tuple)
        return self

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result for these tensors; None if their memory is aligned otherwise or was freed."""
        inputs_of, extents = self._inputs
        if not hold_all(inputs_of(tensors), extents):
            return None
        results = tuple(allocate() for allocate in self._allocate)
        operands = self._operands((*tensors, *results, *self._values))
        addresses = [_address(one) if isinstance(one, torch.Tensor) else 0 for one in operands]
        if addresses.count(0) != self._hosts or misalignment_of(addresses) != self._misalignment:
            return None
        device_errors.raise_reported()
        plan = self._plan
        self._launch(current_stream(plan.device), workspace_of(plan), self._args(*operands), addresses)
        return results[0] if self._single else results


class Calls:
    """The calls of one operator, whose kernel takes its arguments and returns ``Work`` or the result."""

    #: Maximum number of keys, and of calls with one key. All keys are dropped when there are too many.
    _MOST_KEYS, _MOST_CALLS = 1024, 4

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        self._known: dict[Any, tuple[Repeated, ...]] = {}

    def key(self, kinds: tuple[type, ...], values: Any, tensors: Sequence[torch.Tensor]) -> Any:
        return kinds, values, *map(_shape, tensors)

    def find(self, key: Any, tensors: Sequence[torch.Tensor]) -> Repeated | None:
        """The earlier call with this key, if tensors have its metadata."""
        for known in self._known.get(key, ()):
            if known.matches(*tensors):
                return known
        return None

    def run(self, key: Any, tensors: Sequence[torch.Tensor], arguments: Sequence[Any], recorded: bool) -> Any:
        """Run the kernel. The second call with a key is prepared for repetition: many keys occur once."""
        work = self._kernel(*arguments)
        if not isinstance(work, Work):
            return work
        result, known = work.run(), self._known.get(key)
        if known is None:
            if len(self._known) >= self._MOST_KEYS:
                self._known.clear()
            self._known[key] = ()
        elif len(known) < self._MOST_CALLS:
            made = Repeated.of(tensors, work, recorded)
            self._known[key] = known if made is None else (*known, made)
        return result


_shape = attrgetter("shape")


def _allocation(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that allocates a tensor with the metadata of ``like``."""
    shape, strides = tuple(like.shape), like.stride()
    empty = partial(torch.empty_strided, shape, strides, dtype=like.dtype, device=like.device)
    return (lambda: on_huge_pages(empty())) if wants_huge_pages(like) else empty


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
