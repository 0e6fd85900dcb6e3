"""One call of a public function, or of a counterpart of it, with all gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from holdfast.core.bits import memory, mismatch
from holdfast.core.case import laid_out, operands_of
from holdfast.core.device_errors import check_errors
from holdfast.core.draw import Inexpressible, case_of, space_of
from holdfast.core.errors import HoldfastError
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.segment_sum.cases import row_values
from holdfast.proof.conformance import copy_args
from holdfast.proof.fuzz.check import Differs, same_bits
from holdfast.proof.fuzz.problem import Drawn

#: Results and gradients by name, or the error; None if the function cannot express the problem.
Outcome = dict[str, torch.Tensor] | str | None


class Call:
    """The call of the public function of a plan, with the gradients of all floating inputs.

    A plan of a backward gives these gradients itself. Some functions refuse inputs that require a gradient.
    ``functions`` holds counterparts, by the names of holdfast's functions.
    """

    def __init__(
        self,
        plan: AnyPlan,
        drawn: Drawn,
        *,
        device: str = "cpu",
        functions: object | None = None,
        args: Args | None = None,
    ) -> None:
        self.plan, self.drawn, self.device, self.functions = plan, drawn, device, functions
        self.args = drawn.args(plan)[0] if args is None else args
        self._moved = self.args if device == "cpu" else copy_args(self.args, device)
        self.desc = case_of(plan, drawn.problem).descriptor
        self._space = space_of(plan)
        self.differentiates = plan.direction == "forward"
        self._upstream: dict[str, torch.Tensor] = {}

    def like(self, device: str, functions: object | None = None) -> Call:
        """The same call on a device, or of a counterpart."""
        made = Call(self.plan, self.drawn, device=device, functions=functions, args=self.args)
        made.differentiates = self.differentiates
        return made

    def move(self) -> None:
        """Give all arguments new memory."""
        self._moved = copy_args(self.args, self.device)

    def gives(self, result: torch.Tensor) -> bool:
        """Whether a result is in the memory of an argument, as the gradient of a sum's first term is."""
        given = [*operands_of(self._moved).values(), *self._upstream.values()]
        memory = {one.untyped_storage().data_ptr() for one in given if isinstance(one, torch.Tensor)}
        return result.untyped_storage().data_ptr() in memory

    def first(self) -> Outcome:
        """The first call, without gradients if they are refused. Later calls do the same."""
        found = self.checked()
        if self.differentiates and isinstance(found, str):
            self.differentiates = False
            found = self.checked()
        return found

    def checked(self) -> Outcome:
        """A call, and on CUDA the errors that its kernels report."""
        found = self()
        try:
            check_errors()
        except HoldfastError as reported:
            return _sentence(reported)
        return found

    def __call__(self) -> Outcome:
        operands = operands_of(self._moved)
        leaves = {
            name: operands[name].detach().requires_grad_()
            for name in (self.plan.inputs if self.differentiates else ())
            if isinstance(operands[name], torch.Tensor) and operands[name].is_floating_point()
        }
        args = type(self.args)(**{**operands, **leaves})
        try:
            found = self._results(args)
            if found is None:
                return None
            recorded = {name: result for name, result in found.items() if result.requires_grad}
            if recorded:
                upstream = [self._gradient_of(name, result) for name, result in recorded.items()]
                gradients = torch.autograd.grad(
                    list(recorded.values()), list(leaves.values()), upstream, allow_unused=True
                )
                pairs = zip(leaves, gradients, strict=True)
                found |= {f"gradient of {name}": made for name, made in pairs if made is not None}
        except HoldfastError as refused:
            return _sentence(refused)
        except Inexpressible:
            return None
        return {name: result.detach() for name, result in found.items()}

    def _results(self, args: Any) -> dict[str, torch.Tensor] | None:
        given = (self.plan, self.drawn.problem, self.desc, args)
        if self.functions is None:
            return self._space.public(*given)
        return self._space.public(*given, _Counterparts(self.functions))

    def _gradient_of(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """The gradient of a result, in the layout that was drawn for the result, or of one number."""
        if name not in self._upstream:
            label = f"gradient of {name} in {self.drawn.problem.name}"
            if Random(label).randrange(4) == 0:
                made = row_values(label, (1,), result.dtype).to(self.device).expand(result.shape)
            else:
                layout = self.drawn.layouts.get(name, "contiguous")
                made = on_device(laid_out(row_values(label, result.shape, result.dtype), layout), self.device)
            self._upstream[name] = made
        return self._upstream[name]


class _Counterparts:
    """The functions of a module. One that is not there has no call for any problem."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._module, name):
            raise Inexpressible
        return getattr(self._module, name)


def takes_counterparts(plan: AnyPlan) -> bool:
    """Whether the public function of a plan can be replaced by a counterpart."""
    return "functions" in inspect.signature(space_of(plan).public).parameters


def on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides."""
    if device == "cpu":
        return tensor
    return memory(tensor).to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def compare(way: str, expected: Outcome, found: Outcome, skip: tuple[str, ...] = ()) -> None:
    """Raise ``Differs`` unless both outcomes have equal bits, or are the same error."""
    if not (isinstance(expected, dict) and isinstance(found, dict)):
        if expected != found:
            shown = [given if isinstance(given, str) else "no error" for given in (expected, found)]
            raise Differs(way, f"{shown[0]!r} expected, {shown[1]!r} found")
        return
    for name, wanted in expected.items():
        if name in skip:
            continue
        if name not in found:
            raise Differs(way, f"there is no {name}")
        got = found[name].to(wanted.device)
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            kinds = [f"{tuple(given.shape)} of {given.dtype}" for given in (wanted, got)]
            raise Differs(way, f"{name}: {kinds[0]} expected, {kinds[1]} found")
        if not same_bits(wanted, got):
            detail = mismatch(name, wanted.cpu().clone(), got.cpu().clone())
            raise Differs(way, str(detail))


def _sentence(error: HoldfastError) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Let torch fill all memory that it allocates with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
