"""The command ``holdfast demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.core.files import require_writable
from holdfast.demo.bars import Bars
from holdfast.demo.page import page
from holdfast.demo.run import FULL, QUICK, Result, run
from holdfast.demo.training import Training
from holdfast.proof.report import print_report

DEFAULT_PAGE = Path("holdfast-demo.html")


def demo(
    report_file: Annotated[
        Path, typer.Option("--report", metavar="FILE", help="The HTML page to write.")
    ] = DEFAULT_PAGE,
    quick: Annotated[bool, typer.Option("--quick", hidden=True)] = False,
) -> None:
    """Train a small classifier at 8, 4 and 2 bits, twice each; deploy it to ONNX; compare every bit."""
    require_writable(report_file)
    console = Console()
    with Bars(console) as bars:
        result = run(QUICK if quick else FULL, bars)
    print_report(result.proof, console)
    print_result(result, console)
    report_file.write_text(page(result), encoding="utf-8")
    console.print(f"page: {report_file}", soft_wrap=True, highlight=False, markup=False)
    if not result.passed:
        raise typer.Exit(1)


def print_result(result: Result, console: Console) -> None:
    """Print the table, a sentence for each missing package, and a summary line."""
    table = Table(title=f"classifier of {result.data}")
    for heading in ("format", "accuracy", "bytes", "digest", "trained twice", "deployed"):
        table.add_column(heading, justify="right" if heading in ("accuracy", "bytes") else "left")
    for training in result.shown:
        twice = "[green]equal[/]" if training.equal else "[red]differs[/]"
        table.add_row(
            training.recipe.format, f"{training.accuracy:.1%}", f"{training.size:,}",
            training.digests[0], twice, _deployed(result, training),
        )  # fmt: skip
    console.print(table)
    for sentence in sorted({made.missing for made in result.deployments.values()} - {""}):
        console.print(f"not deployed to ONNX: {escape(sentence)}", soft_wrap=True, highlight=False)
    for training in result.trainings:
        if not training.equal:
            console.print(f"[red]differs[/] {training.recipe}: digests {', '.join(training.digests)}")
    verdict = "[green]every bit equal[/]" if result.passed else "[red]not equal[/]"
    compared = sum(made.elements for made in result.deployments.values())
    deployed = f"{compared:,} codes and values of onnxruntime; " if compared else ""
    console.print(
        f"{verdict}: {len(result.trainings)} trainings, twice each; {deployed}{result.seconds:.1f} s",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def _deployed(result: Result, training: Training) -> str:
    made = result.deployments.get(training.recipe.format)
    if made is None:
        return ""
    if not made.equal:
        return f"[red]{made.different:,} differ[/]"
    return "converted: equal; ONNX: not run" if made.missing else "[green]equal[/]"
