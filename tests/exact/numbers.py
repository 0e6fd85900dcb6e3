"""Arrays of exact numbers: integers times a power of two, which represents every float."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.dtypes import FLOATS, Float, dtype_name

Array = npt.NDArray[Any]
#: Maximum size of an array whose elements are converted one by one, which is faster.
FEW = 16


@dataclass(frozen=True)
class Exact:
    """``whole * 2**shift``, elementwise. ``whole`` holds Python integers, which never overflow."""

    whole: Array
    shift: int

    @staticmethod
    def of(values: Array) -> Exact:
        """Exact numbers from finite floats."""
        values = np.asarray(values, np.float64)
        if values.size <= FEW:
            return Exact._of_few(values)
        fractions, exponents = np.frexp(values)
        whole = np.ldexp(fractions, 53).astype(np.int64)
        used = int(np.bitwise_or.reduce(whole, axis=None))
        spare = max((used & -used).bit_length() - 1, 0)  # low bits that are zero in every element
        whole, exponents = whole >> spare, exponents.astype(np.int64) - 53 + spare
        shift = int(exponents.min(where=whole != 0, initial=0))
        by = np.where(whole == 0, 0, exponents - shift)
        if 53 - spare + by.max(initial=0) < 63:
            return Exact((whole << by).astype(object), shift)  # the same, faster
        return Exact(whole.astype(object) << by.astype(object), shift)

    @staticmethod
    def _of_few(values: Array) -> Exact:
        ratios = [value.as_integer_ratio() for value in values.reshape(-1).tolist()]
        places = max([below.bit_length() for _, below in ratios], default=1) - 1
        whole = np.empty(len(ratios), object)
        whole[:] = [above << (places + 1 - below.bit_length()) for above, below in ratios]
        return Exact(whole.reshape(values.shape), -places)

    @staticmethod
    def whole_numbers(values: Array) -> Exact:
        return Exact(np.asarray(values).astype(object), 0)

    def _aligned(self, other: Exact) -> tuple[Array, Array, int]:
        up = self.shift - other.shift
        if up > 0:
            return self.whole << up, other.whole, other.shift
        return self.whole, other.whole << -up if up else other.whole, self.shift

    def __add__(self, other: Exact) -> Exact:
        mine, others, shift = self._aligned(other)
        return Exact(mine + others, shift)

    def __sub__(self, other: Exact) -> Exact:
        mine, others, shift = self._aligned(other)
        return Exact(mine - others, shift)

    def __mul__(self, other: Exact) -> Exact:
        return Exact(self.whole * other.whole, self.shift + other.shift)

    def __abs__(self) -> Exact:
        return Exact(np.abs(self.whole), self.shift)

    def __getitem__(self, places: Any) -> Exact:
        return Exact(np.asarray(self.whole[places], object), self.shift)

    def total(self) -> Fraction:
        """The sum of all elements."""
        return Fraction(int(self.whole.sum())) * power(self.shift)

    def lost(self, compute: Float) -> Fraction:
        """The largest total loss when the elements are rounded to subnormals of ``compute``."""
        normal = least_normal(compute.torch)
        least = normal - compute.precision + 1
        if self.shift >= least:
            return Fraction(0)
        small = np.abs(self.whole) < (1 << max(normal - self.shift, 0))
        inexact = (self.whole & ((1 << (least - self.shift)) - 1)) != 0
        return Fraction(int((small & inexact).sum())) * power(least) / 2


@cache
def power(exponent: int) -> Fraction:
    """2**exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def exponent(value: Fraction) -> int:
    """The largest e with 2**e <= value."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if power(e) <= value else e - 1


@cache
def least_normal(dtype: torch.dtype) -> int:
    """The exponent of the smallest normal number of ``dtype``."""
    return exponent(Fraction(torch.finfo(dtype).smallest_normal))


def ulp(value: Fraction, dtype: torch.dtype) -> Fraction:
    """The distance between adjacent numbers of ``dtype`` at ``value``."""
    least = least_normal(dtype)
    e = max(least, exponent(abs(value))) if value else least
    return power(e - FLOATS[dtype_name(dtype)].precision + 1)


def lost_below(terms: Array, compute: Float) -> Fraction:
    """The largest total loss when each term is rounded to a subnormal of ``compute``."""
    small = (np.abs(terms) < torch.finfo(compute.torch).smallest_normal) & (terms != 0)
    return int(small.sum()) * ulp(Fraction(0), compute.torch) / 2
