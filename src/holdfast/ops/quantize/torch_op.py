"""The torch operators of quantize: registration, tracing, autograd, vmap, and ``hf.quantize``."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.autograd import register_autograd, register_constant
from holdfast.core.checks import require_bool, require_tensor
from holdfast.core.dtypes import parse_dtype
from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import format_of
from holdfast.core.granularity import ONE_SCALE, Granularity, validate_granularity
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import by_sample, cached_plan, define, named_dtype, register_vmap
from holdfast.ops.affine.batched import batched
from holdfast.ops.affine.torch_op import (
    SHARED_SCHEMA,
    code_range,
    empty_codes,
    plans_by_granularity,
    refuse_second_derivative,
    select,
    shared_arguments,
    unchecked_arguments,
    unchecked_name,
)
from holdfast.ops.quantize import plan as plans
from holdfast.ops.quantize.plan import QuantizeArgs, QuantizeBackwardArgs

__all__ = ["quantize"]

_FORWARD = plans_by_granularity(plans, "Quantize")
_BACKWARD = plans_by_granularity(plans, "Quantize", "Backward")

_RANGE_SCHEMA = "str dtype, int? q_min, int? q_max"


@cached_plan
def _forward_plan(shape, input_dtype, device, granularity, dtype, q_min, q_max, packed):
    return select(
        _FORWARD, granularity, device, shape=shape, input_dtype=input_dtype, output_dtype=parse_dtype(dtype),
        q_min=q_min, q_max=q_max, packed=packed,
    )  # fmt: skip


@cached_plan
def _backward_plan(shape, input_dtype, device, granularity, dtype, q_min, q_max):
    return select(
        _BACKWARD, granularity, device, shape=shape, input_dtype=input_dtype, output_dtype=parse_dtype(dtype),
        q_min=q_min, q_max=q_max,
    )  # fmt: skip


def _quantize(x, scale, scale_value, zero_point, zero_value, granularity, dtype, q_min, q_max, packed=False):
    plan = _forward_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, packed)
    q = on_huge_pages(empty_codes(x, dtype, packed))
    args = QuantizeArgs(
        x=x,
        scale=scale_value if scale is None else scale,
        zero_point=zero_value if zero_point is None else zero_point,
        q=q,
    )
    return Work(plan, args, q)


def _quantize_fake(
    x, scale, scale_value, zero_point, zero_value, granularity, dtype, q_min, q_max, packed=False
):
    return empty_codes(x, dtype, packed)


def _quantize_backward(dy, x, scale, scale_value, zero_point, zero_value, granularity, dtype, q_min, q_max):
    plan = _backward_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max)
    dx = on_huge_pages(torch.empty_like(x))
    args = QuantizeBackwardArgs(
        dy=dy,
        x=x,
        scale=scale_value if scale is None else scale,
        zero_point=zero_value if zero_point is None else zero_point,
        dx=dx,
    )
    return Work(plan, args, dx)


def _quantize_backward_fake(dy, x, *rest):
    return torch.empty_like(x)


_to_integers = define(
    "quantize", f"(Tensor x, {SHARED_SCHEMA}, {_RANGE_SCHEMA}, bool packed) -> Tensor", _quantize,
    _quantize_fake,
)  # fmt: skip
_again = _to_integers.again
_to_floats = define(
    "quantize_to_float", f"(Tensor x, {SHARED_SCHEMA}, {_RANGE_SCHEMA}) -> Tensor", _quantize, _quantize_fake
)
_gradient = define(
    "quantize_backward", f"(Tensor dy, Tensor x, {SHARED_SCHEMA}, {_RANGE_SCHEMA}) -> Tensor",
    _quantize_backward, _quantize_backward_fake,
)  # fmt: skip


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, scale, scale_value, zero_point, *rest = inputs
    ctx.save_for_backward(x, scale, zero_point)
    ctx.values = scale_value, rest


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, scale, zero_point = ctx.saved_tensors
    scale_value, (zero_value, *rest) = ctx.values
    dx = _gradient(dy, x, scale, scale_value, zero_point, zero_value, *rest)
    return dx, *[None] * 8


register_constant("quantize", integers=True)
register_autograd("quantize_to_float", _differentiate, by=["x"], setup_context=_save_for_backward)
register_autograd("quantize_backward", refuse_second_derivative("quantize"), by=["dy", "x"])


def _quantize_batched(call):
    def rule(info, in_dims, x, *rest):
        *shared, granularity, dtype, q_min, q_max = rest[:8]
        if rest[8:] == (True,):  # the packed axis must stay the last one
            return by_sample(call)(info, in_dims, x, *rest)
        static = (dtype, q_min, q_max, *rest[8:])
        return batched(call, info, in_dims, (x,), shared, granularity, static)

    return rule


def _quantize_backward_batched(info, in_dims, dy, x, *rest):
    *shared, granularity, dtype, q_min, q_max = rest
    static = (dtype, q_min, q_max)
    return batched(_gradient, info, in_dims, (dy, x), shared, granularity, static)


register_vmap("quantize", _quantize_batched(_to_integers))
register_vmap("quantize_to_float", _quantize_batched(_to_floats))
register_vmap("quantize_backward", _quantize_backward_batched)


def quantize(
    x: torch.Tensor,
    scale: torch.Tensor | float,
    zero_point: torch.Tensor | int | None = None,
    *,
    dtype: torch.dtype = torch.int8,
    granularity: Granularity = ONE_SCALE,
    q_min: int | None = None,
    q_max: int | None = None,
    packed: bool = False,
) -> torch.Tensor:
    """The codes of ``x``: ``clamp(rint(x / scale) + zero_point, q_min, q_max)``.

    ``scale`` is a number, or a tensor with one scale for each part of ``x`` that ``granularity`` names.
    ``zero_point`` is an int, an int32 tensor like the scale, or None for 0.

    ``dtype`` is the dtype of the codes. Codes of 2 or 4 bits are stored one per int8 or uint8 element or,
    with ``packed``, several per byte along the last axis. With a floating ``dtype``, which needs ``q_min``
    and ``q_max``, the codes are floats. They are differentiable with respect to ``x`` by the straight-through
    estimator: ``dx = dy / scale`` where the code is in range, else 0.

    >>> import torch, holdfast as hf
    >>> hf.quantize(torch.tensor([-1.0, 0.04, 0.05, 9.0]), 0.1)
    tensor([-10,   0,   0,  90], dtype=torch.int8)
    >>> x = torch.tensor([0.26, 99.0], requires_grad=True)
    >>> codes = hf.quantize(x, 0.5, dtype=torch.float32, q_min=-8, q_max=7)
    >>> codes.sum().backward()
    >>> codes.detach(), x.grad
    (tensor([1., 7.]), tensor([2., 0.]))
    """
    shared = unchecked_arguments(scale, zero_point, granularity)
    found = _again(x, *shared, unchecked_name(dtype), q_min, q_max, packed)
    if found is not None:
        return found  # type: ignore[no-any-return]
    require_tensor("x", x)
    validate_granularity(granularity)
    require_bool("packed", packed)
    codes = named_dtype("dtype", dtype), *code_range(q_min, q_max)
    shared = shared_arguments(scale, zero_point)
    if not format_of(dtype, "dtype").carried:
        return _to_integers(x, *shared, granularity.name, *codes, packed)  # type: ignore[no-any-return]
    if packed:
        raise InvalidArgs(
            f"packed=True with dtype {dtype}: codes carried as floats share no byte. Leave it out."
        )
    return _to_floats(x, *shared, granularity.name, *codes)  # type: ignore[no-any-return]
