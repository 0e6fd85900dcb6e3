"""Tests of affine_grid: its values and gradients against torch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import holdfast as hf
from holdfast.core.stream import CPU_STREAM
from holdfast.ops.affine_grid.plan import (
    AffineGridBackwardDescriptor,
    AffineGridBackwardPlan,
    AffineGridDescriptor,
    AffineGridPlan,
)
from holdfast.ops.affine_grid.reference import coordinates
from holdfast.ops.affine_grid.torch_op import affine_grid

SIZES = [(2, 3, 5, 7), (2, 3, 1, 8), (3, 1, 67, 131), (2, 1, 3, 4, 5)]


def thetas(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    axes = len(size) - 2
    generator = torch.Generator().manual_seed(17)
    return torch.randn((size[0], axes, axes + 1), generator=generator).to(dtype)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid behavior:UserWarning")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_within_the_bound_that_the_plan_states(
    size: tuple[int, ...], aligned: bool, dtype: torch.dtype
) -> None:
    theta = thetas(size, dtype)
    own, wide = theta.clone().requires_grad_(), theta.double().requires_grad_()
    grid, exact = affine_grid(own, size, aligned), F.affine_grid(wide, list(size), align_corners=aligned)
    dgrid = torch.randn(grid.shape, generator=torch.Generator().manual_seed(19)).to(dtype)
    (dtheta,) = torch.autograd.grad(grid, own, dgrid)
    (exact_dtheta,) = torch.autograd.grad(exact, wide, dgrid.double())
    fields: dict[str, Any] = {
        "shape": theta.shape, "output_size": size[2:], "dtype": dtype, "align_corners": aligned
    }  # fmt: skip
    forward = AffineGridPlan.select(CPU_STREAM, AffineGridDescriptor(**fields))
    backward = AffineGridBackwardPlan.select(CPU_STREAM, AffineGridBackwardDescriptor(**fields))
    precision = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}[dtype]
    # Coordinates are at most 1, so these sums bound the sums of magnitudes.
    unit = theta.double().abs().sum(-1).reshape(size[0], *[1] * (len(size) - 2), -1).expand_as(grid)
    dunit = dgrid.double().abs().flatten(1, -2).sum(1)[:, :, None].expand_as(dtheta)
    for ours, theirs, bound, of in (
        (grid, exact, forward.precision_guarantee().ulp["grid"], unit),
        (dtheta, exact_dtheta, backward.precision_guarantee().ulp["dtheta"], dunit),
    ):
        place = torch.ldexp(torch.ones_like(of), torch.frexp(of)[1] - precision)
        slack = 8 if dtype == torch.float64 else 1  # torch has an error of the same size
        assert ((ours.double() - theirs).abs() / place).max() <= bound * slack


@pytest.mark.parametrize("aligned", [False, True])
def test_coordinates_are_correctly_rounded(aligned: bool) -> None:
    for size in (1, 2, 3, 7, 100, 4097):
        desc = AffineGridDescriptor(shape=(1, 2, 3), output_size=(size, size), align_corners=aligned)
        steps = max(size - 1 if aligned else size, 1)
        exact = np.array([(2 * i - (size - 1)) / steps for i in range(size)]).astype(np.float32)
        assert np.array_equal(coordinates(size, desc), exact)


@pytest.mark.parametrize("size", [(1, 1, 2, 3), (2, 1, 2, 2, 2)])
@pytest.mark.parametrize("aligned", [False, True])
def test_gradcheck(size: tuple[int, ...], aligned: bool) -> None:
    theta = thetas(size, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: affine_grid(t, size, aligned), (theta,), nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(lambda t: affine_grid(t, size, aligned), (theta,), nondet_tol=0.0)


def test_a_sample_has_the_same_bits_alone_and_in_a_batch() -> None:
    theta = thetas((5, 1, 40, 50), torch.float32)
    dgrid = torch.randn(5, 40, 50, 2)
    grid = affine_grid(theta, (5, 1, 40, 50))
    dtheta = torch.ops.holdfast.affine_grid_backward(dgrid, False)
    for n in range(5):
        assert torch.equal(affine_grid(theta[n : n + 1], (1, 1, 40, 50))[0], grid[n])
        assert torch.equal(torch.ops.holdfast.affine_grid_backward(dgrid[n : n + 1], False)[0], dtheta[n])


def test_opcheck_compile_and_vmap() -> None:
    theta = thetas((2, 1, 3, 4), torch.float32).requires_grad_()
    torch.library.opcheck(torch.ops.holdfast.affine_grid.default, (theta, [3, 4], True))
    torch.library.opcheck(torch.ops.holdfast.affine_grid_backward.default, (torch.randn(2, 3, 4, 2), True))
    compiled = torch.compile(
        lambda t: affine_grid(t, (2, 1, 3, 4)).square().sum(), fullgraph=True, backend="aot_eager"
    )
    plain, traced = affine_grid(theta, (2, 1, 3, 4)).square().sum(), compiled(theta)
    assert torch.equal(plain, traced)
    assert torch.equal(*torch.autograd.grad(plain, theta), *torch.autograd.grad(traced, theta))
    many = torch.randn(3, 2, 2, 3)
    looped = torch.stack([affine_grid(t, (2, 1, 3, 4)) for t in many])
    assert torch.equal(torch.vmap(lambda t: affine_grid(t, (2, 1, 3, 4)))(many), looped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (2, 3, 3)}, "theta must have shape"),
        ({"output_size": (3,)}, r"must be \(H, W\) or \(D, H, W\)"),
        ({"output_size": (2**25, 1)}, "its numbers must be from 0 to 16777216"),
        ({"output_size": None}, "must be a sequence of whole numbers"),
        ({"dtype": torch.int32}, "dtype is torch.int32"),
        ({"align_corners": None}, "True or False"),
    ],
)
def test_descriptors_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"shape": (2, 2, 3), "output_size": (6, 7), **change}
    with pytest.raises(hf.InvalidDescriptor, match=message):
        AffineGridPlan.select(CPU_STREAM, AffineGridDescriptor(**fields))


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(hf.InvalidArgs, match=r"theta has shape \(2, 2, 3\)"):
        affine_grid(torch.zeros(2, 2, 3), (3, 1, 4, 4))


def test_sizes_may_be_numbers_of_numpy() -> None:
    theta = torch.randn(2, 2, 3)
    assert torch.equal(affine_grid(theta, list(np.array([2, 1, 3, 4]))), affine_grid(theta, (2, 1, 3, 4)))
