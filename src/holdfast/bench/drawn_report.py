"""The results of ``holdfast bench --drawn``, as two tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.bench.report import duration, now, versions
from holdfast.bench.step_timing import Spread
from holdfast.core.training_step import EAGER, OURS

#: What is timed of a problem.
PARTS = ("forward", "backward", "host")
#: The number of slowest problems to show.
WORST = 15
NOTE = (
    "A ratio is the time of torch eager divided by the time of holdfast, both medians of the public "
    "functions with gradients on: above 1x holdfast is faster. The three numbers are the quartiles over the "
    "problems. On a GPU forward and backward are times of the device, with cold caches, and 'host' is the "
    "time until forward and backward return, where the device needs less than 0.2 ms."
)


@dataclass
class DrawnRow:
    """The medians of one problem in seconds, by part and by step.

    ``failed``: why holdfast has no time. ``no_peer``: why torch has none.
    """

    function: str
    name: str
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: str = ""
    no_peer: str = ""

    def ratio(self, part: str) -> float:
        return self.seconds[part][EAGER] / self.seconds[part][OURS]


@dataclass
class DrawnReport:
    """One run of ``holdfast bench --drawn``. ``drawn`` is the number of problems that were asked for."""

    device: str
    threads: int | None
    seed: int
    drawn: int
    seconds: float = 0.0
    rows: list[DrawnRow] = field(default_factory=list)
    date: str = field(default_factory=now)
    versions: dict[str, str | None] = field(default_factory=versions)

    @property
    def complete(self) -> bool:
        """Whether holdfast was measured in every row."""
        return not any(row.failed for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def print(self, console: Console) -> None:
        console.print(self._functions())
        console.print(self._worst())
        for row in self.rows:
            if row.failed:
                console.print(f"Not timed: {row.name}: {row.failed}.", style="bold red", markup=False)
        lacking = [(row.function, row.no_peer) for row in self.rows if row.no_peer]
        for function, reason in sorted(set(lacking)):
            count = lacking.count((function, reason))
            console.print(f"No peer for {count} of {function}: {reason}.", markup=False)
        if len(self.rows) < self.drawn:
            console.print(f"Stopped after {len(self.rows)} of {self.drawn} problems, {self.seconds} s.")
        console.print(NOTE, style="dim")

    def _functions(self) -> Table:
        """The quartiles of the ratios of each function, and of all, with a row for each part of a step."""
        threads = "" if self.threads is None else f", {self.threads} threads"
        table = Table(title=f"{self.device}{threads}: random problems, seed {self.seed}, torch / holdfast")
        table.add_column("function", no_wrap=True)
        table.add_column("part", no_wrap=True)
        for heading in ("count", "quartiles", "<1x", "<0.5x"):
            table.add_column(heading, justify="right", no_wrap=True)
        for function in [*dict.fromkeys(row.function for row in self.rows), "all"]:
            rows = [row for row in self.rows if function in (row.function, "all")]
            parts = [part for part in PARTS if any(part in row.seconds for row in rows)] or ["n/a"]
            for part in parts:
                ratios = [row.ratio(part) for row in rows if part in row.seconds]
                counts = [str(sum(ratio < bound for ratio in ratios)) for bound in (1, 0.5)]
                name, count = (function, str(len(rows))) if part == parts[0] else ("", "")
                table.add_row(name, part, count, _quartiles(ratios), *counts, end_section=part == parts[-1])
        return table

    def _worst(self) -> Table:
        table = Table(title="Lowest ratios")
        table.add_column("problem", overflow="fold")
        for heading in ("part", "torch", "holdfast", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        found = sorted(
            (row.ratio(part), row.name, part, row.seconds[part]) for row in self.rows for part in row.seconds
        )
        for ratio, name, part, taken in found[:WORST]:
            table.add_row(name, part, duration(taken[EAGER]), duration(taken[OURS]), f"{ratio:.2f}x")
        return table


def _quartiles(ratios: list[float]) -> str:
    if not ratios:
        return "n/a"
    spread = Spread.of(ratios)
    return " ".join(f"{ratio:.2f}" for ratio in (spread.low, spread.median, spread.high))
