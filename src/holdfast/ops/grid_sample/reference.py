"""grid_sample and its gradients in NumPy, the definition. Each operation is rounded separately.

A sample has coordinates (x, y, and z in 3-D) in pixels. Along each axis it has taps: the pixels that it
interpolates, each with a weight. A corner is one tap of every axis; its weight is the product of the taps'
weights, x times y times z. Corners are numbered with x fastest: nw, ne, sw, se.

    out[n, c, sample]    = sum over corners: weight * pixel
    dinput[n, c, pixel]  = sum over corners and samples: weight * dout, in integers
    dgrid[n, sample, x]  = scale * sum over corners: slope * (ordered sum over channels: dout * pixel)

The sums over corners start from +0.0 and go from the first corner to the last. A corner outside the image is
omitted from every sum, not multiplied by 0. A corner inside is added whatever its weight.

The sums of dinput are exact sums of integers, so their order is arbitrary. Each plane of dout, one image and
one channel, is scaled by a power of two such that no sum can overflow (``plane_shift``). Each product of a
weight and a scaled dout is truncated to an integer. The sum is converted once and scaled back. A pixel with a
term that is not finite is what an IEEE sum would be: NaN, inf or -inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from holdfast.core.plan import Launch
from holdfast.numerics.reference import Array, accumulated, store, widen
from holdfast.ops.grid_sample.plan import (
    LONGEST_AXIS,
    MARGIN,
    GridSampleArgs,
    GridSampleBackwardArgs,
    GridSampleBackwardDescriptor,
    GridSampleDescriptor,
    Mode,
    Padding,
    SampleDescriptor,
    SampleKernel,
)
from holdfast.ops.segment_sum.reference import ordered_sum


def pixel_coordinate(g: Array, size: int, align_corners: bool) -> Array:
    """Grid coordinate in pixels; the centre of the first pixel is 0."""
    kind = g.dtype.type
    one, two = kind(1), kind(2)
    x: Array = ((g + one) / two) * kind(size - 1) if align_corners else ((g + one) * kind(size) - one) / two
    return x


def pixels_per_unit(size: int, align_corners: bool) -> float:
    """Derivative of the pixel coordinate by the grid coordinate; exact."""
    return ((size - 1) if align_corners else size) / 2


def clipped(x: Array, size: int) -> tuple[Array, Array]:
    """Clip to the outermost pixel centres; also whether x was strictly inside. NaN becomes 0."""
    kind = x.dtype.type
    last = kind(size - 1)
    moves = (x > 0) & (x < last)
    return np.where(x > 0, np.where(x < last, x, last), kind(0)), moves


def reflected(x: Array, size: int, align_corners: bool) -> tuple[Array, Array]:
    """Reflect x into the image, and the derivative of the result by x: 1, -1 or 0.

    Mirrors are at the outermost pixel centres, or at the edges, half a pixel further out; the result is then
    clipped to the centres.
    """
    kind = x.dtype.type
    low = kind(0 if align_corners else -0.5)
    period = kind(2 * (size - 1) if align_corners else 2 * size)
    if period == 0:
        return np.zeros_like(x), np.zeros_like(x)
    from_low = x - low
    away = np.abs(from_low)
    within = away - np.floor(away / period) * period
    back = period - within
    turned = within > back
    mirrored, moves = clipped(np.where(turned, back, within) + low, size)
    return mirrored, np.where(moves, np.where(turned ^ (from_low < 0), kind(-1), kind(1)), kind(0))


def padded_coordinate(g: Array, size: int, desc: SampleDescriptor) -> tuple[Array, Array]:
    """Coordinate of a sample after padding, and its derivative by the grid coordinate.

    The coordinate is finite and at most ``LONGEST_AXIS`` plus a few pixels, so its floor is an index.
    """
    kind = g.dtype.type
    x = pixel_coordinate(g, size, desc.align_corners)
    scale = kind(pixels_per_unit(size, desc.align_corners))
    if desc.padding_mode == Padding.ZEROS:
        near = (x >= -MARGIN) & (x <= size + (MARGIN - 1))
        return np.where(near, x, kind(-MARGIN)), np.where(near, scale, kind(0))
    if desc.mode == Mode.BICUBIC:  # its taps are clipped or reflected separately
        if desc.padding_mode == Padding.BORDER:
            near = (x >= -MARGIN) & (x <= size + (MARGIN - 1))
            far = np.where(x > 0, kind(size + (MARGIN - 1)), np.where(x < 0, kind(-MARGIN), kind(0)))
            return np.where(near, x, far), np.where(near, scale, kind(0))
        countable = np.abs(x) <= LONGEST_AXIS
        return np.where(countable, x, kind(0)), np.where(countable, scale, kind(0))
    if desc.padding_mode == Padding.BORDER:
        x, moves = clipped(x, size)
        return x, np.where(moves, scale, kind(0))
    x, way = reflected(x, size, desc.align_corners)
    return x, way * scale


def nearest_index(x: Array) -> Array:
    """Nearest pixel; half to even."""
    return np.rint(x).astype(np.int64)


def mirrored_index(index: Array, size: int, align_corners: bool) -> Array:
    """Reflect a pixel index into the image, in integer arithmetic."""
    period = 2 * (size - 1) if align_corners else 2 * size
    if period == 0:
        return np.zeros_like(index)
    within = index % period
    return np.where(within < size, within, period - (0 if align_corners else 1) - within)


def near_weight(u: Array) -> Array:
    """Cubic weight of a tap at distance u, for u from 0 to 1."""
    kind = u.dtype.type
    weight: Array = ((kind(1.25) * u - kind(2.25)) * u) * u + kind(1)
    return weight


def far_weight(u: Array) -> Array:
    """Cubic weight of a tap at distance u, for u from 1 to 2."""
    kind = u.dtype.type
    weight: Array = ((kind(3.75) - kind(0.75) * u) * u - kind(6)) * u + kind(3)
    return weight


def near_slope(u: Array) -> Array:
    """Derivative of ``near_weight``."""
    kind = u.dtype.type
    slope: Array = (kind(3.75) * u - kind(4.5)) * u
    return slope


def far_slope(u: Array) -> Array:
    """Derivative of ``far_weight``."""
    kind = u.dtype.type
    slope: Array = (kind(7.5) - kind(2.25) * u) * u - kind(6)
    return slope


def cubic(t: Array) -> tuple[list[Array], list[Array]]:
    """Weights of the taps at -1, 0, 1 and 2 for a sample at t from 0 to 1, and their derivatives by t."""
    one = t.dtype.type(1)
    rest = one - t
    weights = [far_weight(t + one), near_weight(t), near_weight(rest), far_weight(rest + one)]
    slopes = [far_slope(t + one), near_slope(t), -near_slope(rest), -far_slope(rest + one)]
    return weights, slopes


@dataclass(frozen=True)
class Axis:
    """The taps of every sample along one axis: pixel index (-1 outside the image), weight and slope.

    The slope is the derivative of the weight by the coordinate. ``scale`` is the derivative of the coordinate
    by the grid coordinate: 0 where padding holds the coordinate.
    """

    index: list[Array]
    weight: list[Array]
    slope: list[Array]
    scale: Array


def taps(g: Array, size: int, desc: SampleDescriptor) -> Axis:
    """Taps along an axis of ``size`` pixels, for grid coordinates ``g``."""
    kind = g.dtype.type
    x, scale = padded_coordinate(g, size, desc)
    one = np.ones_like(x)
    if desc.mode == Mode.NEAREST:
        index, weight, slope = [nearest_index(x)], [one], [one]
        scale = np.zeros_like(scale)
    else:
        first = np.floor(x)
        t = x - first
        base = first.astype(np.int64)
        if desc.mode == Mode.BILINEAR:
            index, weight, slope = [base, base + 1], [kind(1) - t, t], [-one, one]
        else:
            index = [base + offset for offset in (-1, 0, 1, 2)]
            weight, slope = cubic(t)
    if desc.mode == Mode.BICUBIC and desc.padding_mode == Padding.BORDER:
        index = [np.clip(i, 0, size - 1) for i in index]
    if desc.mode == Mode.BICUBIC and desc.padding_mode == Padding.REFLECTION:
        index = [mirrored_index(i, size, desc.align_corners) for i in index]
    return Axis([np.where((i >= 0) & (i < size), i, -1) for i in index], weight, slope, scale)


def axes_of(grid: Array, desc: SampleDescriptor) -> list[Axis]:
    """Taps along x, y and z for a grid of shape (N, samples, 2 or 3)."""
    with np.errstate(all="ignore"):
        return [taps(grid[..., a], size, desc) for a, size in enumerate(reversed(desc.image_size))]


@dataclass(frozen=True)
class Corner:
    """One corner of every sample: pixel (-1 outside the image), weight, and slope along each axis."""

    pixel: Array
    weight: Array
    slopes: list[Array]


def corners(axes: list[Axis], desc: SampleDescriptor) -> Iterator[Corner]:
    """All corners in order, x fastest."""
    sizes = list(reversed(desc.image_size))
    for chosen in product(*(range(len(axis.index)) for axis in reversed(axes))):
        tap = list(reversed(chosen))
        pixel: Array = np.zeros_like(axes[0].index[0])
        inside: Array = np.ones_like(pixel, dtype=bool)
        for a in reversed(range(len(axes))):
            index = axes[a].index[tap[a]]
            pixel = pixel * sizes[a] + index
            inside = inside & (index >= 0)
        yield Corner(
            np.where(inside, pixel, -1),
            _product([axis.weight[k] for axis, k in zip(axes, tap, strict=True)]),
            [
                _product([(axis.slope if a == b else axis.weight)[tap[b]] for b, axis in enumerate(axes)])
                for a in range(len(axes))
            ],
        )


def _product(factors: list[Array]) -> Array:
    total = factors[0]
    for factor in factors[1:]:
        total = total * factor
    return total


def at_pixels(image: Array, pixel: Array) -> Array:
    """image[n, c, pixel[n, sample]]; arbitrary for a pixel of -1."""
    return np.take_along_axis(image, np.maximum(pixel, 0)[:, None, :], axis=2)


def grid_sample(image: Array, grid: Array, desc: SampleDescriptor) -> Array:
    """Samples, of shape (N, C, samples), of an image of shape (N, C, pixels)."""
    axes = axes_of(grid, desc)
    out = np.zeros((desc.batch, desc.channels, desc.samples), image.dtype)
    with np.errstate(all="ignore"):
        for corner in corners(axes, desc):
            values, inside = at_pixels(image, corner.pixel), (corner.pixel >= 0)[:, None]
            if desc.mode == Mode.NEAREST:
                return np.where(inside, values, out)
            out = np.where(inside, out + corner.weight[:, None] * values, out)
    return out


def plane_shift(dout: Array, fraction_bits: int) -> Array:
    """The exponent of the power of two that scales each plane of ``dout``, of shape (N, C, samples).

    The largest finite magnitude of a plane is scaled to less than ``2**fraction_bits``. A plane of zeros and
    subnormal numbers is scaled as one of the smallest normal number.
    """
    magnitude = np.where(np.isfinite(dout), np.abs(dout), dout.dtype.type(0)).max(axis=2, initial=0)
    smallest = np.finfo(dout.dtype).smallest_normal
    _, exponent = np.frexp(np.maximum(magnitude, smallest))
    shift: Array = fraction_bits - exponent
    return shift[:, :, None]


def scaled(x: Array, shift: Array) -> Array:
    """``x`` times ``2**shift``, in two multiplications by representable factors."""
    half = shift // 2
    one = x.dtype.type(1)
    product: Array = (x * np.ldexp(one, half)) * np.ldexp(one, shift - half)
    return product


def whole_words(terms: Array, fraction_bits: int) -> list[Array]:
    """Each finite term as integers: truncated, and for float64 also its fraction, truncated."""
    words = [terms.astype(np.int64)]
    if terms.dtype == np.float64:
        rest = terms - words[0].astype(np.float64)
        words.append(np.ldexp(rest, fraction_bits).astype(np.int64))
    return words


def from_words(words: list[Array], like: Array, fraction_bits: int) -> Array:
    """The sums of words as floats."""
    value = words[0].astype(like.dtype)
    if len(words) > 1:
        value = value + np.ldexp(words[1].astype(like.dtype), -fraction_bits)
    return value


def gradient_of_input(dout: Array, grid: Array, desc: SampleDescriptor) -> Array:
    """dinput, of shape (N, C, pixels)."""
    bits = desc.fraction_bits
    dinput = np.zeros((desc.batch, desc.channels, desc.pixels), dout.dtype)
    every = list(corners(axes_of(grid, desc), desc))
    with np.errstate(all="ignore"):
        shift = plane_shift(dout, bits)
        change = scaled(dout, shift)
        for n in range(desc.batch):
            pixels = np.concatenate([corner.pixel[n] for corner in every])
            terms = np.concatenate([corner.weight[n] * change[n] for corner in every], axis=1)
            inside = pixels >= 0
            dinput[n] = sum_pixels(pixels[inside], terms[:, inside], desc.pixels, bits)
        return scaled(dinput, -shift)


def sum_pixels(pixels: Array, terms: Array, count: int, fraction_bits: int) -> Array:
    """Integer sums of ``terms``, of shape (C, terms), by pixel; of shape (C, ``count``)."""
    finite = np.isfinite(terms)
    sums: list[Array] = []
    for word in whole_words(np.where(finite, terms, terms.dtype.type(0)), fraction_bits):
        total = np.zeros((count, len(terms)), np.int64)
        np.add.at(total, pixels, word.T)
        sums.append(total.T)
    made = from_words(sums, terms, fraction_bits)
    special = np.zeros((count, len(terms)), terms.dtype)
    np.add.at(special, pixels, np.where(finite, terms.dtype.type(0), terms).T)
    return np.where(special.T == 0, made, special.T)


def gradient_of_grid(dout: Array, image: Array, grid: Array, desc: SampleDescriptor) -> Array:
    """dgrid, of shape (N, samples, 2 or 3)."""
    axes = axes_of(grid, desc)
    changes = [np.zeros((desc.batch, desc.samples), dout.dtype) for _ in axes]
    with np.errstate(all="ignore"):
        for corner in corners(axes, desc):
            products = dout * at_pixels(image, corner.pixel)
            total = ordered_sum(products.transpose(1, 0, 2))
            for a, slope in enumerate(corner.slopes):
                changes[a] = np.where(corner.pixel >= 0, changes[a] + slope * total, changes[a])
        scaled = [
            np.where(axis.scale != 0, change * axis.scale, dout.dtype.type(0))
            for axis, change in zip(axes, changes, strict=True)
        ]
    return np.stack(scaled, axis=-1)


class GridSample(SampleKernel[GridSampleDescriptor]):
    """``grid_sample``."""

    def prepare(self, args: GridSampleArgs) -> Launch[GridSampleArgs]:
        desc = self.desc

        def launch(stream: object, workspace: object, args: GridSampleArgs, addresses: object) -> None:
            image = widen(args.input, desc.compute).reshape(*desc.shape[:2], desc.pixels)
            grid = widen(args.grid, desc.compute).reshape(desc.batch, desc.samples, desc.axes)
            store(args.out, grid_sample(image, grid, desc))

        return launch


class GridSampleBackward(SampleKernel[GridSampleBackwardDescriptor]):
    """``gradient_of_input`` and ``gradient_of_grid``, each if needed."""

    def prepare(self, args: GridSampleBackwardArgs) -> Launch[GridSampleBackwardArgs]:
        desc = self.desc

        def launch(
            stream: object, workspace: object, args: GridSampleBackwardArgs, addresses: object
        ) -> None:
            dout = widen(args.dout, desc.compute).reshape(*desc.shape[:2], desc.samples)
            grid = widen(args.grid, desc.compute).reshape(desc.batch, desc.samples, desc.axes)
            made = {}
            if args.dinput is not None:
                made["dinput"] = gradient_of_input(dout, grid, desc)
            if args.dgrid is not None and args.input is not None:
                image = widen(args.input, desc.compute).reshape(*desc.shape[:2], desc.pixels)
                made["dgrid"] = gradient_of_grid(dout, image, grid, desc)
            for name, gradient in made.items():
                out = getattr(args, name)
                gradient = gradient.reshape(out.shape)
                store(out, accumulated(out, gradient, desc.compute) if args.accumulate else gradient)

        return launch
