"""Writes the generated parts of README.md: the plans, from the registry, and the numbers, from benchmarks/.

Run it after adding a plan or a benchmark: python docs/generate.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.core.contract import printed_bound
from holdfast.proof.catalogue import catalogue

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def plan_table() -> str:
    """Every plan of the registry with what it guarantees."""
    lines = ["| plan | result | backends | same bits | numerics | error |", "|---|---|---|---|---|---|"]
    for entry in catalogue():
        cells = (
            f"`{entry.plan}`",
            f"`{_result(hf.plans.all()[entry.plan])}`",
            ", ".join(entry.backends),
            entry.bit_stable if entry.deterministic else "no",
            f"{entry.numerics_version}",
            ", ".join(f"{name}: {printed_bound(ulp)}" for name, ulp in entry.ulp.items()),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _result(plan: type[hf.plans.Plan[Any, Any]]) -> str:
    """What the plan computes: how the docstring of its op begins."""
    described = next(base for base in plan.__mro__ if "op" in vars(base))
    return re.split(r"[;.] |\.$", str(described.__doc__).strip().splitlines()[0])[0].replace("|", "\\|")


def measured() -> str:
    """The numbers of the last full runs, one table for each machine."""
    files = sorted((ROOT / "benchmarks").glob("*.json"))
    if not files:
        return "No run is stored. `holdfast bench --json benchmarks/NAME.json` makes one."
    return "\n\n".join(_machine(json.loads(path.read_text())) for path in files)


def _machine(report: dict[str, Any]) -> str:
    versions = report["versions"]
    threads = f", {report['threads']} threads" if report["threads"] else ""
    lines = [
        f"**{report['device']}**{threads}, torch {versions['torch']}, Triton {versions['triton']}, Numba "
        f"{versions['numba']}, {report['date'][:10]}; a copy moves "
        f"{report['copy_bytes_per_second'] / 1e9:,.0f} GB/s.",
        "",
    ]
    families: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        families.setdefault(row.get("family", "quantize"), []).append(row)
    lines.append("\n\n".join(_table(rows) for rows in families.values()))
    if report["host_microseconds"]:
        costs = ", ".join(f"{name} {cost:.1f} µs" for name, cost in report["host_microseconds"].items())
        lines += ["", f"Host cost of one call on a small tensor: {costs}."]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> str:
    """The rows of one family of ops, a column for each combination of dtypes."""
    pairs = list(dict.fromkeys(_pair(row) for row in rows))
    lines = [f"| | {' | '.join(pairs)} |", "|---" * (len(pairs) + 1) + "|"]
    for label in dict.fromkeys(_label(row) for row in rows):
        cells = {_pair(row): _cell(row) for row in rows if _label(row) == label}
        lines.append(f"| {label} | {' | '.join(cells.get(pair, '') for pair in pairs)} |")
    return "\n".join(lines)


def _label(row: dict[str, Any]) -> str:
    return f"{'hf.' if row['function'] else ''}{row['op']} {row['granularity']}"


def _pair(row: dict[str, Any]) -> str:
    return (
        row.get("dtypes") or f"{row['real_dtype']}, {'packed ' if row['packed'] else ''}{row['code_dtype']}"
    )


def _cell(row: dict[str, Any]) -> str:
    ratios = (row["peers"][peer].get("speedup") for peer in ("compiled", "torch op"))
    shown = ("n/a" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
    return f"{100 * row['of_copy']:.0f} %, {', '.join(shown)}"


def regenerated(text: str) -> str:
    """``text`` with its generated parts made anew."""
    for marker, part in (("plans", plan_table()), ("measured", measured())):
        begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{README.name} has no {begin} ... {end} to fill.")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(regenerated(README.read_text()))
