"""Segment sum: rows added up by destination, in the order that they come in.

``out[i]`` is the sum of ``terms[n]`` over all n with ``destinations[n] == i``: sequential within chunks of 32
in ascending n, then over the chunk sums in the same way until one is left. This is what the gradients of
embedding and embedding_bag are made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.ops.segment_sum.indexed import (
    IndexedDescriptor,
    IndexedPlan,
    SummingArgs,
    summing_ulp,
)


@dataclass(frozen=True, kw_only=True)
class SegmentSumDescriptor(IndexedDescriptor):
    """``shape`` is that of the destinations; each has a term of ``width`` elements, and goes to a segment."""

    segments: int
    width: int

    sizes = ("segments", "width")
    operands = ("out", "terms", "destinations")

    @property
    def empty(self) -> bool:
        return self.segments == 0 or self.width == 0

    def expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name == "destinations":
            return self.shape, self.index_dtype
        return ((self.segments,) if name == "out" else self.shape) + (self.width,), self.dtype


@dataclass(kw_only=True, slots=True, eq=False)
class SegmentSumArgs(SummingArgs):
    """``terms`` and ``destinations`` are read, ``out`` is written, or with ``accumulate`` added to.

    A destination that is no segment is skipped. A segment without terms is zeros; with ``accumulate`` it is
    left as it is.
    """

    terms: torch.Tensor
    destinations: torch.Tensor
    out: torch.Tensor
    accumulate: bool = False

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.out, self.terms, self.destinations

    def options(self) -> tuple[bool]:
        return (self.accumulate,)


class SegmentSumPlan(IndexedPlan[SegmentSumDescriptor, SegmentSumArgs]):
    """out[i] = the ordered sum of the terms whose destination is i."""

    op = "segment_sum"
    direction = "forward"
    outputs = ("out",)
    Descriptor = SegmentSumDescriptor
    Args = SegmentSumArgs
    kernels = {
        "cpu": "holdfast.ops.segment_sum.cpu:SegmentSum",
        "gpu": "holdfast.ops.segment_sum.gpu:SegmentSum",
        "reference": "holdfast.ops.segment_sum.reference:SegmentSum",
    }
    cases = "holdfast.ops.segment_sum.cases"

    def mode(self) -> str:
        return "ordered"

    def _ulp(self) -> dict[str, float]:
        return {"out": summing_ulp(self.descriptor.real, self.descriptor.count)}

    def bytes_moved(self) -> int:
        desc = self.descriptor
        rows = desc.count + desc.segments
        return rows * desc.width * desc.dtype.itemsize + desc.count * desc.index_dtype.itemsize
