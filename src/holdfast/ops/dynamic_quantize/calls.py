"""Example calls of dynamic_quantize."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.affine.calls import CHANNELS, INT8, X
from holdfast.ops.dynamic_quantize.torch_op import dynamic_quantize

CALLS = {
    "dynamic_quantize": Call(
        dynamic_quantize,
        {"x": X, "symmetric": True, "narrow": None, "packed": False, **INT8, **CHANNELS},
        constant=("x",),
    ),
    "dynamic_quantize affine": Call(
        dynamic_quantize,
        {"x": X, "symmetric": False, "dtype": torch.uint4, "packed": True},  # type: ignore[attr-defined]
        constant=("x",),
    ),
}
