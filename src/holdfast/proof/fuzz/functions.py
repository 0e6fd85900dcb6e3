"""Checks public functions at real sizes: results of many megabytes, on several threads, call after call.

A function is called several times on 1, 2 and 3 threads, and finally in the plain way: on one thread, in
memory of torch's allocator, and through torch's dispatcher, where no launch is repeated. All calls must give
the same bits, gradients included. Memory that may become a result is poisoned before each call. Problems of
moderate size are also compared with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import torch

from holdfast.backends.threads import ELEMENTS_PER_THREAD
from holdfast.core.bits import mismatch
from holdfast.core.case import laid_out, operands_of
from holdfast.core.draw import case_of, space_of
from holdfast.core.errors import HoldfastError
from holdfast.core.huge_pages import on_huge_pages, ordinary_pages
from holdfast.core.plan import AnyPlan
from holdfast.core.torch_op import dispatched
from holdfast.ops.segment_sum.cases import row_values
from holdfast.proof.conformance import cpu_threads
from holdfast.proof.fuzz.check import Differs, Finding, check_against_reference, finding_of, same_bits
from holdfast.proof.fuzz.problem import Drawn, draw_problem

#: Maximum number of elements of a tensor, and of those that are compared with the reference.
BUDGET, MODERATE = 2**23, 2**18
#: Number of problems per theme.
THEME = 5
#: Numbers of threads, one after the other. A plan may divide its workspace by the first.
_THREADS = ((2, 3, 1), (3, 1, 2))
#: Number of consecutive calls: the second prepares its launch for repetition, the third repeats it.
_CALLS = 3
#: Maximum number of draws to find a problem of the wanted size.
_TRIES = 40
#: Sharing of work among threads as users have it.
_USUAL = {"least": 2 * ELEMENTS_PER_THREAD, "worth": ELEMENTS_PER_THREAD}
_POISON = 0xFF

#: Results and gradients by name, or the error; None if the function cannot express the problem.
Outcome = dict[str, torch.Tensor] | str | None


def draw_call(plan: AnyPlan, theme: str, number: int) -> Drawn:
    """A problem with a tensor of at least a wanted size, if one is found; its logarithm is uniform."""
    wanted = 2 ** Random(f"size of {theme}/{number}").uniform(8, 23)
    best, most = draw_problem(plan, theme, number, BUDGET), 0
    for again in range(_TRIES):
        drawn = draw_problem(plan, theme, number + THEME * again, BUDGET)
        size = _elements(plan, drawn)
        if most < size <= BUDGET:
            best, most = drawn, size
        if most >= wanted:
            break
    return replace(best, other=best.problem, other_layouts=best.layouts, limit=None, broken=None)


def check_functions(plan: AnyPlan, drawn: Drawn) -> Finding | None:
    """Call the public function of ``plan`` in every way. Returns the first difference."""
    return finding_of(plan, drawn, lambda: _check(plan, drawn), functions=True)


def _check(plan: AnyPlan, drawn: Drawn) -> None:
    call, random = _Call(plan, drawn), Random(f"ways of {drawn.problem.name}")
    sharing = random.choice(({}, _USUAL))
    expected: Outcome = None
    for threads in random.choice(_THREADS):
        kept: list[Outcome] = []
        with cpu_threads(threads, **sharing), _poisoned_allocations():
            for number in range(1, _CALLS + 1):
                _poison_blocks(expected)
                found = call.first() if expected is None else call()
                if found is None:
                    return
                expected = found if expected is None else expected
                way = f"call {number} of the function on {threads} thread{'s' * (threads > 1)}"
                _compare(way, expected, found)
                kept += [found] * (threads != 2)
        for number, found in enumerate(kept, 1):
            _compare(f"call {number} of the function, after later calls", expected, found)
    with cpu_threads(1), ordinary_pages(), dispatched():
        _compare("the plain call of the function", expected, call())
    if _elements(plan, drawn) <= MODERATE:
        check_against_reference(plan, drawn.problem, call.args)


def _elements(plan: AnyPlan, drawn: Drawn) -> int:
    """The number of elements of the largest operand."""
    desc = case_of(plan, drawn.problem).descriptor
    expected = (desc.expected(name) for name in plan.operands)
    return max(torch.Size(found[0]).numel() for found in expected if found is not None)


class _Call:
    """The call of the public function of a plan, with the gradients of all floating inputs.

    A plan of a backward gives these gradients itself. Some functions refuse inputs that require a gradient.
    """

    def __init__(self, plan: AnyPlan, drawn: Drawn) -> None:
        self.plan, self.drawn = plan, drawn
        self.args, _ = drawn.args(plan)
        self._desc = case_of(plan, drawn.problem).descriptor
        self._differentiates = plan.direction == "forward"
        self._upstream: dict[str, torch.Tensor] = {}

    def first(self) -> Outcome:
        """The first call, without gradients if they are refused. Later calls do the same."""
        found = self()
        if self._differentiates and isinstance(found, str):
            self._differentiates = False
            found = self()
        return found

    def __call__(self) -> Outcome:
        operands = operands_of(self.args)
        leaves = {
            name: operands[name].detach().requires_grad_()
            for name in (self.plan.inputs if self._differentiates else ())
            if isinstance(operands[name], torch.Tensor) and operands[name].is_floating_point()
        }
        args = type(self.args)(**{**operands, **leaves})
        try:
            found = space_of(self.plan).public(self.plan, self.drawn.problem, self._desc, args)
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
            return f"{type(refused).__name__}: {refused}"
        return {name: result.detach() for name, result in found.items()}

    def _gradient_of(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """The gradient of a result, in the layout that was drawn for the result, or of one number."""
        if name not in self._upstream:
            label = f"gradient of {name} in {self.drawn.problem.name}"
            if Random(label).randrange(4) == 0:
                made = row_values(label, (1,), result.dtype).expand(result.shape)
            else:
                layout = self.drawn.layouts.get(name, "contiguous")
                made = laid_out(row_values(label, result.shape, result.dtype), layout)
            self._upstream[name] = made
        return self._upstream[name]


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """Let torch fill all memory that it allocates with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _poison_blocks(like: Outcome) -> None:
    """Fill the blocks of huge pages that results of these sizes may get."""
    sizes = [result.nbytes for result in like.values()] if isinstance(like, dict) else []
    blocks = [on_huge_pages(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    for block in blocks:
        block.fill_(_POISON)


def _compare(way: str, expected: Outcome, found: Outcome) -> None:
    if not (isinstance(expected, dict) and isinstance(found, dict)):
        if expected != found:
            shown = [given if isinstance(given, str) else "no error" for given in (expected, found)]
            raise Differs(way, f"{shown[0]!r} expected, {shown[1]!r} found")
        return
    for name, wanted in expected.items():
        if not same_bits(wanted, found[name]):
            raise Differs(way, str(mismatch(name, wanted, found[name])))
