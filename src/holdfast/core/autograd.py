"""Gradients of torch operators, also under the transforms of ``torch.func``.

Operators of ``torch.library.register_autograd`` do not work under ``torch.func.grad``. A transform calls the
operator's autograd kernel once per level, with tensors of that level, and then dispatches to the level below.
The kernel must record its own level only and keep gradient recording enabled for the levels below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from holdfast.core import private
from holdfast.core.errors import InvalidArgs, Unsupported

LIBRARY = torch.library.Library("holdfast", "FRAGMENT")
#: The arguments of each operator that was defined: their names and types.
ARGUMENTS: dict[str, dict[str, str]] = {}
#: The number of results of each operator.
RESULTS: dict[str, int] = {}
#: For each differentiable operator, functions that record a call for autograd without torch's dispatcher.
#: Nothing may trace or transform the call.
RECORDERS: dict[str, Recorder] = {}


class Recorder(NamedTuple):
    """Records calls of one operator."""

    #: Takes the arguments. Raises if one requires a gradient that is not there.
    check: Callable[[Sequence[Any]], None]
    #: Takes the first ``leading`` arguments, then a tuple of the others and (the result,). Returns the result
    #: with its history.
    record: Callable[..., Any]
    #: Number of arguments up to the last tensor. torch takes time for every argument that it is given.
    leading: int


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """``setup_context`` of a backward that needs no saved values."""


def register_autograd(
    name: str,
    backward: Callable[..., tuple[Any, ...]],
    *,
    by: Collection[str],
    setup_context: Callable[..., None] = _save_nothing,
) -> None:
    """Register ``backward(ctx, *gradients)`` for ``holdfast::name``, set up by ``setup_context``.

    ``by`` names the differentiable arguments. If any other tensor requires a gradient, the call raises:
    otherwise that gradient would silently be zero.
    """
    others = _tensors_but(name, by)
    if private.redispatch_below_autograd is None:

        def set_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _refuse_derivatives_by(others, inputs)
            setup_context(ctx, inputs, output)

        torch.library.register_autograd(f"holdfast::{name}", backward, setup_context=set_up, lib=LIBRARY)
        return
    below = _below(name, private.redispatch_below_autograd)
    leading = 1 + max(i for i, kind in enumerate(ARGUMENTS[name].values()) if "Tensor" in kind)

    class Recorded(torch.autograd.Function):
        """Takes ``leading`` arguments, then (the others, the dispatch keys that remain or (the result,))."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            rest, source = given[-1]
            arguments = given[:-1] + rest
            if type(source) is tuple:
                (output,) = source
            elif private.transforms_active():
                with torch.enable_grad(), private.recording_forward_mode():
                    output = below(source, arguments)
            else:
                output = below(source, arguments)
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            return *backward(ctx, *gradients)[:leading], None

    private.untraced(Recorded.backward)
    Recorded.__name__ = f"{name}_recorded"
    apply = private.apply_of(Recorded)
    RECORDERS[name] = Recorder(partial(_refuse_derivatives_by, others), apply, leading)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_forward_mode(name, arguments)
        if not (torch.is_grad_enabled() and private.any_requires_grad(*arguments)):
            return below(keyset, arguments)
        _refuse_derivatives_by(others, arguments)
        if not private.transforms_active():
            return Recorded.apply(*arguments[:leading], (arguments[leading:], keyset))  # type: ignore[no-untyped-call]
        with private.single_level():
            return apply(*arguments[:leading], (arguments[leading:], keyset))

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def register_constant(name: str, *, integers: bool = False) -> None:
    """Make the results of ``holdfast::name`` constants for autograd, as documented for the function.

    In forward mode the call raises, because the tangent of a constant is a zero tensor that looks like a
    derivative. ``integers`` says that results may be integers, which have no derivative in any mode.
    """
    if private.redispatch_below_autograd is None:
        torch.library.register_autograd(
            f"holdfast::{name}", refuse_derivatives, setup_context=_mark_constant, lib=LIBRARY
        )
        return
    below = _below(name, private.redispatch_below_autograd)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if not integers:
            _refuse_forward_mode(name, arguments)
        found = below(keyset, arguments)
        if integers and found.is_floating_point():
            _refuse_forward_mode(name, arguments)
        return found

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _refuse_derivatives_by(others: Sequence[tuple[int, str]], arguments: Sequence[Any]) -> None:
    for position, argument in others:
        if arguments[position] is not None and arguments[position].requires_grad:
            raise InvalidArgs(
                f"{argument} requires a gradient, but this call has no gradient with respect to it; pass "
                f"{argument}.detach()."
            )


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` detached. In forward mode it is returned unchanged, and the operator raises."""
    return tensor if private.in_forward_mode() else tensor.detach()


def refuse_derivatives(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """The backward of an operator without differentiable arguments. It is never called."""
    raise AssertionError("an argument was recorded that has no derivative")


def _mark_constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))


def _below(name: str, redispatch: Callable[..., Any]) -> Callable[[Any, Sequence[Any]], Any]:
    """A function that redispatches ``holdfast::name`` below autograd."""
    return partial(redispatch, getattr(torch.ops.holdfast, name).default)


def _tensors_but(name: str, by: Collection[str]) -> list[tuple[int, str]]:
    """The position and name of each argument that may be a tensor and is not in ``by``."""
    tensors = {argument: i for i, (argument, kind) in enumerate(ARGUMENTS[name].items()) if "Tensor" in kind}
    unknown = set(by) - tensors.keys()
    if unknown:
        raise ValueError(f"holdfast::{name} has no tensor {', '.join(sorted(unknown))}")
    return [(i, argument) for argument, i in tensors.items() if argument not in by]


def _refuse_forward_mode(name: str, arguments: Sequence[Any]) -> None:
    if private.in_forward_mode() and any(map(_has_tangent, arguments)):
        raise Unsupported(
            f"{name} has no derivative in forward mode (jvp, jacfwd); use reverse mode: backward, "
            "torch.func.grad, vjp or jacrev."
        )


#: Minimum elements of tensors for which it is worth asking which gradients are requested.
_WORTH_ASKING = 2**16


def requested_gradients(ctx: Any, *tensors: torch.Tensor | None) -> Sequence[bool]:
    """``ctx.needs_input_grad`` without the gradients that this backward pass leaves out.

    ``torch.autograd.grad`` and ``backward(inputs=…)`` ask for some gradients only. To find out which takes up
    to 20 microseconds. So nobody is asked if ``tensors``, which the gradients read or write, are small.
    """
    needed: Sequence[bool] = ctx.needs_input_grad
    if sum(needed) < 2:
        return needed
    elements = 0
    for tensor in tensors:
        elements += 0 if tensor is None else tensor.numel()
    if type(elements) is not int or elements < _WORTH_ASKING:  # a symbolic size must not be compared
        return needed
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    if len(nodes) != sum(needed):
        return needed
    requested = iter([private.is_requested(node) for node in nodes])
    return [is_needed and next(requested) for is_needed in needed]


def is_batch(gradient: Any) -> bool:
    """Whether this is a batched gradient of ``is_grads_batched``."""
    return isinstance(gradient, torch.Tensor) and private.is_legacy_batch(gradient)


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None
