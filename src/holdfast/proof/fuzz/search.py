"""Runs random problems of every plan, theme by theme, in one process or in several."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from multiprocessing.connection import Connection, wait
from random import Random
from typing import Any

from holdfast import __version__
from holdfast.core.contract import NUMERICS_VERSION
from holdfast.core.machine import Machine
from holdfast.core.registry import plans
from holdfast.proof.conformance import gpu_way
from holdfast.proof.fuzz import functions as calls
from holdfast.proof.fuzz import routes
from holdfast.proof.fuzz.check import Finding, check_problem
from holdfast.proof.fuzz.problem import THEME, Drawn, draw_problem
from holdfast.proof.fuzz.shrink import shrink

#: Maximum number of elements of a tensor: compiled, and in Triton's interpreter, which is slow.
BUDGET, INTERPRETED = 200_000, 8_000
#: Maximum number of findings per plan. The search then skips the plan.
MAX_FINDINGS = 3

#: Called after each problem with the name of its plan and the total number of problems done.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class How:
    """What a search draws and checks: plans, or with ``functions`` public functions at real sizes.

    ``interpret``: plans also run their GPU kernels, in Triton's interpreter. ``device``: where functions run.
    """

    interpret: bool = False
    functions: bool = False
    device: str = "cpu"

    @property
    def theme(self) -> int:
        """Number of problems per theme."""
        return calls.THEME if self.functions else THEME

    def draw(self, name: str, theme: str, number: int) -> Drawn:
        if self.functions:
            return calls.draw_call(plans()[name], theme, number)
        budget = INTERPRETED if self.interpret and gpu_way() else BUDGET
        return draw_problem(plans()[name], theme, number, budget)

    def check(self, name: str, drawn: Drawn) -> Finding | None:
        if self.functions:
            return calls.check_functions(plans()[name], drawn, self.device)
        return check_problem(plans()[name], drawn, interpret=self.interpret)


@dataclass
class Report:
    """The result of a search. ``problems`` counts the problems by plan, ``routes`` by route."""

    seed: int
    seconds: float = 0.0
    problems: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    interpreted: bool = False
    functions: bool = False
    device: str = "cpu"
    routes: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return sum(self.problems.values())

    @property
    def passed(self) -> bool:
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed, "numerics_version": NUMERICS_VERSION,
            "machine": asdict(Machine.here(holdfast=__version__)),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "seed": self.seed,
            "seconds": round(self.seconds, 1), "interpreted": self.interpreted,
            "functions": self.functions, "device": self.device, "problems": self.count,
            "by_plan": dict(sorted(self.problems.items())), "by_route": dict(sorted(self.routes.items())),
            "differences": [f"{finding}. Repeat it: {finding.command}" for finding in self.findings],
        }  # fmt: skip


def fuzz_plan(
    name: str, *, seed: int = 0, problems: int = THEME, interpret: bool = False, functions: bool = False
) -> list[Finding]:
    """Run ``problems`` problems of one plan in this process, as ``How`` says."""
    found: list[Finding] = []
    how = How(interpret, functions)
    for theme, number in (divmod(i, how.theme) for i in range(problems)):
        finding = _checked(name, how.draw(name, f"{name}/{seed}/{theme}", number), how)
        found += [finding] if finding else []
        if len(found) >= MAX_FINDINGS:
            break
    return found


def search(
    names: Sequence[str],
    *,
    seed: int,
    seconds: float,
    jobs: int,
    interpret: bool,
    functions: bool = False,
    device: str = "cpu",
    progress: Progress = lambda plan, done: None,
) -> Report:
    """Run problems of the plans ``names``, or of all plans, for ``seconds`` seconds in ``jobs`` processes."""
    began, how = time.monotonic(), How(interpret, functions, device)
    report = Report(seed, interpreted=interpret, functions=functions, device=device)
    chosen = sorted(names or plans())
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    workers = [_Worker(chosen, seed, first, jobs, began + seconds, how) for first in range(jobs)]
    while workers:
        for connection in wait([worker.connection for worker in workers]):
            worker = next(worker for worker in workers if worker.connection is connection)
            try:
                what, *said = worker.connection.recv()
            except EOFError:
                workers.remove(worker)
                crash = worker.died()
                if crash is not None:
                    report.findings.append(crash)
                    workers.append(worker.next(began + seconds))
                continue
            if what == "begins":
                worker.at = said[0], said[1], said[2]
            elif what == "done":
                report.problems[said[0]] = report.problems.get(said[0], 0) + 1
                report.routes.update(said[1])
                progress(said[0], report.count)
            else:
                report.findings.append(said[0])
    report.seconds = time.monotonic() - began
    return report


class _Worker:
    """A process that runs every ``jobs``-th theme. It sends each problem first, to identify crashes."""

    def __init__(self, names: list[str], seed: int, first: int, jobs: int, until: float, how: How) -> None:
        context = multiprocessing.get_context("spawn")
        self.given = names, seed, jobs, how
        self.at: tuple[int, str, str] | None = None
        self.connection, theirs = context.Pipe(duplex=False)
        given = (theirs, names, seed, first, jobs, until - time.monotonic(), how)
        self.process = context.Process(target=_work, args=given, daemon=True)
        self.process.start()
        theirs.close()

    def died(self) -> Finding | None:
        """Wait for the process. Returns the problem that crashed it, or None."""
        self.process.join()
        if not self.process.exitcode or self.at is None:
            return None
        _, plan, problem = self.at
        detail = f"it ended with exit code {self.process.exitcode}"
        how = self.given[-1]
        return Finding(plan, problem, "process", detail, functions=how.functions, device=how.device)

    def next(self, until: float) -> _Worker:
        """A new process that continues after the theme that crashed this one."""
        names, seed, jobs, how = self.given
        assert self.at is not None
        return _Worker(names, seed, self.at[0] + jobs, jobs, until, how)


def _work(
    to: Connection, names: list[str], seed: int, first: int, jobs: int, seconds: float, how: How
) -> None:
    until = time.monotonic() + seconds
    left = dict.fromkeys(names, MAX_FINDINGS)
    for theme in count(first, jobs):
        for name in Random(f"{seed}/{theme}").sample(names, len(names)):
            if not left[name]:
                continue
            for number in range(how.theme):
                if time.monotonic() > until:
                    return
                drawn = how.draw(name, f"{name}/{seed}/{theme}", number)
                to.send(("begins", theme, name, drawn.to_json()))
                finding = _checked(name, drawn, how)
                to.send(("done", name, routes.take()))
                if finding is not None:
                    to.send(("found", finding))
                    left[name] -= 1
                    break
        if not any(left.values()):
            return


def _checked(name: str, drawn: Drawn, how: How) -> Finding | None:
    finding = how.check(name, drawn)
    return finding and shrink(drawn, finding, lambda smaller: how.check(name, smaller))
