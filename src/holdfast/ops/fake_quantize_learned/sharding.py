"""Sharding rule of the gradients of a learned scale and zero point.

The gradient of a scale that varies along the split dimension is whole on its rank. Otherwise every rank has
the sum over its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.core.granularity import granularity_named
from holdfast.core.sharding import SUM, Option, Place, Rule, Shards, Whole
from holdfast.ops.affine.sharding import place_of_scale, with_scales
from holdfast.ops.fake_quantize.torch_op import lsq_factor


def _options(whole: Whole) -> Iterator[Option]:
    granularity, shape = granularity_named(whole["granularity"]), tuple(whole["x"].shape)

    def outputs(dim: int, places: Any) -> tuple[Place, ...]:
        scale = (
            places["scale"]
            if "scale" in places
            else place_of_scale(granularity, shape, None, dim, whole.parts)
        )
        zero_point = _summed(places["zero_point"]) if whole["needs_dzero"] else None
        return dim, _summed(scale), zero_point

    return with_scales(["dy", "x"], outputs)(whole)


def _summed(place: Place) -> Place:
    return SUM if place is None else place


def _run(operator: Callable[..., Any], local: dict[str, Any], shards: Shards) -> Any:
    if local["grad_factor"] is None:  # the factor of LSQ, which depends on the whole shape
        whole = shards.whole
        local["grad_factor"] = lsq_factor(whole["x"].shape, whole["granularity"], whole["q_max"])
    return operator(**local)


RULES = {"fake_quantize_learned_backward": Rule(_options, _run)}
