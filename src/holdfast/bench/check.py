"""Compares a kernel with the reference before it is timed."""

from __future__ import annotations

from dataclasses import replace

import torch

from holdfast.core.benchmark import Case, Tensors
from holdfast.core.bits import canonical
from holdfast.core.stream import Stream

#: Number of elements: few enough for the reference, enough to reach every loop of a kernel.
ELEMENTS = 2**16


def differences(case: Case, stream: Stream, backend: str) -> int:
    """The number of elements in which ``backend`` and reference differ, on a small version of the case."""
    timed = case.problem(ELEMENTS, stream, backend)
    tensors = timed.draw()
    timed.put_special_values(tensors)
    for name in timed.plan.outputs:
        _poison(tensors[name])
    reference = replace(case, function=False).problem(ELEMENTS, Stream.current("cpu"), "reference")
    copies: Tensors = {
        name: value.cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in tensors.items()
    }
    made, expected = timed.call(tensors)(), reference.call(copies)()
    return sum(int((canonical(a.cpu()) != canonical(b)).sum()) for a, b in zip(made, expected, strict=True))


def _poison(output: torch.Tensor | None) -> None:
    """Fill an output, so that elements that are not written differ from the reference."""
    if output is not None:
        output.fill_(float("nan") if output.is_floating_point() else 85)
