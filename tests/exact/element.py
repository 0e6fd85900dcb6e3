"""The exact value of one element of an output, and its allowed error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch

from exact.numbers import Exact, ulp

#: Number of elements of each output to check. Exact arithmetic is slow.
SAMPLED = 24


@dataclass(frozen=True)
class Element:
    """Element ``place`` of the flattened output ``output``.

    ``right`` is the exact value. ``magnitude`` is the unit of the error: for a sum, the sum of magnitudes.
    ``lost`` is the possible loss of subnormal terms. ``codes``: the unit of the error is 1.
    """

    output: str
    place: int
    right: Fraction
    magnitude: Fraction
    lost: Fraction = Fraction(0)
    codes: bool = False

    def allowed(self, bound: float, dtype: torch.dtype) -> Fraction:
        """The largest allowed error for a bound of ``bound`` units."""
        unit = Fraction(1) if self.codes else ulp(self.magnitude, dtype)
        return Fraction(bound) * unit + self.lost

    def overflows(self, *dtypes: torch.dtype) -> bool:
        """Whether the sum, or a partial sum, may overflow a dtype."""
        return any(self.magnitude > half_of_largest(dtype) for dtype in dtypes)


@cache
def half_of_largest(dtype: torch.dtype) -> Fraction:
    return Fraction(torch.finfo(dtype).max) / 2


def summed(
    output: str, place: int, terms: Exact, times: Fraction = Fraction(1), lost: Fraction = Fraction(0)
) -> Element:
    """``times`` a sum of terms, whose total loss is at most ``lost``."""
    right, magnitude = times * terms.total(), abs(times) * abs(terms).total()
    return Element(output, place, right, magnitude, abs(times) * lost)


def as_given(output: str, place: int, value: float) -> Element:
    """A value that the op copies."""
    return Element(output, place, Fraction(value), abs(Fraction(value)))


def sampled(count: int, most: int = SAMPLED) -> Iterator[int]:
    """At most ``most`` of ``count`` positions, including the first and the last."""
    if count <= most:
        yield from range(count)
    else:
        yield from (i * (count - 1) // (most - 1) for i in range(most))
