"""The derivative of every function with respect to every argument is right, or raises. It is never silently
zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import holdfast as hf
from public_calls import CALLS, TENSORS, flat

REAL = [(name, arg) for name, arg in TENSORS if CALLS[name].tensors[arg].dtype.is_floating_point]
#: A function of one tensor, and the tensor.
Ask = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]


def loss_of(name: str, argument: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The weighted sum of all floating-point results, with a different weight for each element."""

    def loss(tensor: torch.Tensor) -> torch.Tensor:
        results = [found for found in flat(CALLS[name](**{argument: tensor})) if found.is_floating_point()]
        weighted = [found * torch.arange(1.0, 1 + found.numel()).reshape(found.shape) for found in results]
        return torch.stack([found.sum() for found in weighted]).sum()

    return loss


def backward(function: Any, tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf)
    return found


def in_a_dual_level(function: Any, tensor: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        out = function(forward_ad.make_dual(tensor, torch.ones_like(tensor)))
        return forward_ad.unpack_dual(out).tangent


REVERSE: dict[str, Ask] = {
    "backward": backward,
    "grad": lambda f, t: grad(f)(t),
    "vjp": lambda f, t: vjp(f, t)[1](torch.ones(()))[0],
    "jacrev": lambda f, t: jacrev(f)(t),
    "vmap of grad": lambda f, t: vmap(grad(f))(torch.stack([t, t]))[0],
    "grad of vmap": lambda f, t: grad(lambda both: vmap(f)(both).sum())(torch.stack([t, t]))[0],
}
FORWARD: dict[str, Ask] = {
    "jvp": lambda f, t: jvp(f, (t,), (torch.ones_like(t),))[1],
    "jacfwd": lambda f, t: jacfwd(f)(t),
    "a dual level": in_a_dual_level,
    "vmap of jvp": lambda f, t: vmap(lambda one: jvp(f, (one,), (torch.ones_like(one),))[1])(
        torch.stack([t, t])
    ),
    "jvp of vmap": lambda f, t: jvp(
        lambda both: vmap(f)(both).sum(), (torch.stack([t, t]),), (torch.ones(2, *t.shape),)
    )[1],
}


@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize(("name", "argument"), REAL)
def test_forward_mode(name: str, argument: str, way: str) -> None:
    call = CALLS[name]
    if argument in call.discrete:
        assert not any(found.is_floating_point() for found in flat(call()))
        return
    with pytest.raises(hf.Unsupported, match="has no derivative in forward mode"):
        FORWARD[way](loss_of(name, argument), call.tensors[argument])


@pytest.mark.parametrize("way", REVERSE)
@pytest.mark.parametrize(("name", "argument"), REAL)
def test_reverse_mode(name: str, argument: str, way: str) -> None:
    call, loss = CALLS[name], loss_of(name, argument)
    tensor = call.tensors[argument]
    if argument in call.by:
        found = REVERSE[way](loss, tensor)
        assert found.any() and torch.equal(found, backward(loss, tensor))
    elif argument in call.constant:
        assert "No gradient flows" in " ".join(str(call.function.__doc__).split())
        results = flat(call(**{argument: tensor.clone().requires_grad_()}))
        assert not any(found.requires_grad for found in results)
    elif argument in call.discrete:
        assert not any(found.is_floating_point() for found in flat(call()))
    else:
        with pytest.raises(hf.InvalidArgs, match=f"{argument} requires a gradient, but this call has no"):
            REVERSE[way](loss, tensor)


def test_every_operator_says_what_its_derivatives_are() -> None:
    """Without an autograd kernel, torch treats the results of an operator as constants."""
    ours = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("holdfast::")]
    assert len(ours) > 20
    tests = ("holdfast::refused_by_transforms", "holdfast::taken_by_transforms")
    # On buffers, which have no gradient.
    blends = ("holdfast::blend_scale", "holdfast::blend_scale_affine", "holdfast::state_before")
    states = ("holdfast::settle_scale", "holdfast::start_learning")  # on a module's state, under no_grad
    counts = ("holdfast::count_events",)  # on integers
    for name in sorted({name.partition(".")[0] for name in ours} - {*tests, *blends, *states, *counts}):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"), name
