"""Mutants of the affine_grid kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("AffineGridPlan",))
_backward = partial(KernelMutant, plans=("AffineGridBackwardPlan",))
_CPU, _GPU = "holdfast.ops.affine_grid.cpu", "holdfast.ops.affine_grid.gpu"

# fmt: off
MUTANTS = (
    _forward("a row of scratch of half the size", _CPU,
        "_ROW_BYTES = LANES * 8",
        "_ROW_BYTES = LANES * 4", likely="ten blocks"),
    _forward("terms added in another order", _CPU,
        "own[i] = ((a * x[i] + b * y[i]) + c * z[i]) + d",
        "own[i] = (a * x[i] + b * y[i]) + (c * z[i] + d)"),
    _forward("a carry from y to z lost", _CPU,
        "along[width + row % height], along[width + height + row // height]",
        "along[width + row % height], along[width + height]"),
    _backward("the last, shorter row of lanes dropped", _CPU,
        "min(block * BLOCK + BLOCK, places), LANES):",
        "min(block * BLOCK + BLOCK, places // LANES * LANES), LANES):"),
    _backward("sums of blocks added to one lane", _CPU,
        "lanes[i % LANES] += sums[i]",
        "lanes[0] += sums[i]", likely="ten blocks"),
    _backward("accumulate lost", _CPU,
        "result[k] = old[k] + result[k]",
        "result[k] = zero(like) + result[k]", likely="no places"),
    _forward("a mask one place too long", _GPU, "inside = place < places", "inside = place <= places"),
    _forward("the row stride of theta for its column stride", _GPU,
        "step = theta_strides[2]",
        "step = theta_strides[1]"),
    _backward("places that do not exist not masked", _GPU,
        "mask=place < places, other=0.0)",
        "mask=place <= places, other=0.0)"),
    _backward("two sums in one place", _GPU,
        "tl.store(first + AXES * blocks, sum_lanes(",
        "tl.store(first + 2 * blocks, sum_lanes("),
    _backward("lanes of a narrower type", _GPU,
        "        of_one += change\n",
        "        of_one = (of_one + change).to(tl.float32).to(COMPUTE)\n", likely="float64"),
    _backward("accumulate lost", _GPU,
        "total = widen(tl.load(target), COMPUTE) + total",
        "total = total + 0.0", likely="no places"),
)
