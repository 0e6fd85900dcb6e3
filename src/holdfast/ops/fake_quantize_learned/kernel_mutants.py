"""Kernel mutants of the gradients of learned scales and zero points, and of the tree sum."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_mutant = partial(KernelMutant, plans=("FakeQuantizeLearnedBackwardPlan",))
_CPU, _GPU = "holdfast.ops.fake_quantize_learned.cpu", "holdfast.ops.fake_quantize_learned.gpu"
_TREE_CPU, _TREE_GPU = "holdfast.ops.tree_sum.cpu", "holdfast.ops.tree_sum.gpu"

# fmt: off
MUTANTS = (
    _mutant("a scratch run of half the size", _TREE_CPU,
        "_RUN_BYTES = BLOCK * 8",
        "_RUN_BYTES = BLOCK * 4", likely="float64"),
    _mutant("a carry that goes up one level", _TREE_CPU,
        "while lane >> level & 1:",
        "if lane >> level & 1:", likely="4099x40"),
    _mutant("sums of blocks added to one lane", _TREE_CPU,
        "lanes[i & (LANES - 1)] += sums[start + begin + i]",
        "lanes[0] += sums[start + begin + i]", likely="70000"),
    _mutant("accumulate lost", _TREE_CPU,
        "totals[k] = old[k] + totals[k]",
        "totals[k] = zero(factor) + totals[k]", likely="empty tokens"),
    _mutant("the number of a lane lost", _CPU,
        "add_lane(walk, 1, lane, taken, like)",
        "add_lane(walk, 1, 0, taken, like)", likely="4099x40"),
    _mutant("the zero point's sums over the scale's", _CPU,
        "store_lane_sums(walk, 1, min(count, LANES), segment, taken, begin, sums[1], like)",
        "store_lane_sums(walk, 1, min(count, LANES), segment, taken, begin, sums[0], like)",
        likely="4099x40"),
    _mutant("all pieces of a sum in one place", _TREE_GPU,
        "place = out + ((segment.to(tl.int64) * blocks + block) * SPLITS + split)",
        "place = out + ((segment.to(tl.int64) * blocks + block) * SPLITS)", likely="4099x40"),
    _mutant("the last, shorter row of lanes dropped", _TREE_GPU,
        "* BLOCK + (LANES - 1)) // LANES",
        "* BLOCK) // LANES"),
    _mutant("sums that do not exist not masked", _TREE_GPU,
        "inside = (segment < segments)[:, None] & (element < length)",
        "inside = (segment < segments)[:, None] & (element <= length)", likely="70000"),
    _mutant("accumulate lost", _TREE_GPU,
        "total = widen(tl.load(place, mask=inside), lanes.dtype) + total",
        "total = total + 0.0", likely="empty tokens"),
    _mutant("the strides of dx for those of x", _GPU,
        "to_x = to_dx if SAME_STRIDES else x_start + loop_offsets(element, within, x_within)",
        "to_x = to_dx if SAME_STRIDES else x_start + loop_offsets(element, within, dx_within)",
        likely="transposed output"),
    _mutant("the strides of x for those of dy", _GPU,
        "to_dy = to_dx if SAME_STRIDES else dy_start + loop_offsets(element, within, dy_within)",
        "to_dy = to_dx if SAME_STRIDES else dy_start + loop_offsets(element, within, x_within)",
        likely="dy in another layout"),
    _mutant("lanes of a narrower type", _GPU,
        "        sums = term if ROWS == 1 else sums + term",
        "        sums = term if ROWS == 1 else (sums + term).to(tl.float32).to(COMPUTE)", likely="3x8191"),
)
