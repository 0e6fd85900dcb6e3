"""Checks public functions at real sizes: results of many megabytes, call after call, on the CPU or on CUDA.

On the CPU a function is called several times on 1, 2 and 3 threads, and finally in the plain way: on one
thread, in memory of torch's allocator, and through torch's dispatcher, where no launch is repeated. All calls
must give the same bits, gradients included. Memory that may become a result is poisoned before each call.
Problems of moderate size are also compared with the reference. On CUDA, the plain call on the CPU is the
expected result; ``cuda`` has the ways to call. Then the counterparts of the function are called.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch

from holdfast.backends.threads import ELEMENTS_PER_THREAD
from holdfast.core.draw import case_of
from holdfast.core.huge_pages import on_huge_pages, ordinary_pages
from holdfast.core.plan import AnyPlan
from holdfast.core.torch_op import dispatched
from holdfast.proof.conformance import cpu_threads
from holdfast.proof.fuzz import cuda
from holdfast.proof.fuzz.call import Call, Outcome, compare, poisoned_allocations
from holdfast.proof.fuzz.check import Finding, check_against_reference, finding_of
from holdfast.proof.fuzz.counterparts import check_counterparts
from holdfast.proof.fuzz.problem import Drawn, draw_problem

#: Maximum number of elements of a tensor, and of those that are compared with the reference.
BUDGET, MODERATE = 2**23, {"cpu": 2**18, "cuda": 2**14}
#: Number of problems per theme.
THEME = 5
#: Numbers of threads, one after the other. A plan may divide its workspace by the first.
_THREADS = ((2, 3, 1), (3, 1, 2))
#: Number of consecutive calls: the second prepares its launch for repetition, the third repeats it.
_CALLS = 3
#: One problem in this many has an empty tensor.
_EMPTY = 12
#: Maximum number of draws to find a problem of the wanted size.
_TRIES = 40
#: Sharing of work among threads as users have it.
_USUAL = {"least": 2 * ELEMENTS_PER_THREAD, "worth": ELEMENTS_PER_THREAD}
_POISON = 0xFF


def draw_call(plan: AnyPlan, theme: str, number: int) -> Drawn:
    """A problem with a tensor of at least a wanted size, if one is found; its logarithm is uniform.

    One problem in ``_EMPTY`` has a tensor without elements instead.
    """
    random = Random(f"size of {theme}/{number}")
    wanted, empty = 2 ** random.uniform(8, 23), random.randrange(_EMPTY) == 0
    budget = min(int(64 * wanted), BUDGET)
    best, most = draw_problem(plan, theme, number, budget), 0
    for again in range(_TRIES):
        drawn = draw_problem(plan, theme, number + THEME * again, budget)
        sizes = _sizes(plan, drawn)
        if empty and not all(sizes):
            best = drawn
            break
        size = max(sizes)
        if most < size <= BUDGET:
            best, most = drawn, size
        if most >= wanted and not empty:
            break
    return replace(best, other=best.problem, other_layouts=best.layouts, limit=None, broken=None)


def check_functions(plan: AnyPlan, drawn: Drawn, device: str = "cpu") -> Finding | None:
    """Call the public function of ``plan`` and its counterparts in every way. Returns a difference."""
    return finding_of(plan, drawn, lambda: _check(plan, drawn, device), functions=True, device=device)


def _check(plan: AnyPlan, drawn: Drawn, device: str) -> None:
    call = Call(plan, drawn)
    if device == "cpu":
        expected = _check_on_cpu(call)
    else:
        expected = _plainly(call)
        cuda.check_on_cuda(call, expected, _plainly)
    if expected is None:
        return
    if max(_sizes(plan, drawn)) <= MODERATE[device]:
        check_against_reference(plan, drawn.problem, call.args, device)
    check_counterparts(call, expected, device)


def _plainly(call: Call) -> Outcome:
    """The result of a call on one CPU thread, in torch's memory, through torch's dispatcher."""
    with cpu_threads(1), ordinary_pages(), dispatched():
        return call.first()


def _check_on_cpu(call: Call) -> Outcome:
    random = Random(f"ways of {call.drawn.problem.name}")
    sharing = random.choice(({}, _USUAL))
    expected: Outcome = None
    for threads in random.choice(_THREADS):
        kept: list[Outcome] = []
        with cpu_threads(threads, **sharing), poisoned_allocations():
            for number in range(1, _CALLS + 1):
                _poison_blocks(expected)
                found = call.first() if expected is None else call()
                if found is None:
                    return None
                expected = found if expected is None else expected
                way = f"call {number} of the function on {threads} thread{'s' * (threads > 1)}"
                compare(way, expected, found)
                kept += [found] * (threads != 2)
        for number, found in enumerate(kept, 1):
            compare(f"call {number} of the function, after later calls", expected, found)
    compare("the plain call of the function", expected, _plainly(call))
    return expected


def _sizes(plan: AnyPlan, drawn: Drawn) -> list[int]:
    """The number of elements of each operand."""
    desc = case_of(plan, drawn.problem).descriptor
    expected = (desc.expected(name) for name in plan.operands)
    return [torch.Size(found[0]).numel() for found in expected if found is not None]


def _poison_blocks(like: Outcome) -> None:
    """Fill the blocks of huge pages that results of these sizes may get."""
    sizes = [result.nbytes for result in like.values()] if isinstance(like, dict) else []
    blocks = [on_huge_pages(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    for block in blocks:
        block.fill_(_POISON)
