"""Draws docs/estimators.svg: what each estimator makes of a gradient of 1, at 2, 4 and 8 bits.

The curves are gradients of hf.fake_quantize itself. Run it after a change of an estimator:
python docs/plot_estimators.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast as hf

PICTURE = Path(__file__).resolve().parent / "estimators.svg"

#: The largest code of each symmetric range.
LARGEST = {2: 1, 4: 7, 8: 127}
ORDER = ("identity", "clipped_identity", "in_range", "hard_tanh", "tanh")

# The picture: a row for each estimator, a column for each number of bits. All in pixels.
WIDTH, HEIGHT = 210, 64
LEFT, TOP, GAP_X, GAP_Y = 160, 34, 26, 30
POINTS = 840
INK, LINE, GUIDE = "#444", "#0b62c4", "#bbb"

Point = tuple[float, float]


def gradients(bits: int, ste: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs in units of the scale, to twice the range, and their gradients where dy is 1."""
    most = LARGEST[bits]
    x = torch.linspace(-2, 2, POINTS + 1, dtype=torch.float64).mul(most).float().requires_grad_()
    hf.fake_quantize(x, 1.0, q_min=-most, q_max=most, ste=hf.SteKind(ste)).sum().backward()
    assert x.grad is not None
    return x.detach(), x.grad


def drawing() -> str:
    """The whole picture."""
    width = LEFT + len(LARGEST) * (WIDTH + GAP_X)
    height = TOP + len(ORDER) * (HEIGHT + GAP_Y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for column, bits in enumerate(LARGEST):
        x = LEFT + column * (WIDTH + GAP_X)
        parts.append(_text(x + WIDTH / 2, 18, f"{bits} bits", "middle"))
        for row, ste in enumerate(ORDER):
            y = TOP + row * (HEIGHT + GAP_Y)
            if column == 0:
                parts.append(_text(12, y + HEIGHT / 2 + 4, ste.upper(), "start"))
            parts += _panel(x, y, bits, ste)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, top: float, bits: int, ste: str) -> list[str]:
    """One estimator at one width: the axes, the bounds of the range, the curve."""
    most, bottom = LARGEST[bits], top + HEIGHT
    places = {-most: left + WIDTH / 4, 0: left + WIDTH / 2, most: left + 3 * WIDTH / 4}
    parts = [_line((place, top), (place, bottom), GUIDE, "2 3") for place in places.values()]
    parts.append(_line((left, bottom), (left + WIDTH, bottom), INK))
    parts += [_text(place, bottom + 14, str(code), "middle") for code, place in places.items()]
    parts += [_text(left - 4, y + 4, label, "end") for label, y in (("0", bottom), ("1", top + 4))]
    x, dx = gradients(bits, ste)
    across = ((x.double() / most + 2) / 4 * WIDTH + left).tolist()
    down = (bottom - dx.double() * (HEIGHT - 4)).tolist()
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in _simplified(list(zip(across, down, strict=True))))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6"/>')
    return parts


def _simplified(points: list[Point], tolerance: float = 0.05) -> list[Point]:
    """As few of the points as draw the same line."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    off = [abs(y - y0 - (y1 - y0) * (x - x0) / (x1 - x0)) for x, y in points]
    worst = max(range(len(points)), key=off.__getitem__)
    if off[worst] <= tolerance:
        return [points[0], points[-1]]
    return _simplified(points[: worst + 1])[:-1] + _simplified(points[worst:])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _line(start: Point, end: Point, colour: str, dashes: str = "none") -> str:
    ends = f'x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="{dashes}"/>'


if __name__ == "__main__":
    PICTURE.write_text(drawing())
