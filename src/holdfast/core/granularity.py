"""Granularities: which elements share a scale.

Kernels are the same for all granularities. A granularity gives a ``ScaleView`` of the tensor: one scale for
all elements (per tensor), for each index of an axis (per channel), for each row of the last axis (per token),
or for each run of neighbours along an axis (per group; the view splits that axis in two).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from typing import Any

from holdfast.core.checks import is_whole, shown
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.strided import contiguous_strides


@dataclass(frozen=True)
class ScaleView:
    """The shape of a tensor, and how scales are broadcast to it.

    ``shape`` is the tensor's shape. A grouped axis is split in two: ``split`` is (axis, group size).
    ``varies`` says for each dimension of ``shape`` whether the scale varies along it. ``scale_shape`` is the
    shape of the scale tensor.
    """

    shape: tuple[int, ...]
    varies: tuple[bool, ...]
    scale_shape: tuple[int, ...]
    split: tuple[int, int] | None = None

    @property
    def scale_count(self) -> int:
        return prod(self.scale_shape)

    def tensor_strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """The tensor's strides in the dimensions of ``shape``."""
        if self.split is None:
            return tuple(strides)
        axis, group = self.split
        return (*strides[:axis], strides[axis] * group, *strides[axis:])

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The tensor's shape with 1 for each axis that shares a scale, as from ``keepdim=True``."""
        return tuple(size if varies else 1 for size, varies in zip(self.shape, self.varies, strict=True))

    @property
    def accepted_scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that ``scale_strides`` accepts, without repetitions."""
        kept = (self.kept_shape,) if self.split is None else ()
        return tuple(dict.fromkeys((self.scale_shape, *kept, (self.scale_count,))))

    def scale_strides(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
        """The strides of a scale tensor in the dimensions of ``shape``; None if its shape is not accepted.

        Accepted are ``scale_shape``, ``kept_shape`` unless an axis is split, and a 1-D tensor of
        ``scale_count`` scales.
        """
        if tuple(shape) == self.scale_shape:
            own = iter(strides)
        elif self.split is None and tuple(shape) == self.kept_shape:
            return tuple(step if varies else 0 for step, varies in zip(strides, self.varies, strict=True))
        elif tuple(shape) == (self.scale_count,):
            own = iter(step * strides[0] for step in contiguous_strides(self.scale_shape))
        else:
            return None
        return tuple(next(own) if varies else 0 for varies in self.varies)


class Granularity:
    """Which elements share a scale."""

    #: The granularity as a string, which ``granularity_named`` reads. It is stored at construction: in a
    #: trace an axis may be a symbol, which has no string.
    name: str

    def __post_init__(self) -> None:
        numbers = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        object.__setattr__(self, "name", ":".join([_NAMES[type(self)], *map(str, numbers)]))

    def view(self, shape: tuple[int, ...]) -> ScaleView:
        """The scale view of ``shape``. Raises InvalidDescriptor if the granularity does not fit it."""
        self.require_numbers()  # before the cache look-up, because True equals 1 as a key
        return _view(self, shape)

    def require_numbers(self) -> None:
        """Raise unless the axis and the size of a group are whole numbers."""
        for field in fields(self):  # type: ignore[arg-type]
            _require_whole(field.name, getattr(self, field.name))

    def _view(self, shape: tuple[int, ...]) -> ScaleView:
        raise NotImplementedError


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor."""

    def _view(self, shape: tuple[int, ...]) -> ScaleView:
        return ScaleView(shape, (False,) * len(shape), ())


@dataclass(frozen=True)
class PerChannel(Granularity):
    """One scale for each index of ``axis``; a negative axis counts from the end."""

    axis: int

    def _view(self, shape: tuple[int, ...]) -> ScaleView:
        axis = _axis(self.axis, shape)
        return ScaleView(shape, tuple(d == axis for d in range(len(shape))), (shape[axis],))


@dataclass(frozen=True)
class PerToken(Granularity):
    """One scale for each row of the last axis: the scales have the shape of the tensor without that axis."""

    def _view(self, shape: tuple[int, ...]) -> ScaleView:
        last = len(shape) - 1
        return ScaleView(shape, tuple(d != last for d in range(len(shape))), shape[:-1])


@dataclass(frozen=True)
class PerGroup(Granularity):
    """One scale for each group of ``group_size`` neighbouring elements along ``axis``.

    ``group_size`` must divide the size of the axis. The scales have the tensor's shape, with
    ``shape[axis] // group_size`` along ``axis``.
    """

    group_size: int
    axis: int = -1

    def require_numbers(self) -> None:
        super().require_numbers()
        if self.group_size < 1:
            raise InvalidDescriptor(
                f"group_size is {self.group_size}; it must be a whole number of at least 1."
            )

    def _view(self, shape: tuple[int, ...]) -> ScaleView:
        group = self.group_size
        axis = _axis(self.axis, shape)
        size = shape[axis]
        if size % group:
            raise InvalidDescriptor(
                f"group_size {group} does not divide axis {axis} of shape {shape}, which has {size} "
                "elements; choose a divisor, or pad the tensor."
            )
        groups = (*shape[:axis], size // group, *shape[axis + 1 :])
        split = (*shape[:axis], size // group, group, *shape[axis + 1 :])
        return ScaleView(split, tuple(d != axis + 1 for d in range(len(split))), groups, (axis, group))


_NAMES: dict[type[Granularity], str] = {
    PerTensor: "per_tensor", PerChannel: "per_channel", PerToken: "per_token", PerGroup: "per_group",
}  # fmt: skip
_KINDS = {name: kind for kind, name in _NAMES.items()}


#: The default granularity.
ONE_SCALE = PerTensor()


@lru_cache(maxsize=1024)
def granularity_named(name: str) -> Granularity:
    """The granularity with this ``name``."""
    kind, *numbers = name.split(":")
    try:
        return _KINDS[kind](*map(int, numbers))
    except (KeyError, TypeError, ValueError):
        raise InvalidDescriptor(
            f"there is no granularity {name!r}; accepted are per_tensor, per_channel:AXIS, per_token and "
            "per_group:SIZE:AXIS."
        ) from None


@lru_cache(maxsize=4096)
def _view(granularity: Granularity, shape: tuple[int, ...]) -> ScaleView:
    return granularity._view(shape)


def validate_granularity(granularity: Any) -> None:
    """Raise unless this is a granularity."""
    if not isinstance(granularity, Granularity):
        raise InvalidDescriptor(
            f"granularity is {shown(granularity)}; accepted are PerTensor(), PerChannel(axis), PerToken() "
            "and PerGroup(size, axis)."
        )


def _require_whole(name: str, number: Any) -> None:
    if not is_whole(number):
        raise InvalidDescriptor(f"{name} is {shown(number)}; it must be a whole number.")


def _axis(axis: int, shape: tuple[int, ...]) -> int:
    _require_whole("axis", axis)
    if not -len(shape) <= axis < len(shape):
        accepted = f"from {-len(shape)} to {len(shape) - 1}" if shape else "none (it has rank 0)"
        raise InvalidDescriptor(f"axis {axis} is out of range for shape {shape}; accepted: {accepted}.")
    return axis % len(shape)
