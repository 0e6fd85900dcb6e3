"""The taps of interpolate along one axis: for each output index its input indices and their weights.

All of it is computed in float64 with + - * / and comparisons alone, so it is the same on every machine. Only
the indices of the modes nearest and nearest-exact are computed in float32, as torch does. Kernels round the
weights once to their compute type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Table:
    """The taps of an axis: index i reads ``first[i]`` to ``first[i] + count[i]``.

    Its weights are ``weights[start[i]]`` and on. ``first`` never decreases, nor does ``first + count``.
    """

    first: Array
    count: Array
    weights: Array

    @property
    def start(self) -> Array:
        return np.cumsum(self.count) - self.count

    @property
    def most(self) -> int:
        """Maximum number of taps of an index."""
        return int(self.count.max())

    @property
    def usual(self) -> int:
        """Number of taps of most indices. One index, or 1/32 of them, may have more: those at the edges."""
        others = min(max(len(self.count) // 32, 1), len(self.count) - 1)
        return int(np.sort(self.count)[-1 - others])

    @property
    def roundings(self) -> int:
        """Maximum number of roundings between a term and the sum. Products with 0 and 1 are exact."""
        return self.most - bool(np.isin(self.weights, (0.0, 1.0)).all())

    def transposed(self, size: int) -> Table:
        """The table of the gradient: for each of ``size`` input indices, the output indices that read it."""
        index = np.arange(size)
        first = np.searchsorted(self.first + self.count, index, "right")
        count = np.searchsorted(self.first, index, "right") - first
        place, output = _flat(first, count)
        return Table(first, count, self.weights[self.start[output] + place - self.first[output]])


def _flat(first: Array, count: Array) -> tuple[Array, Array]:
    """For all taps of all indices, in order: the index, and the position that the tap reads."""
    index = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(index)) - (np.cumsum(count) - count)[index]
    return index, first[index] + number


def each(size: int) -> Table:
    """An axis of which each index reads itself."""
    return Table(np.arange(size), np.ones(size, np.int64), np.ones(size))


#: An axis that is not interpolated.
SAME = each(1)


@lru_cache(maxsize=64)
def table_of(
    mode: str, size: int, output_size: int, align_corners: bool, antialias: bool, scale: float
) -> Table:
    """The table of an axis. ``scale`` is the given scale factor, or 0 for the ratio of the sizes."""
    if mode in ("nearest", "nearest-exact"):
        return _nearest(size, output_size, scale, 0.5 if mode == "nearest-exact" else 0.0)
    if mode == "area":
        return _area(size, output_size)
    step = _step(size, output_size, align_corners, scale)
    if antialias:
        return _antialiased(size, output_size, step, mode == "bicubic")
    return _interpolated(size, output_size, step, align_corners, mode == "bicubic")


def _step(size: int, output_size: int, align_corners: bool, scale: float) -> float:
    """The distance of neighbouring output indices, in input indices."""
    if align_corners:
        return (size - 1) / (output_size - 1) if output_size > 1 else 0.0
    return 1.0 / scale if scale else size / output_size


def _nearest(size: int, output_size: int, scale: float, offset: float) -> Table:
    """One tap. The index is computed in float32."""
    step = np.float32(1.0 / scale) if scale else np.float32(size) / np.float32(output_size)
    at = (np.arange(output_size, dtype=np.float32) + np.float32(offset)) * step
    first = np.minimum(np.floor(at), size - 1).astype(np.int64)
    return Table(first, np.ones(output_size, np.int64), np.ones(output_size))


def _area(size: int, output_size: int) -> Table:
    """The windows of adaptive average pooling."""
    index = np.arange(output_size)
    first, end = index * size // output_size, -(-(index + 1) * size // output_size)
    count = end - first
    return Table(first, count, np.repeat(1.0 / count, count))


def _interpolated(size: int, output_size: int, step: float, align_corners: bool, cubic: bool) -> Table:
    """Two or four taps around a coordinate. Taps outside the axis are added to the tap at its end."""
    index = np.arange(output_size, dtype=np.float64)
    at = step * index if align_corners else step * (index + 0.5) - 0.5
    if not cubic:
        at = np.maximum(at, 0.0)
    low = np.minimum(np.floor(at), size - 1)
    t = np.minimum(np.maximum(at - low, 0.0), 1.0)
    taps = [far(t + 1.0), near(t), near(1.0 - t), far((1.0 - t) + 1.0)] if cubic else [1.0 - t, t]
    below = 1 if cubic else 0
    places = [np.clip(low.astype(np.int64) + number - below, 0, size - 1) for number, _ in enumerate(taps)]
    first, count = places[0], places[-1] - places[0] + 1
    start, weights = np.cumsum(count) - count, np.zeros(int(count.sum()))
    for place, weight in zip(places, taps, strict=True):
        weights[start + place - first] += weight
    return Table(first, count, weights)


def near(u: Array, a: float = -0.75) -> Array:
    """The cubic filter at a distance of up to 1."""
    return ((a + 2.0) * u - (a + 3.0)) * u * u + 1.0


def far(u: Array, a: float = -0.75) -> Array:
    """The cubic filter at a distance from 1 to 2."""
    return (((u - 5.0) * u + 8.0) * u - 4.0) * a


def _antialiased(size: int, output_size: int, step: float, cubic: bool) -> Table:
    """Taps in a window that is wider the more the axis shrinks. The weights are divided by their sum."""
    shrink = max(step, 1.0)
    support = (2.0 if cubic else 1.0) * shrink
    centre = step * (np.arange(output_size, dtype=np.float64) + 0.5)
    first = np.clip(np.trunc(centre - support + 0.5), 0, size - 1).astype(np.int64)
    end = np.clip(np.trunc(centre + support + 0.5), first + 1, size).astype(np.int64)
    count = end - first
    index, place = _flat(first, count)
    u = np.abs((place - centre[index] + 0.5) * (1.0 / shrink))
    if cubic:
        weights = np.where(u < 1.0, near(u, -0.5), np.where(u < 2.0, far(u, -0.5), 0.0))
    else:
        weights = np.where(u < 1.0, 1.0 - u, 0.0)
    table = Table(first, count, weights)
    start, total = table.start, np.zeros(output_size)
    for number in range(table.most):
        filled = np.flatnonzero(number < count)
        total[filled] += weights[start[filled] + number]
    return Table(first, count, weights / np.where(total != 0.0, total, 1.0)[index])


def joined(tables: Sequence[Table]) -> tuple[Array, Array]:
    """The tables of several axes in one: rows of first, count and start (int32), and all weights."""
    spans, used = [], 0
    for table in tables:
        spans.append(np.stack([table.first, table.count, table.start + used]))
        used += len(table.weights)
    return np.concatenate(spans, axis=1).astype(np.int32), np.concatenate([t.weights for t in tables])
