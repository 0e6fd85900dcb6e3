"""Command-line options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.proof.conformance import plan_named

PlanOption = Annotated[
    list[str] | None, typer.Option("--plan", metavar="NAME", help="Only this plan; may be repeated.")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the results to FILE, or - for stdout.")
]
#: Columns below which the names of plans are folded, so that a table keeps its other columns.
NARROW = 72


def plan_names(given: list[str] | None) -> list[str]:
    """The full names of the plans given with ``--plan``."""
    return [plan_named(name).__name__ for name in given or []]


def write_json(file: str, data: dict[str, Any]) -> None:
    """Write ``data`` to ``file``, or to stdout if it is ``-``."""
    text = json.dumps(data, indent=1)
    print(text) if file == "-" else Path(file).write_text(text + "\n")
