"""Args with one mistake. Every backend must refuse them with the same message and write nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.core.case import operands_of
from holdfast.core.errors import HoldfastError
from holdfast.core.plan import Args, Plan
from holdfast.core.stream import Stream, Workspace
from holdfast.proof.conformance import copy_args, first_mismatch


def refused_everywhere(plans: Sequence[Plan[Any, Any]], args: Args, number: int) -> str:
    """Check that ``plans``, all on the CPU, refuse mistake ``number``. Returns what is wrong, or ''."""
    names = [name for name, value in operands_of(args).items() if isinstance(value, torch.Tensor)]
    name, mistake = names[number % len(names)], MISTAKES[number // len(names) % len(MISTAKES)]
    broken = mistake(getattr(args, name))
    if broken is None:
        return ""
    sentences = {made.backend: _sentence(made, args, name, broken) for made in plans}
    what = f"{name} {mistake.__name__.strip('_').replace('_', ' ')}"
    for backend, (sentence, written) in sentences.items():
        if not sentence:
            return f"{what}: {backend} did not refuse it"
        if written:
            return f"{what}: {backend} wrote {written}"
    if len(set(sentences.values())) > 1:
        return f"{what}: {sentences}"
    return ""


def _sentence(made: Plan[Any, Any], args: Args, name: str, broken: Any) -> tuple[str, str]:
    """The message of a plan that refuses args where ``name`` is ``broken``, and what it wrote anyway."""
    given = copy_args(args, "cpu")
    setattr(given, name, broken)
    reason, sentence = made.can_implement(given).reason, ""
    try:
        made.run(Stream.current("cpu"), Workspace.allocate(made.workspace_size(), "cpu"), given)
    except HoldfastError as refused:
        sentence = str(refused)
    if sentence != reason:
        return f"run says {sentence!r}, can_implement says {reason!r}", ""
    return sentence, first_mismatch(args, given, skip=(name,))


def _of_another_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex64)


def _with_one_more_axis(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).expand(2, *tensor.shape)


def _as_a_list(tensor: torch.Tensor) -> Any:
    return ["a", "list"]


def _on_no_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _sparse(tensor: torch.Tensor) -> torch.Tensor | None:
    real = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1  # torch has no sparse codes
    return tensor.to_sparse() if tensor.dim() and real else None


def _without_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed if tensor.numel() else None


#: Functions that return an invalid version of a tensor, or None if it would be valid.
MISTAKES: tuple[Callable[[torch.Tensor], Any], ...] = (
    _of_another_dtype, _with_one_more_axis, _as_a_list, _on_no_device, _sparse, _without_memory,
)  # fmt: skip
