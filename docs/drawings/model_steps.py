"""Charts of the stored training steps of models: benchmarks/models/*.json."""

from __future__ import annotations

import json
import math

from drawings import speed, svg
from drawings.speed import Report, Row

STORED = speed.STORED / "models"
OURS, EAGER = "holdfast", "eager"


def machines() -> list[str]:
    """The names of the stored runs, GPUs first."""
    return sorted((path.stem for path in STORED.glob("*.json")), key=lambda name: (name == "cpu", name))


def stored(machine: str) -> Report:
    """Load a stored run."""
    report: Report = json.loads((STORED / f"{machine}.json").read_text())
    return report


def speedup(row: Row, peer: str, part: str) -> float | None:
    """The time of ``part`` of a peer's step, divided by that of holdfast. None if one was not timed."""
    steps = [row["steps"].get(name, {}).get(part) for name in (peer, OURS)]
    if None in steps:
        return None
    theirs, ours = (step["median"] for step in steps)
    return float(theirs / ours)


def chart(report: Report) -> str:
    """A chart of the speed-up of each backward over torch eager, with a line from 1x to the speed-up."""
    ratios = {row["name"]: speedup(row, EAGER, "backward") for row in report["rows"]}
    known = [ratio for ratio in ratios.values() if ratio]
    low, high = min([0.5, *map(_power_below, known)]), max([2.0, *map(_power_above, known)])
    ticks = [2.0**power for power in range(round(math.log2(low)), round(math.log2(high)) + 1)]
    left, wide, top, step = 30 + 6.3 * max(map(len, ratios)), 260.0, 76.0, 22.0
    bottom, right = top + step * len(ratios), left + wide + 70
    across = speed.log_scale(left, left + wide, low, high)
    parts = [
        svg.text(12, 22, f"Backward of training steps against torch eager, {report['device']}", bold=True),
        svg.dot(16, 42, "hf-a"),
        svg.text(26, 46, "faster than torch eager"),
        svg.dot(196, 42, "hf-b"),
        svg.text(206, 46, "slower than torch eager"),
        *speed.axis(across, ticks, top - 6, bottom),
    ]
    for number, (name, ratio) in enumerate(ratios.items()):
        y = top + step * number + 9
        if number % 2 == 0:
            parts.insert(0, svg.box(0, y - step / 2, right, step, "hf-box"))
        parts.append(svg.text(left - 12, y + 4, name, anchor="end", size=11))
        letter = "b" if ratio and ratio < 1 else "a"
        if ratio:
            parts.append(svg.line((across(1), y), (across(ratio), y), f"hf-line-{letter}", width=2))
            parts.append(svg.dot(across(ratio), y, f"hf-{letter}"))
        shown = f"{ratio:.2f}x" if ratio else "n/a"
        parts.append(svg.text(right - 10, y + 4, shown, anchor="end", colour=f"hf-{letter}", bold=True))
    parts.append(svg.text(12, bottom + 24, f"{speed.where(report)}.", colour="hf-muted", size=11))
    return svg.drawing(right, bottom + 36, f"Backward against torch eager: {speed.where(report)}", parts)


def _power_below(ratio: float) -> float:
    return float(2.0 ** math.floor(math.log2(ratio)))


def _power_above(ratio: float) -> float:
    return float(2.0 ** math.ceil(math.log2(ratio)))


def drawings() -> dict[str, str]:
    """The charts, by file name."""
    return {f"models_{machine}.svg": chart(stored(machine)) for machine in machines()}
