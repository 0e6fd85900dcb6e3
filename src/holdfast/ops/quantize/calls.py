"""Example calls of quantize."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.affine.calls import CHANNELS, INT8, ROWS, ZEROS, X
from holdfast.ops.quantize.torch_op import quantize

CALLS = {
    "quantize": Call(
        quantize,
        {"x": X, "scale": ROWS, "zero_point": ZEROS, "packed": False, **INT8, **CHANNELS},
        discrete=("x", "scale"),
    ),
    "quantize to floats": Call(
        quantize,
        {"x": X, "scale": ROWS, "zero_point": ZEROS, **INT8, **CHANNELS, "dtype": torch.float32},
        by=("x",),
    ),
}
