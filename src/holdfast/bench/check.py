"""No speed without the right bits: the kernel that is timed is compared with the reference first."""

from __future__ import annotations

from dataclasses import replace

import torch

from holdfast.bench.cases import Case, Tensors
from holdfast.core.stream import Stream

#: Small enough for the reference, large enough for every kernel to use all of its loops.
ELEMENTS = 2**16
_SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 3e38, -3e38, 1e-42, 0.5, 1.5, -0.5, -2.5)


def differences(case: Case, stream: Stream, backend: str) -> int:
    """In how many elements ``backend`` and the reference differ, on a small version of the case."""
    timed = case.problem(ELEMENTS, stream, backend)
    tensors = timed.draw()
    for name, tensor in tensors.items():
        if tensor is not None and name in timed.plan.tensors:
            _season(tensor, output=name in timed.plan.outputs)
    reference = replace(case, function=False).problem(ELEMENTS, Stream.current("cpu"), "reference")
    expected: Tensors = {name: None if t is None else t.cpu().clone() for name, t in tensors.items()}
    return _unequal(timed.call(tensors)(), reference.call(expected)())


def _season(tensor: torch.Tensor, *, output: bool) -> None:
    """Poison an output, so that what was not written shows; put the hard values into an input."""
    if output:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 85)
    elif tensor.is_floating_point():
        tensor.view(-1)[: len(_SPECIAL)] = torch.tensor(_SPECIAL, device=tensor.device).to(tensor.dtype)


def _unequal(made: torch.Tensor, expected: torch.Tensor) -> int:
    made = made.cpu()
    if not made.is_floating_point():
        return int((made != expected).sum())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[made.element_size()]
    both_nan = made.isnan() & expected.isnan()
    return int(((made.view(bits) != expected.view(bits)) & ~both_nan).sum())
