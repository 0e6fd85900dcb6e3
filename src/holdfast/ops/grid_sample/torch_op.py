"""grid_sample for torch: operators, fake kernels, autograd, vmap, and the public function."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from holdfast.core.autograd import register_autograd, requested_gradients
from holdfast.core.checks import require_bool, require_choice, require_memory, require_tensor
from holdfast.core.errors import InvalidArgs
from holdfast.core.huge_pages import on_huge_pages
from holdfast.core.repeated import Work
from holdfast.core.torch_op import cached_plan, define, register_vmap, select_plan
from holdfast.ops.grid_sample.composed import composed_grid_sample
from holdfast.ops.grid_sample.plan import (
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardPlan,
    GridSamplePlan,
    Mode,
    Padding,
)

__all__ = ["grid_sample"]

_MODES = tuple(map(str, Mode))
_PADDINGS = tuple(map(str, Padding))
_KIND_SCHEMA = "str mode, str padding_mode, bool align_corners"


@cached_plan
def _forward_plan(shape, size, input_dtype, grid_dtype, device, mode, padding_mode, align_corners):
    return select_plan(
        GridSamplePlan, device, shape=shape, output_size=size, input_dtype=input_dtype, grid_dtype=grid_dtype,
        mode=mode, padding_mode=padding_mode, align_corners=align_corners,
    )  # fmt: skip


@cached_plan
def _backward_plan(
    shape, size, input_dtype, grid_dtype, device, mode, padding_mode, align_corners, needs_dinput, needs_dgrid
):
    return select_plan(
        GridSampleBackwardPlan, device, shape=shape, output_size=size, input_dtype=input_dtype,
        grid_dtype=grid_dtype, mode=mode, padding_mode=padding_mode, align_corners=align_corners,
        needs_dinput=needs_dinput, needs_dgrid=needs_dgrid,
    )  # fmt: skip


def _in_channels_last(image: torch.Tensor) -> bool:
    """Whether the image has channels last; False if it is also contiguous."""
    if image.is_contiguous():
        return False
    last = torch.channels_last if image.dim() == 4 else torch.channels_last_3d
    return image.is_contiguous(memory_format=last)


def _empty(like, shape, channels_last):
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    layout = last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def _output(image, grid):
    return _empty(image, (*image.shape[:2], *grid.shape[1:-1]), _in_channels_last(image))


def _grid_sample(image, grid, mode, padding_mode, align_corners):
    plan = _forward_plan(
        image.shape,
        grid.shape[1:-1],
        image.dtype,
        grid.dtype,
        image.device,
        mode,
        padding_mode,
        align_corners,
    )
    out = on_huge_pages(_output(image, grid))
    args = GridSampleArgs(input=image, grid=grid, out=out)
    return Work(plan, args, out)


def _grid_sample_fake(image, grid, mode, padding_mode, align_corners):
    return _output(image, grid)


def _gradients(dout, grid, input_size, channels_last, needs_dinput, needs_dgrid):
    """Allocate dinput and dgrid; an empty tensor for one that is not needed."""
    dinput = _empty(dout, tuple(input_size), channels_last) if needs_dinput else dout.new_empty(0)
    dgrid = (
        torch.empty(grid.shape, dtype=grid.dtype, device=grid.device) if needs_dgrid else grid.new_empty(0)
    )
    return dinput, dgrid


def _grid_sample_backward(
    dout, image, grid, input_size, channels_last, mode, padding_mode, align_corners, needs_dinput, needs_dgrid
):
    plan = _backward_plan(
        tuple(input_size), grid.shape[1:-1], dout.dtype, grid.dtype, dout.device, mode, padding_mode,
        align_corners, needs_dinput, needs_dgrid,
    )  # fmt: skip
    made = _gradients(dout, grid, input_size, channels_last, needs_dinput, needs_dgrid)
    dinput, dgrid = map(on_huge_pages, made)
    args = GridSampleBackwardArgs(
        dout=dout,
        grid=grid,
        input=image if needs_dgrid else None,
        dinput=dinput if needs_dinput else None,
        dgrid=dgrid if needs_dgrid else None,
    )
    return Work(plan, args, (dinput, dgrid))


def _grid_sample_backward_fake(dout, image, grid, input_size, channels_last, *rest):
    return _gradients(dout, grid, input_size, channels_last, *rest[-2:])


_forward = define(
    "grid_sample", f"(Tensor input, Tensor grid, {_KIND_SCHEMA}) -> Tensor", _grid_sample, _grid_sample_fake
)
_again = _forward.again
# The image may be None if dgrid is not needed, so its size and layout are parameters.
_backward = define(
    "grid_sample_backward",
    f"(Tensor dout, Tensor? input, Tensor grid, SymInt[] input_size, bool channels_last, {_KIND_SCHEMA}, "
    "bool needs_dinput, bool needs_dgrid) -> (Tensor, Tensor)",
    _grid_sample_backward,
    _grid_sample_backward_fake,
)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    image, grid, *kind = inputs
    ctx.save_for_backward(image if ctx.needs_input_grad[1] else None, grid)
    ctx.rest = image.shape, _in_channels_last(image), *kind


def _differentiate(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    image, grid = ctx.saved_tensors
    needs_dinput, needs_dgrid, *_ = requested_gradients(ctx, dout, image)
    dinput, dgrid = _backward(
        dout, image if needs_dgrid else None, grid, *ctx.rest, needs_dinput, needs_dgrid
    )
    return dinput if needs_dinput else None, dgrid if needs_dgrid else None, None, None, None


def _save_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    dout, image, grid, input_size, channels_last, *ctx.kind, ctx.needs_dinput, ctx.needs_dgrid = inputs
    ctx.image = input_size, channels_last
    ctx.save_for_backward(dout, image, grid)


def _differentiate_again(ctx: Any, ddinput: torch.Tensor, ddgrid: torch.Tensor) -> tuple[Any, ...]:
    """dinput is linear in dout, and grid_sample is the transpose; torch differentiates dgrid."""
    dout, image, grid = ctx.saved_tensors
    found: list[torch.Tensor | None] = [None, None, None]
    if ctx.needs_dinput and ddinput is not None:
        if ctx.needs_input_grad[0]:
            found[0] = _forward(ddinput, grid, *ctx.kind)
        if ctx.needs_input_grad[2]:
            found[2] = _backward(dout, ddinput, grid, *ctx.image, *ctx.kind, False, True)[1]
    if ctx.needs_dgrid and ddgrid is not None and ctx.kind[0] != Mode.NEAREST:
        for i, more in enumerate(_second_by_grid(ctx, dout, image, grid, ddgrid)):
            known = found[i]
            found[i] = more if known is None else known + more
    return found[0], found[1], found[2], *[None] * 7


def _second_by_grid(ctx, dout, image, grid, ddgrid):
    """Gradients of dgrid times ``ddgrid`` with respect to dout, the image and the grid."""
    for name, tensor in (("dout", dout), ("input", image), ("grid", grid), ("ddgrid", ddgrid)):
        require_memory(name, tensor)

    def gradient(dout, image, grid):
        made: Any = torch.func.vjp(lambda grid: composed_grid_sample(image, grid, *ctx.kind), grid)
        out, differentiate = made
        return differentiate(dout.to(out.dtype))[0]

    return torch.func.vjp(gradient, dout, image, grid)[1](ddgrid)


register_autograd("grid_sample", _differentiate, by=["input", "grid"], setup_context=_save_for_backward)
register_autograd(
    "grid_sample_backward",
    _differentiate_again,
    by=["dout", "input", "grid"],
    setup_context=_save_for_second_backward,
)


def _folded(info, dims, tensors):
    """Fold the batch of vmap into the batch of each tensor; bits of an image do not depend on the batch."""
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor is None:
            yield None
            continue
        moved = tensor.movedim(dim, 0) if dim is not None else tensor.expand(info.batch_size, *tensor.shape)
        yield moved.flatten(0, 1)


def _unfolded(info, tensor, images):
    """A result of folded samples, each with this number of images; there may be no samples."""
    return tensor.reshape(info.batch_size, images, *tensor.shape[1:])


def _grid_sample_batched(info, in_dims, image, grid, *kind):
    images = image.shape[0 if in_dims[0] != 0 else 1]
    image, grid = _folded(info, in_dims[:2], (image, grid))
    return _unfolded(info, _forward(image, grid, *kind), images), 0


def _grid_sample_backward_batched(info, in_dims, dout, image, grid, input_size, *rest):
    images = input_size[0]
    dout, image, grid = _folded(info, in_dims[:3], (dout, image, grid))
    made = _backward(dout, image, grid, [info.batch_size * images, *input_size[1:]], *rest)
    shaped = tuple(
        _unfolded(info, gradient, images) if needed else gradient
        for gradient, needed in zip(made, rest[-2:], strict=True)
    )
    return shaped, tuple(0 if needed else None for needed in rest[-2:])


register_vmap("grid_sample", _grid_sample_batched)
register_vmap("grid_sample_backward", _grid_sample_backward_batched)


def grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = False,
) -> torch.Tensor:
    """``torch.nn.functional.grid_sample``, with gradients that have the same bits on every run and device.

    ``input`` has shape (N, C, H, W) with a ``grid`` of shape (N, OH, OW, 2), or (N, C, D, H, W) with a grid
    of shape (N, OD, OH, OW, 3). The grid may be float32 for an input of 16 bits; a grid narrower than the
    input is widened. For an input with channels last, the output and the gradient have channels last. A
    coordinate that is not finite or far outside samples zero with padding "zeros", and a pixel of the image
    otherwise; it has no gradient.

    >>> import torch, holdfast as hf
    >>> image = torch.arange(4.0).reshape(1, 1, 2, 2).requires_grad_()
    >>> hf.grid_sample(image, torch.zeros(1, 1, 1, 2)).sum().backward()
    >>> image.grad
    tensor([[[[0.2500, 0.2500],
              [0.2500, 0.2500]]]])
    """
    found = _again(input, grid, mode, padding_mode, align_corners)
    if found is not None:
        return found  # type: ignore[no-any-return]
    require_tensor("input", input)
    require_tensor("grid", grid)
    axes = input.dim() - 2
    if (
        axes not in (2, 3)
        or grid.dim() != axes + 2
        or grid.shape[-1] != axes
        or grid.shape[0] != input.shape[0]
    ):
        raise InvalidArgs(
            f"input has shape {tuple(input.shape)} and grid {tuple(grid.shape)}; accepted are (N, C, H, W) "
            "with (N, OH, OW, 2), and (N, C, D, H, W) with (N, OD, OH, OW, 3)."
        )
    require_choice("mode", mode, _MODES)
    require_choice("padding_mode", padding_mode, _PADDINGS)
    if align_corners is not None:
        require_bool("align_corners", align_corners)
    if grid.dtype.is_floating_point and grid.dtype.itemsize < input.dtype.itemsize:
        if not is_compiling():
            require_memory("grid", grid)
        grid = grid.to(input.dtype)
    return _forward(input, grid, str(mode), str(padding_mode), bool(align_corners))  # type: ignore[no-any-return]
