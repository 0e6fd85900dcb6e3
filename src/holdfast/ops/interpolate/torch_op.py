"""interpolate for torch: operators, fake kernels, autograd, vmap, and the public function."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.autograd import register_autograd
from holdfast.core.checks import (
    finite_number,
    require_bool,
    require_choice,
    require_tensor,
    shown,
    whole_number,
)
from holdfast.core.errors import InvalidArgs
from holdfast.core.repeated import Work
from holdfast.core.torch_op import cached_plan, define, register_vmap, select_plan
from holdfast.ops.interpolate.plan import (
    AXES,
    GREATEST_SCALE,
    LONGEST_AXIS,
    InterpolateArgs,
    InterpolateBackwardArgs,
    InterpolateBackwardPlan,
    InterpolatePlan,
    Mode,
)

__all__ = ["interpolate"]

_MODES = tuple(map(str, Mode))
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# The last parameters of both operators. ``scales`` is empty if the sizes set the scales.
_KIND = "str mode, bool align_corners, bool antialias, float[] scales"


@cached_plan
def _plan(kind, shape, size, dtype, device, mode, align_corners, antialias, scales):
    return select_plan(
        kind, device, shape=shape, output_size=size, dtype=dtype, mode=mode, align_corners=align_corners,
        antialias=antialias, scales=scales or None,
    )  # fmt: skip


def _in_channels_last(image: torch.Tensor) -> bool:
    """Whether the image has channels last; False if it is also contiguous."""
    last = _LAST.get(image.dim())
    return last is not None and not image.is_contiguous() and image.is_contiguous(memory_format=last)


def _empty(like, shape, channels_last):
    layout = _LAST[len(shape)] if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _interpolate(image, size, mode, align_corners, antialias, scales):
    plan = _plan(
        InterpolatePlan, image.shape, tuple(size), image.dtype, image.device, mode, align_corners, antialias,
        tuple(scales),
    )  # fmt: skip
    out = _interpolate_fake(image, size)
    return Work(plan, InterpolateArgs(input=image, out=out), out)


def _interpolate_fake(image, size, *kind):
    return _empty(image, (*image.shape[:2], *size), _in_channels_last(image))


def _interpolate_backward(dout, input_size, channels_last, mode, align_corners, antialias, scales):
    dinput = _empty(dout, tuple(input_size), channels_last)
    plan = _plan(
        InterpolateBackwardPlan, dinput.shape, dout.shape[2:], dout.dtype, dout.device, mode, align_corners,
        antialias, tuple(scales),
    )  # fmt: skip
    return Work(plan, InterpolateBackwardArgs(dout=dout, dinput=dinput), dinput)


def _interpolate_backward_fake(dout, input_size, channels_last, *kind):
    return _empty(dout, tuple(input_size), channels_last)


_forward = define(
    "interpolate", f"(Tensor input, SymInt[] size, {_KIND}) -> Tensor", _interpolate, _interpolate_fake
)
_backward = define(
    "interpolate_backward",
    f"(Tensor dout, SymInt[] input_size, bool channels_last, {_KIND}) -> Tensor",
    _interpolate_backward,
    _interpolate_backward_fake,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    image, _, *ctx.kind = inputs
    ctx.image = image.shape, _in_channels_last(image)


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    return _backward(dout, *ctx.image, *ctx.kind), *[None] * 5


def _save_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    dout, _, _, *ctx.kind = inputs
    ctx.size = dout.shape[2:]


def _differentiate_again(ctx: Any, ddinput: torch.Tensor) -> tuple[Any, ...]:
    """dinput is linear in dout, and interpolate is the transpose of that map."""
    return _forward(ddinput, ctx.size, *ctx.kind), *[None] * 6


register_autograd("interpolate", _differentiate, by=["input"], setup_context=_save_for_backward)
register_autograd(
    "interpolate_backward", _differentiate_again, by=["dout"], setup_context=_save_for_second_backward
)


def _interpolate_batched(info, in_dims, image, *rest):
    image = image.movedim(in_dims[0], 0)
    return _forward(image.flatten(0, 1), *rest).unflatten(0, image.shape[:2]), 0


def _interpolate_backward_batched(info, in_dims, dout, input_size, *rest):
    dout = dout.movedim(in_dims[0], 0)
    folded = (info.batch_size * input_size[0], *input_size[1:])
    return _backward(dout.flatten(0, 1), folded, *rest).unflatten(0, dout.shape[:2]), 0


register_vmap("interpolate", _interpolate_batched)
register_vmap("interpolate_backward", _interpolate_backward_batched)


def interpolate(
    input: torch.Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.interpolate``, with a gradient that has the same bits on every run and device.

    ``input`` has shape (N, C, W), (N, C, H, W) or (N, C, D, H, W). Either ``size`` or ``scale_factor`` is
    given, one number for all axes or one for each. ``mode`` is "nearest", "nearest-exact", "area", "linear"
    (3-D inputs), "bilinear" or "bicubic" (4-D inputs), or "trilinear" (5-D inputs). ``antialias`` is for
    "bilinear" and "bicubic". For an input with channels last, the output and the gradient have channels last.

    >>> import torch, holdfast as hf
    >>> image = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    >>> hf.interpolate(image, 4, mode="linear").tolist()
    [[[1.0, 1.25, 1.75, 2.0]]]
    """
    require_tensor("input", input)
    require_choice("mode", mode, _MODES)
    axes = input.dim() - 2
    if axes not in (1, 2, 3):
        raise InvalidArgs(
            f"input has shape {tuple(input.shape)}; accepted are (N, C, W), (N, C, H, W) and (N, C, D, H, W)."
        )
    if align_corners is not None:
        require_bool("align_corners", align_corners)
        if mode not in AXES:
            raise InvalidArgs(
                f"align_corners is {align_corners} and mode is {mode!r}; leave align_corners out, or use "
                f"{', '.join(map(repr, map(str, AXES)))}."
            )
    if recompute_scale_factor is not None:
        require_bool("recompute_scale_factor", recompute_scale_factor)
    require_bool("antialias", antialias)
    if (size is None) == (scale_factor is None):
        given = "neither size nor scale_factor is" if size is None else "both size and scale_factor are"
        raise InvalidArgs(f"{given} given; give one of them.")
    scales: tuple[float, ...] = ()
    if size is not None:
        if recompute_scale_factor:
            raise InvalidArgs("recompute_scale_factor is True and size is given; give scale_factor instead.")
        sizes = tuple(whole_number("size", n, 1, LONGEST_AXIS) for n in _each("size", size, axes))
    else:
        if type(scale_factor) is int:
            scale_factor = finite_number("scale_factor", scale_factor)  # once for all axes
        factors = _each("scale_factor", scale_factor, axes)
        scales = tuple([finite_number("scale_factor", factor) for factor in factors])
        sizes = tuple(map(_resized, input.shape[2:], scales))
        if recompute_scale_factor or mode == Mode.AREA:
            scales = ()
    return _forward(input, sizes, str(mode), bool(align_corners), antialias, scales)  # type: ignore[no-any-return]


def _each(name: str, given: Any, axes: int) -> tuple[Any, ...]:
    """One number for each axis."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return (given,) * axes
    if len(given) != axes:
        raise InvalidArgs(
            f"{name} is {shown(given)}; it must be one number, or {axes} for the last {axes} axes of input."
        )
    return tuple(given)


def _resized(size: Any, factor: float) -> int:
    """The size of an axis of the output, rounded down."""
    if not 0 < factor <= GREATEST_SCALE:
        raise InvalidArgs(f"scale_factor is {factor}; it must be positive and at most {GREATEST_SCALE}.")
    if type(size) is int:
        return int(size * factor)
    return torch.sym_int(size * factor)  # type: ignore[no-any-return]
