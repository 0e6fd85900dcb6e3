"""The torch operator for the gradients of fake_quantize with a learned scale and zero point.

This module also registers the derivative of ``holdfast::fake_quantize``. If the scale or the zero point is
learned, the derivative calls this operator, else ``holdfast::fake_quantize_backward``.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.autograd import register_autograd, requested_gradients
from holdfast.core.dtypes import float_dtype, parse_dtype
from holdfast.core.errors import Unsupported
from holdfast.core.formats import format_of
from holdfast.core.granularity import granularity_named
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import by_sample, cached_plan, define, register_vmap, select_plan
from holdfast.ops.affine.torch_op import SHARED_SCHEMA, refuse_second_derivative
from holdfast.ops.fake_quantize.plan import SteKind, refused_learning
from holdfast.ops.fake_quantize.torch_op import backward, lsq_factor, range_of_codes
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardPlan,
)


@cached_plan
def _plan(
    shape, input_dtype, device, granularity, q_min, q_max, ste, scale_dtype, zero_point_dtype, grad_factor
):
    return select_plan(
        FakeQuantizeLearnedBackwardPlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity), q_min=q_min, q_max=q_max, ste=ste,
        scale_dtype=scale_dtype, zero_point_dtype=zero_point_dtype, grad_factor=grad_factor,
    )  # fmt: skip


def _gradients(dy, x, scale, zero_point, granularity, needs_dzero):
    """Uninitialized dx, dscale and dzero_point. dzero_point has no elements unless ``needs_dzero``."""
    if scale is None:
        shape = granularity_named(granularity)._view(tuple(x.shape)).scale_shape
        dscale = x.new_empty(shape, dtype=float_dtype(x.dtype, "x").compute.torch)
    else:
        dscale = torch.empty_like(scale)
    return torch.empty_like(x), dscale, torch.empty_like(zero_point) if needs_dzero else x.new_empty(0)


def _backward(
    dy,
    x,
    scale,
    scale_value,
    zero_point,
    zero_value,
    granularity,
    q_min,
    q_max,
    ste,
    grad_factor,
    needs_dzero,
):
    if grad_factor is None:
        grad_factor = lsq_factor(x.shape, granularity, q_max)
    dx, dscale, dzero_point = _gradients(dy, x, scale, zero_point, granularity, needs_dzero)
    dx = on_huge_pages(dx)
    plan = _plan(
        x.shape, x.dtype, x.device, granularity, q_min, q_max, ste, dscale.dtype,
        dzero_point.dtype if needs_dzero else None, grad_factor,
    )  # fmt: skip
    args = FakeQuantizeLearnedBackwardArgs(
        dy=dy,
        x=x,
        scale=scale_value if scale is None else scale,
        zero_point=zero_value if zero_point is None else zero_point,
        dx=dx,
        dscale=dscale,
        dzero_point=dzero_point if needs_dzero else None,
    )
    return Work(plan, args, (dx, dscale, dzero_point))


def _backward_fake(dy, x, scale, scale_value, zero_point, zero_value, granularity, *rest):
    return _gradients(dy, x, scale, zero_point, granularity, rest[-1])


# grad_factor None is the factor of LSQ, which depends on the shape. Under torch.compile the shape may be
# symbolic, and a number would specialize the graph to one shape.
_call = define(
    "fake_quantize_learned_backward",
    f"(Tensor dy, Tensor x, {SHARED_SCHEMA}, int q_min, int q_max, str ste, float? grad_factor, "
    "bool needs_dzero) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _save_fake_quantize(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, scale, scale_value, zero_point, zero_value, *rest = inputs
    learned = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
    if learned and rest[1]:
        codes = format_of(parse_dtype(rest[1]), "dtype")
        if codes.is_float:
            raise Unsupported(refused_learning(codes))
    ctx.values = scale_value, zero_value, rest
    if learned or rest[-2] != SteKind.IDENTITY:
        ctx.save_for_backward(x, scale, zero_point)


def _differentiate_fake_quantize(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    scale_value, zero_value, (granularity, dtype, q_min, q_max, ste, grad_factor) = ctx.values
    dx, dscale, dzero_point = dy, None, None
    _, learns_scale, _, learns_zero_point, *_ = requested_gradients(ctx, dy)
    if learns_scale or learns_zero_point:
        x, scale, zero_point = ctx.saved_tensors
        q_min, q_max = range_of_codes(dtype, q_min, q_max)
        dx, dscale, dzero_point = _call(
            dy, x, scale, scale_value, zero_point, zero_value, granularity, q_min, q_max, ste, grad_factor,
            learns_zero_point,
        )  # fmt: skip
        dscale = dscale.reshape(scale.shape) if learns_scale else None
        dzero_point = dzero_point.reshape(zero_point.shape) if learns_zero_point else None
    elif ste != SteKind.IDENTITY:
        x, scale, zero_point = ctx.saved_tensors
        dx = backward(
            dy, x, scale, scale_value, zero_point, zero_value, granularity, dtype, q_min, q_max, ste
        )
    return dx, dscale, None, dzero_point, *[None] * 7


_REAL = ["x", "scale", "zero_point"]
register_autograd("fake_quantize", _differentiate_fake_quantize, by=_REAL, setup_context=_save_fake_quantize)
_refuse = refuse_second_derivative("a learned scale")
register_autograd("fake_quantize_learned_backward", _refuse, by=["dy", *_REAL])
# Every sample has its own gradients, even of a scale that all samples share.
register_vmap("fake_quantize_learned_backward", by_sample(_call))
