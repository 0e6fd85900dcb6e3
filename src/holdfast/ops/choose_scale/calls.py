"""Example calls of choose_scale, observe_range and scale_of_range."""

from __future__ import annotations

from holdfast.core.calls import Call
from holdfast.ops.affine.calls import CHANNELS, INT8, ROWS, X
from holdfast.ops.choose_scale.torch_op import choose_scale, observe_range, scale_of_range

CALLS = {
    "observe_range": Call(observe_range, {"x": X, **CHANNELS}, constant=("x",)),
    "choose_scale": Call(
        choose_scale, {"x": X, "symmetric": True, "narrow": True, **INT8, **CHANNELS}, constant=("x",)
    ),
    "choose_scale affine": Call(choose_scale, {"x": X, "symmetric": False}, constant=("x",)),
    "scale_of_range": Call(
        scale_of_range, {"low": -ROWS, "high": ROWS * 3, "symmetric": True, "narrow": False, **INT8}
    ),
    "scale_of_range affine": Call(scale_of_range, {"low": -ROWS, "high": ROWS, "symmetric": False}),
}
