"""Random terms of kinds that are hard to sum accurately."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from exact.numbers import Array
from holdfast.core.dtypes import float_dtype

Rng = np.random.Generator


def _ordinary(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    return rng.standard_normal(count)


def _wide(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    """Exponents uniform from ``low`` to ``high``, over a range of at most 1000."""
    exponents = rng.integers(max(low, high - 1000), high, count)
    return np.ldexp(rng.uniform(1, 2, count), exponents) * rng.choice([-1, 1], count)


def _cancelling(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    """Large terms and their negatives, and a small remainder."""
    half = rng.standard_normal(count // 2) * 1000
    return rng.permutation(np.concatenate([half, -half, rng.standard_normal(count % 2) * 1e-3]))


def _subnormal(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    return np.ldexp(rng.uniform(-1, 1, count), low + rng.integers(0, 4, count))


def _alternating(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    return np.where(np.arange(count) % 2, -1, 1) * (1 + rng.uniform(0, 0.01, count))


def _equal(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    return np.full(count, rng.uniform(0.5, 1))


def _ascending(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    return np.sort(rng.exponential(1, count))


def _descending(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    return _ascending(rng, count, precision, low, high)[::-1].copy()


def _nudging(rng: Rng, count: int, precision: int, low: int, high: int) -> Array:
    """One large term in each 32, then terms just above half of its last place: each rounds up by half."""
    small = np.ldexp(1.0 + 2.0 ** (2 - min(precision, 11)), -precision if precision > 11 else -24)
    return np.where(np.arange(count) % 32 == 0, 1.0, small)


#: Functions that return a number of terms for a given precision and exponent range.
KINDS: dict[str, Callable[[Rng, int, int, int, int], Array]] = {
    "ordinary": _ordinary,
    "wide": _wide,
    "cancelling": _cancelling,
    "subnormal": _subnormal,
    "alternating": _alternating,
    "equal": _equal,
    "ascending": _ascending,
    "descending": _descending,
    "nudging": _nudging,
}


def terms(kind: str, rng: Rng, count: int, width: int, dtype: torch.dtype, factors: int = 1) -> torch.Tensor:
    """``width`` columns of ``count`` terms. Products of ``factors`` terms and their sums do not overflow."""
    info, record = torch.finfo(dtype), float_dtype(dtype, "dtype")
    low = int(np.log2(info.smallest_normal))
    if kind != "subnormal":
        low = (low - (record.precision if factors == 1 else 0)) // factors
    high = (int(np.log2(info.max)) - count.bit_length() - 1) // factors
    made = [KINDS[kind](rng, count, record.precision, low, max(high, low + 1)) for _ in range(width)]
    values = torch.from_numpy(np.stack(made, axis=1) if made else np.zeros((count, 0)))
    return values.to(dtype)
