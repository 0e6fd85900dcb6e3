"""Example calls of interpolate."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.interpolate.torch_op import interpolate

CALLS = {
    "interpolate": Call(
        interpolate,
        {"input": torch.linspace(-1, 1, 24).reshape(1, 2, 3, 4), "size": (5, 6), "mode": "bilinear"}
        | {"align_corners": False, "antialias": False},
        by=("input",),
    ),
    "interpolate by a factor": Call(
        interpolate,
        {"input": torch.linspace(-1, 1, 24).reshape(1, 2, 3, 4), "scale_factor": 1.5, "mode": "bilinear"}
        | {"recompute_scale_factor": False},
        by=("input",),
    ),
}
