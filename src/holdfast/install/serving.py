"""How a call of a torch operator is served, or passed on to torch's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.core.dtypes import FLOATS
from holdfast.core.plan import Plan
from holdfast.core.strided import span
from holdfast.core.torch_op import cached_plan, select_plan

#: Takes the arguments of a torch operator and returns its result, or raises.
Serve = Callable[..., Any]


class PassOn(Exception):
    """This call goes to torch's own kernel. The message is the reason."""


_FLOATS = frozenset(dtype.torch for dtype in FLOATS.values())


def is_served(dtype: torch.dtype) -> bool:
    """Whether holdfast's kernels take this dtype."""
    return dtype in _FLOATS


def require_float(tensor: torch.Tensor) -> None:
    """Pass the call on unless the tensor has a dtype of holdfast."""
    if tensor.dtype not in _FLOATS:
        raise PassOn(f"the dtype is {tensor.dtype}")


@cached_plan
def plan_of(plan: type[Plan[Any, Any]], device: torch.device, **fields: Any) -> Plan[Any, Any]:
    """The plan for the descriptor with these fields."""
    return select_plan(plan, device, **fields)


def empty(like: torch.Tensor, shape: tuple[int, ...], layout: torch.memory_format) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def layout_of(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that torch gives to a result of the same rank."""
    # A contiguous tensor may have both formats: with one channel, or images of one pixel.
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None or tensor.stride(-1) < tensor.stride(1):  # most tensors
        return torch.contiguous_format
    return last if _is_channels_last(tensor.shape, tensor.stride()) else torch.contiguous_format


def _is_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch takes a tensor for one with channels last, possibly sliced."""
    if not strides[1]:
        return False
    least = 0
    for axis in (1, *range(len(sizes) - 1, 1, -1), 0):
        if not sizes[axis] or strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * sizes[axis]
    return True


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory of two tensors intersects, from their first elements to their last ones."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    (begin, end), (start, stop) = _extent(one), _extent(other)
    return begin < stop and start < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + span(tensor.shape, tensor.stride()) * tensor.element_size()


def into(serve: Serve, name: str) -> Serve:
    """``serve`` for the overload of the operator that writes into the argument ``name``."""

    def serve_into(*arguments: Any, **options: Any) -> Any:
        out = options.pop(name)
        if any(may_overlap(given, out) for given in arguments if torch.is_tensor(given)):
            raise PassOn("the output shares memory with an input")
        found = serve(*arguments, **options)
        if found.shape != out.shape or found.dtype != out.dtype or found.device != out.device:
            raise PassOn("the output has another shape, dtype or device than the result")
        return out.copy_(found)

    return serve_into
