"""The torch operators of fake_quantize: registration, tracing, vmap, and ``hf.fake_quantize``.

``fake_quantize_learned`` registers the derivative of ``holdfast::fake_quantize``, since that derivative calls
the backward operators of both modules.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from holdfast.core.autograd import register_autograd
from holdfast.core.checks import finite_number, require_choice, require_tensor
from holdfast.core.dtypes import parse_dtype
from holdfast.core.granularity import ONE_SCALE, Granularity, granularity_named, validate_granularity
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import cached_plan, define, named_dtype, register_vmap, select_plan
from holdfast.ops.affine.batched import batched
from holdfast.ops.affine.torch_op import (
    SHARED_SCHEMA,
    code_range,
    refuse_second_derivative,
    shared_arguments,
    unchecked_arguments,
    unchecked_name,
)
from holdfast.ops.fake_quantize.plan import (
    FakeQuantizeArgs,
    FakeQuantizeBackwardArgs,
    FakeQuantizeBackwardPlan,
    FakeQuantizeDescriptor,
    FakeQuantizePlan,
    SteKind,
)

__all__ = ["SteKind", "fake_quantize"]

RANGE_SCHEMA = "str? dtype, int? q_min, int? q_max, str ste"
ESTIMATORS = tuple(str(kind) for kind in SteKind)


@cached_plan
def _forward_plan(shape, input_dtype, device, granularity, dtype, q_min, q_max, ste):
    return select_plan(
        FakeQuantizePlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity), dtype=dtype and parse_dtype(dtype), q_min=q_min,
        q_max=q_max,
    )  # fmt: skip


@cached_plan
def _backward_plan(shape, input_dtype, device, granularity, dtype, q_min, q_max, ste):
    return select_plan(
        FakeQuantizeBackwardPlan, device, shape=shape, input_dtype=input_dtype,
        granularity=granularity_named(granularity), dtype=dtype and parse_dtype(dtype), q_min=q_min,
        q_max=q_max, ste=ste,
    )  # fmt: skip


def _fake_quantize(
    x, scale, scale_value, zero_point, zero_value, granularity, dtype, q_min, q_max, ste, grad_factor
):
    plan = _forward_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, ste)
    y = on_huge_pages(torch.empty_like(x))
    args = FakeQuantizeArgs(
        x=x,
        scale=scale_value if scale is None else scale,
        zero_point=zero_value if zero_point is None else zero_point,
        y=y,
    )
    return Work(plan, args, y)


def _fake_quantize_fake(x, *rest):
    return torch.empty_like(x)


def _fake_quantize_backward(
    dy, x, scale, scale_value, zero_point, zero_value, granularity, dtype, q_min, q_max, ste
):
    plan = _backward_plan(x.shape, x.dtype, x.device, granularity, dtype, q_min, q_max, ste)
    dx = on_huge_pages(torch.empty_like(x))
    args = FakeQuantizeBackwardArgs(
        dy=dy,
        x=x,
        scale=scale_value if scale is None else scale,
        zero_point=zero_value if zero_point is None else zero_point,
        dx=dx,
    )
    return Work(plan, args, dx)


def _fake_quantize_backward_fake(dy, x, *rest):
    return torch.empty_like(x)


# grad_factor None is the factor of LSQ, which depends on the shape.
_forward = define(
    "fake_quantize",
    f"(Tensor x, {SHARED_SCHEMA}, {RANGE_SCHEMA}, float? grad_factor) -> Tensor",
    _fake_quantize,
    _fake_quantize_fake,
)
_again = _forward.again
backward = define(
    "fake_quantize_backward",
    f"(Tensor dy, Tensor x, {SHARED_SCHEMA}, {RANGE_SCHEMA}) -> Tensor",
    _fake_quantize_backward,
    _fake_quantize_backward_fake,
)


def range_of_codes(dtype: str | None, q_min: int | None, q_max: int | None) -> tuple[int, int]:
    """The least and the greatest code."""
    codes = None if dtype is None else parse_dtype(dtype)
    return FakeQuantizeDescriptor(shape=(), dtype=codes, q_min=q_min, q_max=q_max).code_range


def lsq_factor(shape: torch.Size, granularity: str, q_max: int) -> float:
    """The gradient factor of LSQ: 1 / sqrt(n * q_max), where n elements share the scale.

    If torch traces with symbolic sizes, the factor is symbolic too.
    """
    view = granularity_named(granularity)._view(tuple(shape))
    elements = math.prod(size for size, varies in zip(view.shape, view.varies, strict=True) if not varies)
    return 1.0 / torch.sym_sqrt(torch.sym_max(elements, 1) * max(q_max, 1))  # type: ignore[no-any-return]


_refuse = refuse_second_derivative("fake_quantize")
register_autograd("fake_quantize_backward", _refuse, by=["dy", "x", "scale", "zero_point"])


def _fake_quantize_batched(info, in_dims, x, *rest):
    *shared, granularity, dtype, q_min, q_max, ste, grad_factor = rest
    if grad_factor is None:  # from the shape of one sample, without the batch axis
        shape = x.shape if in_dims[0] is None else x.movedim(in_dims[0], 0).shape[1:]
        grad_factor = lsq_factor(shape, granularity, range_of_codes(dtype, q_min, q_max)[1])
    static = (dtype, q_min, q_max, ste, grad_factor)
    return batched(_forward, info, in_dims, (x,), shared, granularity, static)


def _fake_quantize_backward_batched(info, in_dims, dy, x, *rest):
    *shared, granularity, dtype, q_min, q_max, ste = rest
    static = (dtype, q_min, q_max, ste)
    return batched(backward, info, in_dims, (dy, x), shared, granularity, static)


register_vmap("fake_quantize", _fake_quantize_batched)
register_vmap("fake_quantize_backward", _fake_quantize_backward_batched)


def checked_factor(given: Any) -> float:
    """``grad_factor`` as a finite float. -0.0 becomes 0.0, which equals it as a key of caches."""
    return finite_number("grad_factor", given, "a finite number, or 'lsq'") + 0.0


def _unchecked_factor(given: Any) -> float | None:
    """``grad_factor`` for the ``again`` of the operator; NaN, which equals nothing, if it must be checked."""
    if type(given) is float:
        return given
    return None if isinstance(given, str) and given == "lsq" else math.nan


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor | float,
    zero_point: torch.Tensor | int | None = None,
    *,
    dtype: torch.dtype | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    granularity: Granularity = ONE_SCALE,
    ste: SteKind | str = SteKind.IN_RANGE,
    grad_factor: float | Literal["lsq"] = 1.0,
) -> torch.Tensor:
    """``dequantize(quantize(x))`` in every bit, except that NaN stays NaN. Differentiable.

    ``dtype`` names the format of the codes, or ``q_min`` and ``q_max`` give their range. If none of the three
    is given, the codes are int8. ``scale``, ``zero_point`` and ``granularity`` are those of ``quantize``; the
    zero point may also be a floating tensor. The result has the dtype of ``x``.

    ``ste`` is the estimator of the gradient with respect to ``x``. ``scale`` and a floating ``zero_point``
    can be learned; a floating zero point is rounded where it is used. Their gradients are multiplied by
    ``grad_factor``. The default here is 1, the plain derivative. "lsq" is 1 / sqrt(n * q_max), where n
    elements share a scale; it is the default of ``hf.nn.FakeQuantize``. Autograd keeps only the inputs.

    >>> import torch, holdfast as hf
    >>> x = torch.tensor([0.26, -0.3, 99.0], requires_grad=True)
    >>> y = hf.fake_quantize(x, 0.5, dtype=torch.int4)
    >>> y.sum().backward()
    >>> y.detach(), x.grad
    (tensor([ 0.5000, -0.5000,  3.5000]), tensor([1., 1., 0.]))
    >>> hf.fake_quantize(torch.tensor([0.3, 17.0, 1e4]), 1.0, dtype=torch.float8_e4m3fn)
    tensor([3.1250e-01, 1.6000e+01, 4.4800e+02])
    """
    if dtype is None and q_min is None and q_max is None:
        dtype = torch.int8
    found = _again(
        x, *unchecked_arguments(scale, zero_point, granularity),
        None if dtype is None else unchecked_name(dtype), q_min, q_max,
        ste.value if type(ste) is SteKind else ste, _unchecked_factor(grad_factor),
    )  # fmt: skip
    if found is not None:
        return found  # type: ignore[no-any-return]
    require_tensor("x", x)
    validate_granularity(granularity)
    require_choice("ste", ste, ESTIMATORS)
    codes = None if dtype is None else named_dtype("dtype", dtype), *code_range(q_min, q_max)
    shared = shared_arguments(scale, zero_point)
    learns_as_lsq = isinstance(grad_factor, str) and grad_factor == "lsq"
    factor = None if learns_as_lsq else checked_factor(grad_factor)
    return _forward(x, *shared, granularity.name, *codes, str(ste), factor)  # type: ignore[no-any-return]
