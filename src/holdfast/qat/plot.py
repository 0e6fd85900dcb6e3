"""Bar charts as SVG text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_ROW, _LABELS, _PANEL, _GAP, _TOP = 20, 320, 260, 70, 40
_STYLE = (
    "text{fill:#1f2328} rect{fill:#0b62c4} .paper{fill:#fff} "
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3} rect{fill:#58a6ff} .paper{fill:#0d1117}}"
)


def bars(labels: Sequence[str], panels: Mapping[str, Sequence[float]]) -> str:
    """A panel of horizontal bars for each entry of ``panels``, one bar for each label."""
    width, height = _LABELS + len(panels) * (_PANEL + _GAP), _TOP + _ROW * len(labels) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(', '.join(panels))}</title><style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for row, label in enumerate(labels):
        parts.append(_text(_LABELS - 10, _TOP + row * _ROW + 14, label, "end"))
    for number, (title, values) in enumerate(panels.items()):
        left = _LABELS + number * (_PANEL + _GAP)
        parts.append(_text(left, _TOP - 14, title))
        largest = max((value for value in values if math.isfinite(value)), default=0.0) or 1.0
        for row, value in enumerate(values):
            length = _PANEL * min(max(value, 0.0), largest) / largest
            y = _TOP + row * _ROW
            parts.append(f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="{_ROW - 6}" rx="2"/>')
            parts.append(_text(left + length + 5, y + 14, f"{value:.3g}"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
