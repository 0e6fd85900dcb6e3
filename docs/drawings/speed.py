"""Charts of the stored benchmarks: benchmarks/*.json."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from drawings import svg

STORED = Path(__file__).resolve().parents[2] / "benchmarks"

Row = dict[str, Any]
Report = dict[str, Any]

#: The page of each family. Other families have a page of their own name.
PAGES = {
    "quantize": "quantize",
    "fake_quantize": "fake_quantize",
    "fake_quantize_learned": "fake_quantize",
    "dequantize": "quantize",
    "choose_scale": "scales",
    "dynamic_quantize": "scales",
    "dynamic_fake_quantize": "scales",
}

TORCH, COMPILED = "torch op", "compiled"
_TICKS = (0.5, 1, 2, 4, 8, 16, 32, 64)


def machines() -> list[str]:
    """The names of the stored runs, GPUs first."""
    return sorted((path.stem for path in STORED.glob("*.json")), key=lambda name: (name == "cpu", name))


def stored(machine: str) -> Report:
    """Load a stored run."""
    report: Report = json.loads((STORED / f"{machine}.json").read_text())
    return report


def page_of(row: Row) -> str:
    family: str = row.get("family", "quantize")
    return PAGES.get(family, family)


def by_page(report: Report) -> dict[str, list[Row]]:
    """The rows of a run, by page."""
    found: dict[str, list[Row]] = {}
    for row in report["rows"]:
        found.setdefault(page_of(row), []).append(row)
    return found


def where(report: Report) -> str:
    """The machine, the versions and the date in one line."""
    versions = report["versions"]
    threads = f", {report['threads']} threads" if report["threads"] else ""
    return (
        f"{report['device']}{threads}, torch {versions['torch']}, Triton {versions['triton']}, "
        f"{report['date'][:10]}"
    )


def label(row: Row) -> str:
    """The name of the timed call. Functions start with ``hf.``; all others are plans."""
    return f"{'hf.' if row['function'] else ''}{row['op']} {row['granularity']}"


def dtypes(row: Row) -> str:
    return (
        row.get("dtypes") or f"{row['real_dtype']}, {'packed ' if row['packed'] else ''}{row['code_dtype']}"
    )


def speedup(row: Row, peer: str) -> float | None:
    ratio: float | None = row["peers"].get(peer, {}).get("speedup")
    return ratio


def duration(seconds: float) -> str:
    """A time with three significant digits."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def kind(row: Row) -> str:
    """The op and its direction."""
    words = row["op"].split()
    learned = " learned" if "learned" in words else ""
    return f"{words[0]}{learned}{' backward' if 'backward' in words else ''}"


def overview(report: Report) -> str:
    """A chart with one row per op and direction: the median, slowest and fastest of its cases."""
    rows = [row for row in report["rows"] if not row["function"]]
    kinds = list(dict.fromkeys(kind(row) for row in rows if speedup(row, TORCH)))
    left, right, top, step = 228.0, 740.0, 84.0, 30.0
    across = log_scale(left, right - 84, 0.5, 16)
    bottom = top + step * len(kinds)
    parts = [
        svg.text(16, 26, f"Speed of holdfast against torch on one {report['device']}", size=16, bold=True),
        svg.dot(22, 46, "hf-a"),
        svg.text(32, 50, "against torch's own operator"),
        svg.ring(222, 46, "hf-line-b"),
        svg.text(232, 50, "against torch.compile of the plain formula"),
        svg.text(right - 8, top - 11, "median", anchor="end", colour="hf-muted", size=11),
        *axis(across, [t for t in _TICKS if t <= 16], top - 6, bottom - 8),
    ]
    for number, name in enumerate(kinds):
        y = top + step * number + 10
        mine = [row for row in rows if kind(row) == name]
        parts.append(svg.text(left - 14, y + 4, name, anchor="end"))
        for peer, shift, mark, colour in ((TORCH, -5, svg.dot, "a"), (COMPILED, 6, svg.ring, "b")):
            ratios = [ratio for row in mine if (ratio := speedup(row, peer))]
            if not ratios:
                continue
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            parts.append(svg.line((across(low), y + shift), (across(high), y + shift), f"hf-line-{colour}"))
            line = "hf-" if mark is svg.dot else "hf-line-"
            parts.append(mark(across(middle), y + shift, f"{line}{colour}"))
            if peer == TORCH:
                parts.append(
                    svg.text(right - 8, y + 3, f"{middle:.1f}x", anchor="end", colour="hf-a", bold=True)
                )
    notes = [
        f"{where(report)}.",
        "Circle: median of all stored cases of the op. Line: slowest to fastest case. Right of 1x is faster.",
        f"Sizes: {_sizes(rows)}.",
        "Every case, with its size, is listed in docs/results.md.",
    ]
    parts += [
        svg.text(16, bottom + 34 + 17 * n, note, colour="hf-muted", size=11) for n, note in enumerate(notes)
    ]
    title = f"Speed of holdfast against torch, {where(report)}"
    return svg.drawing(right + 10, bottom + 100, title, parts)


