"""Searches for a difference between a mutant and the reference, with the cases or with random problems."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from holdfast.backends import interpreted
from holdfast.core.mutant import KernelMutant, MutantError
from holdfast.core.plan import AnyPlan
from holdfast.proof.conformance import Difference, Way, cases_of, difference, run_reference, select_on, ways
from holdfast.proof.fuzz.check import check_problem
from holdfast.proof.fuzz.problem import THEME, draw_problems
from holdfast.proof.fuzz.search import BUDGET

#: Returns the first difference between the reference and a plan that uses the mutant.
Search = Callable[[AnyPlan, KernelMutant], Difference | None]


def ways_of(backend: str) -> list[Way]:
    """Every configuration of ``backend`` on this machine."""
    return [way for way in ways() if way.backend == backend]


def by_cases(plan: AnyPlan, mutant: KernelMutant) -> Difference | None:
    """The first case that differs, on any number of threads. The kernel may raise."""
    backend = mutant.backend
    for case in sorted(cases_of(plan), key=lambda case: mutant.likely not in case.name):
        if case.common and backend == "gpu":
            continue  # saves time in the interpreter
        args, reference = run_reference(plan, case)
        for way in ways_of(backend):
            detail = difference(plan, case, way, args, reference, select_on(backend))
            if detail:
                return Difference(plan.__name__, case.name, str(way), detail)
    return None


def by_fuzz(plan: AnyPlan, mutant: KernelMutant) -> Difference | None:
    """The first random problem that differs. Raises MutantError if a problem raises."""
    interpret = mutant.backend == "gpu" and interpreted()
    each = 1 if interpret else THEME  # themes share compiled kernels, of which the interpreter has none
    for drawn in islice(draw_problems(plan, 0, BUDGET, each=each), PROBLEMS[mutant.backend]):
        found = check_problem(plan, drawn, interpret=interpret, only=mutant.backend)
        if found is not None and found.raised:
            raise MutantError(found.detail)
        if found is not None:
            return Difference(plan.__name__, drawn.problem.name, found.way, found.detail)
    return None


#: Maximum number of random problems per plan, by backend.
PROBLEMS = {"cpu": 3000, "gpu": 600}
#: Every search by name.
SEARCHES: dict[str, Search] = {"cases": by_cases, "fuzz": by_fuzz}
