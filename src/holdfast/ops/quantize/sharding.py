"""Sharding rules of quantize."""

from __future__ import annotations

from holdfast.core.sharding import Rule
from holdfast.ops.affine.sharding import with_scales

_FORWARD = Rule(with_scales(["x"], lambda dim, places: (dim,)))

RULES = {
    "quantize": _FORWARD,
    "quantize_to_float": _FORWARD,
    "quantize_backward": Rule(with_scales(["dy", "x"], lambda dim, places: (dim,))),
}