def _sizes(rows: list[Row]) -> str:
    """A phrase with the ranges of the timed sizes."""
    affine = [row for row in rows if page_of(row) in ("quantize", "fake_quantize")]
    counts = sorted({math.prod(row["shape"]) for row in affine})
    powers = f"2^{math.log2(counts[0]):g} to 2^{math.log2(counts[-1]):g}" if counts else ""
    read = sorted({math.prod(row["shape"]) for row in rows if page_of(row).startswith("embedding")})
    lookups = f"; embedding {read[0]:,} to {read[-1]:,} indices" if read else ""
    images = sorted({math.prod(row["shape"]) for row in rows if page_of(row) == "grid_sample"})
    sampled = f"; images {images[0] / 1e6:.0f} to {images[-1] / 1e6:.0f} million elements" if images else ""
    return f"quantization {powers} elements{lookups}{sampled}"


def chart(report: Report, rows: list[Row]) -> str:
    """A chart of every case of one page: its fraction of the copy bandwidth, and its speed-up over torch."""
    labels = list(dict.fromkeys(map(label, rows)))
    pairs = list(dict.fromkeys(map(dtypes, rows)))
    left, wide, gap, top, step = 30 + 6.3 * max(map(len, labels)), 230.0, 44.0, 88.0, 20.0
    bottom = top + step * len(labels)
    most = max(1.25, math.ceil(4 * max(row["of_copy"] for row in rows)) / 4)
    share = _linear_scale(left, left + wide, most)
    ratios = [r for row in rows for peer in (TORCH, COMPILED) if (r := speedup(row, peer))]
    high = next((t for t in _TICKS if t >= max(ratios, default=2)), _TICKS[-1])
    across = log_scale(left + wide + gap, left + 2 * wide + gap, 0.5, max(high, 2))
    parts = [
        svg.text(left, 22, "share of copy bandwidth", bold=True),
        svg.text(left + wide + gap, 22, "speed-up over torch", bold=True),
        svg.dot(16, 18, "hf-muted", radius=3.5),
        svg.text(26, 22, "speed-up over torch's own operator", size=11),
        svg.ring(16, 42, "hf-axis"),
        svg.text(26, 46, "speed-up over torch.compile", size=11),
        *axis(share, [t / 4 for t in range(0, int(most * 4) + 1)], top - 6, bottom, _percent, bold=1.0),
        *axis(across, [t for t in _TICKS if t <= max(high, 2)], top - 6, bottom, bold=1.0),
    ]
    for number, pair in enumerate(pairs):
        x = left + 175 * number
        parts += [svg.dot(x + 4, 42, f"hf-{'abc'[number % 3]}"), svg.text(x + 14, 46, pair)]
    for number, name in enumerate(labels):
        y = top + step * number + 8
        if number % 2 == 0:
            parts.insert(0, svg.box(0, y - step / 2, left + 2 * wide + gap + 20, step, "hf-box"))
        parts.append(svg.text(left - 12, y + 4, name, anchor="end", size=11))
        for row in (row for row in rows if label(row) == name):
            letter = "abc"[pairs.index(dtypes(row)) % 3]
            parts.append(svg.dot(share(row["of_copy"]), y, f"hf-{letter}", radius=3.5))
            if ratio := speedup(row, COMPILED):
                parts.append(svg.ring(across(ratio), y, f"hf-line-{letter}"))
            if ratio := speedup(row, TORCH):
                parts.append(svg.dot(across(ratio), y, f"hf-{letter}", radius=3.5))
    parts.append(svg.text(12, bottom + 24, f"{where(report)}.", colour="hf-muted", size=11))
    return svg.drawing(left + 2 * wide + gap + 20, bottom + 36, f"Measured: {where(report)}", parts)


def drawings() -> dict[str, str]:
    """The charts, by file name."""
    made = {"speed.svg": overview(stored("h200"))}
    for machine in machines():
        report = stored(machine)
        for page, rows in by_page(report).items():
            made[f"speed_{machine}_{page}.svg"] = chart(report, rows)
    return made


def _percent(value: float) -> str:
    return f"{100 * value:g} %"


def _times(value: float) -> str:
    return f"{value:g}x"


def axis(
    scale: Callable[[float], float],
    ticks: Iterable[float],
    top: float,
    bottom: float,
    shown: Callable[[float], str] = _times,
    bold: float = 1.0,
) -> list[str]:
    """The lines of an axis, with their numbers above."""
    parts = []
    for tick in ticks:
        colour, width = ("hf-axis", 1.5) if tick == bold else ("hf-rule", 1)
        parts.append(svg.line((scale(tick), top), (scale(tick), bottom), colour, width=width))
        parts.append(svg.text(scale(tick), top - 5, shown(tick), anchor="middle", colour="hf-muted", size=11))
    return parts


def log_scale(left: float, right: float, low: float, high: float) -> Callable[[float], float]:
    """A scale of ratios. A value below ``low`` is drawn at ``low``."""
    span = math.log2(high / low)
    return lambda value: left + (right - left) * max(math.log2(value / low), 0) / span


def _linear_scale(left: float, right: float, high: float) -> Callable[[float], float]:
    return lambda value: left + (right - left) * value / high
