"""The command ``holdfast plans``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.core.contract import printed_bound
from holdfast.proof.catalogue import Entry, catalogue
from holdfast.proof.options import NARROW


def plans(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every plan: its dtypes, backends and guarantees."""
    entries = catalogue()
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
        return
    table = Table(title=f"{len(entries)} plans", show_lines=True)
    console = Console()
    table.add_column("plan", no_wrap=console.width >= NARROW, overflow="fold")
    table.add_column("dtypes", overflow="fold")
    table.add_column("guarantee", overflow="fold")
    for entry in entries:
        name = f"[bold]{entry.plan}[/]\n{entry.op} {entry.direction}\non {', '.join(entry.backends)}"
        table.add_row(name, _dtypes(entry), _guarantee(entry))
    console.print(table)


def _dtypes(entry: Entry) -> str:
    """The dtypes of each field, with widths merged: float16/32/64."""
    lines = []
    for field, names in entry.dtypes.items():
        widths: dict[str, list[str]] = {}
        for name in names:
            kind = name.rstrip("0123456789")
            widths.setdefault(kind, []).append(name.removeprefix(kind))
        lines.append(f"{field}: {', '.join(kind + '/'.join(all_) for kind, all_ in widths.items())}")
    return "\n".join(lines)


def _guarantee(entry: Entry) -> str:
    if not entry.cases:
        return "unknown: the plan has no cases, so nothing is verified"
    errors = ", ".join(f"{name} within {printed_bound(ulp)} ULP" for name, ulp in entry.ulp.items())
    stable = f"{'deterministic, ' if entry.deterministic else ''}same bits {entry.bit_stable}"
    return f"{stable}\n{errors}\nnumerics {entry.numerics_version}, in {' or '.join(entry.compute_dtypes)}"
