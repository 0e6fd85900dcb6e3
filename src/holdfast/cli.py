"""The command line: what there is, what would run, and the proof and the speed of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.bench.command import bench
from holdfast.core.contract import PlanPreference, printed_bound
from holdfast.core.errors import HoldfastError, InvalidArgs
from holdfast.core.plan import AnyPlan
from holdfast.core.stream import Stream
from holdfast.proof.against import compare
from holdfast.proof.catalogue import Entry, catalogue
from holdfast.proof.conformance import plan_named
from holdfast.proof.fuzz.command import fuzz
from holdfast.proof.kernel_mutants.command import mutants
from holdfast.proof.page import benchmarks, page
from holdfast.proof.report import bar, show
from holdfast.proof.stored import findings, fuzz_run, writable
from holdfast.proof.verify import verify as run_verify

app = typer.Typer(
    help="Kernels that hold their bits: list them, ask which one would run, prove them, time them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bench)
app.command()(fuzz)
app.command()(mutants)


def main() -> None:
    """The ``holdfast`` command."""
    app()


@app.command()
def plans(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every plan: the dtypes it takes, its backends, and what it guarantees."""
    entries = catalogue()
    if as_json:
        print(json.dumps([entry.as_json() for entry in entries], indent=1))
        return
    table = Table(title=f"{len(entries)} plans", show_lines=True)
    table.add_column("plan", no_wrap=True)
    table.add_column("dtypes")
    table.add_column("guarantee")
    for entry in entries:
        name = f"[bold]{entry.plan}[/]\n{entry.op} {entry.direction}\non {', '.join(entry.backends)}"
        table.add_row(name, _dtypes(entry), _guarantee(entry))
    Console().print(table)


def _dtypes(entry: Entry) -> str:
    """The dtypes of each field, those that differ in width only drawn together."""
    lines = []
    for field, names in entry.dtypes.items():
        widths: dict[str, list[str]] = {}
        for name in names:
            kind = name.rstrip("0123456789")
            widths.setdefault(kind, []).append(name.removeprefix(kind))
        lines.append(f"{field}: {', '.join(kind + '/'.join(all_) for kind, all_ in widths.items())}")
    return "\n".join(lines)


def _guarantee(entry: Entry) -> str:
    errors = ", ".join(f"{name} within {printed_bound(ulp)} ULP" for name, ulp in entry.ulp.items())
    stable = f"{'deterministic, ' if entry.deterministic else ''}same bits {entry.bit_stable}"
    return f"{stable}\n{errors}\nnumerics {entry.numerics_version}, in {' or '.join(entry.compute_dtypes)}"


@app.command()
def explain(
    plan: Annotated[str, typer.Argument(help="The plan, such as QuantizePerChannelPlan.")],
    field: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="Fields of its descriptor: shape=64,3,7,7 axis=0."),
    ] = None,
    device: Annotated[str, typer.Option(help="The device that it would run on.")] = "cpu",
    backend: Annotated[str | None, typer.Option(help="Ask for this backend.")] = None,
) -> None:
    """Say which implementation would run for a descriptor, and why the others would not."""
    kind = _plan(plan)
    console = Console()
    try:
        descriptor = kind.Descriptor.from_fields(_fields(field or []))
        stream = Stream.current(device)
        pref = PlanPreference(backend=backend, precompile=False)
        candidates = kind.consider(stream, descriptor, pref)
        made = kind.select(stream, descriptor, pref)
    except (HoldfastError, RuntimeError) as error:
        _refuse(str(error))
    console.print(f"[bold]{kind.__name__}[/] {escape(descriptor.to_json())}", soft_wrap=True)
    table = Table("implementation", "verdict")
    taken = next(candidate for candidate in candidates if not candidate.reason)
    for candidate in candidates:
        way = getattr(made.kernel, "variant", "")
        runs = f"runs, {way}" if way else "runs"
        served = runs if candidate is taken else "could run, but comes later"
        table.add_row(candidate.label, escape(candidate.reason or served))
    console.print(table)
    promise = made.precision_guarantee()
    errors = ", ".join(f"{name} within {printed_bound(ulp)} ULP" for name, ulp in promise.ulp.items())
    deterministic = "deterministic, " if promise.deterministic else ""
    facts = {
        "sku": str(made.sku()),
        "guarantee": f"{deterministic}same bits {promise.bit_stable}, {errors}",
        "computes in": f"{promise.compute_dtype}, rounded {promise.rounding}",
        "workspace": f"{made.workspace_size()} bytes",
        "moves": f"{made.bytes_moved()} bytes at least",
    }
    for name, fact in facts.items():
        console.print(f"{name}: {escape(fact)}", soft_wrap=True, highlight=False)


def _plan(name: str) -> AnyPlan:
    try:
        return plan_named(name)
    except InvalidArgs as error:
        _refuse(str(error))


def _fields(given: list[str]) -> dict[str, Any]:
    """The fields in their JSON form; a list may go without its brackets, and a string without quotes."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            _refuse(f"{text!r} is no FIELD=VALUE; write one such as shape=64,3,7,7.")
        if name == "shape" and not value.startswith("["):
            value = f"[{value}]"
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _refuse(sentence: str) -> NoReturn:
    Console(stderr=True).print(f"[red]error[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


@app.command()
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
    names = [_plan(name).__name__ for name in plan or []]
    console = Console(stderr=json_file == "-")
    try:  # whatever is to be read or written is tried before the minutes that verifying takes
        other = findings(against) if against else None
        found = findings(stored) if stored else None
        fuzzed = fuzz_run(fuzz_file) if fuzz_file else None
        measured = benchmarks(bench_file) if report_file else []
        writable(report_file, json_file if json_file != "-" else None)
    except HoldfastError as error:
        _refuse(str(error))
    if stored and (names or exhaustive or write_digests):
        _refuse("--from shows what was found before; leave out --plan, --exhaustive and --write-digests.")
    if bench_file and not report_file:
        _refuse("--bench is shown on the page only; say where to write it: --report FILE.")
    if found is None:
        with bar(console) as progress:
            found = run_verify(names, exhaustive=exhaustive, write_digests=write_digests, progress=progress)
    found.fuzz = fuzzed or found.fuzz
    show(found, console)
    if json_file is not None:
        text = json.dumps(found.as_json(), indent=1)
        print(text) if json_file == "-" else Path(json_file).write_text(text + "\n")
    if report_file is not None:
        report_file.write_text(page(found, measured), encoding="utf-8")
    same = other is None or compare(found, other, str(against), names, console)
    if not (found.passed and same):
        raise typer.Exit(1)


@app.command()
def demo() -> None:
    """Verify every plan, then time a few."""
    verify()
    bench(quick=True)
