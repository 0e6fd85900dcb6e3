"""The scale that a FakeQuantize uses: at least a floor, and rounded to the dtype in which it is stored.

Both steps are one operator: torch.compile removes a pair of casts, and the bits would be those of another
scale. Only comparisons, selections and casts are made, so the bits are the same on any device.

The gradient is straight-through. Below the floor it is made negative, so that gradient descent raises the
scale above the floor again.
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
from holdfast.ops.affine.torch_op import refuse_second_derivative
from holdfast.ops.choose_scale.plan import SCALE_FLOOR

#: The dtypes in which a scale can be stored.
STORED = (torch.float32, torch.bfloat16, torch.float16)

#: The floor of a learned scale, as a part of the scale of the first batch: there a tensor is clipped and not
#: yet lost, so that gradients can raise the scale. A power of two, so that the product is exact.
FLOOR_PART = 2.0**-6


def checked_scale_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Check the argument ``scale_dtype``."""
    if dtype is not None and dtype not in STORED:
        named = ", ".join(map(str, STORED))
        raise InvalidArgs(f"scale_dtype is {shown(dtype)}; accepted are {named}, and None for no rounding.")
    return dtype


def floor_of(scale: torch.Tensor) -> torch.Tensor:
    """The floor of scales that the data has set to ``scale``. NaN stays NaN."""
    return (scale.detach().abs() * FLOOR_PART).clamp_min(SCALE_FLOOR)


def _scale_in_use(scale, floor, dtype):
    # A NaN floor is unset and holds nothing; a NaN scale stays visible.
    used = scale.clone() if floor is None else torch.where(scale < floor, floor, scale)
    if dtype is None:
        return used
    stored = parse_dtype(dtype)
    limits = torch.finfo(stored)
    least = limits.smallest_normal * limits.eps  # the smallest subnormal: a stored scale is never zero
    return used.clamp(least, limits.max).to(stored).to(scale.dtype)


def _save(ctx, inputs, output):
    scale, floor, _ = inputs
    ctx.save_for_backward(scale, floor)


def _differentiate(ctx, used_gradient):
    scale, floor = ctx.saved_tensors
    return used_gradient if floor is None else _call_backward(used_gradient, scale, floor), None, None


def _raised(used_gradient, scale, floor):
    return torch.where(scale < floor, -used_gradient.abs(), used_gradient)


_call = define(
    "scale_in_use",
    "(Tensor scale, Tensor? floor, str? dtype) -> Tensor",
    _scale_in_use,
    lambda scale, floor, dtype: torch.empty_like(scale),
)
# An operator, so that autograd keeps the scale and the floor and no mask, in every compiled graph alike.
_call_backward = define(
    "scale_in_use_backward",
    "(Tensor used_gradient, Tensor scale, Tensor floor) -> Tensor",
    _raised,
    lambda used_gradient, scale, floor: torch.empty_like(used_gradient),
)
register_autograd("scale_in_use", _differentiate, by=["scale"], setup_context=_save)
_refuse = refuse_second_derivative("a learned scale")
register_autograd("scale_in_use_backward", _refuse, by=["used_gradient", "scale"])
register_vmap("scale_in_use", by_sample(_call))
register_vmap("scale_in_use_backward", by_sample(_call_backward))


def scale_in_use(scale: torch.Tensor, floor: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
    """``scale``, raised to ``floor`` and rounded to ``dtype``; None leaves out either step."""
    if floor is None and dtype is None:
        return scale
    return cast(torch.Tensor, _call(scale, floor, None if dtype is None else dtype_name(dtype)))
