"""The launch that a plan did last, and whether new args are like those it was prepared for.

Reading dtype, shape, strides and device of every tensor from Python costs more than all else that ``run``
does. torch can compare them with remembered ones in one call, by which its compiler guards what it compiled.
Where that private interface is missing, every run takes the long way, to the same end.
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

#: The address of each operand, 0 for one of the host; and the bytes of each tensor's storage.
Places = tuple[Sequence[int], Sequence[int]]


def storage_sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The bytes of each tensor's storage, which may have been freed or shrunk since the last look."""
    return list(map(_size, map(_storage, tensors)))


class LastCall(Generic[T]):
    """What was prepared for some operands and options, and a quick way to tell whether others are alike."""

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
        """None where there is no quick way to compare."""
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        check = private.guard_of(tensors) if tensors else None
        return None if check is None else cls(prepared, check, operands, options)

    def places(self, operands: Sequence[Any], options: tuple[bool, ...]) -> Places | None:
        """Where the operands are; None if they are unlike the remembered ones."""
        if options is not self._options:  # an empty tuple is one object
            for option, known in zip(options, self._options, strict=True):
                if option is not known:  # 1 equals True, and is none
                    return None
        for i, kind, key in self._hosts:
            operand = operands[i]
            if operand is not key and (type(operand) is not kind or host_key(operand) != key):
                return None
        tensors = self._tensors_of(operands)
        try:
            for tensor in tensors:
                if tensor.is_nested:  # it has no sizes, and the check, asked for them, would end the process
                    return None
        except AttributeError:  # a value of the host, where there was a tensor
            return None
        if not self._check(*tensors):
            return None
        found = list(map(_address, tensors))
        for i, _, _ in self._hosts:
            found.insert(i, 0)
        return found, storage_sizes(tensors)


def getter_of(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the operands at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    # One position would give the operand itself, one slice gives it in a tuple.
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))


def host_key(operand: Any) -> Any:
    """What a launch depends on in a value of the host: a float may change from run to run."""
    return float if type(operand) is float else operand
