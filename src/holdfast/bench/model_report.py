"""The results of ``holdfast bench --models``, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from holdfast.bench.report import duration, now, versions
from holdfast.bench.step_timing import Memory, Spread, Times
from holdfast.core.dtypes import dtype_name
from holdfast.core.training_step import COMPILED, DETERMINISTIC, EAGER, OURS, ModelCase

NOTE = (
    "Times are medians of the public functions with gradients on. The columns of the peers are speed-ups of "
    "the forward / of the backward: above 1x holdfast is faster. 'eager' is torch's own operator, "
    "'deterministic' the same under torch.use_deterministic_algorithms(True), 'compiled' the plain formula "
    "under torch.compile. On a GPU these are times of the device, with cold caches. 'host' is "
    "the time until forward and backward of a small version of the case return, and its ratio to eager. "
    "'memory' is the peak of the backward, as a multiple of the gradients that it returns: holdfast / eager."
)


@dataclass
class ModelRow:
    """What was measured of one case, by step. ``small`` is the size that measured the host time."""

    case: ModelCase
    small: str
    times: dict[str, Times] = field(default_factory=dict)
    host: dict[str, Spread] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        case = self.case
        return {
            "name": case.name,
            "op": case.op,
            "family": case.family,
            "model": case.model,
            "size": case.label,
            "dtype": dtype_name(case.real),
            "small": self.small,
            "steps": {name: self._step(name) for name in dict.fromkeys((*self.times, *self.reasons))},
        }

    def _step(self, name: str) -> dict[str, Any]:
        """What was measured of one step, or the reason why it has no time."""
        if name not in self.times:
            return {"reason": self.reasons[name]}
        return {
            **asdict(self.times[name]),
            "host": asdict(self.host[name]) if name in self.host else None,
            "memory": asdict(self.memory[name]) if name in self.memory else None,
        }

    def speedups(self, peer: str) -> str:
        """The speed-ups of the forward and of the backward over ``peer``."""
        if peer not in self.times or OURS not in self.times:
            return "raises" if self.reasons.get(peer, "").startswith("raises") else "n/a"
        ours, other = self.times[OURS], self.times[peer]
        pairs = ((ours.forward, other.forward), (ours.backward, other.backward))
        return " / ".join(f"{theirs.median / mine.median:.2f}x" for mine, theirs in pairs)


@dataclass
class ModelReport:
    """One run of ``holdfast bench --models``."""

    device: str
    threads: int | None
    rows: list[ModelRow] = field(default_factory=list)
    date: str = field(default_factory=now)
    versions: dict[str, str | None] = field(default_factory=versions)

    @property
    def complete(self) -> bool:
        """Whether holdfast was measured in every row."""
        return all(OURS in row.times for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        head = {"device": self.device, "threads": self.threads, "date": self.date, "versions": self.versions}
        return {**head, "rows": [row.to_json() for row in self.rows]}

    def print(self, console: Console) -> None:
        """Print the rows by op and dtype: a line with the name of the case, then a line with its numbers.

        Names are as long as a line of a terminal. A column without a number is left out.
        """
        threads = "" if self.threads is None else f", {self.threads} threads"
        console.print(f"{self.device}{threads}: forward and backward of the public functions", markup=False)
        others = dict.fromkeys(name for row in self.rows for name in (*row.times, *row.reasons))
        peers = [name for name in dict.fromkeys((EAGER, DETERMINISTIC, COMPILED, *others)) if name != OURS]
        columns = [["forward", *map(_forward, self.rows)], ["backward", *map(_backward, self.rows)]]
        columns += [[peer, *(row.speedups(peer) for row in self.rows)] for peer in peers]
        columns += [["host", *map(_host, self.rows)], ["memory", *map(_memory, self.rows)]]
        columns = [cells for cells in columns if cells[0] == "forward" or {*cells[1:]} != {"n/a"}]
        widths = [max(map(len, cells)) for cells in columns]
        heading, *lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            for cells in zip(*columns, strict=True)
        )
        group = None
        for row, line in zip(self.rows, lines, strict=True):
            if group != (group := f"{row.case.op}, {dtype_name(row.case.real)}"):
                console.print(f"\n{group}", style="bold", markup=False, highlight=False)
                console.print(f"  {heading}", style="dim", soft_wrap=True, highlight=False)
            case = ", ".join(filter(None, (row.case.model, row.case.label)))
            console.print(case, markup=False, soft_wrap=True, highlight=False)
            console.print(f"  {line}", soft_wrap=True, highlight=False)
        console.print()
        for row in self.rows:
            if OURS in row.reasons:
                console.print(
                    f"Not timed: {row.case.name}: {row.reasons[OURS]}.", style="bold red", markup=False
                )
        for peer, reason in sorted(
            {(p, r) for row in self.rows for p, r in row.reasons.items() if p != OURS}
        ):
            console.print(f"n/a, {peer}: {reason}.", markup=False)
        console.print(NOTE, style="dim")


def _forward(row: ModelRow) -> str:
    return duration(row.times[OURS].forward.median) if OURS in row.times else "n/a"


def _backward(row: ModelRow) -> str:
    return duration(row.times[OURS].backward.median) if OURS in row.times else "n/a"


def _host(row: ModelRow) -> str:
    if OURS not in row.host:
        return "n/a"
    ours = row.host[OURS].median
    ratio = f", {ours / row.host[EAGER].median:.2f}x" if EAGER in row.host else ""
    return f"{duration(ours)}{ratio}"


def _memory(row: ModelRow) -> str:
    if OURS not in row.memory:
        return "n/a"
    size = max(row.memory[OURS].gradients, 1)
    return " / ".join(
        f"{row.memory[name].backward / size:.2f}" for name in (OURS, EAGER) if name in row.memory
    )
