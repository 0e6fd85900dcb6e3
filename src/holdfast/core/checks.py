"""Checks of callers' arguments. An error message says what was given, what is accepted and what to do.

Kernels receive addresses, so every tensor must be dense and have all its elements in memory. Numbers are
checked by type, because ``1``, ``1.0`` and ``True`` are equal as keys of a cache. Functions named
``refused_*`` return the reason for a refusal, or "".
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch

from holdfast.core import private
from holdfast.core.errors import InvalidArgs, InvalidDescriptor
from holdfast.core.strided import span

#: The range of integer arguments of torch operators.
INT64 = -(2**63), 2**63 - 1
_INFINITY = float("inf")
#: Longest text of a value in an error message, characters.
_LONGEST = 80


def shown(value: Any) -> str:
    """The text of ``value`` in an error message, shortened if necessary."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write whole numbers of more than 4300 digits
        return f"{kind_of(value)} of {value.bit_length()} bits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def kind_of(value: Any) -> str:
    """The type of ``value`` in an error message, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def refused_kind(name: str, tensor: torch.Tensor) -> str:
    """Why no kernel accepts a tensor of this kind, or "". Reads no memory, so it can be traced."""
    if tensor.is_nested:
        return f"{name} is a nested tensor; it must be a dense one. Call to_padded_tensor() first."
    if tensor.layout is not torch.strided:
        return f"{name} has layout {tensor.layout}; it must be a dense tensor. Call to_dense() first."
    if tensor.is_quantized:
        return f"{name} is a quantized tensor of torch, {tensor.dtype}; pass its codes, int_repr()."
    return ""


def refused_memory(name: str, tensor: torch.Tensor) -> str:
    """Why the memory of a dense tensor does not hold all its elements, or ""."""
    if private.has_dispatch(tensor):
        return f"{name} is {kind_of(tensor)}, which has no memory of its own; pass a plain tensor."
    if private.is_zerotensor(tensor):
        return f"{name} is a zero tensor of torch, which has no memory; pass {name}.clone()."
    needed = span(tensor.shape, tensor.stride()) * tensor.element_size()
    if needed and (tensor.data_ptr() == 0 or not _holds(tensor, needed)):
        return short_memory(name, tensor, needed)
    return ""


def _holds(tensor: torch.Tensor, needed: int) -> bool:
    begin = tensor.storage_offset() * tensor.element_size()
    return bool(begin + needed <= tensor.untyped_storage().nbytes())


def short_memory(name: str, tensor: torch.Tensor, needed: int) -> str:
    """The error message for a tensor whose storage was freed or shrunk."""
    room = tensor.untyped_storage().nbytes()
    return (
        f"{name} needs {needed} bytes from element {tensor.storage_offset()} of its storage, which has "
        f"{room} bytes; the storage was freed or shrunk. Restore it with untyped_storage().resize_(), or "
        "pass a new tensor."
    )


def require_tensor(name: str, tensor: Any) -> None:
    """Raise unless this is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgs(f"{name} is {kind_of(tensor)}; it must be a torch tensor.")
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        raise InvalidArgs(refused_kind(name, tensor))


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor's storage was freed or shrunk.

    For tensors that torch's own operations read before a kernel does: torch would read past the storage.
    Under a transform the innermost tensor is checked. Traced tensors have no memory and are accepted.
    """
    tensor = private.unwrapped(tensor)
    if private.is_zerotensor(tensor) or tensor.is_meta or not private.has_storage(tensor):
        return
    if private.has_dispatch(tensor):
        return
    reason = refused_memory(name, tensor)
    if reason:
        raise InvalidArgs(reason)


def require_bool(name: str, value: Any) -> None:
    """Raise unless this is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgs(f"{name} is {shown(value)}; it must be True or False.")


def require_dtype(name: str, dtype: Any) -> None:
    """Raise unless this is a dtype."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgs(f"{name} is {shown(dtype)}; it must be a dtype of torch, such as torch.int8.")


def require_choice(name: str, value: Any, accepted: Collection[str]) -> None:
    """Raise unless this is one of the accepted strings."""
    if not isinstance(value, str) or value not in accepted:
        named = ", ".join(repr(str(word)) for word in accepted)
        raise InvalidDescriptor(f"{name} is {shown(value)}; accepted are {named}.")


def is_whole(value: Any) -> bool:
    """Whether this is an int or a SymInt, and not a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int, most: int) -> int:
    """``value`` as an int from ``least`` to ``most``."""
    if type(value) is not int:
        if isinstance(value, torch.SymInt):
            return value  # type: ignore[return-value]
        value = as_index(name, value)
    if not least <= value <= most:
        raise InvalidArgs(f"{name} is {shown(value)}; accepted are whole numbers from {least} to {most}.")
    return value  # type: ignore[no-any-return]


def as_index(name: str, value: Any, what: str = "a whole number") -> int:
    """``value`` as an int. Bools are refused, and tensors, which would need a device synchronization."""
    if not isinstance(value, (bool, torch.Tensor)):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise InvalidArgs(f"{name} is {shown(value)}; it must be {what}.")


def finite_number(name: str, value: Any, what: str = "a finite number") -> float:
    """``value`` as a float."""
    if type(value) is float and abs(value) < _INFINITY:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = _INFINITY
        if abs(number) < _INFINITY:
            return number
    raise InvalidArgs(f"{name} is {shown(value)}; it must be {what}.")
