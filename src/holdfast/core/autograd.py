"""Gradients of torch operators, also under the transforms of ``torch.func``.

Operators of ``torch.library.register_autograd`` do not work under ``torch.func.grad``. A transform calls the
operator's autograd kernel once per level, with tensors of that level, and then dispatches to the level below.
The kernel must record its own level only and keep gradient recording enabled for the levels below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode

from holdfast.core.errors import InvalidArgs, Unsupported

LIBRARY = torch.library.Library("holdfast", "FRAGMENT")


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """``setup_context`` of a backward that needs no saved values."""


def register_autograd(
    name: str,
    backward: Callable[..., tuple[Any, ...]],
    *,
    by: Collection[str],
    setup_context: Callable[..., None] = _save_nothing,
) -> None:
    """Register ``backward(ctx, *gradients)`` for ``holdfast::name``; ``setup_context(ctx, inputs, output)``
    saves.

    ``by`` names the differentiable arguments. If any other tensor requires a gradient, the call raises:
    otherwise that gradient would silently be zero.
    """
    below = _below(name)
    others = _tensors_but(name, by)

    class Recorded(torch.autograd.Function):
        """Takes the operator's arguments, then the dispatch keys that remain."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            *arguments, keyset = given
            ctx.transformed = torch._C._are_functorch_transforms_active()
            if ctx.transformed:
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    output = below(keyset, arguments)
            else:
                output = below(keyset, arguments)
            setup_context(ctx, tuple(arguments), output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            # Batched gradients (is_grads_batched) and tensors saved under a finished transform look like
            # plain tensors, but only torch can unwrap them. While a mode is active, every call goes through
            # torch.
            if ctx.transformed or any(map(is_batch, gradients)):
                with BaseTorchFunctionMode():
                    return (*backward(ctx, *gradients), None)
            return (*backward(ctx, *gradients), None)

    Recorded.__name__ = f"{name}_recorded"

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_forward_mode(name, arguments)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return below(keyset, arguments)
        for position, argument in others:
            if arguments[position] is not None and arguments[position].requires_grad:
                raise InvalidArgs(
                    f"{argument} requires a gradient, and there is none with respect to it here; pass "
                    f"{argument}.detach()."
                )
        if not torch._C._are_functorch_transforms_active():
            return Recorded.apply(*arguments, keyset)  # type: ignore[no-untyped-call]
        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, Recorded).apply(*arguments, keyset)  # type: ignore[no-untyped-call]

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def register_constant(name: str, *, integers: bool = False) -> None:
    """Make the results of ``holdfast::name`` constants for autograd, as documented for the function.

    In forward mode the call raises, because the tangent of a constant is a zero tensor that looks like a
    derivative. Integer results have no derivative in any mode; ``integers`` says that results may be
    integers.
    """
    below = _below(name)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if not integers:
            _refuse_forward_mode(name, arguments)
        found = below(keyset, arguments)
        if integers and found.is_floating_point():
            _refuse_forward_mode(name, arguments)
        return found

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached. In forward mode it is returned unchanged, and the operator raises."""
    return tensor if forward_ad._current_level >= 0 else tensor.detach()


def refuse_derivatives(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """The backward of an operator without differentiable arguments. It is never called."""
    raise AssertionError("an argument was recorded that has no derivative")


def _below(name: str) -> Callable[[Any, Sequence[Any]], Any]:
    """A function that redispatches ``holdfast::name`` below autograd."""
    operator = getattr(torch.ops.holdfast, name).default

    def below(keyset: Any, arguments: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return below


def _tensors_but(name: str, by: Collection[str]) -> list[tuple[int, str]]:
    """The position and name of each argument that may be a tensor and is not in ``by``."""
    arguments = getattr(torch.ops.holdfast, name).default._schema.arguments
    tensors = {argument.name: i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)}
    unknown = set(by) - tensors.keys()
    if unknown:
        raise ValueError(f"holdfast::{name} has no tensor {', '.join(sorted(unknown))}")
    return [(i, argument) for argument, i in tensors.items() if argument not in by]


def _refuse_forward_mode(name: str, arguments: Sequence[Any]) -> None:
    if forward_ad._current_level >= 0 and any(map(_has_tangent, arguments)):
        raise Unsupported(
            f"{name} was asked for a derivative in forward mode (jvp, jacfwd), which there is none of; "
            "use reverse mode: backward, torch.func.grad, vjp or jacrev."
        )


def is_batch(gradient: Any) -> bool:
    """Whether this is a batched gradient of ``is_grads_batched``."""
    return isinstance(gradient, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(gradient)


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None
