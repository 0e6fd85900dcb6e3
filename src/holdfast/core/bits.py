"""Exact comparison and digests of tensors.

All NaN compare equal, because payload and sign of a NaN are not guaranteed. +0 and -0 differ. Elements of a
one-byte floating dtype are codes: all their bits are compared, also those of NaN.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from holdfast.core.dtypes import dtype_name

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor = tensor.masked_fill(tensor != tensor, float("nan"))
    return tensor.contiguous().view(_WHOLE[tensor.dtype.itemsize])


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the storage that ``tensor`` is a view of."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def digest(outputs: dict[str, torch.Tensor]) -> str:
    """A digest of the outputs: names, dtypes, shapes and bits; 16 hexadecimal digits."""
    total = hashlib.sha256()
    for name, tensor in outputs.items():
        total.update(f"{name} {dtype_name(tensor.dtype)} {tuple(tensor.shape)}\n".encode())
        total.update(canonical(tensor.cpu()).numpy().tobytes())
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class Mismatch:
    """The first element at which two tensors differ, and the number of elements that differ."""

    where: str
    expected: str
    found: str
    count: int

    def __str__(self) -> str:
        return f"{self.where}: {self.expected} expected, {self.found} found ({self.count} differ)"


def mismatch(name: str, expected: torch.Tensor, found: torch.Tensor) -> Mismatch | None:
    """The first difference between the tensors, or between the memory around them; None if there is none."""
    if same_layout(expected, found) and torch.equal(_bytes(expected), _bytes(found)):
        return None
    differs = (canonical(expected) != canonical(found)).nonzero()
    if len(differs):
        index = tuple(differs[0].tolist())
        where = f"{name}[{', '.join(map(str, index))}]"
        return Mismatch(where, _shown(expected[index]), _shown(found[index]), len(differs))
    around, found_around = memory(expected), memory(found)
    differs = (canonical(around) != canonical(found_around)).nonzero()
    if len(differs):
        place = int(differs[0])
        where = f"memory beside {name}, {place - expected.storage_offset():+d} elements from its start"
        return Mismatch(where, _shown(around[place]), _shown(found_around[place]), len(differs))
    return None


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether shapes, strides and offsets are equal, so that comparing the storages compares the tensors."""
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _shown(element: torch.Tensor) -> str:
    bits = int(canonical(element.reshape(1))[0]) & (2 ** (8 * element.element_size()) - 1)
    return f"{element.item()!r} (0x{bits:0{2 * element.element_size()}x})"
