"""The command ``holdfast fuzz``."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from holdfast.core.errors import InvalidArgs
from holdfast.core.files import require_writable
from holdfast.core.registry import plans
from holdfast.proof.fuzz import routes
from holdfast.proof.fuzz.check import Finding
from holdfast.proof.fuzz.problem import Drawn
from holdfast.proof.fuzz.search import How, Report, search
from holdfast.proof.options import JsonOption, PlanOption, plan_names, write_json


def fuzz(
    plan: PlanOption = None,
    seconds: Annotated[float, typer.Option(min=1, help="Duration of the search.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random problems.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes. Default: one per CPU; with --functions, one."),
    ] = None,
    functions: Annotated[
        bool,
        typer.Option(
            "--functions",
            help="Test public functions, modules and replaced functions of torch, at sizes up to 64 MB.",
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Where --functions runs. The CPU gives the expected bits.")
    ] = "cpu",
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Also run GPU kernels, in Triton's interpreter (slow).")
    ] = False,
    problem: Annotated[
        str | None, typer.Option(metavar="JSON", help="Repeat only this problem of one plan.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Test random problems of every plan. Every backend must give equal bits."""
    console = Console(stderr=json_file == "-")
    require_writable(json_file)
    names = plan_names(plan)
    if functions and interpret:
        raise InvalidArgs("--functions tests the CPU and --interpret the kernels of GPUs; give one of them.")
    _check_device(device, functions)
    how = How(interpret, functions, device)
    if problem is not None:
        report = _repeat(names, problem, how)
    else:
        report = _search(console, names, seed, seconds, jobs or (not functions and os.cpu_count()) or 1, how)
    _show(console, report)
    if json_file is not None:
        write_json(json_file, report.as_json())
    if not report.passed:
        raise typer.Exit(1)


def _check_device(device: str, functions: bool) -> None:
    if device not in ("cpu", "cuda"):
        raise InvalidArgs(f"--device is {device!r}; accepted are cpu and cuda.")
    if device == "cuda" and not functions:
        raise InvalidArgs("--device cuda is for --functions; plans run on every device anyway.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgs("--device is cuda, and torch finds no CUDA device here; leave --device out.")


def _repeat(names: list[str], problem: str, how: How) -> Report:
    if len(names) != 1:
        raise InvalidArgs("--problem repeats a problem of one plan; give that plan with --plan.")
    if how.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    found = how.check(names[0], Drawn.from_json(plans()[names[0]], problem))
    took, findings = time.monotonic() - began, [found] if found else []
    return Report(
        0, took, {names[0]: 1}, findings, how.interpret, how.functions, how.device, Counter(routes.take())
    )


def _search(console: Console, names: list[str], seed: int, seconds: float, jobs: int, how: How) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as display:
        task, began = display.add_task("starting", total=seconds), time.monotonic()

        def progress(at: str, done: int) -> None:
            display.update(task, completed=time.monotonic() - began, description=f"{done:,} problems, {at}")

        return search(names, seed=seed, seconds=seconds, jobs=jobs, **asdict(how), progress=progress)


def _show(console: Console, report: Report) -> None:
    failing: dict[str, list[Finding]] = {}
    for finding in report.findings:
        failing.setdefault(finding.plan, []).append(finding)
    table = Table("plan", "problems", "result")
    table.columns[1].justify = "right"
    for name in sorted({*report.problems, *failing}):
        bad = len(failing.get(name, ()))
        result = f"[red]{bad} differ{'s' * (bad == 1)}[/]" if bad else "[green]equal[/]"
        table.add_row(name, f"{report.problems.get(name, 0):,}", result)
    console.print(table)
    for route, count in sorted(report.routes.items()):
        console.print(f"{count:,} of {escape(route)}", soft_wrap=True, highlight=False)
    for finding in report.findings:
        console.print(f"[red]differs[/] {escape(str(finding))}", soft_wrap=True, highlight=False)
        console.print(escape(finding.command), soft_wrap=True, highlight=False)
    verdict = "[green]every bit equal[/]" if report.passed else "[red]not equal[/]"
    console.print(
        f"{verdict}: {report.count:,} problems of {len(report.problems)} plans, seed {report.seed}, "
        f"{report.seconds:.0f} s"
    )
