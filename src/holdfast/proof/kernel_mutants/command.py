"""The command ``holdfast mutants``."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.core.contract import NUMERICS_VERSION
from holdfast.core.errors import InvalidArgs
from holdfast.core.files import require_writable
from holdfast.core.mutant import KernelMutant
from holdfast.proof.kernel_mutants.registry import every_mutant
from holdfast.proof.kernel_mutants.run import trials
from holdfast.proof.kernel_mutants.search import SEARCHES
from holdfast.proof.kernel_mutants.trial import Trial
from holdfast.proof.options import JsonOption, write_json
from holdfast.proof.report import progress_bar


def mutants(
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", metavar="NAME", help="Only mutants of this plan; may be repeated."),
    ] = None,
    by: Annotated[str, typer.Option(help=f"Inputs to test with: {', '.join(SEARCHES)}.")] = "cases",
    jobs: Annotated[int, typer.Option(min=1, help="Mutants to run in parallel.")] = os.cpu_count() or 1,
    json_file: JsonOption = None,
) -> None:
    """Change one line of a kernel's source at a time, and check that the tests notice."""
    if by not in SEARCHES:
        raise InvalidArgs(f"--by is {by!r}; accepted are {', '.join(SEARCHES)}.")
    require_writable(json_file)
    chosen = _mutants_of(plan or [])
    console = Console(stderr=json_file == "-")
    began, done = time.perf_counter(), list[Trial]()
    with progress_bar(console) as progress:
        progress("loading the compilers", 0, len(chosen))
        for trial in trials(chosen, by=by, jobs=jobs):
            done.append(trial)
            progress(trial.mutant, len(done), len(chosen))
    passed, seconds = all(trial.caught for trial in done), time.perf_counter() - began
    show(done, seconds, console)
    if json_file is not None:
        found = {
            "passed": passed, "numerics_version": NUMERICS_VERSION, "torch": torch.__version__,
            "seconds": seconds, "trials": [asdict(trial) for trial in done],
        }  # fmt: skip
        write_json(json_file, found)
    if not passed:
        raise typer.Exit(1)


def _mutants_of(plans: list[str]) -> dict[str, KernelMutant]:
    """The mutants of ``plans``, or of all plans if it is empty. The suffix ``Plan`` is optional."""
    known = {name for mutant in every_mutant().values() for name in mutant.plans}
    wanted = {name if name in known else f"{name}Plan" for name in plans}
    unknown = sorted(wanted - known)
    if unknown:
        tried = ", ".join(sorted(known))
        raise InvalidArgs(f"no kernel mutant is tried on {', '.join(unknown)}, but on {tried}.")
    every = every_mutant().items()
    return {label: mutant for label, mutant in every if not wanted or wanted & set(mutant.plans)}


def show(done: list[Trial], seconds: float, console: Console) -> None:
    """Print a table of the mutants and the case that caught each, and a summary line."""
    table = Table("mutant", "caught by", "s")
    for trial in sorted(done, key=lambda trial: trial.mutant):
        found = trial.difference
        caught_by = f"{found.plan}: {found.case}, {found.way}" if found else ""
        missed = f"[red]error[/] {escape(trial.error)}" if trial.error else "[red]survived[/]"
        table.add_row(escape(trial.mutant), escape(caught_by) if found else missed, f"{trial.seconds:.1f}")
    console.print(table)
    caught = sum(trial.caught for trial in done)
    verdict = "[green]every mutant caught[/]" if caught == len(done) else "[red]not every mutant caught[/]"
    console.print(f"{verdict}: {caught}/{len(done)} kernel mutants, {seconds:.1f} s")
