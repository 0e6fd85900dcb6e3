"""Whether samples side by side are taken side by side, in Triton.

Then they are best read as they come, and dout with them; if not, in the order of the cells. A group of
samples, those of a warp, is scattered if it takes pixels from many cache lines; the grid is if a quarter of
its groups are. It is counted, and asked for, on the device.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.ops.segment_sum.gpu_counting_sort import CALLER

#: Which of the order's tallies counts the scattered groups.
SCATTERED = tl.constexpr(CALLER.value + 1)
#: The samples of a group, the most lines if it is not scattered, and the pixels of a line: twice as many as
#: there are, for a group seldom begins where a line does.
GROUP, LINES, LINE = tl.constexpr(32), tl.constexpr(8), tl.constexpr(64)


@triton.jit
def count_scattered(tallies, first, TILE: tl.constexpr):
    """Count the scattered groups among TILE samples whose corners nw are ``first``."""
    x = tl.reshape(first[0], (TILE // GROUP, GROUP))
    y = tl.reshape(first[1], (TILE // GROUP, GROUP))
    rows = tl.max(y, 1) - tl.min(y, 1) + 1
    lines = rows * ((tl.max(x, 1) - tl.min(x, 1)) // LINE + 1)
    tl.atomic_add(tallies + SCATTERED, tl.sum((lines > LINES).to(tl.int32), 0), sem="relaxed")


@triton.jit
def is_scattered(tallies, count):
    """Whether more than a quarter of the groups of ``count`` samples are."""
    return tl.load(tallies + SCATTERED) > count // (4 * GROUP)
