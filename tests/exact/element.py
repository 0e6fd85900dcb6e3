"""What an output would be without rounding, at one of its elements, and the error that is allowed there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch

from exact.numbers import Exact, ulp

#: Elements of each output that are checked; exact numbers are slow.
SAMPLED = 24


@dataclass(frozen=True)
class Element:
    """Element ``place`` of the flattened output ``output``.

    ``right`` is its exact value and ``magnitude`` what its error counts in: of a sum, the sum of magnitudes.
    ``lost`` is what terms below the normal range may have lost. ``codes`` count in units of 1.
    """

    output: str
    place: int
    right: Fraction
    magnitude: Fraction
    lost: Fraction = Fraction(0)
    codes: bool = False

    def allowed(self, bound: float, dtype: torch.dtype) -> Fraction:
        """The largest error within ``bound`` units."""
        unit = Fraction(1) if self.codes else ulp(self.magnitude, dtype)
        return Fraction(bound) * unit + self.lost

    def overflows(self, *dtypes: torch.dtype) -> bool:
        """Whether the sum may pass the largest number of a dtype on its way."""
        return any(self.magnitude * 2 > Fraction(torch.finfo(dtype).max) for dtype in dtypes)


def summed(
    output: str, place: int, terms: Exact, times: Fraction = Fraction(1), lost: Fraction = Fraction(0)
) -> Element:
    """``times`` a sum of terms, which have lost as much as ``lost`` in all."""
    right, magnitude = times * terms.total(), abs(times) * abs(terms).total()
    return Element(output, place, right, magnitude, abs(times) * lost)


def as_given(output: str, place: int, value: float) -> Element:
    """A value that is passed on."""
    return Element(output, place, Fraction(value), abs(Fraction(value)))


def sampled(count: int, most: int = SAMPLED) -> Iterator[int]:
    """At most ``most`` places of ``count``, the first and the last among them."""
    if count <= most:
        yield from range(count)
    else:
        yield from (i * (count - 1) // (most - 1) for i in range(most))
