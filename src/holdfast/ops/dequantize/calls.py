"""Example calls of dequantize."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.affine.calls import BYTES, CHANNELS, CODES, ROWS, ZEROS, X
from holdfast.ops.dequantize.torch_op import dequantize

CALLS = {
    "dequantize": Call(
        dequantize, {"q": CODES, "scale": ROWS, "zero_point": ZEROS, "dtype": torch.float32, **CHANNELS}
    ),
    "dequantize packed": Call(
        dequantize,
        {"q": BYTES, "scale": 0.5, "zero_point": 1, "packed": True, "code_dtype": torch.int4, "length": 5},  # type: ignore[attr-defined]
    ),
    "dequantize from floats": Call(
        dequantize, {"q": X, "scale": ROWS, "zero_point": ZEROS, **CHANNELS}, by=("q",)
    ),
}
