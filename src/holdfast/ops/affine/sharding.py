"""Sharding rules that the quantization ops share: tensors with one scale for several elements.

A shard of a tensor goes with the shard of its scales. If the scale does not vary along the split dimension,
every rank has a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from holdfast.core.granularity import Granularity, granularity_named
from holdfast.core.sharding import Option, Place, Whole

Outputs = Callable[[int, Mapping[str, Place]], tuple[Place, ...]]


class NotAligned(Exception):
    """The shards of the scales would not be those of the tensor."""


def place_of_scale(
    granularity: Granularity, shape: tuple[int, ...], scale_shape: Sequence[int] | None, dim: int, parts: int
) -> Place:
    """The place of a scale tensor if a tensor of ``shape`` is split along ``dim``.

    ``scale_shape`` None is the shape of the scales that are computed from the tensor. Raises NotAligned.
    """
    view = granularity.view(shape)
    scales = view.scale_shape if scale_shape is None else tuple(scale_shape)
    if view.scale_strides(scales, [0] * len(scales)) is None:
        raise NotAligned  # a wrong shape, which the plan refuses
    if view.split is None and not view.varies[dim]:
        return None
    groups = shape[dim]
    if view.split is not None and dim == view.split[0]:
        groups //= view.split[1]
        if groups % parts:
            raise NotAligned
    own = dim if view.split is not None else sum(view.varies[:dim])
    if scales == view.scale_shape:
        return own
    if len(scales) == len(shape):  # with 1 for each axis that shares a scale
        return dim
    # All scales in one vector. Its shards are those of the dimension if they are contiguous in it.
    before, after = view.scale_shape[:own], view.scale_shape[own + 1 :]
    if prod(before) == 1 and (prod(after) == 1 or groups % parts == 0):
        return 0
    raise NotAligned


def with_scales(tensors: Sequence[str], outputs: Outputs) -> Callable[[Whole], Iterator[Option]]:
    """Options that split ``tensors`` alike, with the scales and zero points that belong to each shard."""

    def options(whole: Whole) -> Iterator[Option]:
        granularity, shape = granularity_named(whole["granularity"]), _shape(whole, tensors[0])
        for dim in _dimensions(whole, shape):
            places: dict[str, Place] = dict.fromkeys(tensors, dim)
            try:
                for name in ("scale", "zero_point"):
                    if whole.given.get(name) is not None:
                        places[name] = place_of_scale(granularity, shape, whole[name].shape, dim, whole.parts)
                yield Option(places, outputs(dim, places))
            except NotAligned:
                continue

    return options


def from_data(outputs: Callable[[int, int], tuple[Place, ...]]) -> Callable[[Whole], Iterator[Option]]:
    """Options of an operator that computes scales from ``x``: a scale and its data are on one rank.

    ``outputs`` takes the split dimension of ``x`` and that of the scales.
    """

    def options(whole: Whole) -> Iterator[Option]:
        granularity, shape = granularity_named(whole["granularity"]), _shape(whole, "x")
        for dim in _dimensions(whole, shape):
            try:
                place = place_of_scale(granularity, shape, None, dim, whole.parts)
            except NotAligned:
                continue
            if isinstance(place, int):
                yield Option({"x": dim}, outputs(dim, place))

    return options


def _shape(whole: Whole, name: str) -> tuple[int, ...]:
    """The shape of a tensor, of packed codes after unpacking."""
    shape = tuple(whole[name].shape)
    length = whole.given.get("length")
    return shape if length is None else (*shape[:-1], length)


def _dimensions(whole: Whole, shape: tuple[int, ...]) -> range:
    """The dimensions that may be split: not the last one of packed codes, which share bytes."""
    packed: Any = whole.given.get("packed") or whole.given.get("length") is not None
    return range(len(shape) - bool(packed))
