"""Example calls of fake_quantize."""

from __future__ import annotations

from holdfast.core.calls import Call
from holdfast.ops.affine.benchmark import INT4
from holdfast.ops.affine.calls import CHANNELS, INT8, ROWS, ZEROS, X
from holdfast.ops.fake_quantize.torch_op import fake_quantize

CALLS = {
    "fake_quantize": Call(
        fake_quantize,
        {"x": X, "scale": ROWS, "zero_point": ZEROS.float(), "ste": "in_range", "grad_factor": 0.5}
        | INT8
        | CHANNELS,
        by=("x", "scale", "zero_point"),
    ),
    "fake_quantize of one scale": Call(
        fake_quantize, {"x": X, "scale": 0.25, "zero_point": 1, "dtype": INT4}, by=("x",)
    ),
}
