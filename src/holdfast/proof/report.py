"""Terminal output of ``holdfast verify``: a progress bar, a table, and the differences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdfast.proof.options import NARROW
from holdfast.proof.verify import Progress as Tell
from holdfast.proof.verify import Report

#: Maximum number of differences to print. The JSON has all of them.
SHOWN = 50


@contextmanager
def progress_bar(console: Console) -> Iterator[Tell]:
    """A progress bar; yields the function that updates it. Prints one line per plan if not on a terminal."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def _lines(console: Console) -> Tell:
    last = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        subject, is_plan, _ = what.partition(":")
        if subject != last:
            console.print(f"checking {subject}" if is_plan else subject, soft_wrap=True, highlight=False)
            last = subject

    return tell


def print_report(report: Report, console: Console) -> None:
    """Print the table, the differences, and a summary line."""
    exhaustive = any(plan.swept for plan in report.plans)
    table = Table(title=f"{' = '.join(report.ways)} ({report.device})")
    for heading in ("plan", "cases", "runs", "mutants caught", *(["values swept"] if exhaustive else [])):
        left = heading == "plan"
        whole = left and console.width >= NARROW
        table.add_column(heading, justify="left" if left else "right", no_wrap=whole, overflow="fold")
    table.add_column("result")
    for plan in report.plans:
        row = [plan.plan, str(plan.cases), str(plan.runs), f"{plan.mutants_caught}/{plan.mutants}"]
        row += [f"{plan.swept / 1e6:,.1f} M"] if exhaustive else []
        bad = len(plan.differences)
        table.add_row(*row, "[green]equal[/]" if plan.passed else f"[red]{bad} differ{'s' * (bad == 1)}[/]")
    console.print(table)
    for difference in report.differences[:SHOWN]:
        console.print(f"[red]differs[/] {escape(str(difference))}", soft_wrap=True)
    if len(report.differences) > SHOWN:
        console.print(f"... and {len(report.differences) - SHOWN} more")
    if report.fuzz:
        found = report.fuzz["differences"]
        bad = len(found) if isinstance(found, list) else found
        problems, seed = report.fuzz["problems"], report.fuzz["seed"]
        console.print(f"{problems:,} random problems with seed {seed}: {bad} differ")
    caught, of = (sum(getattr(plan, name) for plan in report.plans) for name in ("mutants_caught", "mutants"))
    verdict = "[green]every bit equal[/]" if report.passed else "[red]not equal[/]"
    cases, runs = sum(plan.cases for plan in report.plans), sum(plan.runs for plan in report.plans)
    console.print(
        f"{verdict}: {len(report.plans)} plans, {cases} cases, {runs} runs, mutants caught {caught}/{of}, "
        f"{report.seconds:.1f} s"
    )
