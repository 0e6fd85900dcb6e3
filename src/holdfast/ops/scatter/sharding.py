"""Sharding rules of scatter and gather: dimensions that the index leaves alone, and terms split.

A dimension other than ``dim`` is split if the index covers it, or if the index has one number for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.core.sharding import SUM, Option, Place, Rule, Shards, Whole


def _untouched(index: Sequence[int], size: Sequence[int], dim: int) -> Iterator[tuple[int, Place]]:
    """Each dimension that may be split, and the place of the index then."""
    by_element = len(index) == len(size)
    for axis in range(len(size)):
        if axis != dim and (not by_element or index[axis] == size[axis]):
            yield axis, axis if by_element else None


def _scatter(whole: Whole) -> Iterator[Option]:
    index, size, dim = whole["index"].shape, whole["size"], whole["dim"]
    for axis, place in _untouched(index, size, dim):
        yield Option({"input": axis, "src": axis, "index": place}, (axis,))
    if whole["base"] == "zeros" and whole["reduce"] == "sum":
        yield Option({"src": dim, "index": dim if len(index) == len(size) else 0}, (SUM,))


def _sums(operator: Callable[..., Any], local: dict[str, Any], shards: Shards) -> Any:
    ranges = [shards.range_of(shards.outputs[0], axis, n) for axis, n in enumerate(local["size"])]
    local["size"] = [end - begin for begin, end in ranges]
    return operator(**local)


def _gather(whole: Whole) -> Iterator[Option]:
    index, size, dim = whole["index"].shape, whole["input"].shape, whole["dim"]
    for axis, place in _untouched(index, size, dim):
        yield Option({"input": axis, "index": place}, (axis,))
    yield Option({"index": dim if len(index) == len(size) else 0}, (dim,))


RULES = {"scatter": Rule(_scatter, _sums), "gather": Rule(_gather)}
