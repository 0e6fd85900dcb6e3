"""Exact results of ops with scales: elementwise ops, and reductions over the elements of a scale."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath
import numpy as np
import torch

import holdfast as hf
from exact.element import Element, as_given, sampled, summed
from exact.indexed import numbers
from exact.numbers import Array, Exact, lost_below
from holdfast.core.formats import Format
from holdfast.numerics.reference import compute_type
from holdfast.ops.choose_scale.plan import SCALE_FLOOR
from holdfast.ops.tree_sum.reference import by_segment

FLOOR = Fraction(SCALE_FLOOR)


def spread(desc: Any, values: Any) -> Array:
    """The scale or zero point of each element, flat, in the compute dtype."""
    if not isinstance(values, torch.Tensor):
        made = torch.tensor(0 if values is None else values, dtype=torch.float64)
        return np.full(math.prod(desc.shape), float(made.to(desc.real.compute.torch)))
    strides = desc.view.scale_strides(values.shape, values.stride())
    found = values.detach().as_strided(desc.view.shape, strides, values.storage_offset())
    return np.asarray(found.double().reshape(-1).numpy())


def whole(zero_point: float) -> int:
    """The effective zero point: a learned one is rounded, and NaN becomes 0."""
    return 0 if math.isnan(zero_point) else round(min(max(zero_point, -(2.0**23)), 2.0**23))


def _flat(desc: Any, tensor: torch.Tensor) -> Array:
    if desc.per_byte > 1 and tensor.dtype == torch.uint8:
        tensor = hf.unpack(tensor.contiguous(), desc.codes.torch, desc.shape[-1])
    return numbers(tensor).reshape(-1)


def _elements(desc: Any, args: Any, *names: str) -> Iterator[tuple[int, float, int, list[float]]]:
    """Positions where the scale, the zero point and the operands ``names`` are finite."""
    operands = [_flat(desc, getattr(args, name)) for name in names]
    scales, zero_points = spread(desc, args.scale), spread(desc, getattr(args, "zero_point", None))
    for place in sampled(math.prod(desc.shape)):
        given, s = [float(values[place]) for values in operands], float(scales[place])
        if all(map(math.isfinite, [*given, s])) and s != 0:
            yield place, s, whole(float(zero_points[place])), given


def _element(output: str, place: int, right: Fraction) -> Element:
    return Element(output, place, right, abs(right))


@cache
def values_of(codes: Format) -> list[Fraction]:
    """The values of a float format that are not negative, in ascending order."""
    return [Fraction(codes.value(code)) for code in range(codes.highest_code + 1)]


def float_code(codes: Format, t: Fraction) -> int:
    """The index of the float format value nearest to t, ties to even. It is negative for negative t."""
    values = values_of(codes)
    above = bisect_left(values, abs(t))
    if above == len(values):
        code = above - 1
    elif above == 0:
        code = 0
    else:
        below = above - 1
        up, down = values[above] - abs(t), abs(t) - values[below]
        code = below if down < up or (down == up and below % 2 == 0) else above
    return -code if t < 0 else code


def _in_range(desc: Any, t: Any, lo: Any, hi: Any) -> bool:
    """Whether a quotient in the compute dtype is in range after rounding."""
    if not desc.codes.is_float:
        return bool(lo <= np.rint(t) <= hi)
    # 448 is even and 480 would be odd: a tie between them stays in range.
    return bool(np.isfinite(t)) and abs(Fraction(float(t))) <= (448 + 480) / 2


def quantize(desc: Any, args: Any) -> Iterator[Element]:
    q_min, q_max = desc.code_range
    for place, s, z, (x,) in _elements(desc, args, "x"):
        if desc.codes.is_float:
            right = float_code(desc.codes, Fraction(x) / Fraction(s))
            yield Element("q", place, Fraction(right), Fraction(0), codes=True)
            continue
        right = min(max(round(Fraction(x) / Fraction(s)) + z, q_min), q_max)
        yield Element("q", place, Fraction(right), Fraction(0), codes=True)


def quantize_backward(desc: Any, args: Any) -> Iterator[Element]:
    number, (q_min, q_max) = compute_type(desc.real.compute), desc.code_range
    for place, s, z, (dy, x) in _elements(desc, args, "dy", "x"):
        with np.errstate(all="ignore"):  # the mask of the forward, which uses the rounded quotient
            kept = _in_range(desc, number(x) / number(s), q_min - z, q_max - z)
        yield _element("dx", place, Fraction(dy) / Fraction(s) if kept else Fraction(0))


def dequantize(desc: Any, args: Any) -> Iterator[Element]:
    for place, s, z, (q,) in _elements(desc, args, "q"):
        yield _element("y", place, (Fraction(q) - z) * Fraction(s))


def dequantize_backward(desc: Any, args: Any) -> Iterator[Element]:
    for place, s, _, (dy,) in _elements(desc, args, "dy"):
        yield _element("dq", place, Fraction(dy) * Fraction(s))


def fake_quantize(desc: Any, args: Any) -> Iterator[Element]:
    """Exact fake_quantize, given the code of quantize."""
    number = compute_type(desc.real.compute)
    for place, s, z, (x,) in _elements(desc, args, "x"):
        with np.errstate(all="ignore"):
            t = number(x) / number(s)
        lo, hi = (end - z for end in desc.code_range)
        if desc.codes.is_float:
            code = float_code(desc.codes, Fraction(float(np.clip(t, lo, hi))))
            value = Fraction(desc.codes.value(abs(code))) * (-1 if code < 0 else 1)
        else:
            value = Fraction(int(min(max(np.rint(t), lo), hi)))
        yield _element("y", place, value * Fraction(s))


def fake_quantize_backward(desc: Any, args: Any) -> Iterator[Element]:
    for place, s, z, (dy, x) in _elements(desc, args, "dy", "x"):
        yield _element("dx", place, Fraction(dy) * estimator(desc, x, s, z))


def estimator(desc: Any, x: float, s: float, z: int) -> Fraction:
    """The factor of an estimator at its rounded argument."""
    number = compute_type(desc.real.compute)
    given, scale = number(x), number(s)
    lo, hi = (number(end - z) for end in desc.code_range)
    with np.errstate(all="ignore"):
        lo_x, hi_x, quotient = lo * scale, hi * scale, given / scale
        mid, half = (lo_x + hi_x) / number(2), (hi_x - lo_x) / number(2)
        t = (given - mid) / scale if desc.ste == "tanh" else np.abs((given - mid) / half)
    if desc.ste in ("identity", "in_range", "clipped_identity"):
        passes = {
            "identity": True,
            "in_range": _in_range(desc, quotient, lo, hi),
            "clipped_identity": lo_x <= given <= hi_x,
        }
        return Fraction(int(passes[desc.ste]))
    if np.isnan(t):
        return Fraction(0)
    if desc.ste == "hard_tanh":
        return 1 - Fraction(float(t)) if t < 1 else Fraction(0)
    with mpmath.workprec(200):
        e = mpmath.exp(-min(2 * abs(mpmath.mpf(float(t))), 80 if number is np.float32 else 700))
        return Fraction(*mpmath.libmp.to_rational((4 * e / (1 + e) ** 2)._mpf_))


def learned_backward(desc: Any, args: Any) -> Iterator[Element]:
    yield from fake_quantize_backward(desc, args)
    number = compute_type(desc.real.compute)
    xs, dys = (_segments(desc, numbers(values)) for values in (args.x, args.dy))
    scales, zeros = (_segments(desc, spread(desc, of)) for of in (args.scale, args.zero_point))
    factor = Fraction(desc.grad_factor)
    for place in sampled(desc.view.scale_count):
        x, dy = xs[place], dys[place]
        if not len(x):
            yield as_given("dscale", place, 0.0)
            continue
        s, z = float(scales[place][0]), whole(float(zeros[place][0]))
        if not (np.isfinite(x).all() and np.isfinite(dy).all() and math.isfinite(s)) or s == 0:
            continue
        lo, hi = (end - z for end in desc.code_range)
        with np.errstate(all="ignore"):
            t = x.astype(number) / number(s)
            r = np.rint(t)
        code, outside = np.clip(r, lo, hi).astype(np.int64), (r < lo) | (r > hi)
        codes, scale = Exact.whole_numbers(code), Exact.of(np.array(s))
        # dy (r - x / s) = dy (r s - x) / s, and dy lo = dy (lo s) / s
        steps = codes * scale - Exact.of(np.where(outside, 0.0, x))
        with np.errstate(all="ignore"):
            nearly = dy * np.where(outside, code, r - t)
        times = factor / Fraction(s)
        lost = lost_below(nearly, desc.real.compute) * abs(Fraction(s))
        made = summed("dscale", place, Exact.of(dy) * steps, times, lost)
        magnitude = abs(Exact.of(dy)) * (abs(codes) + Exact.whole_numbers(np.ones_like(code)))
        yield Element("dscale", place, made.right, abs(factor) * magnitude.total(), made.lost)
        if desc.zero_point_dtype is not None:
            terms = Exact.of(np.where(outside, -dy, 0.0)) * scale
            yield summed("dzero_point", place, terms, factor, terms.lost(desc.real.compute))


def _segments(desc: Any, values: Array) -> Array:
    """The elements of each scale, as rows."""
    count = desc.view.scale_count
    return by_segment(values.reshape(desc.shape), desc.view).reshape(count, -1) if count else values[:0]


def lsq_init(desc: Any, args: Any) -> Iterator[Element]:
    root = Fraction(math.isqrt(desc.q_max << 400), 1 << 200)
    xs = _segments(desc, numbers(args.x))
    for place in sampled(desc.view.scale_count):
        x = xs[place]
        if np.isfinite(x).all():
            right = 2 * abs(Exact.of(x)).total() / (max(len(x), 1) * root)
            yield _element("scale", place, max(right, FLOOR))


def observe_range(desc: Any, args: Any) -> Iterator[Element]:
    for place, low, high in _ranges(desc, args):
        yield _element("low", place, low)
        yield _element("high", place, high)


def _ranges(desc: Any, args: Any) -> Iterator[tuple[int, Fraction, Fraction]]:
    xs = _segments(desc, numbers(args.x))
    for place in sampled(desc.view.scale_count):
        x = np.append(xs[place], 0.0)
        if np.isfinite(x).all():
            yield place, Fraction(float(x.min())), Fraction(float(x.max()))


def choose_scale(desc: Any, args: Any) -> Iterator[Element]:
    lowest, highest = desc.ends(*desc.code_range)
    for place, low, high in _ranges(desc, args):
        if desc.symmetric:
            right = max(high / highest, low / lowest, FLOOR)
        else:
            right = max((high - low) / (highest - lowest), FLOOR)
            zero_point = min(max(lowest - round(low / right), lowest), highest)
            yield Element("zero_point", place, Fraction(zero_point), Fraction(0), codes=True)
        yield _element("scale", place, right)


def dynamic_quantize(desc: Any, args: Any) -> Iterator[Element]:
    """Exact codes, given the stored scale."""
    yield from choose_scale(desc, args)
    yield from quantize(desc, args)


def dynamic_fake_quantize(desc: Any, args: Any) -> Iterator[Element]:
    """The exact results, given the stored scale."""
    yield from choose_scale(desc, args)
    yield from fake_quantize(desc, args)


def dynamic_fake_quantize_backward(desc: Any, args: Any) -> Iterator[Element]:
    """The elements with finite operands. A scale that covers the data passes the gradient of all of them."""
    if not desc.covers_data:
        yield from fake_quantize_backward(desc, args)
        return
    for place, _, _, (dy, _) in _elements(desc, args, "dy", "x"):
        yield _element("dx", place, Fraction(dy))
