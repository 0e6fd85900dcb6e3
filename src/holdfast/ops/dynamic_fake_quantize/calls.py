"""Example calls of dynamic_fake_quantize."""

from __future__ import annotations

from holdfast.core.calls import Call
from holdfast.ops.affine.benchmark import INT4
from holdfast.ops.affine.calls import CHANNELS, INT8, X
from holdfast.ops.dynamic_fake_quantize.torch_op import dynamic_fake_quantize

CALLS = {
    "dynamic_fake_quantize": Call(
        dynamic_fake_quantize,
        {"x": X, "symmetric": True, "narrow": None, "ste": "in_range", "return_scale": False}
        | INT8
        | CHANNELS,
        by=("x",),
    ),
    "dynamic_fake_quantize affine": Call(
        dynamic_fake_quantize, {"x": X, "symmetric": False, "dtype": INT4, "ste": "tanh"}, by=("x",)
    ),
}
