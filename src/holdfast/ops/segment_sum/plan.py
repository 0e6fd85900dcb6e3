"""Segment sum: the sum of the rows of each destination, in the order of the input.

``out[i]`` is the sum of ``terms[n]`` over all n with ``destinations[n] == i``: sequential within chunks of 32
in ascending n, then over the chunk sums in the same way until one is left. The gradients of embedding and
embedding_bag are segment sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.declaration import Implementation, Output, arguments
from holdfast.core.descriptor import Expected
from holdfast.core.plan import Plan
from holdfast.ops.segment_sum.indexed import IndexedDescriptor, SummingArgs, summing_ulp


@dataclass(frozen=True, kw_only=True)
class SegmentSumDescriptor(IndexedDescriptor):
    """``shape`` is the shape of the destinations; each has a term of ``width`` elements."""

    segments: int
    width: int

    sizes = ("segments", "width")

    @property
    def empty(self) -> bool:
        return self.segments == 0 or self.width == 0

    def expected(self, name: str) -> Expected:
        if name == "destinations":
            return self.shape, self.index_dtype
        return ((self.segments,) if name == "out" else self.shape) + (self.width,), self.dtype


@arguments
class SegmentSumArgs(SummingArgs):
    """``terms`` and ``destinations`` are read; ``out`` is written, or with ``accumulate`` added to.

    A destination out of range is skipped. A segment without terms is set to zeros, or with ``accumulate``
    left unchanged.
    """

    terms: torch.Tensor
    destinations: torch.Tensor
    out: Output
    accumulate: bool = False


class SegmentSumPlan(Plan[SegmentSumDescriptor, SegmentSumArgs]):
    """out[i] = the ordered sum of terms[n] over all n with destinations[n] == i."""

    kernels = (
        Implementation("cpu", ".cpu:SegmentSum"),
        Implementation("gpu", ".gpu_few_terms:segment_sum"),
        Implementation("reference", ".reference:SegmentSum"),
    )

    def mode(self) -> str:
        return "ordered"

    def ulp(self) -> dict[str, float]:
        return {"out": summing_ulp(self.descriptor.real, self.descriptor.count)}
