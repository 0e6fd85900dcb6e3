"""Segments: the elements that share a scale, and the loops that walk over them.

The extremes of a segment are the same in whatever order its elements are seen, so all loops are ordered by
the memory that they walk. The innermost one of all is called the columns: it runs within a segment, or over
the segments, whichever has its elements closer together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from holdfast.core.granularity import ScaleView
from holdfast.core.plan import Operand
from holdfast.core.strided import Space, coalesce


@dataclass(frozen=True)
class Segments:
    """The loops ``over`` the segments and those ``within`` each.

    The last loop of both is that of the columns; where it belongs to the other, its size is 1. ``over`` has
    strides for each tensor, then for each operand with a value per segment; ``within`` for the tensors alone.
    """

    over: Space
    within: Space
    columns_within: bool

    @property
    def columns(self) -> int:
        return (self.within if self.columns_within else self.over).columns

    @property
    def count(self) -> int:
        return prod(self.over.sizes)

    @property
    def length(self) -> int:
        return prod(self.within.sizes)


def segments(
    view: ScaleView, tensors: Sequence[Sequence[int]], per_segment: Sequence[Operand], *, packed: bool = False
) -> Segments:
    """The loops over tensors with these strides, of which the first is followed in memory.

    ``packed`` keeps the last axis innermost, since its neighbours share bytes.
    """
    of_tensors = [view.tensor_strides(strides) for strides in tensors]
    of_operands = [_strides(view, operand) for operand in per_segment]
    over = _loops(view, True, (*of_tensors, *of_operands), packed)
    within = _loops(view, False, of_tensors, packed)
    columns_within = not view.varies[-1] if packed else _step(within) <= _step(over)
    if columns_within:
        return Segments(_without_columns(over), within, True)
    return Segments(over, _without_columns(within), False)


def _strides(view: ScaleView, operand: Operand) -> tuple[int, ...]:
    steps = None
    if isinstance(operand, torch.Tensor):
        steps = view.scale_strides(operand.shape, operand.stride())
    return steps or (0,) * len(view.shape)


def _loops(view: ScaleView, varying: bool, strides: Sequence[Sequence[int]], keep_order: bool) -> Space:
    chosen = [d for d, varies in enumerate(view.varies) if varies == varying]
    return coalesce(
        [view.shape[d] for d in chosen], [[own[d] for d in chosen] for own in strides], keep_order=keep_order
    )


def _step(space: Space) -> float:
    """How far apart neighbours of the innermost loop are; a loop of one has none."""
    return space.strides[0][-1] if space.columns != 1 else float("inf")


def _without_columns(space: Space) -> Space:
    if space.sizes == (1,):
        return replace(space, strides=tuple((0,) for _ in space.strides))
    return Space((*space.sizes, 1), tuple((*strides, 0) for strides in space.strides))
