"""The operands of a run: their places in memory, their launch keys, and checks of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Self

import torch

from holdfast.core import private
from holdfast.core.checks import kind_of, refused_kind, refused_memory, short_memory
from holdfast.core.descriptor import Expected
from holdfast.core.last_call import Places, host_key, storage_sizes
from holdfast.core.strided import overlaps_itself, span

#: A tensor, or a host value (a scale as a float, a zero point as an int or None).
Operand = torch.Tensor | float | int | None

#: Differs from the places of all operands.
NO_PLACES: Places = ((), ())

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class Extents:
    """Sizes of operands in memory, from the first byte to the last."""

    of_operands: tuple[int, ...]  # bytes; 0 for host values
    of_tensors: tuple[tuple[int, int, int], ...]  # position among the operands, bytes, itemsize

    @classmethod
    def of(cls, operands: Sequence[Operand]) -> Self:
        tensors = [(i, operand) for i, operand in enumerate(operands) if isinstance(operand, torch.Tensor)]
        sizes = {i: tensor.element_size() for i, tensor in tensors}
        reached = {i: span(tensor.shape, tensor.stride()) * sizes[i] for i, tensor in tensors}
        return cls(
            tuple(reached.get(i, 0) for i in range(len(operands))),
            tuple((i, reached[i], sizes[i]) for i, _ in tensors),
        )


def addresses_of(operands: Sequence[Operand]) -> list[int]:
    """The address of each operand; 0 for a host value."""
    return [_address(operand) if isinstance(operand, torch.Tensor) else 0 for operand in operands]


def _address(tensor: torch.Tensor) -> int:
    if type(tensor) not in _PLAIN and refused_memory("", tensor):
        raise TypeError  # a tensor without memory has no address
    return tensor.data_ptr()


def places_of(operands: Sequence[Operand]) -> Places:
    """The address of each operand, and the storage size of each tensor."""
    rooms = storage_sizes(operand for operand in operands if isinstance(operand, torch.Tensor))
    return addresses_of(operands), rooms


def misalignment_of(addresses: Sequence[int]) -> tuple[int, ...]:
    """Each address modulo 16; empty if all addresses are aligned to 16 bytes. Selects the kernel variant."""
    if not reduce(or_, addresses, 0) & 15:
        return ()
    return tuple(address & 15 for address in addresses)


def launch_key(operand: Operand) -> Any:
    """The properties of an operand that a launch depends on."""
    if isinstance(operand, torch.Tensor):
        kind = type(operand), operand.is_neg(), private.is_zerotensor(operand)
        return operand.dtype, operand.shape, operand.stride(), operand.device, kind
    return type(operand), host_key(operand)


def refused_place(name: str, tensor: torch.Tensor, device: torch.device) -> str:
    """Why a kernel on ``device`` cannot read or write the memory of ``tensor``, or ""."""
    reason = refused_kind(name, tensor)
    if reason:
        return reason
    if tensor.is_neg():
        return f"{name} is a negated view, whose memory holds the opposite; call resolve_neg() first."
    if tensor.device != device:
        return f"{name} is on {tensor.device} and the plan runs on {device}; move it there."
    return refused_memory(name, tensor)


def refused_tensor(name: str, tensor: Any, expected: Expected | None) -> str:
    """Why ``tensor`` does not match the descriptor, or "". With ``expected=None`` it must be None."""
    if expected is None:
        return "" if tensor is None else f"{name} is given, and the descriptor says that there is none."
    shape, dtype = expected
    reason = refused_dtype(name, tensor, dtype)
    if not reason and tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}; the descriptor asks for {shape}."
    return reason


def refused_dtype(name: str, tensor: Any, dtype: torch.dtype) -> str:
    """Why ``tensor`` is not a tensor of ``dtype``, or ""."""
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is {kind_of(tensor)}; it must be a torch tensor."
    if tensor.dtype != dtype:
        return f"{name} has dtype {tensor.dtype}; the descriptor asks for {dtype}."
    return ""


def refused_output(name: str, out: torch.Tensor) -> str:
    """Why a tensor cannot be written, or ""."""
    if overlaps_itself(out.shape, out.stride()):
        return (
            f"{name} has strides {tuple(out.stride())} for shape {tuple(out.shape)}, so that "
            "elements share memory; outputs must not overlap themselves. Allocate it anew."
        )
    return ""


def refused_places(
    names: Sequence[str],
    outputs: int,
    operands: Sequence[Operand],
    places: Places,
    reached: Extents,
    workspace: tuple[int, int],
    known: Places = NO_PLACES,
) -> str:
    """Why the memory of an operand is too small or overlaps an output or the workspace, or "".

    The first ``outputs`` operands are written. ``workspace`` is (address or 0, bytes). Operands at their
    ``known`` places are not checked for size again.
    """
    addresses, rooms = places
    before, rooms_before = known
    for nth, (i, extent, itemsize) in enumerate(reached.of_tensors):
        room = rooms[nth]
        if before and addresses[i] == before[i] and room == rooms_before[nth]:
            continue
        tensor: Any = operands[i]
        if extent and (tensor.storage_offset() * itemsize + extent > room or not addresses[i]):
            return short_memory(names[i], tensor, extent)
    extents = reached.of_operands
    for i in range(outputs):
        start = addresses[i]
        end = start + extents[i]
        for other in range(i + 1, len(extents)):
            if addresses[other] < end and start < addresses[other] + extents[other]:
                return (
                    f"{names[i]} shares memory with another argument; an output must have memory of its own. "
                    "Allocate it with torch.empty_like."
                )
    scratch, size = workspace
    if scratch:
        for address, extent in zip(addresses, extents, strict=True):
            if address < scratch + size and scratch < address + extent:
                return (
                    "the workspace shares memory with an argument; it must have memory of its own. Allocate "
                    "it with Workspace.allocate."
                )
    return ""
