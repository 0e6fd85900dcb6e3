"""``holdfast mutants``: every kernel mutant, and what tells it from the reference."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.core.contract import NUMERICS_VERSION
from holdfast.core.files import require_writable
from holdfast.core.mutant import KernelMutant
from holdfast.proof.kernel_mutants.listed import every_mutant
from holdfast.proof.kernel_mutants.run import trials
from holdfast.proof.kernel_mutants.search import SEARCHES
from holdfast.proof.kernel_mutants.trial import Trial
from holdfast.proof.report import bar


def mutants(
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", metavar="NAME", help="Only mutants of this plan; may be repeated."),
    ] = None,
    by: Annotated[
        str, typer.Option(help=f"How differences are looked for: {', '.join(SEARCHES)}.")
    ] = "cases",
    jobs: Annotated[int, typer.Option(min=1, help="Mutants side by side.")] = os.cpu_count() or 1,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all findings to FILE, or - for stdout."),
    ] = None,
) -> None:
    """Put mistakes into the kernels' sources, one at a time, and prove that each changes a bit."""
    if by not in SEARCHES:
        raise typer.BadParameter(f"{by!r} is no search; there are: {', '.join(SEARCHES)}.")
    require_writable(json_file if json_file != "-" else None)
    chosen = _mutants_of(plan or [])
    console = Console(stderr=json_file == "-")
    began, done = time.perf_counter(), list[Trial]()
    with bar(console) as progress:
        progress("loading the compilers", 0, len(chosen))
        for trial in trials(chosen, by=by, jobs=jobs):
            done.append(trial)
            progress(trial.mutant, len(done), len(chosen))
    passed, seconds = all(trial.caught for trial in done), time.perf_counter() - began
    show(done, seconds, console)
    if json_file is not None:
        found = {
            "passed": passed,
            "numerics_version": NUMERICS_VERSION,
            "torch": torch.__version__,
            "seconds": seconds,
            "trials": [trial.as_json() for trial in done],
        }
        text = json.dumps(found, indent=1)
        print(text) if json_file == "-" else Path(json_file).write_text(text + "\n")
    if not passed:
        raise typer.Exit(1)


def _mutants_of(plans: list[str]) -> dict[str, KernelMutant]:
    """The mutants of some plans, or all; a plan's name may go without its ending."""
    known = {name for mutant in every_mutant().values() for name in mutant.plans}
    wanted = {name if name in known else f"{name}Plan" for name in plans}
    unknown = sorted(wanted - known)
    if unknown:
        tried = ", ".join(sorted(known))
        raise typer.BadParameter(f"no kernel mutant is tried on {', '.join(unknown)}, but on {tried}.")
    every = every_mutant().items()
    return {label: mutant for label, mutant in every if not wanted or wanted & set(mutant.plans)}


def show(done: list[Trial], seconds: float, console: Console) -> None:
    """A table of the mutants and what gave each away, and one line that says how it went."""
    table = Table("mutant", "caught by", "s")
    for trial in sorted(done, key=lambda trial: trial.mutant):
        found = trial.difference
        told = f"{found.plan}: {found.case}, {found.way}" if found else ""
        missed = f"[red]error[/] {escape(trial.error)}" if trial.error else "[red]survived[/]"
        table.add_row(escape(trial.mutant), escape(told) if found else missed, f"{trial.seconds:.1f}")
    console.print(table)
    caught = sum(trial.caught for trial in done)
    verdict = "[green]every mutant caught[/]" if caught == len(done) else "[red]not every mutant caught[/]"
    console.print(f"{verdict}: {caught}/{len(done)} kernel mutants, {seconds:.1f} s")
