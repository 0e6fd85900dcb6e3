"""Which layer of a module is the first to give other bits: two runs that differ are repeated and watched.

A call of a module is a record of digests: of its inputs, its outputs and the gradients of both. The runs are
compared record by record. In the forward pass the first difference decides. It is in the outputs of a call
with equal inputs, or in inputs, which the code around the call computes. In the backward pass it is the first
call that gets equal gradients of its outputs, and gives other gradients of its inputs or of its own
parameters. Calls around such a call are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from holdfast.core.bits import digest
from holdfast.testing.outputs import flattened

#: The gradients of inputs and outputs of a call, in the order of their arrival.
Gradients = list[tuple[int, str]]


@dataclass
class Call:
    """One call of a module. ``outer`` is the number of the call that made it."""

    name: str
    outer: int | None
    given: str
    returned: str = ""
    of_inputs: Gradients = field(default_factory=list)
    of_outputs: Gradients = field(default_factory=list)


class Watch:
    """Records the calls of named modules in one run."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.modules = modules
        self.calls = list[Call]()
        #: The numbers of the calls that have not returned yet.
        self._open = list[int]()
        #: The numbers of calls as they begin and return, and as the gradients of their outputs arrive.
        self.forward, self.backward = list[tuple[int, bool]](), list[int]()
        #: The gradients of the own parameters of each module, as they arrive.
        self.gradients = {name: list[str]() for name in modules}

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self.modules.items():
                begin = module.register_forward_pre_hook(self._begun(name), prepend=True, with_kwargs=True)
                hooks.callback(begin.remove)
                hooks.callback(module.register_forward_hook(self._returned).remove)
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad:
                        arrive = parameter.register_post_accumulate_grad_hook(self._accumulated(name))
                        hooks.callback(arrive.remove)
            yield

    def _accumulated(self, name: str) -> Any:
        def accumulate(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.gradients[name].append(_digest([parameter.grad]))

        return accumulate

    def _begun(self, name: str) -> Any:
        def begin(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            number, given = len(self.calls), list(_tensors((args, kwargs)))
            call = Call(name, self._open[-1] if self._open else None, _digest(given))
            self.calls.append(call)
            self._open.append(number)
            self.forward.append((number, False))
            _record_gradients(given, call.of_inputs, lambda: None)

        return begin

    def _returned(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        number, returned = self._open.pop(), list(_tensors(output))
        call = self.calls[number]
        call.returned = _digest(returned)
        self.forward.append((number, True))
        _record_gradients(returned, call.of_outputs, lambda: self.backward.append(number))


def _record_gradients(tensors: Iterable[torch.Tensor], found: Gradients, arrived: Any) -> None:
    def hook(position: int) -> Any:
        def record(gradient: torch.Tensor) -> None:
            found.append((position, _digest([gradient])))
            arrived()

        return record

    for position, tensor in enumerate(tensors):
        if tensor.requires_grad:
            tensor.register_hook(hook(position))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    found: dict[str, torch.Tensor] = {}
    for number, tensor in enumerate(tensors):
        found |= {path: part for path, part in flattened(tensor, str(number))}
    real = {path: torch.view_as_real(part) if part.is_complex() else part for path, part in found.items()}
    return digest(real)


def first_difference(first: Watch, second: Watch) -> str:
    """A sentence about the first layer with other bits; "" if none was found."""
    for (number, has_returned), other in zip(first.forward, second.forward, strict=False):
        call = first.calls[number]
        if (number, has_returned) != other or call.name != second.calls[number].name:
            return ""
        if not has_returned and call.given != second.calls[number].given:
            around = "the step" if call.outer is None else _shown(first, first.calls[call.outer])
            return f"The first difference is in the input of {_shown(first, call)}, which {around} computes."
        if has_returned and call.returned != second.calls[number].returned:
            return f"The first difference is in the output of {_shown(first, call)}; its inputs are equal."
    return _in_backward(first, second)


def _in_backward(first: Watch, second: Watch) -> str:
    differing = [n for n in dict.fromkeys(first.backward) if _differs(first, second, n)]
    around = {outer for n in differing for outer in _outers(first, n)}
    for number in differing:
        if number not in around:
            shown = _shown(first, first.calls[number])
            return (
                f"The first difference is in the backward pass of {shown}; the gradients of its outputs are "
                "equal."
            )
    for number in dict.fromkeys(first.backward):
        call = first.calls[number]
        if call.of_outputs != second.calls[number].of_outputs:
            return f"The first difference is in the gradient that {_shown(first, call)} gets for its output."
    return ""


def _outers(watch: Watch, number: int) -> Iterator[int]:
    """The calls around a call."""
    outer = watch.calls[number].outer
    while outer is not None:
        yield outer
        outer = watch.calls[outer].outer


def _differs(first: Watch, second: Watch, number: int) -> bool:
    """Whether a call with equal gradients of its outputs gives other gradients."""
    one, other = first.calls[number], second.calls[number]
    if not one.of_outputs or one.of_outputs != other.of_outputs:
        return False
    return one.of_inputs != other.of_inputs or first.gradients[one.name] != second.gradients[one.name]


def _shown(watch: Watch, call: Call) -> str:
    kind = type_before_parametrizations(watch.modules[call.name]).__name__
    return f"{call.name!r} ({kind})" if call.name else f"the model ({kind})"
