"""The operands of a plan, and the checks of the tensors among them. Each failure is a sentence."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.checks import refused_kind, refused_memory

#: A tensor, or a value that the host holds (a scale as a float, a zero point as an int or None).
Operand = torch.Tensor | float | int | None


def refused_place(name: str, tensor: torch.Tensor, device: torch.device) -> str:
    """Why a kernel on ``device`` cannot read or write the memory of ``tensor``, or nothing."""
    reason = refused_kind(name, tensor)
    if reason:
        return reason
    if tensor.is_neg():
        return f"{name} is a negated view, whose memory holds the opposite; call resolve_neg() first."
    if tensor.device != device:
        return f"{name} is on {tensor.device} and the plan runs on {device}; move it there."
    return refused_memory(name, tensor)


def refused_tensor(name: str, tensor: Any, expected: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    """Why ``tensor`` is not what the descriptor asks for; if nothing is expected, there must be none."""
    if expected is None:
        return "" if tensor is None else f"{name} is given, and the descriptor says that there is none."
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is a {type(tensor).__name__}; it must be a torch tensor."
    shape, dtype = expected
    if tensor.dtype != dtype:
        return f"{name} has dtype {tensor.dtype}; the descriptor asks for {dtype}."
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}; the descriptor asks for {shape}."
    return ""
