"""Example calls of grid_sample."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.grid_sample.torch_op import grid_sample

IMAGE = torch.linspace(-1, 1, 75).reshape(1, 3, 5, 5)
GRID = torch.linspace(-0.9, 0.8, 24).reshape(1, 3, 4, 2)

CALLS = {
    "grid_sample": Call(
        grid_sample,
        {"input": IMAGE, "grid": GRID, "mode": "bilinear", "padding_mode": "zeros", "align_corners": True},
        by=("input", "grid"),
    ),
    "grid_sample with a narrow grid": Call(
        grid_sample, {"input": IMAGE, "grid": GRID.half()}, by=("input", "grid")
    ),
}
