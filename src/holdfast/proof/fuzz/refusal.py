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
    name, mistake = names[number % len(names)], list(MISTAKES)[number // len(names) % len(MISTAKES)]
    broken = MISTAKES[mistake](getattr(args, name))
    if broken is None:
        return ""
    sentences = {made.backend: _sentence(made, args, name, broken) for made in plans}
    what = f"{name} {mistake}"
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


def _sparse(tensor: torch.Tensor) -> torch.Tensor | None:
    real = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1  # torch has no sparse codes
    return tensor.to_sparse() if tensor.dim() and real else None


def _without_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed if tensor.numel() else None


#: Functions that return an invalid version of a tensor, or None if it would be valid, by what they change.
MISTAKES: dict[str, Callable[[torch.Tensor], Any]] = {
    "of another dtype": lambda tensor: tensor.to(torch.complex64),
    "with one more axis": lambda tensor: tensor.unsqueeze(0).expand(2, *tensor.shape),
    "as a list": lambda tensor: ["a", "list"],
    "on no device": lambda tensor: tensor.to("meta"),
    "sparse": _sparse,
    "without memory": _without_memory,
}
