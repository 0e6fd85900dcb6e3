"""``holdfast verify``: runs every case of every plan on every backend; checks digests, mutants and sweeps.

It collects the results in a ``Report``. The caller prints them.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch

from holdfast import __version__
from holdfast.backends import interpreted
from holdfast.core.case import Case
from holdfast.core.contract import NUMERICS_VERSION
from holdfast.core.machine import Machine
from holdfast.core.mutant import MutantError
from holdfast.core.plan import AnyPlan
from holdfast.core.registry import plans
from holdfast.proof import digests
from holdfast.proof.background_compile import compile_in_background, start_compiler_process
from holdfast.proof.catalogue import Entry, entry
from holdfast.proof.conformance import (
    Difference,
    cases_of,
    check,
    run_reference,
    select_on,
    ways,
)
from holdfast.proof.mutants import CONTROL, MUTANTS, rejection
from holdfast.proof.sweeps import sweeps

#: Cases that a process verifies before it takes others.
CASES_AT_A_TIME = 4

#: Called with the current step, the number of steps done, and the total number of steps.
Progress = Callable[[str, int, int], None]


def _silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass
class PlanReport:
    """The results of one plan.

    ``digests`` are of the reference, by case. ``pinned`` is the number of digests that equal the pinned one.
    ``swept`` is the number of values in all ``sweeps``.
    """

    plan: str
    cases: int = 0
    runs: int = 0
    mutants: int = 0
    mutants_caught: int = 0
    swept: int = 0
    sweeps: int = 0
    pinned: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    promise: Entry | None = None
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.differences

    def add(self, part: PlanReport) -> None:
        """Add the results of a part of the cases, or of the mutants."""
        for count in ("cases", "runs", "mutants", "mutants_caught", "pinned"):
            setattr(self, count, getattr(self, count) + getattr(part, count))
        self.digests |= part.digests
        self.differences += part.differences


@dataclass
class Report:
    """The results of all plans."""

    ways: list[str]
    plans: list[PlanReport]
    device: str
    machine: Machine
    date: str
    numerics_version: int = NUMERICS_VERSION
    seconds: float = 0.0
    fuzz: dict[str, Any] | None = None
    digests_written: int = 0

    @property
    def passed(self) -> bool:
        return all(plan.passed for plan in self.plans) and not (self.fuzz or {}).get("differences")

    @property
    def differences(self) -> list[Difference]:
        return [difference for plan in self.plans for difference in plan.differences]

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def device_name() -> str:
    """The device of the gpu backend on this machine."""
    if interpreted():
        return "Triton's interpreter"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def verify(
    names: Sequence[str] = (),
    *,
    exhaustive: bool = False,
    write_digests: bool = False,
    jobs: int = 1,
    progress: Progress = _silent,
) -> Report:
    """Verify the plans called ``names``, or all plans if it is empty, in ``jobs`` processes."""
    began = time.perf_counter()
    chosen = {name: plan for name, plan in plans().items() if not names or name in names}
    machine = Machine.here(holdfast=__version__)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = Report([str(way) for way in ways()], [], device_name(), machine, date)
    if jobs > 1:
        report.plans = _verify_in_processes(list(chosen), jobs, write_digests, progress)
    else:
        with compile_in_background(list(chosen)):
            for plan in chosen.values():
                found = _conformance(plan, cases_of(plan), write_digests, progress)
                _mutants(plan, found, progress)
                report.plans.append(found)
    if write_digests and report.passed:
        digests.write({found.plan: found.digests for found in report.plans})
        report.digests_written = sum(len(found.digests) for found in report.plans)
    if exhaustive:
        _exhaustive(report, progress)
    report.seconds = time.perf_counter() - began
    return report


def default_jobs() -> int:
    """One process; with CUDA one per CPU, because Triton compiles in Python and many kernels are small."""
    return os.cpu_count() or 1 if any(way.device == "cuda" for way in ways()) else 1


def _verify_in_processes(
    names: Sequence[str], jobs: int, write_digests: bool, progress: Progress
) -> list[PlanReport]:
    """Verify the plans in ``jobs`` processes, a few cases at a time."""
    found = {name: PlanReport(name, promise=entry(plans()[name])) for name in names}
    tasks: list[tuple[Any, ...]] = [(_part_of_mutants, name) for name in names]
    for name in names:
        count = max(len(cases_of(plans()[name])), 1)
        tasks += [(_part_of_cases, name, first, write_digests) for first in range(0, count, CASES_AT_A_TIME)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=start_compiler_process) as pool:
        running = [pool.submit(*task) for task in tasks]
        for number, done in enumerate(as_completed(running)):
            progress("verifying", number, len(running))
            part = done.result()
            found[part.plan].add(part)
    for name, report in found.items():
        report.digests = {case.name: report.digests[case.name] for case in cases_of(plans()[name])}
    return list(found.values())


def _part_of_cases(name: str, first: int, write_digests: bool) -> PlanReport:
    plan = plans()[name]
    return _conformance(plan, cases_of(plan)[first : first + CASES_AT_A_TIME], write_digests, _silent)


def _part_of_mutants(name: str) -> PlanReport:
    report = PlanReport(name)
    _mutants(plans()[name], report, _silent)
    return report


def _conformance(plan: AnyPlan, cases: Sequence[Case], write_digests: bool, progress: Progress) -> PlanReport:
    report = PlanReport(plan.__name__, cases=len(cases), promise=entry(plan))
    if not cases:
        missing = Difference(plan.__name__, "none", "cases", "the plan has no cases to check")
        report.differences.append(missing)
    for number, case in enumerate(cases):
        progress(f"{plan.__name__}: {case.name}", number, len(cases))
        args, reference = run_reference(plan, case)
        report.digests[case.name] = found = digests.of(plan, reference)
        changed = digests.check(plan, case, found)
        report.pinned += changed is None
        report.differences += [changed] if changed and not write_digests else []
        for way in ways():
            report.differences += check(plan, case, way, args, reference, select_on(way.backend))
            report.runs += way.times
    return report


def _mutants(plan: AnyPlan, report: PlanReport, progress: Progress) -> None:
    has_cases = bool(cases_of(plan))
    fitting = [mutant for mutant in MUTANTS if has_cases and mutant.fits(plan)]
    report.mutants = len(fitting)
    control = rejection(CONTROL, plan) if has_cases else None
    report.differences += [control] if control else []
    for number, mutant in enumerate(fitting):
        progress(f"{plan.__name__}: mutant {mutant.name}", number, len(fitting))
        try:
            detail = "" if rejection(mutant, plan) else "no case tells this mutant from the reference"
        except MutantError as error:
            detail = str(error)
        if detail:
            report.differences.append(Difference(plan.__name__, "all", f"mutant {mutant.name!r}", detail))
        else:
            report.mutants_caught += 1


def _exhaustive(report: Report, progress: Progress) -> None:
    by_plan = {found.plan: found for found in report.plans}
    every = [sweep for sweep in sweeps() if sweep.plan.__name__ in by_plan]
    parallel = [sweep for sweep in every if not sweep.alone]
    alone = [sweep for sweep in every if sweep.alone]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = chain(pool.map(lambda sweep: sweep.run(), parallel), (sweep.run() for sweep in alone))
        for number, (sweep, differences) in enumerate(zip(parallel + alone, results, strict=True)):
            found = by_plan[sweep.plan.__name__]
            found.differences += differences
            found.swept += sweep.values
            found.sweeps += 1
            progress(f"{found.plan}: {sweep.name}", number + 1, len(every))
