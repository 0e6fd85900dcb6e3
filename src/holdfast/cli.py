"""The command line: what there is, what would run, and the proof and the speed of it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.bench.command import bench
from holdfast.core.contract import PlanPreference, printed_bound
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import plans as registered
from holdfast.core.stream import Stream
from holdfast.proof.catalogue import Entry, catalogue
from holdfast.proof.conformance import AnyPlan
from holdfast.proof.report import bar, show
from holdfast.proof.verify import verify as run_verify

app = typer.Typer(
    help="Kernels that hold their bits: list them, ask which one would run, prove them, time them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(bench)


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
    table = Table("backend", "verdict")
    for candidate in candidates:
        served = "runs" if candidate.backend == made.backend else "could run, but comes later"
        table.add_row(candidate.backend, escape(candidate.reason or served))
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
    known = registered()
    for candidate in (name, f"{name}Plan"):
        if candidate in known:
            return known[candidate]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
    _refuse(f"there is no plan called {name!r}; near it: {', '.join(near)}. `holdfast plans` lists them all.")


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
) -> None:
    """Prove that reference, cpu and gpu give the same bits, and that wrong kernels would be caught."""
    names = [_plan(name).__name__ for name in plan or []]
    console = Console(stderr=json_file == "-")
    with bar(console) as progress:
        report = run_verify(names, exhaustive=exhaustive, write_digests=write_digests, progress=progress)
    show(report, console)
    if json_file is not None:
        text = json.dumps(report.as_json(), indent=1)
        print(text) if json_file == "-" else Path(json_file).write_text(text + "\n")
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def demo() -> None:
    """Verify every plan, then time a few."""
    verify()
    bench(quick=True)
