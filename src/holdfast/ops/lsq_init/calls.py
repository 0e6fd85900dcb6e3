"""Example calls of lsq_init."""

from __future__ import annotations

from holdfast.core.calls import Call
from holdfast.ops.affine.calls import CHANNELS, INT8, X
from holdfast.ops.lsq_init.torch_op import lsq_init

CALLS = {"lsq_init": Call(lsq_init, {"x": X, **INT8, **CHANNELS}, constant=("x",))}
