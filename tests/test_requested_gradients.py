"""A backward pass that asks for some gradients computes no others, and they have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core import autograd, private
from holdfast.ops.embedding_bag import torch_op as embedding_bag
from holdfast.ops.fake_quantize_learned import torch_op as learned
from holdfast.ops.grid_sample import torch_op as grid_sample
from holdfast.ops.scatter import torch_op as scatter


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


INDEX = torch.randint(9, (8192,), generator=torch.Generator().manual_seed(1))
IMAGE, GRID = values(1, 2, 200, 200), values(1, 9, 9, 2, seed=1).tanh()
TABLE, WEIGHTS = values(9, 32), values(256, 32, seed=1)
ROWS, SOURCE = values(9, 16), values(8192, 16, seed=1)
X, SCALE, ZERO_POINT = values(256, 300), torch.tensor(0.1), torch.tensor(3.0)

#: Functions of tensors that need gradients, the tensors, and the operator that should do less work: its
#: module, its name, and what it does for all gradients, and for each of them alone.
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], Any, str, list[Any]]] = {
    "grid_sample": (hf.grid_sample, (IMAGE, GRID), grid_sample, "_backward", [(1, 1), (1, 0), (0, 1)]),
    "embedding_bag": (
        lambda table, weights: hf.embedding_bag(
            INDEX.reshape(256, 32), table, per_sample_weights=weights, mode="sum"
        ),
        (TABLE, WEIGHTS), embedding_bag, "_backward", [(1, 1), (1, 0), (0, 1)],
    ),
    "fake_quantize": (hf.fake_quantize, (X, SCALE, ZERO_POINT), learned, "_call", [(1,), None, (0,), (1,)]),
    "index_add": (
        lambda rows, source: hf.index_add(rows, 0, INDEX, source), (ROWS, SOURCE), scatter, "_read",
        [("skip",), None, ("skip",)],
    ),
}  # fmt: skip


def asked(
    function: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    wanted: tuple[int, ...],
    way: str,
) -> list[torch.Tensor]:
    """The gradients of the tensors ``wanted``, when all of them need one."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    inputs = leaves if way == "leaves" else [leaf * 1 for leaf in leaves]
    out = function(*inputs)
    dout = values(*out.shape, seed=2)
    if way == "backward":
        out.backward(dout, inputs=[leaves[i] for i in wanted])
        return [leaves[i].grad for i in wanted]  # type: ignore[misc]
    return list(torch.autograd.grad(out, [inputs[i] for i in wanted], dout))


@pytest.mark.parametrize("way", ["leaves", "results", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_only_requested_gradients_are_computed(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, tensors, module, operator, expected = CASES[name]
    monkeypatch.setattr(autograd, "_WORTH_ASKING", 2**12)
    seen, right = list[Any](), getattr(module, operator)

    def spied(*given: Any) -> Any:
        seen.append(given[-len(expected[0]) :])
        return right(*given)

    monkeypatch.setattr(module, operator, spied)
    places = range(len(tensors))
    every = asked(function, tensors, tuple(places), way)
    assert seen.pop() == expected[0] and not seen
    for i in places:
        (alone,) = asked(function, tensors, (i,), way)
        assert torch.equal(alone, every[i])
        assert (seen.pop() if seen else None) == expected[1 + i] and not seen
    for pair in combinations(places, 2):
        assert all(map(torch.equal, asked(function, tensors, pair, way), (every[i] for i in pair)))


def test_nobody_is_asked_about_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = list[Any]()
    monkeypatch.setattr(private, "is_requested", lambda node: asking.append(node) or True)
    for size in (8, 300):
        image, grid = values(1, 1, size, size).requires_grad_(), GRID.clone().requires_grad_()
        torch.autograd.grad(hf.grid_sample(image, grid).sum(), image)
        assert bool(asking) == (size == 300)


def test_one_graph_serves_several_requests() -> None:
    image, grid = IMAGE.clone().requires_grad_(), GRID.clone().requires_grad_()
    out = hf.grid_sample(image, grid)
    dout = values(*out.shape, seed=2)
    dinput, dgrid = torch.autograd.grad(out, (image, grid), dout, retain_graph=True)
    for wanted, expected in ((grid, dgrid), (image, dinput), (grid, dgrid)):
        assert torch.equal(torch.autograd.grad(out, wanted, dout, retain_graph=True)[0], expected)
    out.backward(dout)
    assert torch.equal(image.grad, dinput) and torch.equal(grid.grad, dgrid)  # type: ignore[arg-type]


@pytest.mark.parametrize("of_image", [True, False])
def test_second_derivatives_of_one_gradient(of_image: bool) -> None:
    """The gradient of one input alone can be differentiated by both."""
    found = []
    for worth in (0, 2**62):
        autograd._WORTH_ASKING, before = worth, autograd._WORTH_ASKING
        try:
            image, grid = IMAGE.clone().requires_grad_(), GRID.clone().requires_grad_()
            out = hf.grid_sample(image, grid)
            (first,) = torch.autograd.grad(out.square().sum(), image if of_image else grid, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), (image, grid)))
        finally:
            autograd._WORTH_ASKING = before
    assert all(map(torch.equal, *found))
