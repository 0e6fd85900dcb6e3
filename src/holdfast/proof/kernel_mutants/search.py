"""How a difference is looked for: by the cases. Another search is one more function in ``SEARCHES``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast.proof.conformance import (
    AnyPlan,
    Difference,
    Way,
    cases_of,
    difference,
    expected,
    selected,
    ways,
)
from holdfast.proof.kernel_mutants.record import KernelMutant

#: Looks for the first difference between the reference and a plan, where a mutant's file takes part.
Search = Callable[[AnyPlan, KernelMutant], Difference | None]


def ways_of(backend: str) -> list[Way]:
    """Every way to run a case on ``backend`` here."""
    return [way for way in ways() if way.backend == backend]


@contextmanager
def watched_scratch() -> Iterator[Callable[[], Sequence[str]]]:
    """While this is open, what it yields tells of writes between the runs of a kernel's scratch.

    Nothing watches them yet. Whatever does is opened here, and each of its findings is a difference.
    """
    yield tuple


def by_cases(plan: AnyPlan, mutant: KernelMutant) -> Difference | None:
    """The first case that differs, on any number of threads. It raises what the kernel raises."""
    backend = mutant.backend
    for case in sorted(cases_of(plan), key=lambda case: mutant.likely not in case.name):
        if case.common and backend == "gpu":
            continue  # the interpreter's time is better spent
        args, reference = expected(plan, case)
        for way in ways_of(backend):
            with watched_scratch() as written:
                detail = difference(plan, case, way, args, reference, selected(backend))
                detail = detail or "; ".join(written())
            if detail:
                return Difference(plan.__name__, case.name, str(way), detail)
    return None


#: Every search by name.
SEARCHES: dict[str, Search] = {"cases": by_cases}
