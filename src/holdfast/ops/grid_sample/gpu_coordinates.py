"""Coordinates, taps and corners of samples, in Triton: the formulas of the reference."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.core.strided import span
from holdfast.numerics.gpu import WHOLE_32, WHOLE_64, quotient, widen
from holdfast.ops.grid_sample import plan
from holdfast.ops.grid_sample.plan import TAPS, Mode, Padding, SampleDescriptor

MARGIN, LONGEST_AXIS = tl.constexpr(plan.MARGIN), tl.constexpr(plan.LONGEST_AXIS)
NEAREST, BILINEAR, BICUBIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ZEROS, BORDER, REFLECTION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_MODES = {Mode.NEAREST: NEAREST, Mode.BILINEAR: BILINEAR, Mode.BICUBIC: BICUBIC}
_PADDINGS = {Padding.ZEROS: ZEROS, Padding.BORDER: BORDER, Padding.REFLECTION: REFLECTION}


@triton.jit
def rint(x):
    """Round half to even, for |x| up to LONGEST_AXIS plus a few."""
    WHOLE: tl.constexpr = WHOLE_64 if x.dtype == tl.float64 else WHOLE_32
    whole = tl.where(x < 0, -WHOLE, WHOLE).to(x.dtype)
    return tl.where(tl.abs(x) < WHOLE, (x + whole) - whole, x)


@triton.jit
def clipped(x, scale, last):
    """Clip to the outermost pixel centres, with scale 0 there."""
    moves = (x > 0) & (x < last)
    return tl.where(moves, x, tl.where(x > 0, last, 0.0)), tl.where(moves, scale, 0.0)


@triton.jit
def reflected(x, scale, size, ALIGNED: tl.constexpr):
    """Reflect, before ``clipped``; the sign of the scale is the direction. Zero if the period is 0."""
    low = 0.0 if ALIGNED else -0.5
    period = (2 * (size - 1) if ALIGNED else 2 * size).to(x.dtype) + tl.zeros_like(x)
    from_low = x - low
    away = tl.abs(from_low)
    within = away - tl.floor(quotient(away, period)) * period
    back = period - within
    turned = within > back
    there = tl.where(turned, back, within) + low
    backwards = turned != (from_low < 0)
    return tl.where(period > 0, there, 0.0), tl.where(backwards, -scale, scale)


@triton.jit
def unpadded_coordinate(g, size, PADDING: tl.constexpr, ALIGNED: tl.constexpr):
    """Coordinate of a sample before padding, and its scale: its derivative by the grid coordinate.

    To halve a product or to multiply by half the size gives the same bits, unless the product overflows.
    Reflection alone tells infinity from another large coordinate.
    """
    size = size + tl.zeros(g.shape, tl.int32)
    scale = (size - 1 if ALIGNED else size).to(g.dtype) * 0.5
    if PADDING != REFLECTION:
        x = (g + 1.0) * scale
        x = x if ALIGNED else x - 0.5
    elif ALIGNED:
        x = ((g + 1.0) * 0.5) * (size - 1).to(g.dtype)
    else:
        x = ((g + 1.0) * size.to(g.dtype) - 1.0) * 0.5
    return x, scale


@triton.jit
def padded_coordinate(g, size, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr):
    """Coordinate of a sample after padding, and its scale."""
    x, scale = unpadded_coordinate(g, size, PADDING, ALIGNED)
    size = size + tl.zeros(g.shape, tl.int32)
    last = (size - 1).to(g.dtype)
    before = tl.full(g.shape, -MARGIN, g.dtype)
    beyond = (size + (MARGIN - 1)).to(g.dtype)
    near = (x >= before) & (x <= beyond)
    if PADDING == ZEROS:
        return tl.where(near, x, before), tl.where(near, scale, 0.0)
    elif MODE == BICUBIC and PADDING == BORDER:
        far = tl.where(x > 0, beyond, tl.where(x < 0, before, 0.0))
        return tl.where(near, x, far), tl.where(near, scale, 0.0)
    elif MODE == BICUBIC:
        countable = tl.abs(x) <= 1.0 * LONGEST_AXIS
        return tl.where(countable, x, 0.0), tl.where(countable, scale, 0.0)
    else:
        if PADDING == REFLECTION:
            x, scale = reflected(x, scale, size, ALIGNED)
        return clipped(x, scale, last)


@triton.jit
def first_tap(x, MODE: tl.constexpr):
    """Unpadded pixel of the first tap, and the fraction t of the coordinate."""
    if MODE == NEAREST:
        return rint(x).to(tl.int32), tl.zeros_like(x)
    else:
        floor = tl.floor(x)
        return floor.to(tl.int32) - (1 if MODE == BICUBIC else 0), x - floor


@triton.jit
def tap_pixel(
    first, TAP: tl.constexpr, size, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr
):
    """Pixel of a tap along its axis; -1 outside the image."""
    index = first + TAP
    if MODE == BICUBIC and PADDING == BORDER:
        return tl.minimum(tl.maximum(index, 0), size - 1)
    elif MODE == BICUBIC and PADDING == REFLECTION:
        period = tl.maximum(2 * (size - 1) if ALIGNED else 2 * size, 1)
        within = index % period
        within = tl.where(within < 0, within + period, within)
        return tl.where(within < size, within, period - (0 if ALIGNED else 1) - within)
    else:
        return tl.where((index >= 0) & (index < size), index, -1)


@triton.jit
def near_weight(u):
    return ((1.25 * u - 2.25) * u) * u + 1.0


@triton.jit
def far_weight(u):
    return ((3.75 - 0.75 * u) * u - 6.0) * u + 3.0


@triton.jit
def near_slope(u):
    return (3.75 * u - 4.5) * u


@triton.jit
def far_slope(u):
    return (7.5 - 2.25 * u) * u - 6.0


@triton.jit
def tap_weight(t, TAP: tl.constexpr, MODE: tl.constexpr):
    """Weight of a tap at fraction ``t``."""
    if MODE == NEAREST:
        return tl.full(t.shape, 1.0, t.dtype)
    elif MODE == BILINEAR:
        return 1.0 - t if TAP == 0 else t
    elif TAP < 2:
        return far_weight(t + 1.0) if TAP == 0 else near_weight(t)
    else:
        rest = 1.0 - t
        return near_weight(rest) if TAP == 2 else far_weight(rest + 1.0)


@triton.jit
def tap_slope(t, TAP: tl.constexpr, MODE: tl.constexpr):
    """Derivative of ``tap_weight`` by ``t``."""
    if MODE == BILINEAR:
        return tl.full(t.shape, -1.0 if TAP == 0 else 1.0, t.dtype)
    elif TAP < 2:
        return far_slope(t + 1.0) if TAP == 0 else near_slope(t)
    else:
        rest = 1.0 - t
        return -near_slope(rest) if TAP == 2 else -far_slope(rest + 1.0)


@triton.jit
def load_coordinate(grid, at, inside, AXIS: tl.constexpr, AXES: tl.constexpr, step, COMPUTE: tl.constexpr):
    """Grid coordinate of each sample along AXIS; 0 if the grid has no such axis."""
    if AXIS < AXES:
        return widen(tl.load(grid + at + AXIS * step, mask=inside, other=0.0), COMPUTE)
    else:
        return tl.zeros(at.shape, COMPUTE)


@triton.jit
def locate(
    grid, at, inside, step, sizes,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """First taps, fractions and scales, each for x, y and z, of the samples at offsets ``at`` of the grid."""
    gx = load_coordinate(grid, at, inside, 0, AXES, step, COMPUTE)
    gy = load_coordinate(grid, at, inside, 1, AXES, step, COMPUTE)
    gz = load_coordinate(grid, at, inside, 2, AXES, step, COMPUTE)
    return located(gx, gy, gz, sizes, MODE, PADDING, ALIGNED)


@triton.jit
def located(gx, gy, gz, sizes, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr):
    """First taps, fractions and scales, each for x, y and z, of samples at these grid coordinates."""
    x, scale_x = padded_coordinate(gx, sizes[0], MODE, PADDING, ALIGNED)
    y, scale_y = padded_coordinate(gy, sizes[1], MODE, PADDING, ALIGNED)
    z, scale_z = padded_coordinate(gz, sizes[2], MODE, PADDING, ALIGNED)
    first_x, tx = first_tap(x, MODE)
    first_y, ty = first_tap(y, MODE)
    first_z, tz = first_tap(z, MODE)
    return (first_x, first_y, first_z), (tx, ty, tz), (scale_x, scale_y, scale_z)


@triton.jit
def corner_pixel(
    first, CORNER: tl.constexpr, sizes,
    AXES: tl.constexpr, TAPS: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Pixel of a corner along x, y and z, and whether it is inside the image."""
    x = tap_pixel(first[0], CORNER % TAPS, sizes[0], MODE, PADDING, ALIGNED)
    y = tap_pixel(first[1], CORNER // TAPS % TAPS, sizes[1], MODE, PADDING, ALIGNED)
    if AXES == 3:
        z = tap_pixel(first[2], CORNER // TAPS // TAPS, sizes[2], MODE, PADDING, ALIGNED)
    else:
        z = tl.zeros_like(x)
    return x, y, z, (x | y | z) >= 0


@triton.jit
def corner_weight(t, CORNER: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr, MODE: tl.constexpr):
    """Product of a corner's weights, x times y times z."""
    weight = tap_weight(t[0], CORNER % TAPS, MODE) * tap_weight(t[1], CORNER // TAPS % TAPS, MODE)
    return weight * tap_weight(t[2], CORNER // TAPS // TAPS, MODE) if AXES == 3 else weight


@triton.jit
def factor(
    t, AXIS: tl.constexpr, CORNER: tl.constexpr, BY: tl.constexpr, TAPS: tl.constexpr, MODE: tl.constexpr
):
    """Factor of AXIS in the slope of a corner along axis BY."""
    TAP: tl.constexpr = (
        CORNER if AXIS == 0 else CORNER // TAPS if AXIS == 1 else CORNER // TAPS // TAPS
    ) % TAPS
    return tap_slope(t[AXIS], TAP, MODE) if AXIS == BY else tap_weight(t[AXIS], TAP, MODE)


@triton.jit
def corner_slope(
    t, CORNER: tl.constexpr, BY: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr, MODE: tl.constexpr
):
    """Derivative of ``corner_weight`` by the coordinate along axis BY."""
    slope = factor(t, 0, CORNER, BY, TAPS, MODE) * factor(t, 1, CORNER, BY, TAPS, MODE)
    return slope * factor(t, 2, CORNER, BY, TAPS, MODE) if AXES == 3 else slope


@triton.jit
def unravel(place, sizes, AXES: tl.constexpr):
    """Indices along x, y and z of a row-major index."""
    row = place // sizes[0]
    if AXES == 3:
        return place - row * sizes[0], row % sizes[1], row // sizes[1]
    else:
        return place - row * sizes[0], row, tl.zeros_like(row)


@triton.jit
def offset_of(n, x, y, z, strides):
    """Offset in elements; the strides are of n, x, y and z."""
    offset = x.to(tl.int64) * strides[1] + y.to(tl.int64) * strides[2] + z.to(tl.int64) * strides[3]
    return n.to(tl.int64) * strides[0] + offset


def sampling_constants(desc: SampleDescriptor) -> dict[str, Any]:
    """Constexpr parameters of the kernels that locate samples."""
    return {
        "AXES": desc.axes,
        "MODE": _MODES[desc.mode],
        "PADDING": _PADDINGS[desc.padding_mode],
        "ALIGNED": desc.align_corners,
        "COMPUTE": tl.float64 if desc.compute.bits == 64 else tl.float32,
        "TAPS": TAPS[desc.mode],
    }


def sizes_of(size: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes along x, y and z."""
    return tuple(max(pixels, 1) for pixels in (*reversed(size), 1)[:3])


def strides_of(image: torch.Tensor) -> tuple[int, ...]:
    """Strides of n, x, y and z of a tensor of shape (N, C, ...)."""
    return (image.stride(0), *(*reversed(image.stride()[2:]), 0)[:3])


def grid_strides_of(grid: torch.Tensor) -> tuple[int, ...]:
    """Strides of n, x, y and z of a tensor of shape (N, ..., axes)."""
    return (grid.stride(0), *(*reversed(grid.stride()[1:-1]), 0)[:3])


def offset_type(image: torch.Tensor) -> Any:
    """Type of offsets within a tensor."""
    return tl.int32 if span(image.shape, image.stride()) < 2**31 else tl.int64
