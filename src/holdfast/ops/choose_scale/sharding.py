"""Sharding rules of choose_scale, observe_range and scale_of_range."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.core.sharding import Option, Rule, Whole
from holdfast.ops.affine.sharding import from_data


def _each_range(results: int) -> Callable[[Whole], Iterator[Option]]:
    def options(whole: Whole) -> Iterator[Option]:
        same = whole["low"].shape == whole["high"].shape  # otherwise the operator refuses them
        for dim in range(whole["low"].dim() if same else 0):
            yield Option({"low": dim, "high": dim}, (dim,) * results)

    return options


RULES = {
    "choose_scale": Rule(from_data(lambda dim, scale: (scale,))),
    "choose_scale_affine": Rule(from_data(lambda dim, scale: (scale, scale))),
    "observe_range": Rule(from_data(lambda dim, scale: (scale, scale))),
    "scale_of_range": Rule(_each_range(1)),
    "scale_of_range_affine": Rule(_each_range(2)),
}
