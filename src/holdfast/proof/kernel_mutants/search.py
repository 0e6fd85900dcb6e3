"""How a difference is looked for: by the cases, or by the fuzzer's problems."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from holdfast.backends import interpreted
from holdfast.core.mutant import KernelMutant, MutantError
from holdfast.core.plan import AnyPlan
from holdfast.proof.conformance import Difference, Way, cases_of, difference, expected, selected, ways
from holdfast.proof.fuzz.check import check_problem
from holdfast.proof.fuzz.problem import THEME, draw_problems
from holdfast.proof.fuzz.search import BUDGET

#: Looks for the first difference between the reference and a plan, where a mutant's file takes part.
Search = Callable[[AnyPlan, KernelMutant], Difference | None]


def ways_of(backend: str) -> list[Way]:
    """Every way to run a case on ``backend`` here."""
    return [way for way in ways() if way.backend == backend]


def by_cases(plan: AnyPlan, mutant: KernelMutant) -> Difference | None:
    """The first case that differs, on any number of threads. It raises what the kernel raises."""
    backend = mutant.backend
    for case in sorted(cases_of(plan), key=lambda case: mutant.likely not in case.name):
        if case.common and backend == "gpu":
            continue  # the interpreter's time is better spent
        args, reference = expected(plan, case)
        for way in ways_of(backend):
            detail = difference(plan, case, way, args, reference, selected(backend))
            if detail:
                return Difference(plan.__name__, case.name, str(way), detail)
    return None


def by_fuzz(plan: AnyPlan, mutant: KernelMutant) -> Difference | None:
    """The first drawn problem that differs. It raises if a problem ends with an exception."""
    interpret = mutant.backend == "gpu" and interpreted()
    each = 1 if interpret else THEME  # the interpreter compiles nothing, so kinds need not come in themes
    for drawn in islice(draw_problems(plan, 0, BUDGET, each=each), PROBLEMS[mutant.backend]):
        found = check_problem(plan, drawn, interpret=interpret, only=mutant.backend)
        if found is not None and found.raised:
            raise MutantError(found.detail)
        if found is not None:
            return Difference(plan.__name__, drawn.problem.name, found.way, found.detail)
    return None


#: Drawn problems of each plan, at most.
PROBLEMS = {"cpu": 3000, "gpu": 600}
#: Every search by name.
SEARCHES: dict[str, Search] = {"cases": by_cases, "fuzz": by_fuzz}
