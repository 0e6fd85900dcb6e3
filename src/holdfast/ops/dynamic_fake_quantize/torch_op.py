"""The torch operators of dynamic_fake_quantize: registration, tracing, gradient, and the public function."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from holdfast.core.autograd import register_autograd
from holdfast.core.checks import require_bool, require_choice, require_tensor
from holdfast.core.dtypes import parse_dtype
from holdfast.core.granularity import Granularity, PerToken, granularity_named, validate_granularity
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import by_sample, cached_plan, define, named_dtype, register_vmap, select_plan
from holdfast.ops.affine.torch_op import code_range, refuse_second_derivative
from holdfast.ops.choose_scale.torch_op import empty_scale
from holdfast.ops.dynamic_fake_quantize.plan import (
    DynamicFakeQuantizeArgs,
    DynamicFakeQuantizeBackwardArgs,
    DynamicFakeQuantizeBackwardPlan,
    DynamicFakeQuantizePlan,
)
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize.torch_op import ESTIMATORS, RANGE_SCHEMA

__all__ = ["dynamic_fake_quantize"]

_EACH_TOKEN = PerToken()


@cached_plan
def _forward_plan(shape, input_dtype, device, granularity, dtype, q_min, q_max, narrow, symmetric):
    return select_plan(
        DynamicFakeQuantizePlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity), dtype=dtype and parse_dtype(dtype), q_min=q_min,
        q_max=q_max, narrow=narrow, symmetric=symmetric,
    )  # fmt: skip


@cached_plan
def _backward_plan(shape, input_dtype, device, granularity, dtype, q_min, q_max, ste, symmetric):
    return select_plan(
        DynamicFakeQuantizeBackwardPlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity), dtype=dtype and parse_dtype(dtype), q_min=q_min,
        q_max=q_max, ste=ste, symmetric=symmetric,
    )  # fmt: skip


def _symmetric(x, granularity, dtype, q_min, q_max, ste, narrow):
    plan = _forward_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, narrow, True)
    y, scale = on_huge_pages(torch.empty_like(x)), empty_scale(x, granularity)
    return Work(plan, DynamicFakeQuantizeArgs(x=x, y=y, scale=scale), (y, scale))


def _symmetric_fake(x, granularity, *rest):
    return torch.empty_like(x), empty_scale(x, granularity)


def _affine(x, granularity, dtype, q_min, q_max, ste, narrow):
    plan = _forward_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, narrow, False)
    y, scale = on_huge_pages(torch.empty_like(x)), empty_scale(x, granularity)
    zero_point = empty_scale(x, granularity, torch.int32)
    args = DynamicFakeQuantizeArgs(x=x, y=y, scale=scale, zero_point=zero_point)
    return Work(plan, args, (y, scale, zero_point))


def _affine_fake(x, granularity, *rest):
    return torch.empty_like(x), empty_scale(x, granularity), empty_scale(x, granularity, torch.int32)


def _backward(dy, x, scale, zero_point, granularity, dtype, q_min, q_max, ste):
    plan = _backward_plan(
        x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, ste, zero_point is None
    )
    dx = on_huge_pages(torch.empty_like(x))
    args = DynamicFakeQuantizeBackwardArgs(dy=dy, x=x, scale=scale, zero_point=zero_point, dx=dx)
    return Work(plan, args, dx)


def _backward_fake(dy, x, *rest):
    return torch.empty_like(x)


_RULE = f"str granularity, {RANGE_SCHEMA}, bool? narrow"
_call_symmetric = define(
    "dynamic_fake_quantize", f"(Tensor x, {_RULE}) -> (Tensor, Tensor)", _symmetric, _symmetric_fake
)
_call_affine = define(
    "dynamic_fake_quantize_affine", f"(Tensor x, {_RULE}) -> (Tensor, Tensor, Tensor)", _affine, _affine_fake
)
_call_backward = define(
    "dynamic_fake_quantize_backward",
    f"(Tensor dy, Tensor x, Tensor scale, Tensor? zero_point, str granularity, {RANGE_SCHEMA}) -> Tensor",
    _backward,
    _backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, *ctx.rest, _ = inputs
    _, scale, *zero_point = output
    ctx.mark_non_differentiable(scale, *zero_point)
    ctx.set_materialize_grads(False)
    if ctx.rest[-1] != SteKind.IDENTITY:
        ctx.save_for_backward(x, scale, *zero_point or (None,))


def _differentiate(ctx: Any, dy: torch.Tensor | None, *of_constants: None) -> tuple[Any, ...]:
    dx = dy
    if dy is not None and ctx.rest[-1] != SteKind.IDENTITY:
        dx = _call_backward(dy, *ctx.saved_tensors, *ctx.rest)
    return dx, *[None] * 6


for _name, _call in {
    "dynamic_fake_quantize": _call_symmetric,
    "dynamic_fake_quantize_affine": _call_affine,
}.items():
    register_autograd(_name, _differentiate, by=["x"], setup_context=_save)
    register_vmap(_name, by_sample(_call))
_refuse = refuse_second_derivative("dynamic_fake_quantize")
register_autograd("dynamic_fake_quantize_backward", _refuse, by=["dy", "x", "scale"])
register_vmap("dynamic_fake_quantize_backward", by_sample(_call_backward))


@overload
def dynamic_fake_quantize(
    x: torch.Tensor, *, dtype: torch.dtype | None = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., ste: SteKind | str = ..., symmetric: bool = ...,
    narrow: bool | None = ..., return_scale: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def dynamic_fake_quantize(
    x: torch.Tensor, *, dtype: torch.dtype | None = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., ste: SteKind | str = ..., symmetric: Literal[True] = ...,
    narrow: bool | None = ..., return_scale: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def dynamic_fake_quantize(
    x: torch.Tensor, *, dtype: torch.dtype | None = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., ste: SteKind | str = ..., symmetric: Literal[False],
    narrow: bool | None = ..., return_scale: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def dynamic_fake_quantize(
    x: torch.Tensor, *, dtype: torch.dtype | None = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., ste: SteKind | str = ..., symmetric: bool = ...,
    narrow: bool | None = ..., return_scale: bool,
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...  # fmt: skip


def dynamic_fake_quantize(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    granularity: Granularity = _EACH_TOKEN,
    ste: SteKind | str = SteKind.IN_RANGE,
    symmetric: bool = True,
    narrow: bool | None = None,
    return_scale: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``fake_quantize`` of ``x`` with the scales that ``choose_scale`` computes from it. Differentiable.

    The bits are those of ``choose_scale`` followed by ``fake_quantize``. Tokens, groups and rows of ordinary
    size are read once. The arguments are those of the two functions: ``dtype`` names the format of the codes,
    or ``q_min`` and ``q_max`` give their range; without all three, the codes are int8. With
    ``symmetric=False`` there is a zero point. With ``return_scale`` the result is ``(y, scale)``, or
    ``(y, scale, zero_point)``.

    The gradient is that of ``fake_quantize`` by the estimator ``ste``; the scale counts as a constant, and no
    gradient flows through it. Autograd keeps ``x``, the scale and the zero point. With a symmetric scale all
    finite data is in range, so the default estimator passes the whole gradient.

    >>> import torch, holdfast as hf
    >>> x = torch.tensor([[1.0, -2.0, 0.3], [0.0, 0.7, 0.1]], requires_grad=True)
    >>> y, scale = hf.dynamic_fake_quantize(x, dtype=torch.int4, return_scale=True)
    >>> y.sum().backward()
    >>> y.detach(), scale
    (tensor([[ 0.8571, -2.0000,  0.2857],
            [ 0.0000,  0.7000,  0.1000]]), tensor([0.2857, 0.1000]))
    >>> x.grad
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    require_tensor("x", x)
    validate_granularity(granularity)
    require_choice("ste", ste, ESTIMATORS)
    require_bool("symmetric", symmetric)
    require_bool("return_scale", return_scale)
    if narrow is not None:
        require_bool("narrow", narrow)
    if dtype is None and q_min is None and q_max is None:
        dtype = torch.int8
    codes = None if dtype is None else named_dtype("dtype", dtype), *code_range(q_min, q_max)
    call = _call_symmetric if symmetric else _call_affine
    found = call(x, granularity.name, *codes, str(ste), narrow)
    return found if return_scale else found[0]  # type: ignore[no-any-return]
