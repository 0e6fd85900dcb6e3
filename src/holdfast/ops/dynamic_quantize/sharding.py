"""Sharding rules of quantize_dynamic."""

from __future__ import annotations

from holdfast.core.sharding import Rule
from holdfast.ops.affine.sharding import from_data

RULES = {
    "quantize_dynamic": Rule(from_data(lambda dim, scale: (dim, scale))),
    "quantize_dynamic_affine": Rule(from_data(lambda dim, scale: (dim, scale, scale))),
}
