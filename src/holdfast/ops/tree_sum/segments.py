"""Segments: the elements that share a scale, in row-major order, and how the tree sum cuts them into blocks.

A tensor seen from its scales is ``count`` segments of ``length`` elements. The loops over segments may come
in any order; those over the elements of a segment keep theirs, since it is the order of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from holdfast.core.granularity import ScaleView
from holdfast.core.plan import Operand
from holdfast.core.strided import Space, coalesce

#: A block of the tree sum: ROWS rows of LANES lanes.
LANES = 256
ROWS = 16
BLOCK = ROWS * LANES


def blocks_of(length: int) -> int:
    """The blocks that a segment of ``length`` elements fills; one if it is empty."""
    return max(1, -(-length // BLOCK))


def lanes_of(length: int) -> int:
    """The lanes that the elements of a segment need within a block: a power of two."""
    return 1 << (min(max(length, 1), LANES) - 1).bit_length()


def levels(length: int) -> tuple[int, ...]:
    """How many sums each level of the tree leaves of a segment; the last leaves one."""
    counts = [blocks_of(length)]
    while counts[-1] > 1:
        counts.append(blocks_of(counts[-1]))
    return tuple(counts)


def segment_length(view: ScaleView) -> int:
    """The elements that share each scale."""
    return prod(size for size, varies in zip(view.shape, view.varies, strict=True) if not varies)


@dataclass(frozen=True)
class Segments:
    """The loops over segments and those over the elements of one.

    ``outer`` has strides for each tensor and then for each operand that has one value for a segment;
    ``inner`` has strides for the tensors alone.
    """

    outer: Space
    inner: Space

    @property
    def count(self) -> int:
        return prod(self.outer.sizes)

    @property
    def length(self) -> int:
        return prod(self.inner.sizes)


def segments(view: ScaleView, tensors: Sequence[torch.Tensor], per_segment: Sequence[Operand]) -> Segments:
    """The loops over ``tensors``, the first of which is followed in memory, and what segments have one of."""
    of_tensors = [view.tensor_strides(tensor.stride()) for tensor in tensors]
    of_shared: list[tuple[int, ...]] = []
    for operand in per_segment:
        steps = None
        if isinstance(operand, torch.Tensor):
            steps = view.scale_strides(operand.shape, operand.stride())
        of_shared.append(steps or (0,) * len(view.shape))
    over = [d for d, varies in enumerate(view.varies) if varies]
    within = [d for d, varies in enumerate(view.varies) if not varies and view.shape[d] != 1]
    outer = coalesce([view.shape[d] for d in over], [[s[d] for d in over] for s in (*of_tensors, *of_shared)])
    if outer.sizes == (1,):
        outer = Space((1,), ((0,),) * len(outer.strides))
    inner = coalesce(
        [view.shape[d] for d in within], [[s[d] for d in within] for s in of_tensors], keep_order=True
    )
    return Segments(outer, inner)


def rounding_errors(length: int) -> int:
    """The most additions that round a term on its way to the total.

    At each level of the tree these are the rows of a block but the first, which is added to zero, and the
    halvings of its lanes; an addition of a zero that fills up a block is exact.
    """
    additions = 0
    while length > 1:
        rows, lanes = -(-min(length, BLOCK) // LANES), min(length, LANES)
        additions += rows - 1 + (lanes - 1).bit_length()
        length = blocks_of(length)
    return additions
