"""Exact grid_sample and affine_grid, and their gradients.

The sample positions are those of the reference, in the compute dtype. The guarantee starts from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from exact.element import Element, as_given, sampled, summed
from exact.indexed import numbers
from exact.numbers import Array, Exact, lost_below
from holdfast.numerics.reference import widen
from holdfast.ops.grid_sample.plan import Mode
from holdfast.ops.grid_sample.reference import axes_of, padded_coordinate, plane_shift

#: Number of elements to check: fewer than elsewhere, because a sample has many corners.
SAMPLED = 8


@cache
def constant(value: float) -> Exact:
    return Exact.of(np.array(value))


ONE = constant(1.0)


def ones(t: Exact) -> Exact:
    return Exact(t.whole * 0 + 1, 0)


def nearest(t: Exact) -> tuple[list[Exact], list[Exact]]:
    return [ones(t)], [ones(t)]


def linear(t: Exact) -> tuple[list[Exact], list[Exact]]:
    """The weights of two taps and their slopes."""
    return [ones(t) - t, t], [Exact(-ones(t).whole, 0), ones(t)]


def near(u: Exact) -> tuple[Exact, Exact]:
    weight = ((constant(1.25) * u - constant(2.25)) * u) * u + ONE
    return weight, (constant(3.75) * u - constant(4.5)) * u


def far(u: Exact) -> tuple[Exact, Exact]:
    weight = ((constant(3.75) - constant(0.75) * u) * u - constant(6.0)) * u + constant(3.0)
    return weight, (constant(7.5) - constant(2.25) * u) * u - constant(6.0)


def cubic(t: Exact) -> tuple[list[Exact], list[Exact]]:
    """The weights of four taps and their slopes."""
    rest = ONE - t
    made = [far(t + ONE), near(t), near(rest), far(rest + ONE)]
    slopes = [slope if tap < 2 else Exact(-slope.whole, slope.shift) for tap, (_, slope) in enumerate(made)]
    return [weight for weight, _ in made], slopes


TAPS = {Mode.NEAREST: nearest, Mode.BILINEAR: linear, Mode.BICUBIC: cubic}


class Corners:
    """The corners of every sample: their pixels (-1 outside the image), and weights and slopes on demand.

    ``pixel[k]`` has shape (N, samples). ``scales`` are the derivatives of the coordinates by the grid.
    """

    def __init__(self, desc: Any, args: Any) -> None:
        grid = widen(args.grid, desc.compute).reshape(desc.batch, desc.samples, desc.axes)
        axes = axes_of(grid, desc)
        sizes = list(reversed(desc.image_size))
        self.mode = desc.mode
        self.scales = [axis.scale.astype(np.float64) for axis in axes]
        with np.errstate(all="ignore"):
            self.x = [padded_coordinate(grid[..., a], size, desc)[0] for a, size in enumerate(sizes)]
        self.taps = [
            tuple(reversed(taps)) for taps in product(*(range(len(axis.index)) for axis in reversed(axes)))
        ]
        self.pixel = []
        for tap in self.taps:
            pixel, inside = np.zeros((desc.batch, desc.samples), np.int64), True
            for a in reversed(range(desc.axes)):
                pixel = pixel * sizes[a] + axes[a].index[tap[a]]
                inside = inside & (axes[a].index[tap[a]] >= 0)
            self.pixel.append(np.where(inside, pixel, -1))

    def at(self, places: Any) -> list[tuple[list[Exact], list[Exact]]]:
        """For each axis, the weights and slopes of the taps of some samples."""
        chosen = [np.atleast_1d(x[places]) for x in self.x]
        return [TAPS[self.mode](Exact.of(x) - Exact.of(np.floor(x))) for x in chosen]

    def factor(self, k: int, taps: list[tuple[list[Exact], list[Exact]]], sloped: int = -1) -> Exact:
        """The weight of corner ``k`` for the taps from ``at``, or its slope along axis ``sloped``."""
        factors = [
            (slopes if a == sloped else weights)[self.taps[k][a]] for a, (weights, slopes) in enumerate(taps)
        ]
        return prod(factors[1:], start=factors[0])


def _joined(parts: list[Exact]) -> Exact:
    shift = min((part.shift for part in parts), default=0)
    whole = [(part.whole << (part.shift - shift)).reshape(-1) for part in parts]
    return Exact(np.concatenate([np.zeros(0, object), *whole]), shift)


def _of_magnitudes(element: Element, magnitudes: Exact, times: Fraction = Fraction(1)) -> Element:
    return Element(
        element.output, element.place, element.right, abs(times) * abs(magnitudes).total(), element.lost
    )


def grid_sample(desc: Any, args: Any) -> Iterator[Element]:
    image = numbers(args.input).reshape(desc.batch, desc.channels, desc.pixels)
    made = Corners(desc, args)
    for place in sampled(desc.batch * desc.channels * desc.samples, SAMPLED):
        n, c, s = np.unravel_index(place, (desc.batch, desc.channels, desc.samples))
        inside = [k for k, pixel in enumerate(made.pixel) if pixel[n, s] >= 0]
        values = np.array([image[n, c, made.pixel[k][n, s]] for k in inside])
        if not np.isfinite(values).all():
            continue
        pixels = Exact.of(values)
        taps = made.at((n, s))
        terms = _joined([made.factor(k, taps) for k in inside]) * pixels
        yield _of_magnitudes(summed("out", place, terms, lost=terms.lost(desc.compute)), pixels)


def grid_sample_backward(desc: Any, args: Any) -> Iterator[Element]:
    made = Corners(desc, args)
    dout = numbers(args.dout).reshape(desc.batch, desc.channels, desc.samples)
    if desc.needs_dinput:
        yield from _gradient_of_input(desc, dout, made)
    if desc.needs_dgrid:
        yield from _gradient_of_grid(desc, args, dout, made)


def _gradient_of_input(desc: Any, dout: Array, made: Corners) -> Iterator[Element]:
    with np.errstate(all="ignore"):
        shifts = plane_shift(dout.astype(desc.compute.name), desc.fraction_bits)
    for place in sampled(desc.batch * desc.channels * desc.pixels, SAMPLED):
        n, c, p = np.unravel_index(place, (desc.batch, desc.channels, desc.pixels))
        hits = [(k, np.flatnonzero(pixel[n] == p)) for k, pixel in enumerate(made.pixel)]
        hits = [(k, samples) for k, samples in hits if len(samples)]
        values = np.concatenate([dout[n, c, :0], *(dout[n, c, samples] for _, samples in hits)])
        if not np.isfinite(values).all():
            continue
        weights = _joined([made.factor(k, made.at((n, samples))) for k, samples in hits])
        terms = weights * Exact.of(values)
        words = 2 if desc.compute.bits == 64 else 1
        unit = Fraction(2) ** -(int(shifts[n, c, 0]) + (words - 1) * desc.fraction_bits)
        lost = terms.lost(desc.compute) + len(values) * unit
        yield _of_magnitudes(summed("dinput", place, terms, lost=lost), Exact.of(values))


def _gradient_of_grid(desc: Any, args: Any, dout: Array, made: Corners) -> Iterator[Element]:
    image = numbers(args.input).reshape(desc.batch, desc.channels, desc.pixels)
    for place in sampled(desc.batch * desc.samples * desc.axes, SAMPLED):
        n, s, a = np.unravel_index(place, (desc.batch, desc.samples, desc.axes))
        times = Fraction(float(made.scales[a][n, s]))
        if times == 0 or desc.mode == Mode.NEAREST:
            yield as_given("dgrid", place, 0.0)
            continue
        inside = [k for k, pixel in enumerate(made.pixel) if pixel[n, s] >= 0]
        pixels = np.array([image[n, :, made.pixel[k][n, s]] for k in inside])
        pixels = pixels.reshape(len(inside), desc.channels)
        if not (np.isfinite(pixels).all() and np.isfinite(dout[n, :, s]).all()):
            continue
        products = Exact.of(pixels) * Exact.of(dout[n, :, s])[None, :]
        taps = made.at((n, s))
        slopes = _joined([made.factor(k, taps, a) for k in inside])[:, None]
        # Slopes are below 2, so a lost product counts at most twice.
        sums = Exact((products * slopes).whole.sum(1), products.shift + slopes.shift)
        lost = 2 * products.lost(desc.compute) + sums.lost(desc.compute)
        yield _of_magnitudes(summed("dgrid", place, products * slopes, times, lost), products, times)


def coordinate_numerators(desc: Any) -> tuple[list[Array], list[int]]:
    """x, y and z of every output position as integer numerators, and the denominator of each."""
    along = [2 * np.arange(size) - (size - 1) for size in desc.output_size]
    steps = [max(size - 1 if desc.align_corners else size, 1) for size in desc.output_size]
    spread = np.meshgrid(*along, indexing="ij")
    return [axis.reshape(-1) for axis in reversed(spread)], list(reversed(steps))


def affine_grid(desc: Any, args: Any) -> Iterator[Element]:
    theta, (along, steps) = numbers(args.theta), coordinate_numerators(desc)
    for place in sampled(desc.batch * desc.places * desc.axes):
        n, p, j = np.unravel_index(place, (desc.batch, desc.places, desc.axes))
        row = theta[n, j]
        if not np.isfinite(row).all():
            continue
        common = prod(steps)
        at = [int(along[k][p]) * (common // steps[k]) for k in range(desc.axes)] + [common]
        terms = Exact.of(row) * Exact.whole_numbers(np.array(at, object))
        yield summed("grid", place, terms, Fraction(1, common))


def affine_grid_backward(desc: Any, args: Any) -> Iterator[Element]:
    dgrid = numbers(args.dgrid).reshape(desc.batch, desc.places, desc.axes)
    along, steps = coordinate_numerators(desc)
    for place in sampled(desc.batch * desc.axes * (desc.axes + 1)):
        n, j, k = np.unravel_index(place, (desc.batch, desc.axes, desc.axes + 1))
        values = dgrid[n, :, j]
        if not np.isfinite(values).all():
            continue
        terms, step = Exact.of(values), 1
        lost = Fraction(0)
        if k < desc.axes:
            terms, step = terms * Exact.whole_numbers(along[k]), steps[k]
            lost = step * lost_below(values * along[k] / step, desc.compute)
        yield summed("dtheta", place, terms, Fraction(1, step), lost)
