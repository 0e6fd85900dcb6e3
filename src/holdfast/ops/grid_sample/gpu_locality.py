"""Locality of a grid, in Triton: whether neighbouring samples read neighbouring pixels.

If they do, dout is read plane by plane and dgrid is computed in the order of the samples. Otherwise dout is
copied with channels last, and dgrid is computed in the order of the cells. A group of samples, those of one
warp, is scattered if its pixels are in many cache lines. A grid is scattered if more than a quarter of its
groups are. Both are computed and read on the device.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

#: Position in ``tallies`` that counts the scattered groups.
SCATTERED = tl.constexpr(0)
#: Samples of a group, maximum cache lines of a group that is not scattered, and pixels per line: twice the
#: real number, since groups are not aligned to lines.
GROUP, LINES, LINE = tl.constexpr(32), tl.constexpr(8), tl.constexpr(64)


@triton.jit
def extent(first, TILE: tl.constexpr):
    """Difference between the last and the first pixel of each group along an axis."""
    first = tl.reshape(first, (TILE // GROUP, GROUP))
    return tl.max(first, 1) - tl.min(first, 1)


@triton.jit
def count_scattered(tallies, first, AXES: tl.constexpr, TILE: tl.constexpr):
    """Count the scattered groups among TILE samples, given their first taps."""
    lines = (extent(first[1], TILE) + 1) * (extent(first[0], TILE) // LINE + 1)
    if AXES == 3:
        lines = lines * (extent(first[2], TILE) + 1)
    tl.atomic_add(tallies + SCATTERED, tl.sum((lines > LINES).to(tl.int32), 0), sem="relaxed")


@triton.jit
def is_scattered(tallies, count):
    """Whether more than a quarter of the groups of ``count`` samples are scattered."""
    return tl.load(tallies + SCATTERED) > count // (4 * GROUP)
