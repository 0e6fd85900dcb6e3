"""Kernel mutants of lsq_init."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_mutant = partial(KernelMutant, plans=("LsqInitPlan",))
_CPU, _GPU = "holdfast.ops.lsq_init.cpu", "holdfast.ops.lsq_init.gpu"

# fmt: off
MUTANTS = (
    _mutant("the lanes of all segments in one", _CPU,
        "lanes[k * width + i] += abs(x[here + i])",
        "lanes[i] += abs(x[here + i])", likely="21x300"),
    _mutant("the last element dropped", _CPU,
        "for i in range(begin + lane, begin + count, LANES):",
        "for i in range(begin + lane, begin + count - 1, LANES):", likely="4099x40"),
    _mutant("more lanes than there are", _CPU,
        "store_lane_sums(walk, 0, min(count, LANES), segment, taken, begin, sums, like)",
        "store_lane_sums(walk, 0, count, segment, taken, begin, sums, like)", likely="4099x40"),
    _mutant("the place of the first segment for all", _CPU,
        "here = k * count + row",
        "here = row", likely="21x300"),
    _mutant("no floor", "holdfast.ops.tree_sum.cpu",
        "floor if totals[k] < floor else totals[k]",
        "totals[k] if totals[k] < floor else totals[k]", likely="special values"),
    _mutant("lanes of a narrower type", _GPU,
        "sums += tl.abs(widen(value, COMPUTE))",
        "sums = (sums + tl.abs(widen(value, COMPUTE))).to(tl.float32).to(COMPUTE)"),
    _mutant("a mask one element too long", _GPU,
        "inside = (segment < segments)[:, None] & (element < extent[0])",
        "inside = (segment < segments)[:, None] & (element <= extent[0])"),
    _mutant("the strides of the scale for those of x", _GPU,
        "start = loop_offsets(segment, over, x_over)[:, None]",
        "start = loop_offsets(segment, over, scale_over)[:, None]"),
    _mutant("every piece the first", _GPU,
        "first = (block * BLOCK + split * WIDTH)[:, None]",
        "first = (block * BLOCK)[:, None]"),
    _mutant("rows of a full tile dropped", _GPU,
        "for row in range(ROWS if EVEN else filled_rows(block, extent[0], ROWS)):",
        "for row in range(1 if EVEN else filled_rows(block, extent[0], ROWS)):"),
)
