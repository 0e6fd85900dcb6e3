"""Sharding rule of lsq_init."""

from __future__ import annotations

from holdfast.core.sharding import Rule
from holdfast.ops.affine.sharding import from_data

RULES = {"lsq_init": Rule(from_data(lambda dim, scale: (scale,)))}
