"""Mutants of grid_sample and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from holdfast.core.mutant import Mutant, Run, changed, described, instead_of
from holdfast.core.plan import AnyPlan, Args
from holdfast.numerics.reference import Array
from holdfast.ops.grid_sample import reference
from holdfast.ops.grid_sample.plan import Padding, SampleDescriptor
from holdfast.ops.grid_sample.reference import Axis, Corner
from holdfast.ops.segment_sum.reference import ordered_sum

_F, _B = ("grid_sample forward",), ("grid_sample backward",)
_ANY = _F + _B

_corners, _pixel_coordinate = reference.corners, reference.pixel_coordinate


def _axes_swapped(plan: AnyPlan, desc: Any, run: Run, args: Any) -> None:
    """x and y swapped, in the grid and in dgrid."""
    swapped: dict[str, Any] = {"grid": args.grid.flip(-1)}
    dgrid = getattr(args, "dgrid", None)
    if dgrid is not None:
        swapped["dgrid"] = dgrid.flip(-1)
    run(changed(args, **swapped))
    if dgrid is not None:
        dgrid.copy_(swapped["dgrid"].flip(-1))


def _weights_swapped(axes: list[Axis], desc: SampleDescriptor) -> Iterator[Corner]:
    """The second and third corners have each other's weights."""
    every = list(_corners(axes, desc))
    if len(every) > 2:
        second, third = every[1], every[2]
        every[1] = replace(second, weight=third.weight, slopes=third.slopes)
        every[2] = replace(third, weight=second.weight, slopes=second.slopes)
    return iter(every)


def _last_corner_lost(axes: list[Axis], desc: SampleDescriptor) -> Iterator[Corner]:
    every = list(_corners(axes, desc))
    every[-1] = replace(every[-1], pixel=np.full_like(every[-1].pixel, -1))
    return iter(every)


def _corners_reversed(axes: list[Axis], desc: SampleDescriptor) -> Iterator[Corner]:
    """The same terms in reverse order."""
    return iter(list(_corners(axes, desc))[::-1])


def _sample_lost(plan: AnyPlan, desc: Any, run: Run, args: Any) -> None:
    """The last sample of every eight is lost."""
    dout = args.dout.flatten(2).clone()
    dout[..., 7::8] = 0
    run(changed(args, dout=dout.reshape(args.dout.shape)))


def _in_double(g: Array, size: int, align_corners: bool) -> Array:
    """Coordinates computed in float64: more exact than defined."""
    return _pixel_coordinate(g.astype(np.float64), size, align_corners).astype(g.dtype)


def _not_clipped(x: Array, size: int) -> tuple[Array, Array]:
    """The gradient is not zero where the coordinate is clipped."""
    held, _ = _clipped(x, size)
    return held, np.ones_like(x, dtype=bool)


_clipped = reference.clipped


def _half_up(x: Array) -> Array:
    rounded: Array = np.floor(x + x.dtype.type(0.5))
    return rounded.astype(np.int64)


def _beside_is_read(image: Array, grid: Array, desc: SampleDescriptor) -> Array:
    """Corners outside the image are multiplied by 0 instead of omitted."""
    out = np.zeros((desc.batch, desc.channels, desc.samples), image.dtype)
    with np.errstate(all="ignore"):
        for corner in _corners(reference.axes_of(grid, desc), desc):
            weight = corner.weight * (corner.pixel >= 0)
            out = out + weight[:, None].astype(image.dtype) * reference.at_pixels(image, corner.pixel)
    return out


def _rounded_words(terms: Array, fraction_bits: int) -> list[Array]:
    """Terms rounded to nearest instead of truncated."""
    return _whole_words(np.rint(terms), fraction_bits)


def _unit_of_image(dout: Array, fraction_bits: int) -> Array:
    """One unit for all channels of an image."""
    images = dout.reshape(len(dout), 1, -1)
    return np.broadcast_to(_plane_shift(images, fraction_bits), (*dout.shape[:2], 1))


def _unit_of_all_values(dout: Array, fraction_bits: int) -> Array:
    """A plane with an infinite value has the unit of the largest finite number."""
    largest = np.finfo(dout.dtype).max
    return _plane_shift(np.where(np.isfinite(dout), dout, largest), fraction_bits)


def _one_bit_fewer(dout: Array, fraction_bits: int) -> Array:
    return _plane_shift(dout, fraction_bits - 1)


_whole_words, _plane_shift = reference.whole_words, reference.plane_shift


def _one_by_one(terms: Array) -> Array:
    with np.errstate(all="ignore"):
        total = np.zeros(terms.shape[1:], terms.dtype)
        for term in terms:
            total = total + term
        return total


def _last_added_first(terms: Array) -> Array:
    return ordered_sum(terms[::-1])


def _wrong_scale(size: int, align_corners: bool) -> float:
    return (size if align_corners else size - 1) / 2


def _only_first(plan: AnyPlan, desc: Any, run: Run, args: Args) -> None:
    """Every image has the grid of the first."""
    grid: torch.Tensor = args.grid  # type: ignore[attr-defined]
    run(changed(args, grid=grid[:1].expand_as(grid)))


MUTANTS = (
    Mutant("swapped x and y", _axes_swapped, _ANY),
    Mutant("wrong corner weights", instead_of("corners", _weights_swapped), _ANY),
    Mutant("last corner lost", instead_of("corners", _last_corner_lost), _ANY),
    Mutant("corners in another order", instead_of("corners", _corners_reversed), _ANY),
    Mutant("corners always aligned", described(align_corners=True), _ANY),
    Mutant("align_corners ignored", described(align_corners=False), _ANY),
    Mutant("padding ignored", described(padding_mode=Padding.ZEROS), _ANY),
    Mutant("border for reflection", described(padding_mode=Padding.BORDER), _ANY),
    Mutant("coordinates in a wider type", instead_of("pixel_coordinate", _in_double), _ANY),
    Mutant("halves rounded up", instead_of("nearest_index", _half_up), _ANY),
    Mutant("grid of the first image", _only_first, _ANY),
    Mutant("multiplied by 0 beside the image", instead_of("grid_sample", _beside_is_read), _F),
    Mutant("a sample lost at the edge of a tile", _sample_lost, _B),
    Mutant("gradient beyond the border", instead_of("clipped", _not_clipped), _B),
    Mutant("terms rounded", instead_of("whole_words", _rounded_words), _B),
    Mutant("a unit for each image", instead_of("plane_shift", _unit_of_image), _B),
    Mutant("a unit from infinite values", instead_of("plane_shift", _unit_of_all_values), _B),
    Mutant("a unit of one bit fewer", instead_of("plane_shift", _one_bit_fewer), _B),
    Mutant("sums without chunks", instead_of("ordered_sum", _one_by_one), _B),
    Mutant("sums from the last", instead_of("ordered_sum", _last_added_first), _B),
    Mutant("scale of the other alignment", instead_of("pixels_per_unit", _wrong_scale), _B),
)
