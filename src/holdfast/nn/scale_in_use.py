"""The scale that a FakeQuantize uses: at least a floor, and rounded to the dtype in which it is stored.

Both steps are one operator: torch.compile removes a pair of casts, and the bits would be those of another
scale. Only comparisons, selections and casts are made, so the bits are the same on any device.

The gradient is straight-through. Below the floor it passes only if it is negative, which lets gradient
descent raise the scale and never lets it sink further.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import cast

import torch

from holdfast.core.autograd import register_autograd
from holdfast.core.checks import shown
from holdfast.core.dtypes import dtype_name, parse_dtype
from holdfast.core.errors import InvalidArgs
from holdfast.core.torch_op import by_sample, define, register_vmap
from holdfast.ops.choose_scale.plan import SCALE_FLOOR

#: The dtypes in which a scale can be stored.
STORED = (torch.float32, torch.bfloat16, torch.float16)

_NO_FLOOR = float("-inf")


def checked_scale_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Check the argument ``scale_dtype``."""
    if dtype is not None and dtype not in STORED:
        named = ", ".join(map(str, STORED))
        raise InvalidArgs(f"scale_dtype is {shown(dtype)}; accepted are {named}, and None for no rounding.")
    return dtype


def _scale_in_use(scale, floor, dtype):
    used = scale.clamp_min(floor)
    if dtype is None:
        return used.clone() if used is scale else used
    stored = parse_dtype(dtype)
    limits = torch.finfo(stored)
    least = limits.smallest_normal * limits.eps  # the smallest subnormal: a stored scale is never zero
    return used.clamp(least, limits.max).to(stored).to(scale.dtype)


def _save(ctx, inputs, output):
    scale, ctx.floor, _ = inputs
    ctx.save_for_backward(scale)


def _differentiate(ctx, used_gradient):
    (scale,) = ctx.saved_tensors
    passes = (scale >= ctx.floor) | (used_gradient < 0)
    return torch.where(passes, used_gradient, 0.0), None, None


_call = define(
    "scale_in_use",
    "(Tensor scale, float floor, str? dtype) -> Tensor",
    _scale_in_use,
    lambda scale, floor, dtype: torch.empty_like(scale),
)
register_autograd("scale_in_use", _differentiate, by=["scale"], setup_context=_save)
register_vmap("scale_in_use", by_sample(_call))


def scale_in_use(scale: torch.Tensor, positive: bool, dtype: torch.dtype | None) -> torch.Tensor:
    """``scale``, raised to the floor if ``positive`` and rounded to ``dtype`` unless it is None."""
    floor = SCALE_FLOOR if positive else _NO_FLOOR
    return cast(torch.Tensor, _call(scale, floor, None if dtype is None else dtype_name(dtype)))


def at_floor(scale: torch.Tensor) -> torch.Tensor:
    """The number of scales that the floor holds, as an int64 tensor."""
    return (scale < SCALE_FLOOR).sum()
