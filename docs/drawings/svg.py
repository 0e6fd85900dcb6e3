"""Elements of an SVG drawing, with colours for light and dark pages.

Colours are CSS classes. A separate SVG file uses the colour scheme of the system. A drawing that is inlined
in a page of the site uses the scheme of the page, by the rules in ``stylesheet``.
"""

from __future__ import annotations

from html import escape

Point = tuple[float, float]

#: For each class: its CSS property, its colour on a light page, its colour on a dark page.
COLOURS = {
    "hf-paper": ("fill", "#ffffff", "#0d1117"),
    "hf-ink": ("fill", "#1f2328", "#e6edf3"),
    "hf-muted": ("fill", "#59636e", "#9aa7b4"),
    "hf-box": ("fill", "#eef2f6", "#222b36"),
    "hf-a": ("fill", "#0b62c4", "#58a6ff"),
    "hf-b": ("fill", "#b35900", "#f0a050"),
    "hf-c": ("fill", "#1a7f37", "#56d364"),
    "hf-rule": ("stroke", "#c4ccd4", "#3d4752"),
    "hf-axis": ("stroke", "#59636e", "#9aa7b4"),
    "hf-line-a": ("stroke", "#0b62c4", "#58a6ff"),
    "hf-line-b": ("stroke", "#b35900", "#f0a050"),
    "hf-line-c": ("stroke", "#1a7f37", "#56d364"),
}

_LIGHT, _DARK = 1, 2


def _rules(scheme: int, under: str = "") -> str:
    return " ".join(f"{under}.{name}{{{rule[0]}:{rule[scheme]}}}" for name, rule in COLOURS.items())


def stylesheet() -> str:
    """The CSS for drawings in the site, where a reader can switch between light and dark."""
    light, dark = (f'[data-md-color-scheme="{scheme}"] ' for scheme in ("default", "slate"))
    return "\n".join(
        [
            "/* Written by docs/generate.py from docs/drawings/svg.py. */",
            ".hf-drawing { max-width: 100%; height: auto; }",
            _rules(_LIGHT, light).replace("} ", "}\n"),
            _rules(_DARK, dark).replace("} ", "}\n"),
            f"{light}.hf-paper, {dark}.hf-paper {{ fill: none }}",
            "",
        ]
    )


def drawing(width: float, height: float, title: str, parts: list[str]) -> str:
    """A complete SVG file. ``title`` is for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hf-drawing" role="img" width="{width:g}" '
            f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
            'font-size="12">',
            f"<title>{escape(title)}</title>",
            f"<style>{_rules(_LIGHT)} @media (prefers-color-scheme: dark) {{{_rules(_DARK)}}}</style>",
            f'<rect class="hf-paper" width="{width:g}" height="{height:g}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    colour: str = "hf-ink",
    size: float | None = None,
    bold: bool = False,
) -> str:
    more = f' font-size="{size:g}"' if size else ""
    more += ' font-weight="bold"' if bold else ""
    return (
        f'<text class="{colour}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'
    )


def line(start: Point, end: Point, colour: str = "hf-rule", *, width: float = 1, dashes: str = "") -> str:
    ends = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    more = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line class="{colour}" {ends} stroke-width="{width:g}"{more}/>'


def box(x: float, y: float, width: float, height: float, colour: str = "hf-box", *, radius: float = 0) -> str:
    return (
        f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius:g}"/>'
    )


def dot(x: float, y: float, colour: str, *, radius: float = 4) -> str:
    return f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>'


def ring(x: float, y: float, colour: str, *, radius: float = 3.5) -> str:
    """A circle without fill. ``colour`` must be a class that sets the stroke."""
    return (
        f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="none" stroke-width="1.8"/>'
    )


def path(points: list[Point], colour: str, *, width: float = 1.6) -> str:
    """A polyline through the points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{colour}" points="{places}" fill="none" stroke-width="{width:g}"/>'


def arrow(start: Point, end: Point, colour: str = "hf-axis", *, width: float = 1.2) -> str:
    """A straight line with an arrowhead at its end."""
    (x0, y0), (x1, y1) = start, end
    length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    head = [
        (x1 - 7 * ux - 3.5 * uy, y1 - 7 * uy + 3.5 * ux),
        (x1, y1),
        (x1 - 7 * ux + 3.5 * uy, y1 - 7 * uy - 3.5 * ux),
    ]
    return line(start, end, colour, width=width) + path(head, colour, width=width)
