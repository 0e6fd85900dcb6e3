"""Checks of constructor arguments and of state_dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import distributed

from holdfast.core.checks import kind_of
from holdfast.core.descriptor import whole_numbers
from holdfast.core.errors import InvalidArgs
from holdfast.core.granularity import Granularity, PerChannel, PerTensor
from holdfast.nn.scale_mode import ScaleMode

Name = TypeVar("Name", bound=str)

#: The buffers that count events.
COUNTS = ("rejected_batches", "floor_events")

_INT32 = torch.iinfo(torch.int32)


def checked_name(argument: str, given: Any, kind: type[Name]) -> Name:
    """Convert ``given`` to a member of the enum ``kind``."""
    try:
        return kind(given)
    except ValueError:
        accepted = ", ".join(repr(str(known)) for known in kind)  # type: ignore[attr-defined]
        raise InvalidArgs(f"{argument} is {given!r}; accepted are {accepted}.") from None


def checked_momentum(momentum: Any) -> float:
    if not isinstance(momentum, (int, float)) or isinstance(momentum, bool) or not 0 < momentum <= 1:
        raise InvalidArgs(
            f"momentum is {momentum!r}; it is the weight of a new batch, above 0 and at most 1, such as 0.1."
        )
    return float(momentum)


def checked_device(device: Any) -> torch.device | None:
    if device is None:
        return None
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidArgs(
            f"device is {device!r}; it must be a device of torch, such as 'cpu' or 'cuda:0', or None."
        ) from None


def checked_group(group: Any) -> Any:
    if group is None or not distributed.is_available() or group is distributed.GroupMember.NON_GROUP_MEMBER:
        return group
    if not isinstance(group, distributed.ProcessGroup):
        raise InvalidArgs(
            f"process_group is {kind_of(group)}; it must be what torch.distributed.new_group "
            "returns, or None for all processes. A DeviceMesh has get_group()."
        )
    return group


def checked_shape(shape: Any, granularity: Granularity) -> tuple[int, ...] | None:
    """``scale_shape`` as a tuple; None stays None."""
    if shape is None:
        return None
    checked = whole_numbers("scale_shape", shape, (64,))
    accepted = "sizes of at least 0"
    good = all(size >= 0 for size in checked)
    if isinstance(granularity, PerTensor):
        good, accepted = checked in ((), (1,)), "() or (1,): there is one scale for the whole tensor"
    elif isinstance(granularity, PerChannel):
        good, accepted = good and len(checked) == 1, "one size, such as (64,): the number of channels"
    if not good:
        raise InvalidArgs(f"scale_shape is {checked}; for {granularity} accepted are {accepted}.")
    return checked


def checked_tensor(name: str, value: Any, device: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy of ``value`` as a tensor. If ``dtype`` is None: float64 stays, all else becomes float32."""
    if not isinstance(value, (torch.Tensor, int, float)) or isinstance(value, bool):
        raise InvalidArgs(f"{name} is {kind_of(value)}; it must be a number or a tensor.")
    try:
        made = torch.as_tensor(value)
    except (OverflowError, ValueError, RuntimeError):
        raise InvalidArgs(f"{name} is an integer of more than 64 bits; at most 64 fit.") from None
    if made.dtype == torch.bool or made.is_complex():
        raise InvalidArgs(f"{name} is {made.dtype}; it must be of real numbers.")
    if dtype is None:
        wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
        dtype = torch.float64 if wide else torch.float32
    if not dtype.is_floating_point and made.is_floating_point():
        shown = f"has dtype {made.dtype}" if isinstance(value, torch.Tensor) else f"is {value}"
        raise InvalidArgs(f"{name} {shown}; in mode fixed it must be an integer.")
    if (
        dtype == torch.int32
        and _readable(made)
        and not bool(((made >= _INT32.min) & (made <= _INT32.max)).all())
    ):
        raise InvalidArgs(f"{name} is {made.tolist()}; it must fit 32 bits.")
    return made.detach().to(device=device, dtype=dtype, copy=True)


