"""What the torch operators of quantize and dequantize share.

An operator takes plain values, so that torch can trace it: a granularity and a dtype travel as their names,
and a scale or a zero point as a tensor or a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from holdfast.core.checks import (
    INT64,
    finite_number,
    require_dtype,
    require_memory,
    whole_number,
)
from holdfast.core.checks import require_tensor as require_tensor
from holdfast.core.contract import PlanPreference
from holdfast.core.dtypes import dtype_name, parse_dtype
from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import format_of
from holdfast.core.granularity import Granularity, granularity_named
from holdfast.core.plan import Plan
from holdfast.core.stream import CPU_STREAM, Stream
from holdfast.ops.affine.plan import clamp_zero_point

LIBRARY = torch.library.Library("holdfast", "FRAGMENT")

#: Operators are called with the plan's arguments in this form.
SHARED_SCHEMA = "Tensor? scale, float scale_value, Tensor? zero_point, int zero_value, str granularity"

Shared = tuple[torch.Tensor | None, float, torch.Tensor | None, int]

_ON_FIRST_RUN = PlanPreference(precompile=False)

P = TypeVar("P", bound=Plan[Any, Any])


def define(name: str, schema: str, kernel: Any, fake: Any) -> Any:
    """Register ``holdfast::name`` for the CPU and CUDA, and for tracing; return what calls it.

    A call that torch has nothing to do with (nothing traces, transforms, records or differentiates it) goes
    straight to the kernel: torch's way there costs as much as the launch.
    """
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, kernel, "CUDA")

    def fake_on_one_device(*arguments: Any) -> Any:
        _require_one_device(arguments)
        return fake(*arguments)

    torch.library.register_fake(f"holdfast::{name}", fake_on_one_device, lib=LIBRARY)
    operator = getattr(torch.ops.holdfast, name).default

    def call(*arguments: Any) -> Any:
        if _concerns_only_us(arguments):
            return kernel(*arguments)
        return operator(*(arguments if is_compiling() else map(_in_memory, arguments)))

    return call


def _in_memory(argument: Any) -> Any:
    """A zero tensor of torch as one with memory. torch would make it a view of one element."""
    zero = isinstance(argument, torch.Tensor) and argument._is_zerotensor()
    return argument.clone() if zero else argument


def register_vmap(name: str, rule: Any) -> None:
    """Let ``rule(info, in_dims, *arguments)`` be ``holdfast::name`` under ``torch.vmap``.

    A rule may copy its arguments by operations of torch, which do not ask whether there is memory.
    """
    names = [argument.name for argument in getattr(torch.ops.holdfast, name).default._schema.arguments]

    def checked(info: Any, in_dims: Any, *arguments: Any) -> Any:
        for argument, given in zip(names, arguments, strict=True):
            if isinstance(given, torch.Tensor):
                require_memory(argument, given)
        return rule(info, in_dims, *arguments)

    torch.library.register_vmap(f"holdfast::{name}", checked, lib=LIBRARY)


def _require_one_device(arguments: tuple[Any, ...]) -> None:
    """Plans refuse tensors of other devices; without a plan, as where shapes are all that is asked for, it is
    here that they are.
    """
    first, *others = (argument.device for argument in arguments if isinstance(argument, torch.Tensor))
    for device in others:
        if device != first:
            raise InvalidArgs(f"there are tensors on {first} and on {device}; move them to one device.")


_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_VALUES = frozenset((float, int, bool, str, torch.dtype, type(None)))


def _concerns_only_us(arguments: tuple[Any, ...]) -> bool:
    if (
        is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or _profiler_enabled()
    ):
        return False
    positions = _plain_tensors(tuple(map(type, arguments)))
    if positions is None:
        return False
    recorded = torch.is_grad_enabled()
    for position in positions:
        tensor = arguments[position]
        if (
            tensor.is_neg()
            or tensor.is_meta
            or tensor._is_zerotensor()
            or (recorded and tensor.requires_grad)
        ):
            return False
    return True


@lru_cache(maxsize=256)
def _plain_tensors(kinds: tuple[type, ...]) -> tuple[int, ...] | None:
    """Where the tensors are among arguments of these types; None if any is of a type that torch treats."""
    if not _TENSORS.union(_VALUES).issuperset(kinds):
        return None
    return tuple(position for position, kind in enumerate(kinds) if kind in _TENSORS)


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


def named_dtype(name: str, dtype: Any) -> str:
    """A dtype as an operator takes it."""
    require_dtype(name, dtype)
    return dtype_name(dtype)


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


def select_plan(plan: type[P], device: torch.device, **fields: Any) -> P:
    """The plan for the descriptor with these fields; it compiles what it needs when it needs it."""
    return plan.select(Stream.current(device), plan.Descriptor(**fields), _ON_FIRST_RUN)


def current_stream(device: torch.device) -> Stream:
    """The stream to launch on; on every call, so as cheap as torch allows."""
    if device == CPU_STREAM.device:
        return CPU_STREAM
    return _stream(device, torch._C._cuda_getCurrentRawStream(device.index))


_stream = lru_cache(maxsize=256)(Stream)
