"""torch's operators of ``interpolate``: upsample_* and adaptive average pooling, with their gradients."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from holdfast.core.repeated import Work
from holdfast.core.torch_op import below_autograd
from holdfast.install.operators import KEPT, OWN, TRACED, Operator, with_out
from holdfast.install.serving import PassOn, Serve, empty, layout_of, plan_of, require_float
from holdfast.ops.interpolate.plan import (
    InterpolateArgs,
    InterpolateBackwardArgs,
    InterpolateBackwardDescriptor,
    InterpolateBackwardPlan,
    InterpolatePlan,
    Mode,
)


def _fields(shape, size, dtype, mode, align_corners, antialias, scales):
    return {
        "shape": shape,
        "output_size": size,
        "dtype": dtype,
        "mode": mode,
        "align_corners": align_corners,
        "antialias": antialias,
        "scales": scales,
    }


def _resize(image, size, layout, *kind):
    plan = plan_of(InterpolatePlan, image.device, **_fields(image.shape, size, image.dtype, *kind))
    out = empty(image, (*image.shape[:2], *size), layout)
    return Work(plan, InterpolateArgs(input=image, out=out), out)


def _resize_backward(dout, shape, layout, *kind):
    fields = _fields(shape, tuple(dout.shape[2:]), dout.dtype, *kind)
    plan = plan_of(InterpolateBackwardPlan, dout.device, **fields)
    dinput = empty(dout, shape, layout)
    return Work(plan, InterpolateBackwardArgs(dout=dout, dinput=dinput), dinput)


_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
# A memory format is passed by its number: the calls are looked up by plain values.
_forward = below_autograd(lambda image, size, n, *kind: _resize(image, size, _LAYOUTS[n], *kind))
_backward = below_autograd(lambda dout, shape, n, *kind: _resize_backward(dout, shape, _LAYOUTS[n], *kind))


def _scales(scales: Sequence[float | None]) -> tuple[float, ...] | None:
    """The scale factors; None if the sizes set them. torch ignores a factor that is not positive."""
    found = tuple(scale if scale is not None and scale > 0 else 0.0 for scale in scales)
    return found if any(found) else None


def _require_image(image: torch.Tensor, axes: int) -> None:
    require_float(image)
    if image.dim() != axes + 2:
        raise PassOn("the input has no batch dimension")
    if not image.numel():
        raise PassOn("the input is empty")


class Kind(NamedTuple):
    """What an upsampling operator does."""

    mode: Mode
    axes: int
    #: Whether it has an argument ``align_corners``.
    aligned: bool = True
    antialias: bool = False


def _upsample(kind: Kind) -> tuple[Serve, Serve]:
    """The functions for an upsampling operator and its gradient."""
    mode, axes, aligned, antialias = kind

    def forward(input, output_size, *rest):
        corners, scales = (rest[0], rest[1:]) if aligned else (False, rest)
        _require_image(input, axes)
        settled = str(mode), corners, antialias, _scales(scales)
        return _forward(input, tuple(output_size), _LAYOUTS.index(layout_of(input)), *settled)

    # torch returns these two gradients in the default layout.
    plain = mode == Mode.BICUBIC or (axes == 3 and mode != Mode.TRILINEAR)

    def backward(grad_output, output_size, input_size, *rest):
        corners, scales = (rest[0], rest[1:]) if aligned else (False, rest)
        shape = tuple(input_size)
        if tuple(grad_output.shape) != (*shape[:2], *output_size):
            raise PassOn("the gradient has another shape than the output")
        if not grad_output.numel():
            return grad_output.new_zeros(shape)
        _require_image(grad_output, axes)
        settled = str(mode), corners, antialias, _scales(scales)
        layout = torch.contiguous_format if plain else layout_of(grad_output)
        return _backward(grad_output, shape, _LAYOUTS.index(layout), *settled)

    return forward, backward


def _pool(axes: int) -> tuple[Serve, Serve]:
    """The functions for adaptive average pooling, which is interpolate's mode "area", and its gradient."""

    def batched(image: torch.Tensor) -> torch.Tensor:
        require_float(image)
        if image.dim() not in (axes + 1, axes + 2) or not image.numel():
            raise PassOn("the input is empty or has another rank")
        return image if image.dim() == axes + 2 else image.unsqueeze(0)

    def layout(image: torch.Tensor) -> int:
        return _LAYOUTS.index(layout_of(image)) if axes == 2 and image.dim() == 4 else 0

    def forward(self, output_size):
        image = batched(self)
        if 0 in output_size:
            raise PassOn("the output is empty")
        found = _forward(image, tuple(output_size), layout(self), "area", False, False, None)
        return found if self.dim() == axes + 2 else found.squeeze(0)

    def backward(grad_output, self):
        empty_batch = not grad_output.numel() and 0 not in grad_output.shape[1:]
        if empty_batch and grad_output.dtype == self.dtype:
            return torch.zeros_like(self)
        dout, image = batched(grad_output), batched(self)
        if dout.dtype != image.dtype or dout.shape[:2] != image.shape[:2]:
            raise PassOn("the gradient has another dtype or shape than the output")
        found = _backward(dout, tuple(image.shape), layout(self), "area", False, False, None)
        return found if self.dim() == axes + 2 else found.squeeze(0)

    return forward, backward


UPSAMPLE = {
    "upsample_nearest1d": Kind(Mode.NEAREST, 1, aligned=False),
    "upsample_nearest2d": Kind(Mode.NEAREST, 2, aligned=False),
    "upsample_nearest3d": Kind(Mode.NEAREST, 3, aligned=False),
    "_upsample_nearest_exact1d": Kind(Mode.NEAREST_EXACT, 1, aligned=False),
    "_upsample_nearest_exact2d": Kind(Mode.NEAREST_EXACT, 2, aligned=False),
    "_upsample_nearest_exact3d": Kind(Mode.NEAREST_EXACT, 3, aligned=False),
    "upsample_linear1d": Kind(Mode.LINEAR, 1),
    "upsample_bilinear2d": Kind(Mode.BILINEAR, 2),
    "upsample_trilinear3d": Kind(Mode.TRILINEAR, 3),
    "upsample_bicubic2d": Kind(Mode.BICUBIC, 2),
    "_upsample_bilinear2d_aa": Kind(Mode.BILINEAR, 2, antialias=True),
    "_upsample_bicubic2d_aa": Kind(Mode.BICUBIC, 2, antialias=True),
}


def operators() -> Iterator[Operator]:
    for name, kind in UPSAMPLE.items():
        forward, backward = _upsample(kind)
        yield from with_out(Operator(name, "interpolate", forward, TRACED), "out", "out")
        backward_name = f"{name}_backward"
        yield from with_out(
            Operator(backward_name, "interpolate", backward, TRACED), "grad_input", "grad_input"
        )
    for axes in (2, 3):
        forward, backward = _pool(axes)
        compiled = OWN if axes == 2 else KEPT
        yield Operator(f"_adaptive_avg_pool{axes}d", "adaptive_avg_pool", forward, compiled)
        yield Operator(f"_adaptive_avg_pool{axes}d_backward", "adaptive_avg_pool", backward)


def describe(
    image: torch.Tensor, size: Sequence[int], mode: str, align_corners: bool
) -> InterpolateBackwardDescriptor:
    """The descriptor of the gradient of a call. It raises if holdfast has no such gradient."""
    fields = _fields(tuple(image.shape), tuple(size), image.dtype, mode, align_corners, False, None)
    return InterpolateBackwardDescriptor(**fields)
