"""The cache of a plan's last call, and the check whether new args match it.

Reading dtype, shape, strides and device of every tensor in Python takes more time than the rest of ``run``.
``TensorGuards``, which torch.compile uses for its guards, compares them with stored ones in one call. If this
private interface is missing, every run looks up its full signature instead, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic, Self, TypeVar

import torch

from holdfast.core import private

T = TypeVar("T")

_address = torch.Tensor.data_ptr
_storage = torch.Tensor.untyped_storage
_size = torch.UntypedStorage.nbytes

#: The address of each operand, 0 for a host value; and the storage size of each tensor, bytes.
Places = tuple[Sequence[int], Sequence[int]]


def storage_sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The storage size of each tensor in bytes. It changes if the storage is freed or shrunk."""
    return list(map(_size, map(_storage, tensors)))


class LastCall(Generic[T]):
    """The launch prepared for some operands and options, and a fast check whether others match them."""

    __slots__ = ("_check", "_hosts", "_options", "_tensors_of", "prepared")

    def __init__(
        self, prepared: T, check: Callable[..., bool], operands: Sequence[Any], options: tuple[Any, ...]
    ) -> None:
        self.prepared = prepared
        self._check = check
        self._options = options
        tensors = [i for i, operand in enumerate(operands) if isinstance(operand, torch.Tensor)]
        self._tensors_of = getter_of(tensors)
        self._hosts = [
            (i, type(operand), host_key(operand)) for i, operand in enumerate(operands) if i not in tensors
        ]

    @classmethod
    def of(cls, prepared: T, operands: Sequence[Any], options: tuple[Any, ...]) -> Self | None:
        """The cache for this call; None if TensorGuards cannot compare these operands."""
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        check = private.guard_of(tensors) if tensors else None
        return None if check is None else cls(prepared, check, operands, options)

    def places(self, operands: Sequence[Any], options: tuple[bool, ...]) -> Places | None:
        """The places of the operands; None if they do not match the cached ones."""
        if options is not self._options:  # the empty tuple is a singleton
            for option, known in zip(options, self._options, strict=True):
                if option is not known:  # compared by identity: 1 equals True
                    return None
        for i, kind, key in self._hosts:
            operand = operands[i]
            if operand is not key and (type(operand) is not kind or host_key(operand) != key):
                return None
        tensors = self._tensors_of(operands)
        try:
            for tensor in tensors:
                if tensor.is_nested:  # it has no sizes: the check would abort the process
                    return None
        except AttributeError:  # a host value instead of a tensor
            return None
        if not self._check(*tensors):
            return None
        found = list(map(_address, tensors))
        for i, _, _ in self._hosts:
            found.insert(i, 0)
        return found, storage_sizes(tensors)


def getter_of(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the operands at these positions as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    # With one position itemgetter returns the operand itself; with a slice it returns a tuple.
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))


def host_key(operand: Any) -> Any:
    """The part of a host value that a launch depends on: only the type of a float, the value of an int."""
    return float if type(operand) is float else operand
