"""``holdfast verify``: the proof on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.core.errors import InvalidArgs
from holdfast.core.files import require_writable
from holdfast.proof.against import compare
from holdfast.proof.conformance import plan_named
from holdfast.proof.page import benchmarks, page
from holdfast.proof.report import bar, show
from holdfast.proof.stored import findings, fuzz_run
from holdfast.proof.verify import Report
from holdfast.proof.verify import verify as run_verify


def verify(
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Also every 16-bit input and code; on CUDA every float32.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all findings to FILE, or - for stdout."),
    ] = None,
    plan: Annotated[
        list[str] | None, typer.Option("--plan", metavar="NAME", help="Only this plan; may be repeated.")
    ] = None,
    write_digests: Annotated[
        bool, typer.Option("--write-digests", help="Pin the digests of what the reference gives now.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with what --json wrote on another machine."),
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a page to read in a browser.")
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show what --json wrote, instead of verifying now."),
    ] = None,
    fuzz_file: Annotated[
        Path | None, typer.Option("--fuzz", metavar="FILE", help="A fuzz run, for the page.")
    ] = None,
    bench_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--bench", metavar="FILE", help="A benchmark, for the page; by default those of the checkout."
        ),
    ] = None,
) -> None:
    """Prove that reference, cpu and gpu give the same bits, and that wrong kernels would be caught."""
    names = [plan_named(name).__name__ for name in plan or []]
    console = Console(stderr=json_file == "-")
    # Files are tried now: verifying takes minutes.
    other = findings(against) if against else None
    found = findings(stored) if stored else None
    fuzzed = fuzz_run(fuzz_file) if fuzz_file else None
    measured = benchmarks(bench_file) if report_file else []
    require_writable(report_file, json_file if json_file != "-" else None)
    if stored and (names or exhaustive or write_digests):
        raise InvalidArgs(
            "--from shows what was found before; leave out --plan, --exhaustive and --write-digests."
        )
    if bench_file and not report_file:
        raise InvalidArgs("--bench is shown on the page only; say where to write it: --report FILE.")
    if found is None:
        with bar(console) as progress:
            found = run_verify(names, exhaustive=exhaustive, write_digests=write_digests, progress=progress)
    found.fuzz = fuzzed or found.fuzz
    show(found, console)
    if write_digests:
        console.print(_about_digests(found), soft_wrap=True, highlight=False)
    if json_file is not None:
        text = json.dumps(found.as_json(), indent=1)
        print(text) if json_file == "-" else Path(json_file).write_text(text + "\n")
    if report_file is not None:
        report_file.write_text(page(found, measured), encoding="utf-8")
    same = other is None or compare(found, other, str(against), names, console)
    if not (found.passed and same):
        raise typer.Exit(1)


def _about_digests(found: Report) -> str:
    if found.digests_written:
        return f"wrote {found.digests_written} digests of {len(found.plans)} plans"
    return "[red]no digests were written[/]: a kernel differs from the reference. Mend it first."
