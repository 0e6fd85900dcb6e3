"""Sharding rules of fake_quantize."""

from __future__ import annotations

from holdfast.core.sharding import Rule
from holdfast.ops.affine.sharding import with_scales

RULES = {
    "fake_quantize": Rule(with_scales(["x"], lambda dim, places: (dim,))),
    "fake_quantize_backward": Rule(with_scales(["dy", "x"], lambda dim, places: (dim,))),
}
