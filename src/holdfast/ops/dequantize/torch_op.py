"""The torch operators of dequantize: registration, tracing, autograd, vmap, and ``hf.dequantize``."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.autograd import refuse_derivatives, register_autograd
from holdfast.core.checks import require_bool, require_tensor, shown
from holdfast.core.dtypes import dtype_name, float_dtype, parse_dtype
from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import format_of
from holdfast.core.granularity import ONE_SCALE, Granularity, PerChannel, PerGroup, validate_granularity
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import by_sample, cached_plan, define, named_dtype, register_vmap
from holdfast.ops.affine.batched import batched
from holdfast.ops.affine.torch_op import (
    SHARED_SCHEMA,
    plans_by_granularity,
    select,
    shared_arguments,
    unchecked_arguments,
    unchecked_name,
)
from holdfast.ops.dequantize import plan as plans
from holdfast.ops.dequantize.plan import DequantizeArgs, DequantizeBackwardArgs
from holdfast.ops.packing.torch_op import packed_length

__all__ = ["dequantize"]

_FORWARD = plans_by_granularity(plans, "Dequantize")
_BACKWARD = plans_by_granularity(plans, "Dequantize", "Backward")


@cached_plan
def _forward_plan(shape, code_dtype, device, granularity, dtype, packed):
    return select(
        _FORWARD, granularity, device, shape=shape, input_dtype=parse_dtype(code_dtype),
        output_dtype=parse_dtype(dtype), packed=packed,
    )  # fmt: skip


@cached_plan
def _backward_plan(shape, code_dtype, device, granularity, dtype):
    return select(
        _BACKWARD, granularity, device, shape=shape, input_dtype=parse_dtype(code_dtype), output_dtype=dtype
    )


def _empty_real(q, dtype, length):
    dtype = float_dtype(parse_dtype(dtype), "dtype").torch
    if length is None:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:-1], length), dtype=dtype)


def _dequantize(
    q, scale, scale_value, zero_point, zero_value, granularity, dtype, code_dtype=None, length=None
):
    y = on_huge_pages(_empty_real(q, dtype, length))
    codes = dtype_name(q.dtype) if code_dtype is None else code_dtype
    plan = _forward_plan(y.shape, codes, q.device, granularity, dtype, length is not None)
    args = DequantizeArgs(
        q=q,
        scale=scale_value if scale is None else scale,
        zero_point=zero_value if zero_point is None else zero_point,
        y=y,
    )
    return Work(plan, args, y)


def _dequantize_fake(
    q, scale, scale_value, zero_point, zero_value, granularity, dtype, code_dtype=None, length=None
):
    return _empty_real(q, dtype, length)


def _dequantize_backward(dy, scale, scale_value, granularity, code_dtype):
    dq = on_huge_pages(torch.empty_like(dy, dtype=parse_dtype(code_dtype)))
    plan = _backward_plan(dy.shape, code_dtype, dy.device, granularity, dy.dtype)
    args = DequantizeBackwardArgs(dy=dy, scale=scale_value if scale is None else scale, dq=dq)
    return Work(plan, args, dq)


def _dequantize_backward_fake(dy, scale, scale_value, granularity, code_dtype):
    return torch.empty_like(dy, dtype=parse_dtype(code_dtype))


_from_integers = define(
    "dequantize", f"(Tensor q, {SHARED_SCHEMA}, str dtype, str code_dtype, SymInt? length) -> Tensor",
    _dequantize, _dequantize_fake,
)  # fmt: skip
_again = _from_integers.again
_from_floats = define(
    "dequantize_from_float", f"(Tensor q, {SHARED_SCHEMA}, str dtype) -> Tensor", _dequantize,
    _dequantize_fake,
)  # fmt: skip
_gradient = define(
    "dequantize_backward",
    "(Tensor dy, Tensor? scale, float scale_value, str granularity, str code_dtype) -> Tensor",
    _dequantize_backward, _dequantize_backward_fake,
)  # fmt: skip


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, scale, scale_value, _, _, granularity, _ = inputs
    ctx.save_for_backward(scale)
    ctx.values = scale_value, granularity, dtype_name(q.dtype)


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    (scale,) = ctx.saved_tensors
    return _gradient(dy, scale, *ctx.values), *[None] * 6


def _save_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    dy, scale, scale_value, granularity, _ = inputs
    ctx.save_for_backward(scale)
    ctx.values = scale_value, granularity, dtype_name(dy.dtype)


def _differentiate_again(ctx: Any, ddq: torch.Tensor) -> tuple[Any, ...]:
    """dq is dy times the scale, elementwise, so its derivative is the same product."""
    (scale,) = ctx.saved_tensors
    return _gradient(ddq, scale, *ctx.values), *[None] * 4


register_autograd("dequantize", refuse_derivatives, by=[])
register_autograd("dequantize_from_float", _differentiate, by=["q"], setup_context=_save_for_backward)
register_autograd(
    "dequantize_backward", _differentiate_again, by=["dy"], setup_context=_save_for_second_backward
)


def _dequantize_batched(call):
    def rule(info, in_dims, q, *rest):
        *shared, granularity, dtype = rest[:6]
        if rest[7:] not in ((), (None,)):  # the packed axis must stay the last one
            if in_dims[0] is not None:
                q, in_dims = q.movedim(in_dims[0], 0).contiguous(), (0, *in_dims[1:])
            return by_sample(call)(info, in_dims, q, *rest)
        static = (dtype, *rest[6:])
        return batched(call, info, in_dims, (q,), shared, granularity, static)

    return rule


def _dequantize_backward_batched(info, in_dims, dy, scale, scale_value, granularity, code_dtype):
    def call(dy, scale, scale_value, zero_point, zero_value, granularity, code_dtype):
        return _gradient(dy, scale, scale_value, granularity, code_dtype)

    shared, dims = (scale, scale_value, None, 0), (*in_dims[:3], None)
    return batched(call, info, dims, (dy,), shared, granularity, (code_dtype,))


register_vmap("dequantize", _dequantize_batched(_from_integers))
register_vmap("dequantize_from_float", _dequantize_batched(_from_floats))
register_vmap("dequantize_backward", _dequantize_backward_batched)


def dequantize(
    q: torch.Tensor,
    scale: torch.Tensor | float,
    zero_point: torch.Tensor | int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    granularity: Granularity = ONE_SCALE,
    code_dtype: torch.dtype | None = None,
    packed: bool = False,
    length: int | None = None,
) -> torch.Tensor:
    """The values of the codes ``q``: ``(q - zero_point) * scale``, in ``dtype``.

    ``scale``, ``zero_point`` and ``granularity`` are those of ``quantize``.

    Packed codes need their ``code_dtype`` (such as ``torch.int4``) and ``length``, the size of the last axis
    before packing. ``length`` may be left out if the scales determine it: with ``PerGroup`` or ``PerChannel``
    along the last axis. Floating codes are differentiable: ``dq = dy * scale``.

    >>> import torch, holdfast as hf
    >>> hf.dequantize(torch.tensor([-10, 0, 90], dtype=torch.int8), 0.5)
    tensor([-5.,  0., 45.])
    >>> packed = torch.tensor([225], dtype=torch.uint8)
    >>> hf.dequantize(packed, 0.5, packed=True, code_dtype=torch.int4, length=2)
    tensor([ 0.5000, -1.0000])
    """
    if packed is False and isinstance(q, torch.Tensor):
        codes = unchecked_name(q.dtype if code_dtype is None else code_dtype)
        shared = unchecked_arguments(scale, zero_point, granularity)
        found = _again(q, *shared, unchecked_name(dtype), codes, length)
        if found is not None:
            return found  # type: ignore[no-any-return]
    require_tensor("q", q)
    validate_granularity(granularity)
    require_bool("packed", packed)
    real = named_dtype("dtype", dtype)
    codes = dtype_name(q.dtype) if code_dtype is None else named_dtype("code_dtype", code_dtype)
    shared = shared_arguments(scale, zero_point)
    if q.dtype.is_floating_point and format_of(q.dtype, "q").carried:
        return _from_floats(q, *shared, granularity.name, real)  # type: ignore[no-any-return]
    if packed:
        length = _packed_length(q, code_dtype, length, scale, granularity)
    elif length is not None:
        raise InvalidArgs(f"length is {shown(length)}; it is for packed codes only. Leave it out.")
    return _from_integers(q, *shared, granularity.name, real, codes, length)  # type: ignore[no-any-return]


def _packed_length(
    q: torch.Tensor, dtype: torch.dtype | None, length: int | None, scale: Any, granularity: Granularity
) -> int:
    """The number of codes along the last axis of packed ``q``."""
    if dtype is None or format_of(dtype, "code_dtype").carried:
        raise InvalidArgs(f"packed codes need their code_dtype, such as torch.int4; it is {dtype}.")
    codes = format_of(dtype, "code_dtype")
    if q.dim() == 0:
        raise InvalidArgs("packed codes have rank 0 and no last axis to unpack; reshape them to (1,).")
    if length is None and getattr(granularity, "axis", None) in (-1, q.dim() - 1):
        most = q.shape[-1] * codes.per_byte
        if isinstance(granularity, PerChannel) and isinstance(scale, torch.Tensor):
            # The plan refuses a wrong number of scales.
            return scale.numel() if most - codes.per_byte < scale.numel() <= most else most
        if isinstance(granularity, PerGroup):
            return most  # Groups along the packed axis fill whole bytes.
    return packed_length(length, q.shape[-1], codes)
