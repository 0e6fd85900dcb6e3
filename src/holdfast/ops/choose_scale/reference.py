"""observe_range and choose_scale in NumPy: the definition of their results."""

from __future__ import annotations

import numpy as np

from holdfast.core.granularity import Granularity
from holdfast.numerics.reference import Array, ReferenceKernel, store, widen
from holdfast.ops.affine import reference as affine
from holdfast.ops.choose_scale import plan as plans
from holdfast.ops.choose_scale.plan import SCALE_FLOOR


def observe_range(x: Array, granularity: Granularity) -> tuple[Array, Array]:
    """min(x, 0) and max(x, 0) over the elements of each scale. NaN in x makes both NaN; a zero is +0."""
    view = granularity.view(x.shape)
    numbers = np.arange(view.scale_count).reshape(view.scale_shape)
    scale_of_element = np.broadcast_to(affine.broadcast_scales(numbers, granularity, x.shape), x.shape)
    low, high = np.zeros(view.scale_count, x.dtype), np.zeros(view.scale_count, x.dtype)
    with np.errstate(all="ignore"):
        np.minimum.at(low, scale_of_element.reshape(-1), x.reshape(-1))
        np.maximum.at(high, scale_of_element.reshape(-1), x.reshape(-1))
        zero = x.dtype.type(0)
        return (low + zero).reshape(view.scale_shape), (high + zero).reshape(view.scale_shape)


def scale_of_range(low: Array, high: Array, lowest: int, highest: int, symmetric: bool) -> Array:
    """The scale that maps low to high onto the codes lowest to highest. NaN and infinity stay.

    The formula divides half of the width and doubles the quotient. Halving and doubling are exact, and the
    scale of a finite range is finite even if its width overflows.
    """
    kind = high.dtype.type
    with np.errstate(all="ignore"):
        if symmetric:
            scale = np.maximum(high / kind(highest), low / kind(lowest))
        else:
            half = high * kind(0.5) - low * kind(0.5)
            scale = half / kind(highest - lowest) * kind(2)
        return np.asarray(np.maximum(scale, kind(SCALE_FLOOR)))


def zero_point_of_range(low: Array, scale: Array, lowest: int, highest: int) -> Array:
    """The code of 0.0 if ``low`` has the lowest code. If the scale is not finite, it is the lowest code."""
    with np.errstate(all="ignore"):
        r = np.rint(low / scale)
    r = np.where(np.isnan(r), 0, r)
    return np.asarray(np.clip(lowest - r, lowest, highest), np.int32)


class ObserveRange(ReferenceKernel[plans.ObserveRangeDescriptor]):
    def run(self, args: plans.ObserveRangeArgs) -> None:
        desc = self.desc
        low, high = observe_range(widen(args.x, desc.real.compute), desc.granularity)
        store(args.low, low)
        store(args.high, high)


class ChooseScale(ReferenceKernel[plans.ChooseScaleDescriptor]):
    """``observe_range``, ``scale_of_range`` and ``zero_point_of_range`` as a kernel."""

    def run(self, args: plans.ChooseScaleArgs) -> None:
        desc = self.desc
        ends = desc.ends(*desc.code_range)
        low, high = observe_range(widen(args.x, desc.real.compute), desc.granularity)
        scale = scale_of_range(low, high, *ends, desc.symmetric)
        store(args.scale, scale)
        if args.zero_point is not None:
            store(args.zero_point, zero_point_of_range(low, scale, *ends))
