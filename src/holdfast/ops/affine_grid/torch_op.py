"""affine_grid for torch: operators, fake kernels, autograd, vmap, and the public function."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from holdfast.core.autograd import register_autograd
from holdfast.core.checks import is_whole, require_bool, require_tensor, shown, whole_number
from holdfast.core.errors import InvalidArgs
from holdfast.core.repeated import Work
from holdfast.core.torch_op import cached_plan, define, register_vmap, select_plan
from holdfast.ops.affine_grid.plan import (
    AffineGridArgs,
    AffineGridBackwardArgs,
    AffineGridBackwardPlan,
    AffineGridPlan,
)

__all__ = ["affine_grid"]


@cached_plan
def _plan(kind, shape, size, dtype, device, align_corners):
    return select_plan(kind, device, shape=shape, output_size=size, dtype=dtype, align_corners=align_corners)


def _affine_grid(theta, size, align_corners):
    plan = _plan(AffineGridPlan, theta.shape, tuple(size), theta.dtype, theta.device, align_corners)
    grid = _affine_grid_fake(theta, size, align_corners)
    return Work(plan, AffineGridArgs(theta=theta, grid=grid), grid)


def _affine_grid_fake(theta, size, align_corners):
    return theta.new_empty((theta.shape[0], *size, len(size)))


def _affine_grid_backward(dgrid, align_corners):
    dtheta = _affine_grid_backward_fake(dgrid, align_corners)
    plan = _plan(
        AffineGridBackwardPlan, dtheta.shape, dgrid.shape[1:-1], dgrid.dtype, dgrid.device, align_corners
    )
    return Work(plan, AffineGridBackwardArgs(dgrid=dgrid, dtheta=dtheta), dtheta)


def _affine_grid_backward_fake(dgrid, align_corners):
    axes = dgrid.shape[-1]
    return dgrid.new_empty((dgrid.shape[0], axes, axes + 1))


_forward = define(
    "affine_grid", "(Tensor theta, SymInt[] size, bool align_corners) -> Tensor", _affine_grid,
    _affine_grid_fake,
)  # fmt: skip
_backward = define(
    "affine_grid_backward", "(Tensor dgrid, bool align_corners) -> Tensor", _affine_grid_backward,
    _affine_grid_backward_fake,
)  # fmt: skip


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.align_corners = inputs[2]


def _differentiate(ctx: Any, dgrid: torch.Tensor) -> tuple[Any, ...]:
    return _backward(dgrid, ctx.align_corners), None, None


def _save_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    dgrid, ctx.align_corners = inputs
    ctx.size = dgrid.shape[1:-1]


def _differentiate_again(ctx: Any, ddtheta: torch.Tensor) -> tuple[Any, ...]:
    """dtheta is linear in dgrid, and affine_grid is the transpose of that map."""
    return _forward(ddtheta, ctx.size, ctx.align_corners), None


register_autograd("affine_grid", _differentiate, by=["theta"], setup_context=_save_for_backward)
register_autograd(
    "affine_grid_backward", _differentiate_again, by=["dgrid"], setup_context=_save_for_second_backward
)


def _affine_grid_batched(info, in_dims, theta, size, align_corners):
    theta = theta.movedim(in_dims[0], 0)
    return _forward(theta.flatten(0, 1), size, align_corners).unflatten(0, theta.shape[:2]), 0


def _affine_grid_backward_batched(info, in_dims, dgrid, align_corners):
    dgrid = dgrid.movedim(in_dims[0], 0)
    return _backward(dgrid.flatten(0, 1), align_corners).unflatten(0, dgrid.shape[:2]), 0


register_vmap("affine_grid", _affine_grid_batched)
register_vmap("affine_grid_backward", _affine_grid_backward_batched)


def _is_size(number: Any) -> bool:
    """Whether this is a whole number, possibly one of NumPy's."""
    return is_whole(number) or (isinstance(number, Integral) and not isinstance(number, bool))


def affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool | None = False) -> torch.Tensor:
    """``torch.nn.functional.affine_grid``, with a gradient that has the same bits on every run and device.

    ``theta`` has shape (N, 2, 3) or (N, 3, 4). ``size`` is the shape of the sampled output: (N, C, H, W) or
    (N, C, D, H, W).

    >>> import torch, holdfast as hf
    >>> hf.affine_grid(torch.tensor([[[1.0, 0, 0], [0, 1, 0]]]), (1, 1, 1, 2))
    tensor([[[[-0.5000,  0.0000],
              [ 0.5000,  0.0000]]]])
    """
    require_tensor("theta", theta)
    if not isinstance(size, Sequence) or isinstance(size, str) or not all(map(_is_size, size)):
        raise InvalidArgs(f"size is {shown(size)}; it must be whole numbers, such as (1, 3, 64, 64).")
    size = tuple(whole_number("size", n, 0, 2**63 - 1) for n in size)
    axes = len(size) - 2
    if axes not in (2, 3) or tuple(theta.shape) != (size[0], axes, axes + 1):
        raise InvalidArgs(
            f"theta has shape {tuple(theta.shape)} and size is {size}; accepted are (N, 2, 3) with "
            "(N, C, H, W), and (N, 3, 4) with (N, C, D, H, W)."
        )
    if align_corners is not None:
        require_bool("align_corners", align_corners)
    return _forward(theta, size[2:], bool(align_corners))  # type: ignore[no-any-return]
