"""Charts as SVG text. Colours are CSS classes of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

#: The plot area of a chart of full width, and the margins around it.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 260, 52, 16, 14, 40


def loss_chart(losses: Mapping[str, Sequence[float]]) -> str:
    """Losses against steps on a logarithmic axis. All series but the first start where the first ends."""
    first = len(next(iter(losses.values())))
    starts = [0] + [first] * (len(losses) - 1)
    last = max(start + len(series) for start, series in zip(starts, losses.values(), strict=True))
    every = [loss for series in losses.values() for loss in series if loss > 0]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))

    def across(step: int) -> float:
        return LEFT + WIDTH * step / last

    def down(loss: float) -> float:
        return TOP + HEIGHT * (high - math.log10(max(loss, 10.0**low))) / max(high - low, 1)

    parts, bottom = [], TOP + HEIGHT
    for power in range(low, high + 1):
        y = down(10.0**power)
        parts += [_line(LEFT, y, LEFT + WIDTH, y), _text(LEFT - 8, y + 4, f"{10.0**power:g}", "end")]
    for step in range(0, last, max(last // 6 // 10, 1) * 10):
        parts.append(_text(across(step), bottom + 18, str(step), "middle"))
    parts.append(_text(LEFT + WIDTH / 2, bottom + 36, "step", "middle"))
    for number, (start, series) in enumerate(zip(starts, losses.values(), strict=True)):
        points = " ".join(f"{across(start + i):.1f},{down(loss):.1f}" for i, loss in enumerate(series))
        parts.append(f'<polyline class="line series{number}" points="{points}"/>')
    return _drawing("Loss of each step, by format", parts)


def accuracy_chart(
    groups: Mapping[str, Sequence[tuple[int, float]]], level: float, level_name: str, names: Sequence[str]
) -> str:
    """A bar for each accuracy, in groups, and a dashed line at ``level``.

    Each entry of a group is the number of its series and an accuracy from 0 to 1. ``names`` are the series.
    """
    every = [value for group in groups.values() for _, value in group] + [level]
    low = max(math.floor(20 * min(every) - 0.5) / 20, 0.0)

    def height(value: float) -> float:
        return TOP + HEIGHT * (1 - (value - low) / (1 - low))

    parts, step = [], (1 - low) / 4
    for tick in range(5):
        value = low + tick * step
        y = height(value)
        parts += [_line(LEFT, y, LEFT + WIDTH, y), _text(LEFT - 8, y + 4, f"{100 * value:.3g} %", "end")]
    y = height(level)
    parts.append(f'<line class="level" x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}"/>')
    room = WIDTH / len(groups)
    for number, (title, group) in enumerate(groups.items()):
        left, bar = LEFT + room * number + room * 0.1, room * 0.8 / len(group)
        for place, (series, value) in enumerate(group):
            y = height(value)
            parts.append(
                f'<rect class="bar series{series}" x="{left + bar * place + 2:.1f}" y="{y:.1f}" '
                f'width="{bar - 4:.1f}" height="{TOP + HEIGHT - y:.1f}"><title>{escape(title)}, '
                f"{escape(names[series])}: {value:.1%}</title></rect>"
            )
            parts.append(_text(left + bar * (place + 0.5), y - 5, f"{100 * value:.1f}", "middle"))
        parts.append(_text(left + room * 0.4, TOP + HEIGHT + 18, title, "middle"))
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 36, f"dashed: {level_name}, {level:.1%}", "middle"))
    return _drawing("Accuracy, by format and estimator", parts)


def histogram(title: str, counts: Sequence[int], first: str, last: str, series: int) -> str:
    """Counts of neighbouring bins, with the labels of the first and the last bin."""
    width, height = 340, 120
    bar, most = width / len(counts), max(max(counts), 1)
    gap = 2 if bar > 8 else 0
    parts = []
    for number, count in enumerate(counts):
        tall = height * count / most
        parts.append(
            f'<rect class="bar series{series}" x="{10 + number * bar + gap / 2:.2f}" '
            f'y="{TOP + height - tall:.1f}" width="{bar - gap:.2f}" height="{tall:.1f}"/>'
        )
    bottom = TOP + height
    parts.append(_line(10, bottom, 10 + width, bottom))
    parts += [
        _text(10, bottom + 18, first),
        _text(10 + width, bottom + 18, last, "end"),
        _text(10 + width / 2, bottom + 18, title, "middle"),
    ]
    return _drawing(f"{title}: number of weights by value", parts, width + 20, bottom + 26)


def _drawing(
    title: str, parts: list[str], width: float = LEFT + WIDTH + RIGHT, height: float = TOP + HEIGHT + BOTTOM
) -> str:
    start = f'<svg role="img" viewBox="0 0 {width:g} {height:g}"><title>{escape(title)}</title>'
    return "\n".join([start, *parts, "</svg>"])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
