"""How a call of a torch operator is served, or passed on to torch's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from holdfast.core.dtypes import FLOATS
from holdfast.core.plan import Plan
from holdfast.core.strided import span
from holdfast.core.torch_op import select_plan
from holdfast.install import private

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


@lru_cache(maxsize=4096)
def plan_of(plan: type[Plan[Any, Any]], device: torch.device, **fields: Any) -> Plan[Any, Any]:
    """The plan for the descriptor with these fields."""
    return select_plan(plan, device, **fields)


def empty(like: torch.Tensor, shape: tuple[int, ...], layout: torch.memory_format) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def layout_of(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that torch gives to a result of the same rank."""
    return torch.contiguous_format if tensor.is_contiguous() else private.suggested_format(tensor)


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
