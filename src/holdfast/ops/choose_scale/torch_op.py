"""The torch operators of observe_range, choose_scale and scale_of_range, and the public functions."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from holdfast.core.autograd import constant, refuse_derivatives, register_autograd, register_constant
from holdfast.core.checks import require_bool, require_memory, require_tensor
from holdfast.core.dtypes import float_dtype, parse_dtype
from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import ONE_SCALE, Granularity, granularity_named, validate_granularity
from holdfast.core.repeated import Work
from holdfast.core.torch_op import (
    by_sample,
    cached_plan,
    define,
    named_dtype,
    register_vmap,
    select_plan,
)
from holdfast.ops.affine.torch_op import code_range
from holdfast.ops.choose_scale.plan import (
    SCALE_FLOOR,
    ChooseScaleArgs,
    ChooseScaleDescriptor,
    ChooseScalePlan,
    ObserveRangeArgs,
    ObserveRangePlan,
)

__all__ = ["choose_scale", "observe_range", "scale_of_range"]

RULE_SCHEMA = "str dtype, int? q_min, int? q_max, bool? narrow"


@cached_plan
def _range_plan(shape, input_dtype, device, granularity):
    return select_plan(
        ObserveRangePlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity),
    )  # fmt: skip


@cached_plan
def _scale_plan(shape, input_dtype, device, granularity, dtype, q_min, q_max, narrow, symmetric):
    return select_plan(
        ChooseScalePlan, device, shape=shape, input_dtype=input_dtype,
        output_dtype=parse_dtype(dtype), q_min=q_min, q_max=q_max,
        granularity=granularity_named(granularity), symmetric=symmetric, narrow=narrow,
    )  # fmt: skip


def empty_scale(x: torch.Tensor, granularity: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialized tensor with one value per scale. The default dtype is the compute type of ``x``."""
    # ``view`` is cached by shape, which a traced shape cannot be: use ``_view``.
    shape = granularity_named(granularity)._view(tuple(x.shape)).scale_shape
    return x.new_empty(shape, dtype=dtype or float_dtype(x.dtype, "x").compute.torch)


def _observe_range(x, granularity):
    plan = _range_plan(x.shape, x.dtype, x.device, granularity)
    low, high = empty_scale(x, granularity), empty_scale(x, granularity)
    return Work(plan, ObserveRangeArgs(x=x, low=low, high=high), (low, high))


def _observe_range_fake(x, granularity):
    return empty_scale(x, granularity), empty_scale(x, granularity)


def _choose_scale(x, granularity, dtype, q_min, q_max, narrow):
    plan = _scale_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, narrow, True)
    scale = empty_scale(x, granularity)
    return Work(plan, ChooseScaleArgs(x=x, scale=scale), scale)


def _choose_scale_fake(x, granularity, *rule):
    return empty_scale(x, granularity)


def _choose_scale_affine(x, granularity, dtype, q_min, q_max, narrow):
    plan = _scale_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, narrow, False)
    scale, zero_point = empty_scale(x, granularity), empty_scale(x, granularity, torch.int32)
    args = ChooseScaleArgs(x=x, scale=scale, zero_point=zero_point)
    return Work(plan, args, (scale, zero_point))


def _choose_scale_affine_fake(x, granularity, *rule):
    return empty_scale(x, granularity), empty_scale(x, granularity, torch.int32)


_range = define(
    "observe_range", "(Tensor x, str granularity) -> (Tensor, Tensor)", _observe_range, _observe_range_fake
)
_symmetric = define(
    "choose_scale", f"(Tensor x, str granularity, {RULE_SCHEMA}) -> Tensor", _choose_scale, _choose_scale_fake
)
_affine = define(
    "choose_scale_affine", f"(Tensor x, str granularity, {RULE_SCHEMA}) -> (Tensor, Tensor)",
    _choose_scale_affine, _choose_scale_affine_fake,
)  # fmt: skip


# scale_of_range in plain torch operations. Each operation is rounded, so the bits are those of choose_scale.
# It is an opaque operator, since a compiler would fuse the operations and could divide differently. The fake
# kernel is the kernel itself: the strides of the results depend on those of both ends.


def _scale_of_range(low, high, dtype, q_min, q_max, narrow):
    lowest, highest = _ends(dtype, q_min, q_max, narrow, True)
    _require_ends(low, high)
    return torch.maximum(_over(high, highest), _over(low, lowest)).clamp_min(SCALE_FLOOR)


def _scale_of_range_affine(low, high, dtype, q_min, q_max, narrow):
    lowest, highest = _ends(dtype, q_min, q_max, narrow, False)
    _require_ends(low, high)
    scale = (_over(high * 0.5 - low * 0.5, highest - lowest) * 2).clamp_min(SCALE_FLOOR)
    r = torch.round(low / scale)
    r = torch.where(r == r, r, 0)
    return scale, (lowest - r).clamp(lowest, highest).to(torch.int32)


def _require_ends(low: torch.Tensor, high: torch.Tensor) -> None:
    require_memory("low", low)
    require_memory("high", high)


def _over(x: torch.Tensor, number: int) -> torch.Tensor:
    """x / number, correctly rounded. On CUDA torch divides by a tensor, but multiplies by 1 / number."""
    return x / torch.full_like(x, number)


def _ends(dtype, q_min, q_max, narrow, symmetric):
    rule = ChooseScaleDescriptor(
        shape=(), output_dtype=parse_dtype(dtype), q_min=q_min, q_max=q_max, symmetric=symmetric,
        narrow=narrow,
    )  # fmt: skip
    rule.validate()
    return rule.ends(*rule.code_range)


