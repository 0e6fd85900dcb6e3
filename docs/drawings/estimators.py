"""Plots the gradient of each estimator at 2, 4 and 8 bits, for an upstream gradient of 1.

The gradients are computed by hf.fake_quantize.
"""

from __future__ import annotations

import torch

import holdfast as hf
from drawings import svg
from drawings.svg import Point

#: The largest code of the symmetric range, by number of bits.
LARGEST = {2: 1, 4: 7, 8: 127}
ORDER = ("identity", "clipped_identity", "in_range", "hard_tanh", "tanh")

# Layout: one row per estimator, one column per number of bits. Sizes in pixels.
WIDTH, HEIGHT = 210, 64
LEFT, TOP, GAP_X, GAP_Y = 160, 34, 26, 30
POINTS = 840


def gradients(bits: int, ste: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs up to twice the range, in units of the scale, and their gradients for dy = 1."""
    most = LARGEST[bits]
    x = torch.linspace(-2, 2, POINTS + 1, dtype=torch.float64).mul(most).float().requires_grad_()
    hf.fake_quantize(x, 1.0, q_min=-most, q_max=most, ste=hf.SteKind(ste)).sum().backward()
    assert x.grad is not None
    return x.detach(), x.grad


def drawings() -> dict[str, str]:
    """The drawing, by file name."""
    width = LEFT + len(LARGEST) * (WIDTH + GAP_X)
    height = TOP + len(ORDER) * (HEIGHT + GAP_Y)
    parts = []
    for column, bits in enumerate(LARGEST):
        x = LEFT + column * (WIDTH + GAP_X)
        parts.append(svg.text(x + WIDTH / 2, 18, f"{bits} bits", anchor="middle"))
        for row, ste in enumerate(ORDER):
            y = TOP + row * (HEIGHT + GAP_Y)
            if column == 0:
                parts.append(svg.text(12, y + HEIGHT / 2 + 4, ste.upper()))
            parts += _panel(x, y, bits, ste)
    title = "The gradient of each estimator at 2, 4 and 8 bits"
    return {"estimators.svg": svg.drawing(width, height, title, parts)}


def _panel(left: float, top: float, bits: int, ste: str) -> list[str]:
    """The plot of one estimator at one number of bits."""
    most, bottom = LARGEST[bits], top + HEIGHT
    places = {-most: left + WIDTH / 4, 0: left + WIDTH / 2, most: left + 3 * WIDTH / 4}
    parts = [svg.line((place, top), (place, bottom), dashes="2 3") for place in places.values()]
    parts.append(svg.line((left, bottom), (left + WIDTH, bottom), "hf-axis"))
    parts += [svg.text(place, bottom + 14, str(code), anchor="middle") for code, place in places.items()]
    parts += [svg.text(left - 4, y + 4, label, anchor="end") for label, y in (("0", bottom), ("1", top + 4))]
    x, dx = gradients(bits, ste)
    across = ((x.double() / most + 2) / 4 * WIDTH + left).tolist()
    down = (bottom - dx.double() * (HEIGHT - 4)).tolist()
    parts.append(svg.path(_simplified(list(zip(across, down, strict=True))), "hf-line-a"))
    return parts


def _simplified(points: list[Point], tolerance: float = 0.05) -> list[Point]:
    """The fewest points that draw the same line within ``tolerance`` pixels."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    off = [abs(y - y0 - (y1 - y0) * (x - x0) / (x1 - x0)) for x, y in points]
    worst = max(range(len(points)), key=off.__getitem__)
    if off[worst] <= tolerance:
        return [points[0], points[-1]]
    return _simplified(points[: worst + 1])[:-1] + _simplified(points[worst:])
