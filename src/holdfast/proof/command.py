"""The command ``holdfast verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.core.errors import InvalidArgs
from holdfast.core.files import require_writable
from holdfast.proof.compare_reports import compare
from holdfast.proof.options import JsonOption, PlanOption, plan_names, write_json
from holdfast.proof.page import benchmarks, page
from holdfast.proof.report import print_report, progress_bar
from holdfast.proof.result_files import load_fuzz_report, load_report
from holdfast.proof.verify import Report, default_jobs
from holdfast.proof.verify import verify as run_verify


def verify(
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Also every 16-bit input and code; on CUDA every float32.")
    ] = False,
    json_file: JsonOption = None,
    plan: PlanOption = None,
    write_digests: Annotated[
        bool, typer.Option("--write-digests", help="Pin the current digests of the reference.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes. Default: one per CPU with a GPU, otherwise one."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with a --json FILE of another machine.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML page.")
    ] = None,
    stored: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show a --json FILE instead of verifying.")
    ] = None,
    fuzz_file: Annotated[
        Path | None, typer.Option("--fuzz", metavar="FILE", help="A fuzz --json FILE, for the page.")
    ] = None,
    bench_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--bench",
            metavar="FILE",
            help="A benchmark for the page. Default: the benchmarks stored in the checkout.",
        ),
    ] = None,
) -> None:
    """Verify that reference, cpu and gpu give equal bits, and that the tests reject wrong kernels."""
    names = plan_names(plan)
    console = Console(stderr=json_file == "-")
    # Check all files first: verifying takes minutes.
    other = load_report(against) if against else None
    found = load_report(stored) if stored else None
    fuzzed = load_fuzz_report(fuzz_file) if fuzz_file else None
    measured = benchmarks(bench_file) if report_file else []
    require_writable(report_file, json_file)
    if stored and (names or exhaustive or write_digests):
        raise InvalidArgs(
            "--from shows what was found before; leave out --plan, --exhaustive and --write-digests."
        )
    if bench_file and not report_file:
        raise InvalidArgs("--bench is shown on the page only; say where to write it: --report FILE.")
    if found is None:
        with progress_bar(console) as progress:
            found = run_verify(
                names, exhaustive=exhaustive, write_digests=write_digests, jobs=jobs or default_jobs(),
                progress=progress,
            )  # fmt: skip
    found.fuzz = fuzzed or found.fuzz
    print_report(found, console)
    if write_digests:
        console.print(_digests_message(found), soft_wrap=True, highlight=False)
    if json_file is not None:
        write_json(json_file, found.as_json())
    if report_file is not None:
        report_file.write_text(page(found, measured), encoding="utf-8")
    same = other is None or compare(found, other, str(against), names, console)
    if not (found.passed and same):
        raise typer.Exit(1)


def _digests_message(found: Report) -> str:
    if found.digests_written:
        return f"wrote {found.digests_written} digests of {len(found.plans)} plans"
    return "[red]no digests were written[/]: a kernel differs from the reference. Mend it first."
