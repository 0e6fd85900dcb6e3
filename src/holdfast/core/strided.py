"""The index space of an element-wise kernel: a few nested loops, and the strides of each operand in them.

All operands, scales included, are broadcast to one shape; a stride is 0 where an operand does not vary.
Adjacent loops are merged if they are contiguous for every operand. So a contiguous tensor with one scale
needs a single loop, whatever its rank. The last loop is called the columns, all others together the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Space:
    """``sizes`` of the loops, outermost first, and for each operand its strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> int:
        return self.sizes[-1]

    @property
    def rows(self) -> int:
        rows = 1
        for size in self.sizes[:-1]:
            rows *= size
        return rows


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The extent of a strided tensor in elements, from the first to the last; 0 if it is empty."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may address the same element (exact for every layout that torch creates)."""
    if 0 in sizes:
        return False
    reach = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def coalesce(
    shape: Sequence[int], strides: Sequence[Sequence[int]], *, leader: int = 0, keep_order: bool = False
) -> Space:
    """Order the loops over ``shape`` and merge adjacent loops where all operands allow it.

    The loops are ordered by the strides of operand ``leader``, the output, so that the columns have its
    smallest stride. ``keep_order`` keeps the order of the axes, with the last axis innermost, for packed
    operands, in which neighbours along that axis share a byte.
    """
    last = len(shape) - 1
    dims = [d for d, size in enumerate(shape) if size != 1 or (keep_order and d == last)]
    if not keep_order:
        dims.sort(key=lambda d: tuple(-s[d] for s in (strides[leader], *strides)))
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for d in dims:
        if sizes and all(m[-1] == s[d] * shape[d] for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= shape[d]
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[d]
        else:
            sizes.append(shape[d])
            for m, s in zip(merged, strides, strict=True):
                m.append(s[d])
    if not sizes:
        return Space((1,), tuple((1,) for _ in strides))
    return Space(tuple(sizes), tuple(tuple(m) for m in merged))
