"""The torch operators of dynamic_quantize: registration, tracing, vmap, and ``hf.dynamic_quantize``."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Literal, overload

import torch

from holdfast.core.autograd import constant, register_constant
from holdfast.core.checks import require_bool, require_tensor
from holdfast.core.dtypes import parse_dtype
from holdfast.core.granularity import Granularity, PerToken, granularity_named, validate_granularity
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import by_sample, cached_plan, define, register_vmap, select_plan
from holdfast.ops.affine.torch_op import empty_codes
from holdfast.ops.choose_scale.torch_op import RULE_SCHEMA, empty_scale, scale_rule
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizeArgs, DynamicQuantizePlan

__all__ = ["dynamic_quantize", "quantize_dynamic"]

_EACH_TOKEN = PerToken()


@cached_plan
def _plan(shape, input_dtype, device, granularity, dtype, q_min, q_max, narrow, packed, symmetric):
    return select_plan(
        DynamicQuantizePlan, device, shape=shape, input_dtype=input_dtype,
        output_dtype=parse_dtype(dtype), q_min=q_min, q_max=q_max,
        granularity=granularity_named(granularity), symmetric=symmetric, narrow=narrow,
        packed=packed,
    )  # fmt: skip


def _quantize_dynamic(x, granularity, dtype, q_min, q_max, narrow, packed):
    plan = _plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, narrow, packed, True)
    q, scale = on_huge_pages(empty_codes(x, dtype, packed)), empty_scale(x, granularity)
    return Work(plan, DynamicQuantizeArgs(x=x, q=q, scale=scale), (q, scale))


def _quantize_dynamic_fake(x, granularity, dtype, q_min, q_max, narrow, packed):
    return empty_codes(x, dtype, packed), empty_scale(x, granularity)


def _quantize_dynamic_affine(x, granularity, dtype, q_min, q_max, narrow, packed):
    plan = _plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, narrow, packed, False)
    q, scale = on_huge_pages(empty_codes(x, dtype, packed)), empty_scale(x, granularity)
    zero_point = empty_scale(x, granularity, torch.int32)
    args = DynamicQuantizeArgs(x=x, q=q, scale=scale, zero_point=zero_point)
    return Work(plan, args, (q, scale, zero_point))


def _quantize_dynamic_affine_fake(x, granularity, dtype, q_min, q_max, narrow, packed):
    codes = empty_codes(x, dtype, packed)
    return codes, empty_scale(x, granularity), empty_scale(x, granularity, torch.int32)


_symmetric = define(
    "quantize_dynamic",
    f"(Tensor x, str granularity, {RULE_SCHEMA}, bool packed) -> (Tensor, Tensor)",
    _quantize_dynamic,
    _quantize_dynamic_fake,
)
_affine = define(
    "quantize_dynamic_affine",
    f"(Tensor x, str granularity, {RULE_SCHEMA}, bool packed) -> (Tensor, Tensor, Tensor)",
    _quantize_dynamic_affine,
    _quantize_dynamic_affine_fake,
)
register_constant("quantize_dynamic")
register_constant("quantize_dynamic_affine")
register_vmap("quantize_dynamic", by_sample(_symmetric))
register_vmap("quantize_dynamic_affine", by_sample(_affine))


@overload
def dynamic_quantize(
    x: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., symmetric: Literal[True] = ..., narrow: bool | None = ...,
    packed: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def dynamic_quantize(
    x: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., symmetric: Literal[False], narrow: bool | None = ...,
    packed: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def dynamic_quantize(
    x: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., symmetric: bool, narrow: bool | None = ...,
    packed: bool = ...,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...  # fmt: skip


def dynamic_quantize(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.int8,
    q_min: int | None = None,
    q_max: int | None = None,
    granularity: Granularity = _EACH_TOKEN,
    symmetric: bool = True,
    narrow: bool | None = None,
    packed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The codes of ``x``, and the scales that ``choose_scale`` computes from it: ``(q, scale)``.

    With ``symmetric=False`` the result is ``(q, scale, zero_point)``. The bits are those of ``choose_scale``
    followed by ``quantize``. Tokens and groups of ordinary size are read once. No gradient flows through it.

    >>> import torch, holdfast as hf
    >>> q, scale = hf.dynamic_quantize(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> q, scale
    (tensor([[  64, -127],
            [   0,    0]], dtype=torch.int8), tensor([1.5748e-02, 1.0000e-12]))
    """
    require_tensor("x", x)
    validate_granularity(granularity)
    require_bool("symmetric", symmetric)
    require_bool("packed", packed)
    call = _symmetric if symmetric else _affine
    found = call(constant(x), granularity.name, *scale_rule(dtype, q_min, q_max, narrow), packed)
    return found  # type: ignore[no-any-return]


quantize_dynamic = dynamic_quantize
"""The same function as ``dynamic_quantize``."""
