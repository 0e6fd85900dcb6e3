"""Segments: the elements that share a scale, and the loops over them.

A tensor with scales has ``count`` segments of ``length`` elements. ``segments_in_order`` keeps the order of a
segment's elements, which matters for a sum. ``segments_by_memory`` orders the loops by memory, for a minimum
or maximum, where the order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from holdfast.core.granularity import ScaleView
from holdfast.core.operands import Operand
from holdfast.core.strided import Space, coalesce


@dataclass(frozen=True)
class Segments:
    """The loops ``over`` the segments and the loops ``within`` each segment.

    ``over`` has strides for each tensor, then for each operand with one value per segment; ``within`` has
    strides for the tensors only. The innermost loop is called the columns; ``columns_within`` says whether it
    runs within a segment or over the segments.
    """

    over: Space
    within: Space
    columns_within: bool = True

    @property
    def columns(self) -> int:
        return (self.within if self.columns_within else self.over).columns

    @property
    def count(self) -> int:
        return prod(self.over.sizes)

    @property
    def length(self) -> int:
        return prod(self.within.sizes)


def segment_length(view: ScaleView) -> int:
    """The number of elements that share a scale."""
    return prod(size for size, varies in zip(view.shape, view.varies, strict=True) if not varies)


def segments_in_order(
    view: ScaleView, tensors: Sequence[torch.Tensor], per_segment: Sequence[Operand]
) -> Segments:
    """The loops over ``tensors``. The elements of a segment are in row-major order.

    The loops over segments are ordered by the strides of the first tensor.
    """
    of_tensors = [view.tensor_strides(tensor.stride()) for tensor in tensors]
    over = _loops(view, _varying(view), (*of_tensors, *_strides(view, per_segment)))
    if over.sizes == (1,):
        over = Space((1,), ((0,),) * len(over.strides))
    longer = [d for d in _varying(view, False) if view.shape[d] != 1]
    return Segments(over, _loops(view, longer, of_tensors, keep_order=True))


def segments_by_memory(
    view: ScaleView, tensors: Sequence[Sequence[int]], per_segment: Sequence[Operand], *, packed: bool = False
) -> Segments:
    """The loops over tensors with these strides, ordered by the strides of the first tensor.

    The columns run within a segment or over the segments, whichever has the smaller stride. Both spaces end
    with the loop of the columns; in the space without columns its size is 1. ``packed`` keeps the last axis
    innermost, because its neighbours share bytes.
    """
    of_tensors = [view.tensor_strides(strides) for strides in tensors]
    over = _loops(view, _varying(view), (*of_tensors, *_strides(view, per_segment)), keep_order=packed)
    within = _loops(view, _varying(view, False), of_tensors, keep_order=packed)
    columns_within = not view.varies[-1] if packed else _step(within) <= _step(over)
    if columns_within:
        return Segments(_without_columns(over), within, True)
    return Segments(over, _without_columns(within), False)


def _strides(view: ScaleView, per_segment: Sequence[Operand]) -> list[tuple[int, ...]]:
    strides = []
    for operand in per_segment:
        steps = None
        if isinstance(operand, torch.Tensor):
            steps = view.scale_strides(operand.shape, operand.stride())
        strides.append(steps or (0,) * len(view.shape))
    return strides


def _varying(view: ScaleView, varying: bool = True) -> list[int]:
    """The axes along which the scale varies, or, with False, the other axes."""
    return [d for d, varies in enumerate(view.varies) if varies == varying]


def _loops(
    view: ScaleView, axes: Sequence[int], strides: Sequence[Sequence[int]], *, keep_order: bool = False
) -> Space:
    return coalesce(
        [view.shape[d] for d in axes], [[own[d] for d in axes] for own in strides], keep_order=keep_order
    )


def _step(space: Space) -> float:
    """The stride of the innermost loop; infinite if its size is 1."""
    return space.strides[0][-1] if space.columns != 1 else float("inf")


def _without_columns(space: Space) -> Space:
    if space.sizes == (1,):
        return replace(space, strides=tuple((0,) for _ in space.strides))
    return Space((*space.sizes, 1), tuple((*strides, 0) for strides in space.strides))
