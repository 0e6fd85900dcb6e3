"""Helpers shared by the torch operators of the quantization ops.

torch can trace only plain values. So an operator takes a granularity and a dtype by name, and a scale or a
zero point as an optional tensor plus a number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Rational, Real
from types import ModuleType
from typing import Any

import torch

from holdfast.core.checks import INT64, finite_number, kind_of, require_tensor, whole_number
from holdfast.core.dtypes import dtype_name, parse_dtype
from holdfast.core.errors import InvalidArgs, Unsupported
from holdfast.core.formats import format_of
from holdfast.core.granularity import (
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    granularity_named,
)
from holdfast.core.plan import Plan
from holdfast.core.torch_op import select_plan
from holdfast.ops.affine.plan import clamp_zero_point

#: Schema of the scale, the zero point and the granularity in every operator.
SHARED_SCHEMA = "Tensor? scale, float scale_value, Tensor? zero_point, int zero_value, str granularity"

Shared = tuple[torch.Tensor | None, float, torch.Tensor | None, int]
Plans = Mapping[type[Granularity], type[Plan[Any, Any]]]


def shared_arguments(scale: Any, zero_point: Any) -> Shared:
    """The scale and the zero point in the form of ``SHARED_SCHEMA``. An int zero point saturates."""
    scale_tensor, scale_value, zero_tensor, zero_value = None, 1.0, None, 0
    if type(scale) is float:
        scale_value = scale
    elif isinstance(scale, torch.Tensor):
        require_tensor("scale", scale)
        scale_tensor = scale
    elif isinstance(scale, Real) and not isinstance(scale, bool):  # NumPy's numbers, too
        # The plan refuses floats that the compute type cannot hold, such as infinity and NaN.
        scale_value = finite_number("scale", scale) if isinstance(scale, Rational) else float(scale)
    else:
        raise InvalidArgs(f"scale is {kind_of(scale)}; it must be a tensor or a Python float.")
    if zero_point is None:
        pass
    elif type(zero_point) is int or (isinstance(zero_point, Integral) and not isinstance(zero_point, bool)):
        zero_value = clamp_zero_point(int(zero_point))
    elif isinstance(zero_point, torch.Tensor):
        require_tensor("zero_point", zero_point)
        zero_tensor = zero_point
    else:
        raise InvalidArgs(f"zero_point is {kind_of(zero_point)}; it must be an int32 tensor, an int or None.")
    return scale_tensor, scale_value, zero_tensor, zero_value


def unchecked_arguments(scale: Any, zero_point: Any, granularity: Any) -> tuple[Any, ...]:
    """``shared_arguments`` and the name of a granularity, for the ``again`` of an operator.

    It compares them with the arguments of earlier calls, which were checked. If the scale is None, its value
    is NaN, which equals nothing.
    """
    is_number = type(scale) is float
    has_number = zero_point is None or type(zero_point) is int
    return (
        None if is_number else scale,
        scale if is_number else math.nan if scale is None else 1.0,
        None if has_number else zero_point,
        (zero_point or 0) if has_number else 0,
        granularity.name if isinstance(granularity, Granularity) else None,
    )


def unchecked_name(dtype: Any) -> str:
    """The name of a dtype, for the ``again`` of an operator; no name of a dtype if it is none."""
    return dtype_name(dtype) if type(dtype) is torch.dtype else ""


def code_range(q_min: Any, q_max: Any) -> tuple[int | None, int | None]:
    """q_min and q_max as ints of 64 bits or None. The plan checks the range itself."""
    return (
        None if q_min is None else whole_number("q_min", q_min, *INT64),
        None if q_max is None else whole_number("q_max", q_max, *INT64),
    )


def empty_codes(x: torch.Tensor, dtype: str, packed: bool) -> torch.Tensor:
    """An uninitialized tensor for the codes of ``x``."""
    codes = format_of(parse_dtype(dtype), "dtype")
    if not packed:
        return torch.empty_like(x, dtype=codes.storage)
    columns = (x.shape[-1] + codes.per_byte - 1) // codes.per_byte
    return x.new_empty((*x.shape[:-1], columns), dtype=torch.uint8)


def refuse_second_derivative(op: str) -> Callable[..., Any]:
    """A backward function that raises: the gradient of ``op`` has no derivative."""

    def refuse(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise Unsupported(
            f"{op} has no second derivative: its gradient is an estimate that replaces the derivative of "
            "rounding. Leave create_graph out, or detach the gradient."
        )

    return refuse


def plans_by_granularity(module: ModuleType, op: str, backward: str = "") -> Plans:
    """The plans of ``op`` in its plan module; ``backward`` is "Backward" for those of the gradient."""
    kinds: tuple[type[Granularity], ...] = (PerTensor, PerChannel, PerToken, PerGroup)
    return {kind: getattr(module, f"{op}{kind.__name__}{backward}Plan") for kind in kinds}


def select(plans: Plans, granularity: str, device: torch.device, **fields: Any) -> Plan[Any, Any]:
    """Select the plan of a granularity. Its descriptor gets the granularity's fields (axis, group_size)."""
    named = granularity_named(granularity)
    fields |= {field.name: getattr(named, field.name) for field in dataclasses.fields(named)}  # type: ignore[arg-type]
    return select_plan(plans[type(named)], device, **fields)
