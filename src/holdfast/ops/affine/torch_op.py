"""What the torch operators of quantize and dequantize share.

An operator takes plain values, so that torch can trace it: a granularity and a dtype travel as their names,
and a scale or a zero point as a tensor or a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.core.checks import INT64, finite_number, require_tensor, whole_number
from holdfast.core.dtypes import parse_dtype
from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import format_of
from holdfast.core.granularity import Granularity, granularity_named
from holdfast.core.plan import Plan
from holdfast.core.torch_op import select_plan
from holdfast.ops.affine.plan import clamp_zero_point

#: Operators are called with the plan's arguments in this form.
SHARED_SCHEMA = "Tensor? scale, float scale_value, Tensor? zero_point, int zero_value, str granularity"

Shared = tuple[torch.Tensor | None, float, torch.Tensor | None, int]


def shared_arguments(scale: Any, zero_point: Any) -> Shared:
    """The scale and the zero point as an operator takes them. A zero point saturates, as in the kernels."""
    scale_tensor, scale_value, zero_tensor, zero_value = None, 1.0, None, 0
    if isinstance(scale, torch.Tensor):
        require_tensor("scale", scale)
        scale_tensor = scale
    elif isinstance(scale, (int, float)) and not isinstance(scale, bool):
        # What no kernel can hold, infinity and NaN among it, the plan refuses.
        scale_value = finite_number("scale", scale) if isinstance(scale, int) else float(scale)
    else:
        raise InvalidArgs(f"scale is a {type(scale).__name__}; it must be a tensor or a Python float.")
    if isinstance(zero_point, torch.Tensor):
        require_tensor("zero_point", zero_point)
        zero_tensor = zero_point
    elif isinstance(zero_point, int) and not isinstance(zero_point, bool):
        zero_value = clamp_zero_point(int(zero_point))
    elif zero_point is not None:
        raise InvalidArgs(
            f"zero_point is a {type(zero_point).__name__}; it must be an int32 tensor, an int or None."
        )
    return scale_tensor, scale_value, zero_tensor, zero_value


def code_range(q_min: Any, q_max: Any) -> tuple[int | None, int | None]:
    """The ends of a range of codes as an operator takes them. Plans know which range they take."""
    return (
        None if q_min is None else whole_number("q_min", q_min, *INT64),
        None if q_max is None else whole_number("q_max", q_max, *INT64),
    )


def empty_codes(x: torch.Tensor, dtype: str, packed: bool) -> torch.Tensor:
    """Room for the codes of ``x``."""
    codes = format_of(parse_dtype(dtype), "dtype")
    if not packed:
        return torch.empty_like(x, dtype=codes.storage)
    columns = (x.shape[-1] + codes.per_byte - 1) // codes.per_byte
    return x.new_empty((*x.shape[:-1], columns), dtype=torch.uint8)


def select(
    plans: Mapping[type[Granularity], type[Plan[Any, Any]]],
    granularity: str,
    device: torch.device,
    **fields: Any,
) -> Plan[Any, Any]:
    """The plan for a granularity, whose own fields (axis, group_size) are those of the descriptor."""
    shared = granularity_named(granularity)
    plan = plans[type(shared)]
    own = {field.name: getattr(shared, field.name) for field in dataclasses.fields(shared)}  # type: ignore[arg-type]
    return select_plan(plan, device, **fields, **own)