def check_scale_arguments(mode: ScaleMode, symmetric: bool, scale: Any, zero_point: Any) -> None:
    """Raise if the mode does not use a given ``scale`` or ``zero_point``, or misses one."""
    given = scale is not None
    if given and mode in (ScaleMode.PER_BATCH, ScaleMode.EMA):
        raise InvalidArgs(f"scale is given, but mode {mode} computes it from the data; leave scale out.")
    if not given and mode is ScaleMode.FIXED:
        raise InvalidArgs("mode fixed needs a scale; pass scale=, a number or a tensor.")
    if zero_point is not None and (not given or (symmetric and mode is ScaleMode.LEARNED)):
        raise InvalidArgs(
            "zero_point is given and cannot be used; it goes with scale= in mode fixed, and in mode "
            "learned with symmetric=False."
        )


def checked_scale(scale: torch.Tensor) -> torch.Tensor:
    """Check a given scale. Only values on the CPU are read."""
    if _readable(scale) and not bool(((scale > 0) & scale.isfinite()).all()):
        raise InvalidArgs(f"scale is {scale.tolist()}; a scale must be positive and finite.")
    return scale


def checked_zero_point(zero_point: torch.Tensor) -> torch.Tensor:
    """Check the initial value of a learned zero point. Only values on the CPU are read."""
    if _readable(zero_point) and not bool(zero_point.isfinite().all()):
        raise InvalidArgs(f"zero_point is {zero_point.tolist()}; it must be finite.")
    return zero_point


def checked_switches(state: Any, key: str = "_extra_state") -> tuple[bool, bool, bool]:
    """Parse the result of ``get_extra_state`` into frozen, observes, quantizes."""
    good = isinstance(state, torch.Tensor) and state.device.type != "meta" and tuple(state.shape) == (3,)
    switches = state.tolist() if good else []
    if not good or any(switch not in (0, 1) for switch in switches):
        shown = repr(state)
        if isinstance(state, torch.Tensor):
            shown = repr(switches) if good else f"{state.dtype} of shape {tuple(state.shape)}"
        raise InvalidArgs(
            f"{key} is {shown}; it must be a tensor of three zeros or ones (frozen, observes, quantizes), as "
            "state_dict() of a FakeQuantize holds it. Nothing was loaded into this module."
        )
    frozen, observes, quantizes = map(bool, switches)
    return frozen, observes, quantizes


def check_state_dict(state_dict: Mapping[str, Any], prefix: str, learned: bool, may_be_unset: bool) -> None:
    """Raise if a state_dict has values that no FakeQuantize saves. Only values on the CPU are read."""

    def refuse(name: str, shown: Any, accepted: str) -> None:
        raise InvalidArgs(
            f"{prefix}{name} is {shown}; it must be {accepted}. Nothing was loaded into this module."
        )

    for name in ("scale", "scale_floor", "low", "zero_point", *COUNTS):
        value = state_dict.get(f"{prefix}{name}")
        if not isinstance(value, torch.Tensor):
            continue  # torch reports it
        floats = name in ("scale", "scale_floor", "low") or (learned and name == "zero_point")
        if floats != value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            refuse(name, value.dtype, "of floating point numbers" if floats else "of integers")
        if not _readable(value):
            continue
        if name == "scale" and not learned:  # an optimizer may give a learned scale any value
            good = (value > 0) & value.isfinite()
            if not bool((good | value.isnan() if may_be_unset else good).all()):
                refuse(name, value.tolist(), "positive and finite")
        if name in COUNTS and (value.numel() != 1 or int(value) < 0):
            refuse(name, value.tolist(), "a count, of at least 0")
    if f"{prefix}_extra_state" in state_dict:
        checked_switches(state_dict[f"{prefix}_extra_state"], f"{prefix}_extra_state")


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the values can be read without waiting for a device or for other processes."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
