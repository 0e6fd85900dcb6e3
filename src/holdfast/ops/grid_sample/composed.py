"""grid_sample composed of torch operations, differentiable any number of times.

Only second derivatives with respect to the grid use it. It has the formulas of the reference but another
order of additions, so bits differ.
"""

from __future__ import annotations

from itertools import product

import torch

from holdfast.ops.grid_sample.plan import LONGEST_AXIS, MARGIN, Mode, Padding


def _clipped(x: torch.Tensor, size: int) -> torch.Tensor:
    """Clip to the outermost pixel centres, without a gradient there."""
    held = torch.where(x > 0, torch.full_like(x, size - 1), torch.zeros_like(x))
    return torch.where((x > 0) & (x < size - 1), x, held)


def _reflected(x: torch.Tensor, size: int, align_corners: bool) -> torch.Tensor:
    low, period = (0.0, 2 * (size - 1)) if align_corners else (-0.5, 2 * size)
    if period == 0:
        return torch.zeros_like(x)
    away = (x - low).abs()
    within = away - torch.floor(away / period).detach() * period
    return _clipped(torch.minimum(within, period - within) + low, size)


def _padded_coordinate(
    g: torch.Tensor, size: int, mode: str, padding: str, align_corners: bool
) -> torch.Tensor:
    x = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
    if padding == Padding.ZEROS:
        near = (x >= -MARGIN) & (x <= size + MARGIN - 1)
        return torch.where(near, x, torch.full_like(x, -MARGIN))
    if mode != Mode.BICUBIC:
        return _clipped(x, size) if padding == Padding.BORDER else _reflected(x, size, align_corners)
    if padding == Padding.BORDER:
        x = torch.where(x.isnan(), torch.zeros_like(x), x)
        return x.clamp(-MARGIN, size + MARGIN - 1)
    return torch.where(x.abs() <= LONGEST_AXIS, x, torch.zeros_like(x))


def _cubic_weights(t: torch.Tensor) -> list[torch.Tensor]:
    def near(u: torch.Tensor) -> torch.Tensor:
        return (1.25 * u - 2.25) * u * u + 1

    def far(u: torch.Tensor) -> torch.Tensor:
        return ((3.75 - 0.75 * u) * u - 6) * u + 3

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _taps(
    g: torch.Tensor, size: int, mode: str, padding: str, align_corners: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(pixel index, weight) of each tap along one axis."""
    x = _padded_coordinate(g, size, mode, padding, align_corners)
    first = torch.floor(x).detach()
    t, base = x - first, first.long()
    if mode == Mode.BILINEAR:
        return [(base, 1 - t), (base + 1, t)]
    index = [base + offset for offset in (-1, 0, 1, 2)]
    if padding == Padding.BORDER:
        index = [i.clamp(0, size - 1) for i in index]
    elif padding == Padding.REFLECTION:
        period, turn = (max(2 * (size - 1), 1), 0) if align_corners else (2 * size, 1)
        within = [i % period for i in index]
        index = [torch.where(i < size, i, period - turn - i) for i in within]
    return list(zip(index, _cubic_weights(t), strict=True))


def composed_grid_sample(
    image: torch.Tensor, grid: torch.Tensor, mode: str, padding: str, align_corners: bool
) -> torch.Tensor:
    """``grid_sample``, bilinear or bicubic, in the wider dtype of the two tensors."""
    axes, dtype = grid.shape[-1], torch.promote_types(image.dtype, grid.dtype)
    image, grid = image.to(dtype), grid.to(dtype)
    sizes = list(reversed(image.shape[2:]))
    taps = [_taps(grid[..., a], sizes[a], mode, padding, align_corners) for a in range(axes)]
    number = torch.arange(image.shape[0], device=image.device).reshape(-1, *[1] * axes)
    pixels = image.flatten(2).transpose(1, 2)
    out = torch.zeros((), dtype=dtype, device=image.device)
    for corner in product(*reversed(taps)):
        pixel = torch.zeros((), dtype=torch.long, device=image.device)
        inside = torch.ones((), dtype=torch.bool, device=image.device)
        weight = torch.ones((), dtype=dtype, device=image.device)
        for (index, own), size in zip(corner, reversed(sizes), strict=True):
            pixel, inside, weight = pixel * size + index, inside & (index >= 0) & (index < size), weight * own
        values = pixels[number, torch.where(inside, pixel, 0)]
        out = out + torch.where(inside[..., None], weight[..., None] * values, 0)
    return out.movedim(-1, 1)
