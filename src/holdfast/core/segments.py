"""Segments: the elements that share a scale, and the loops that walk over them.

A tensor seen from its scales is ``count`` segments of ``length`` elements. Where the order of a segment's
elements matters (a sum), ``segments_in_order`` keeps it. Where it does not (a minimum or maximum),
``segments_by_memory`` orders all loops by the memory that they walk.
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
    """The loops ``over`` the segments and those ``within`` each.

    ``over`` has strides for each tensor, then for each operand with a value per segment; ``within`` has
    strides for the tensors alone. The innermost loop of all is called the columns. ``columns_within`` tells
    whether it runs within a segment or over the segments.
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
    """The elements that share each scale."""
    return prod(size for size, varies in zip(view.shape, view.varies, strict=True) if not varies)


def segments_in_order(
    view: ScaleView, tensors: Sequence[torch.Tensor], per_segment: Sequence[Operand]
) -> Segments:
    """The loops over ``tensors``; the elements of a segment come in row-major order.

    The loops over segments follow the memory of the first tensor.
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
    """The loops over tensors with these strides, in the order of the first one's memory.

    The columns run within a segment or over the segments, whichever has its elements closer together. The
    last loop of both spaces is that of the columns; where it belongs to the other, its size is 1. ``packed``
    keeps the last axis innermost, since its neighbours share bytes.
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
    """The axes along which the scale varies, or those along which it does not."""
    return [d for d, varies in enumerate(view.varies) if varies == varying]


def _loops(
    view: ScaleView, axes: Sequence[int], strides: Sequence[Sequence[int]], *, keep_order: bool = False
) -> Space:
    return coalesce(
        [view.shape[d] for d in axes], [[own[d] for d in axes] for own in strides], keep_order=keep_order
    )


def _step(space: Space) -> float:
    """The distance between neighbours of the innermost loop; infinite for a loop of one."""
    return space.strides[0][-1] if space.columns != 1 else float("inf")


def _without_columns(space: Space) -> Space:
    if space.sizes == (1,):
        return replace(space, strides=tuple((0,) for _ in space.strides))
    return Space((*space.sizes, 1), tuple((*strides, 0) for strides in space.strides))
