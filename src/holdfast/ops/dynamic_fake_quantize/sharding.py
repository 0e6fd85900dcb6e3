"""Sharding rules of dynamic_fake_quantize."""

from __future__ import annotations

from holdfast.core.sharding import Rule
from holdfast.ops.affine.sharding import from_data, with_scales

RULES = {
    "dynamic_fake_quantize": Rule(from_data(lambda dim, scale: (dim, scale))),
    "dynamic_fake_quantize_affine": Rule(from_data(lambda dim, scale: (dim, scale, scale))),
    "dynamic_fake_quantize_backward": Rule(with_scales(["dy", "x"], lambda dim, places: (dim,))),
}
