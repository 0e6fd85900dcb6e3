"""torch's operators of ``grid_sample`` and ``affine_grid``."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.repeated import Work
from holdfast.core.torch_op import below_autograd
from holdfast.install.operators import KEPT, OWN, Operator
from holdfast.install.serving import PassOn, Serve, empty, plan_of, require_float
from holdfast.ops.affine_grid.plan import AffineGridArgs, AffineGridPlan
from holdfast.ops.grid_sample.plan import (
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardPlan,
    GridSamplePlan,
)

# By the numbers that torch's operators use.
_MODES = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")


def _fields(shape, grid, dtype, mode, padding_mode, align_corners):
    return {
        "shape": shape,
        "output_size": grid.shape[1:-1],
        "input_dtype": dtype,
        "grid_dtype": grid.dtype,
        "mode": mode,
        "padding_mode": padding_mode,
        "align_corners": align_corners,
    }


@below_autograd
def _forward(image, grid, *kind):
    plan = plan_of(GridSamplePlan, image.device, **_fields(image.shape, grid, image.dtype, *kind))
    out = empty(image, (*image.shape[:2], *grid.shape[1:-1]), torch.contiguous_format)
    return Work(plan, GridSampleArgs(input=image, grid=grid, out=out), out)


@below_autograd
def _backward(dout, image, grid, needs_dinput, needs_dgrid, *kind):
    fields = _fields(image.shape, grid, image.dtype, *kind)
    plan = plan_of(
        GridSampleBackwardPlan, image.device, **fields, needs_dinput=needs_dinput, needs_dgrid=needs_dgrid
    )
    dinput = empty(image, tuple(image.shape) if needs_dinput else (0,), torch.contiguous_format)
    dgrid = empty(grid, tuple(grid.shape) if needs_dgrid else (0,), torch.contiguous_format)
    args = GridSampleBackwardArgs(
        dout=dout,
        grid=grid,
        input=image if needs_dgrid else None,
        dinput=dinput if needs_dinput else None,
        dgrid=dgrid if needs_dgrid else None,
    )
    return Work(plan, args, (dinput, dgrid))


def _require(image: torch.Tensor, grid: torch.Tensor, axes: int) -> None:
    require_float(image)
    if image.dim() != axes + 2 or grid.dtype != image.dtype or not image.numel() or not grid.numel():
        raise PassOn("a tensor is empty, or the dtypes or ranks do not match")


def _kind(interpolation_mode, padding_mode, align_corners):
    if not (0 <= interpolation_mode < len(_MODES) and 0 <= padding_mode < len(_PADDINGS)):
        raise PassOn("the mode is unknown")
    return _MODES[interpolation_mode], _PADDINGS[padding_mode], align_corners


def _sampler(axes: int) -> tuple[Serve, Serve]:
    def forward(input, grid, *kind):
        _require(input, grid, axes)
        return _forward(input, grid, *_kind(*kind))

    def backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
        _require(input, grid, axes)
        kind = _kind(interpolation_mode, padding_mode, align_corners)
        if not any(output_mask):
            return None, None
        found = _backward(grad_output, input, grid, *output_mask, *kind)
        return tuple(one if needed else None for one, needed in zip(found, output_mask, strict=True))

    return forward, backward


def _cudnn(self, grid):
    _require(self, grid, 2)
    return _forward(self, grid, "bilinear", "zeros", True)


def _cudnn_backward(self, grid, grad_output):
    _require(self, grid, 2)
    return _backward(grad_output, self, grid, True, True, "bilinear", "zeros", True)


@below_autograd
def _grid(theta, size, align_corners):
    fields = {"shape": theta.shape, "output_size": size, "dtype": theta.dtype, "align_corners": align_corners}
    plan = plan_of(AffineGridPlan, theta.device, **fields)
    grid = theta.new_empty((theta.shape[0], *size, len(size)))
    return Work(plan, AffineGridArgs(theta=theta, grid=grid), grid)


def _affine_grid(theta, size, align_corners):
    require_float(theta)
    axes = len(size) - 2
    if axes not in (2, 3) or tuple(theta.shape) != (size[0], axes, axes + 1) or 0 in size:
        raise PassOn("a size is 0, or the shape of theta does not match")
    if torch.is_autocast_enabled(theta.device.type):
        raise PassOn("autocast is on, which gives torch's matrix product another dtype")
    return _grid(theta, tuple(size[2:]), align_corners)


def operators() -> Iterator[Operator]:
    for axes in (2, 3):
        forward, backward = _sampler(axes)
        yield Operator(f"grid_sampler_{axes}d", "grid_sample", forward, OWN if axes == 2 else KEPT)
        yield Operator(f"grid_sampler_{axes}d_backward", "grid_sample", backward)
    yield Operator("cudnn_grid_sampler", "grid_sample", _cudnn, devices=("CUDA",))
    yield Operator("cudnn_grid_sampler_backward", "grid_sample", _cudnn_backward, devices=("CUDA",))
    yield Operator("affine_grid_generator", "affine_grid", _affine_grid, OWN)
