"""The launch that a plan did last, and whether new args are like those it was prepared for.

Reading dtype, shape, strides and device of every tensor from Python costs more than all else that ``run``
does. torch can compare them with remembered ones in one call, by which its compiler guards what it compiled.
That interface is internal: where it is missing, every run takes the long way, to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Generic, Self, TypeVar

import torch

TensorGuards: Any
try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

T = TypeVar("T")

_address = torch.Tensor.data_ptr


class Latest(Generic[T]):
    """What was prepared for some operands and options, and a quick way to tell whether others are alike."""

    __slots__ = ("_check", "_hosts", "_options", "_tensors_of", "prepared")

    def __init__(
        self, prepared: T, check: Callable[..., bool], operands: Sequence[Any], options: tuple[Any, ...]
    ) -> None:
        self.prepared = prepared
        self._check = check
        self._options = options
        tensors = [i for i, operand in enumerate(operands) if isinstance(operand, torch.Tensor)]
        # One position would give the tensor itself, one slice gives it in a tuple.
        one = slice(tensors[0], tensors[0] + 1)
        self._tensors_of = itemgetter(*tensors) if len(tensors) > 1 else itemgetter(one)
        self._hosts = [
            (i, type(operand), host_key(operand)) for i, operand in enumerate(operands) if i not in tensors
        ]

    @classmethod
    def of(cls, prepared: T, operands: Sequence[Any], options: tuple[Any, ...]) -> Self | None:
        """None where there is no quick way to compare."""
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        if TensorGuards is None or not tensors:
            return None
        try:
            guards = TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            )
            if not guards.check(*tensors):
                return None
        except Exception:  # an internal interface may change in any way; then this way is closed
            return None
        return cls(prepared, guards.check, operands, options)

    def addresses(self, operands: Sequence[Any], options: tuple[Any, ...]) -> list[int] | None:
        """The address of each operand, 0 for one of the host; None if they are unlike the remembered ones."""
        if options != self._options:
            return None
        for i, kind, key in self._hosts:
            operand = operands[i]
            if operand is not key and (type(operand) is not kind or host_key(operand) != key):
                return None
        tensors = self._tensors_of(operands)
        if not self._check(*tensors):
            return None
        found = list(map(_address, tensors))
        for i, _, _ in self._hosts:
            found.insert(i, 0)
        return found


def host_key(operand: Any) -> Any:
    """What a launch depends on in a value of the host: a float may change from run to run."""
    return float if type(operand) is float else operand
