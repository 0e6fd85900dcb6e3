"""The gradients of fake_quantize with a learned scale and zero point as a torch operator.

``holdfast::fake_quantize`` calls it in its backward.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from holdfast.core.autograd import register_autograd
from holdfast.core.dtypes import float_dtype
from holdfast.core.errors import Unsupported
from holdfast.core.granularity import granularity_named
from holdfast.core.pages import fresh
from holdfast.core.stream import Workspace
from holdfast.ops.affine.batched import by_sample
from holdfast.ops.affine.torch_op import (
    LIBRARY,
    SHARED_SCHEMA,
    current_stream,
    define,
    register_vmap,
    select_plan,
)
from holdfast.ops.fake_quantize.torch_op import lsq_factor
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardPlan,
)


@lru_cache(maxsize=4096)
def _plan(
    shape, input_dtype, device, granularity, q_min, q_max, ste, scale_dtype, zero_point_dtype, grad_factor
):
    return select_plan(
        FakeQuantizeLearnedBackwardPlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity), q_min=q_min, q_max=q_max, ste=ste,
        scale_dtype=scale_dtype, zero_point_dtype=zero_point_dtype, grad_factor=grad_factor,
    )  # fmt: skip


def _gradients(dy, x, scale, zero_point, granularity, needs_dzero):
    """Room for dx, dscale and dzero_point, which has no element if it is not wanted."""
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
    plan = _plan(
        x.shape, x.dtype, x.device, granularity, q_min, q_max, ste, dscale.dtype,
        dzero_point.dtype if needs_dzero else None, grad_factor,
    )  # fmt: skip
    args = FakeQuantizeLearnedBackwardArgs(
        dy=dy,
        x=x,
        scale=scale_value if scale is None else scale,
        zero_point=zero_value if zero_point is None else zero_point,
        dx=fresh(dx),
        dscale=dscale,
        dzero_point=dzero_point if needs_dzero else None,
    )
    plan.run(current_stream(x.device), Workspace.allocate(plan.workspace_size(), x.device), args)
    return dx, dscale, dzero_point


def _backward_fake(dy, x, scale, scale_value, zero_point, zero_value, granularity, *rest):
    return _gradients(dy, x, scale, zero_point, granularity, rest[-1])


# A grad_factor of None stands for that of LSQ: where a compiler traces, the shape that it follows from is not
# known, and a number would tie what is compiled to one shape.
_call = define(
    "fake_quantize_learned_backward",
    f"(Tensor dy, Tensor x, {SHARED_SCHEMA}, int q_min, int q_max, str ste, float? grad_factor, "
    "bool needs_dzero) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _refuse_to_differentiate(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    raise Unsupported(
        "the gradients of a learned scale were asked for their own gradient, which is not defined here: an "
        "estimator stands in for a derivative once. Leave create_graph out, or detach the gradients."
    )


register_autograd(
    LIBRARY,
    "fake_quantize_learned_backward",
    _refuse_to_differentiate,
    by=["dy", "x", "scale", "zero_point"],
)


# Each sample has gradients of its own, also of a scale that all share.
register_vmap("fake_quantize_learned_backward", by_sample(_call))
