"""Example calls of affine_grid."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.affine_grid.torch_op import affine_grid

CALLS = {
    "affine_grid": Call(
        affine_grid,
        {"theta": torch.tensor([[[1.0, 0.2, 0.1], [0.3, 0.9, 0.0]]]), "size": (1, 3, 4, 5)}
        | {"align_corners": False},
        by=("theta",),
    ),
}
