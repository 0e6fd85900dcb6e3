"""``holdfast verify --report``: the results as one self-contained HTML page."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from holdfast.core.contract import printed_bound
from holdfast.proof.report import SHOWN
from holdfast.proof.result_files import load_benchmark
from holdfast.proof.verify import PlanReport, Report

#: Peers that have a column, and the titles of the columns.
PEERS = {"torch op": "torch operator", "compiled": "torch.compile", "eager": "torch eager"}
#: Fields of PlanReport that are summed over all plans.
TOTALS = ("passed", "cases", "runs", "pinned", "mutants", "mutants_caught", "swept", "sweeps")


def benchmarks(given: Sequence[Path] | None) -> list[dict[str, Any]]:
    """The benchmarks in the files ``given``. Default: those stored in the checkout, if there is one."""
    checkout = Path(__file__).parents[3]
    stored = (checkout / "benchmarks").glob("*.json") if (checkout / "pyproject.toml").exists() else ()
    return [load_benchmark(path) for path in (given or sorted(stored))]


def templates() -> Environment:
    """The templates of the package's pages, by path in the package."""
    environment = Environment(
        loader=FunctionLoader(lambda path: files("holdfast").joinpath(path).read_text("utf-8")),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= FILTERS
    return environment


def page(report: Report, measured: Iterable[dict[str, Any]] = ()) -> str:
    """The page as HTML."""
    here = {report.machine.cpu, report.machine.gpu}
    return templates().get_template("proof/page.html").render(
        report=report, plans=sorted(report.plans, key=lambda plan: plan.plan.removesuffix("Plan")),
        total={name: sum(getattr(plan, name) for plan in report.plans) for name in TOTALS}, combined=combined,
        fuzz=_fuzz(report.fuzz), machines=[_machine(made, made["device"] in here) for made in measured],
        peers=PEERS, shown=SHOWN,
    )  # fmt: skip


def combined(plan: PlanReport) -> str:
    """A digest over the digests of all cases of a plan."""
    lines = "".join(f"{case} {digest}\n" for case, digest in sorted(plan.digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _fuzz(made: dict[str, Any] | None) -> dict[str, Any] | None:
    """A fuzz report for the template. ``differences`` may be a list or a count; ``on`` is the machine."""
    if made is None:
        return None
    found, machine = made["differences"], made.get("machine", {})
    listed = [str(one) for one in found] if isinstance(found, list) else []
    counted = len(listed) if isinstance(found, list) else found
    return {**made, "differences": counted, "listed": listed, "on": machine.get("gpu") or machine.get("cpu")}


@dataclass(frozen=True)
class Bar:
    """One bar of a chart. ``share`` is the fraction of the copy rate; ``width`` is in % of the chart."""

    name: str
    share: float
    width: float


def _machine(made: dict[str, Any], here: bool) -> dict[str, Any]:
    by_family: dict[str, list[dict[str, Any]]] = {}
    for row in made["rows"]:
        by_family.setdefault(row.get("family", row["op"]), []).append(row)
    reasons = {
        (PEERS.get(peer, peer), facts["reason"])
        for row in made["rows"]
        for peer, facts in row["peers"].items()
        if facts.get("reason")
    }
    return {
        **made, "here": here, "families": [_family(name, rows) for name, rows in by_family.items()],
        "reasons": sorted(reasons), "host": made.get("host_microseconds") or {},
    }  # fmt: skip


def _family(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The cases of one family. The longest bar, or the copy rate if longer, has the full width."""
    longest = max(1.0, *(share for row in rows for _, share in _shares(row)))
    return {
        "name": name,
        "ceiling": 100 / longest,
        "of_copy": _mean(row["of_copy"] for row in rows),
        "speedups": {peer: _mean(filter(None, (_speedup(row, peer) for row in rows))) for peer in PEERS},
        "rows": [
            {
                **row,
                "bars": [Bar(who, share, 100 * share / longest) for who, share in _shares(row)],
                "speedups": {peer: _speedup(row, peer) for peer in PEERS},
            }
            for row in rows
        ],
    }


def _shares(row: dict[str, Any]) -> list[tuple[str, float]]:
    """The fraction of the copy rate that holdfast reaches, followed by that of each timed peer."""
    timed = [(peer, ratio) for peer in PEERS if (ratio := _speedup(row, peer))]
    return [("holdfast", row["of_copy"]), *((peer, row["of_copy"] / ratio) for peer, ratio in timed)]


def _speedup(row: dict[str, Any], peer: str) -> float | None:
    ratio = row["peers"].get(peer, {}).get("speedup")
    return None if ratio is None else float(ratio)


def _mean(ratios: Iterable[float]) -> float | None:
    """Geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def count(number: float) -> str:
    """A number with thousands separators. Numbers from one million are rounded."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {word}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """A time with three significant digits, in minutes, s, ms or µs."""
    if seconds >= 100:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def times(ratio: float | None) -> str:
    """A speed-up, or a dash for None."""
    if ratio is None:
        return "\N{EN DASH}"
    return f"{ratio:.{2 if ratio < 10 else 1}f}\N{MULTIPLICATION SIGN}"


#: Filters of the template that format numbers.
FILTERS = {"count": count, "duration": duration, "times": times, "bound": printed_bound}
