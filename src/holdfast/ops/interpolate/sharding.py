"""Sharding rules of interpolate: images and channels split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.sharding import Option, Rule, Shards


def _gradient(operator: Callable[..., Any], local: dict[str, Any], shards: Shards) -> Any:
    local["input_size"] = [*local["dout"].shape[:2], *local["input_size"][2:]]
    return operator(**local)


RULES = {
    "interpolate": Rule(lambda whole: [Option({"input": dim}, (dim,)) for dim in (0, 1)]),
    "interpolate_backward": Rule(lambda whole: [Option({"dout": dim}, (dim,)) for dim in (0, 1)], _gradient),
}
