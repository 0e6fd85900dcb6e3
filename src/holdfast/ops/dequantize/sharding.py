"""Sharding rules of dequantize."""

from __future__ import annotations

from holdfast.core.sharding import Rule
from holdfast.ops.affine.sharding import with_scales

_FORWARD = Rule(with_scales(["q"], lambda dim, places: (dim,)))

RULES = {
    "dequantize": _FORWARD,
    "dequantize_from_float": _FORWARD,
    "dequantize_backward": Rule(with_scales(["dy"], lambda dim, places: (dim,))),
}
