"""Sharding rules of grid_sample: images, channels, and rows of the grid split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.core.sharding import SUM, Option, Place, Rule, Shards, Whole


def _forward(whole: Whole) -> Iterator[Option]:
    yield Option({"input": 0, "grid": 0}, (0,))
    yield Option({"input": 1}, (1,))
    for axis in range(1, whole["grid"].dim() - 1):
        yield Option({"grid": axis}, (axis + 1,))


def _backward(whole: Whole) -> Iterator[Option]:
    needs_dinput, needs_dgrid = whole["needs_dinput"], whole["needs_dgrid"]

    def outputs(dinput: Place, dgrid: Place) -> tuple[Place, Place]:
        return dinput if needs_dinput else None, dgrid if needs_dgrid else None

    yield Option({"dout": 0, "input": 0, "grid": 0}, outputs(0, 0))
    yield Option({"dout": 1, "input": 1}, outputs(1, SUM))
    for axis in range(1, whole["grid"].dim() - 1):
        yield Option({"dout": axis + 1, "grid": axis}, outputs(SUM, axis))


def _gradients(operator: Callable[..., Any], local: dict[str, Any], shards: Shards) -> Any:
    local["input_size"] = [*local["dout"].shape[:2], *local["input_size"][2:]]
    return operator(**local)


RULES = {"grid_sample": Rule(_forward), "grid_sample_backward": Rule(_backward, _gradients)}
