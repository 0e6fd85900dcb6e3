"""Example calls of quantize_dynamic."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.affine.calls import CHANNELS, INT8, X
from holdfast.ops.dynamic_quantize.torch_op import quantize_dynamic

CALLS = {
    "quantize_dynamic": Call(
        quantize_dynamic,
        {"x": X, "symmetric": True, "narrow": None, "packed": False, **INT8, **CHANNELS},
        constant=("x",),
    ),
    "quantize_dynamic affine": Call(
        quantize_dynamic,
        {"x": X, "symmetric": False, "dtype": torch.uint4, "packed": True},  # type: ignore[attr-defined]
        constant=("x",),
    ),
}
