"""Mutants of the interpolate kernels."""

from __future__ import annotations

from functools import partial

from holdfast.core.mutant import KernelMutant

_forward = partial(KernelMutant, plans=("InterpolatePlan",))
_backward = partial(KernelMutant, plans=("InterpolateBackwardPlan",))
_CPU, _GPU = "holdfast.ops.interpolate.cpu", "holdfast.ops.interpolate.gpu"

# fmt: off
MUTANTS = (
    _forward("a run of scratch of half the size", _CPU,
        "_RUN_BYTES = 8 * RUN",
        "_RUN_BYTES = 4 * RUN", likely="more columns"),
    _forward("a sum that starts again in each piece", _CPU,
        "product if column == first else total + product",
        "product if column == max(first, piece) else total + product", likely="several runs"),
    _forward("the last column of a piece lost", _CPU,
        "columns = min(RUN, last - piece)",
        "columns = min(RUN - 1, last - piece)", likely="several runs"),
    _forward("the row of the next z lost", _CPU,
        "z, image = line % depth, line // depth",
        "z, image = 0, line // depth", likely="3-d"),
    _forward("the sums of another part of a row kept", _CPU,
        "if kept[2 * slot] != at or kept[2 * slot + 1] != begin:",
        "if kept[2 * slot] != at:", likely="several runs"),
    _backward("a row added without its weight", _CPU,
        "total[i] = total[i] + weight * terms[i]",
        "total[i] = total[i] + terms[i]"),
    _backward("accumulate lost", _CPU,
        "total[i] = old[i] + total[i]",
        "total[i] = zero(like) + total[i]", likely="area"),
    _forward("a mask one element too long", _GPU,
        "inside = element < elements",
        "inside = element <= elements"),
    _forward("the counts of x for those of y", _GPU,
        "count_y = tl.load(at_y + columns",
        "count_y = tl.load(at_x + columns"),
    _forward("the y stride of the input for its z stride", _GPU,
        "tl.full([], in_z, tl.int64) * source_strides[2]",
        "tl.full([], in_z, tl.int64) * source_strides[1]", likely="trilinear"),
    _forward("the first image for all", _GPU,
        "image, channel = tl.cast(plane // channels, tl.int64)",
        "image, channel = tl.cast(plane // channels * 0, tl.int64)"),
    _forward("planes left out", _GPU,
        "tl.minimum(first_plane + PLANES, planes)",
        "tl.minimum(first_plane + PLANES, planes - 1)"),
    _forward("the first channel for all, with channels last", _GPU,
        "corner, target = channel * source_strides[3], channel",
        "corner, target = channel * 0, channel", likely="channels last"),
    _forward("weights of the first tap for all", _GPU,
        "tl.load(weight_y + in_y, mask",
        "tl.load(weight_y, mask", likely="area"),
    _forward("weights of the first tap for all, unrolled", _GPU,
        "of_y[in_y]",
        "of_y[0]"),
    _backward("a sum of a narrower type", _GPU,
        "slab = added(slab, weight, row, in_y, count_y)",
        "slab = added(slab, weight, row.to(tl.float32).to(COMPUTE), in_y, count_y)", likely="float64"),
    _backward("a sum that does not start with its first product", _GPU,
        "tl.where(number > 0, total + product, product)",
        "total + product", likely="special"),
    _backward("accumulate lost", _GPU,
        "total = widen(tl.load(written, mask=inside), COMPUTE) + total",
        "total = total + 0.0", likely="area"),
)
