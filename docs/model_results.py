"""The section of the results page about the training steps of models: benchmarks/models/*.json."""

from __future__ import annotations

from collections import Counter

from drawings import model_steps, speed
from drawings.model_steps import EAGER, OURS
from drawings.speed import Report, Row, duration

from holdfast.bench.models import CPU_ELEMENTS, model_cases

_HEAD = """## Training steps of real models

Forward and backward of the public functions, with gradients on, on the shapes of models. Repeat it with
`holdfast bench --models`.

`holdfast bench --drawn 150` times random problems instead, from 1 KB to 256 MB (16 MB on a CPU). It prints
the quartiles of the ratio to torch eager for each function, and the problems with the lowest ratios. `--seed`
draws other problems; `--seconds` limits the time.

- **forward**, **backward**: the time of holdfast, a median. On a GPU it is device time, with cold caches.
- **eager**: the speed-up of the forward / of the backward over torch's own operator. Below 1x torch is
  faster.
- **deterministic**: the same under `torch.use_deterministic_algorithms(True)`. `raises`: torch has no
  deterministic kernel and raises an error.
- **compiled**: the same over `torch.compile` of the plain formula.
- **host**: the time until forward and backward of a small version of the case return, and its ratio to that
  of eager. Above 1x holdfast takes longer.
- **memory**: the peak of the backward as a multiple of the gradients that it returns, holdfast / eager."""


def section() -> str:
    """The whole section, or an empty string if no run is stored."""
    return "\n\n".join([_HEAD, *map(_machine, model_steps.machines())]) if model_steps.machines() else ""


def _machine(name: str) -> str:
    report = model_steps.stored(name)
    run = f"{speed.where(report)}, holdfast {report['versions']['holdfast']}."
    return "\n\n".join(
        [
            f"### Models, {report['device']}",
            f"{run} {coverage(report)}{later(report)}",
            f"![Backward against torch eager, {report['device']}](assets/models_{name}.svg)",
            table(report),
        ]
    )


def coverage(report: Report) -> str:
    """How many cases the run has, and how many of each op it does not have. On a CPU cases are smaller."""
    measured = {row["name"] for row in report["rows"]}
    cases = model_cases() if report["threads"] is None else [case.at(CPU_ELEMENTS) for case in model_cases()]
    all_of, missing = (
        Counter(case.op for case in some)
        for some in (cases, [case for case in cases if case.name not in measured])
    )
    said = f"This run has {len(measured)} of the {len(cases)} cases."
    if not missing:
        return said
    return f"{said} Not stored: {', '.join(f'{n} of {all_of[op]} of {op}' for op, n in missing.items())}."


def later(report: Report) -> str:
    """How many cases were measured after the date of the report. Their rows have a date of their own."""
    found = Counter((row["op"], row["date"][:10]) for row in report["rows"] if "date" in row)
    return "".join(f" {count} cases of {op} were measured on {date}." for (op, date), count in found.items())


def table(report: Report) -> str:
    """A table of the rows of a run. A peer that was left out of the whole run has no column."""
    rows = report["rows"]
    peers = [peer for peer in dict.fromkeys(p for row in rows for p in row["steps"]) if peer != OURS]
    shown = [peer for peer in peers if any(speedups(row, peer) != "n/a" for row in rows)]
    lines = [f"| case | forward | backward | {' | '.join(shown)} | host | memory |"]
    lines.append(f"|---|{'---:|' * (len(shown) + 4)}")
    for row in rows:
        times = (_time(row, part) for part in ("forward", "backward"))
        cells = (row["name"], *times, *(speedups(row, peer) for peer in shown), _host(row), _memory(row))
        lines.append(f"| {' | '.join(cells)} |")
    left_out = [f"`{peer}`" for peer in peers if peer not in shown]
    return "\n".join(
        [*lines, *(["", f"Not measured in this run: {', '.join(left_out)}."] if left_out else [])]
    )


def speedups(row: Row, peer: str) -> str:
    """The speed-ups of the forward and of the backward over ``peer``."""
    found = [model_steps.speedup(row, peer, part) for part in ("forward", "backward")]
    if None in found:
        reason = row["steps"].get(peer, {}).get("reason", "")
        return "raises" if reason.startswith("raises") else "n/a"
    return " / ".join(f"{ratio:.2f}x" for ratio in found)


def _time(row: Row, part: str) -> str:
    measured = row["steps"][OURS].get(part)
    return duration(measured["median"]) if measured else "n/a"


def _host(row: Row) -> str:
    measured = row["steps"][OURS].get("host")
    ratio = model_steps.speedup(row, EAGER, "host")
    return "n/a" if not measured else duration(measured["median"]) + (f", {1 / ratio:.2f}x" if ratio else "")


def _memory(row: Row) -> str:
    found = [row["steps"].get(name, {}).get("memory") for name in (OURS, EAGER)]
    if not found[0]:
        return "n/a"
    return " / ".join(f"{used['backward'] / max(found[0]['gradients'], 1):.2f}" for used in found if used)