_scale_of = define(
    "scale_of_range", f"(Tensor low, Tensor high, {RULE_SCHEMA}) -> Tensor", _scale_of_range,
    _scale_of_range,
)  # fmt: skip
_affine_of = define(
    "scale_of_range_affine", f"(Tensor low, Tensor high, {RULE_SCHEMA}) -> (Tensor, Tensor)",
    _scale_of_range_affine, _scale_of_range_affine,
)  # fmt: skip


for _name in ("observe_range", "choose_scale", "choose_scale_affine"):
    register_constant(_name)
for _name in ("scale_of_range", "scale_of_range_affine"):
    register_autograd(_name, refuse_derivatives, by=[])
for _name, _call in {
    "observe_range": _range, "choose_scale": _symmetric, "choose_scale_affine": _affine,
    "scale_of_range": _scale_of, "scale_of_range_affine": _affine_of,
}.items():  # fmt: skip
    register_vmap(_name, by_sample(_call))


def scale_rule(dtype: Any, q_min: Any, q_max: Any, narrow: Any) -> tuple[Any, ...]:
    """The arguments of ``RULE_SCHEMA``."""
    if narrow is not None:
        require_bool("narrow", narrow)
    return named_dtype("dtype", dtype), *code_range(q_min, q_max), narrow


def observe_range(
    x: torch.Tensor, *, granularity: Granularity = ONE_SCALE
) -> tuple[torch.Tensor, torch.Tensor]:
    """``min(x, 0)`` and ``max(x, 0)`` over the elements of each scale. Both are NaN if an element is.

    ``torch.minimum`` and ``torch.maximum`` join the ranges of several tensors, and ``scale_of_range``
    computes the scale of a range. No gradient flows through it.

    >>> import torch, holdfast as hf
    >>> hf.observe_range(torch.tensor([[3.0, -1.0], [4.0, 8.0]]), granularity=hf.PerToken())
    (tensor([-1.,  0.]), tensor([3., 8.]))
    """
    require_tensor("x", x)
    validate_granularity(granularity)
    return _range(constant(x), granularity.name)  # type: ignore[no-any-return]


@overload
def choose_scale(
    x: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., symmetric: Literal[True] = ..., narrow: bool | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def choose_scale(
    x: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., symmetric: Literal[False], narrow: bool | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def choose_scale(
    x: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ..., q_max: int | None = ...,
    granularity: Granularity = ..., symmetric: bool, narrow: bool | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def choose_scale(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.int8,
    q_min: int | None = None,
    q_max: int | None = None,
    granularity: Granularity = ONE_SCALE,
    symmetric: bool = True,
    narrow: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The smallest scale with which the codes of ``dtype``, or ``q_min`` to ``q_max``, cover the data.

    A symmetric scale has no zero point: it is the largest magnitude divided by the highest code. With
    ``narrow``, the default of a symmetric scale, there are as many codes below zero as above; without it the
    lowest code is used too. With ``symmetric=False`` the result is a scale and a zero point; 0.0 has a code,
    and ``narrow`` omits the lowest code. No scale is below 1e-12. A NaN makes the scale NaN, and an infinity
    makes it infinite; the zero point is then the lowest code. No gradient flows through it.

    >>> import torch, holdfast as hf
    >>> hf.choose_scale(torch.tensor([0.5, -254.0]))
    tensor(2.)
    >>> hf.choose_scale(torch.tensor([0.5, -1.0, 2.0]), dtype=torch.uint2, symmetric=False)
    (tensor(1.), tensor(1, dtype=torch.int32))
    """
    require_tensor("x", x)
    validate_granularity(granularity)
    require_bool("symmetric", symmetric)
    call = _symmetric if symmetric else _affine
    return call(constant(x), granularity.name, *scale_rule(dtype, q_min, q_max, narrow))  # type: ignore[no-any-return]


@overload
def scale_of_range(
    low: torch.Tensor, high: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ...,
    q_max: int | None = ..., symmetric: Literal[True] = ..., narrow: bool | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def scale_of_range(
    low: torch.Tensor, high: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ...,
    q_max: int | None = ..., symmetric: Literal[False], narrow: bool | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def scale_of_range(
    low: torch.Tensor, high: torch.Tensor, *, dtype: torch.dtype = ..., q_min: int | None = ...,
    q_max: int | None = ..., symmetric: bool, narrow: bool | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def scale_of_range(
    low: torch.Tensor,
    high: torch.Tensor,
    *,
    dtype: torch.dtype = torch.int8,
    q_min: int | None = None,
    q_max: int | None = None,
    symmetric: bool = True,
    narrow: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The result of ``choose_scale`` for data with this range, bit for bit.

    It has no gradient, and refuses a range that requires one.

    >>> import torch, holdfast as hf
    >>> low, high = hf.observe_range(torch.tensor([0.5, -254.0]))
    >>> hf.scale_of_range(low, high)
    tensor(2.)
    """
    for name, end in (("low", low), ("high", high)):
        require_tensor(name, end)
        if end.dtype not in (torch.float32, torch.float64) or end.shape != low.shape:
            raise InvalidArgs(
                f"{name} is {end.dtype} of shape {tuple(end.shape)}; low and high are those of "
                "observe_range, float32 or float64 and of one shape."
            )
    require_bool("symmetric", symmetric)
    call = _scale_of if symmetric else _affine_of
    return call(low, high, *scale_rule(dtype, q_min, q_max, narrow))  # type: ignore[no-any-return]
