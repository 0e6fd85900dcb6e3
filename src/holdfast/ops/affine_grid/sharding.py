"""Sharding rules of affine_grid: images split."""

from __future__ import annotations

from holdfast.core.sharding import Option, Rule

RULES = {
    "affine_grid": Rule(lambda whole: [Option({"theta": 0}, (0,))]),
    "affine_grid_backward": Rule(lambda whole: [Option({"dgrid": 0}, (0,))]),
}
