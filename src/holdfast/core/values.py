"""Real values for cases: spread over binades, special values, every exponent, random bits.

They are computed in float64, where the arithmetic below is exact or rounds once, and then rounded to their
dtype.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.case import random_bits
from holdfast.core.dtypes import Float

Array = npt.NDArray[Any]

#: The integer dtype for the bits of a float, by number of bits.
BITS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def rounded(values: Array, dtype: torch.dtype) -> torch.Tensor:
    """float64 values as a tensor of ``dtype``; 16-bit dtypes are rounded to float32 first."""
    if dtype == torch.float64:
        return torch.from_numpy(np.ascontiguousarray(values))
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(values.astype(np.float32))).to(dtype)


def spread(label: str, count: int, precision: int, least: int, most: int) -> Array:
    """Numbers of ``precision`` bits and random sign from 2**least to 2**most; every binade is as likely."""
    bits = random_bits(label, count)
    significand = (bits >> np.uint64(12) & np.uint64(2 ** (precision - 1) - 1)).astype(np.float64)
    exponent = (bits % np.uint64(most - least)).astype(np.int64) + least
    magnitude = np.ldexp(1 + significand * 2.0 ** (1 - precision), exponent)
    return np.where(bits >> np.uint64(63) == 1, -magnitude, magnitude)


def special_values(record: Float) -> torch.Tensor:
    """Zeros, infinities, NaN, subnormals, the ends of the range, and some plain numbers."""
    info = torch.finfo(record.torch)
    least = torch.tensor([1, 3], dtype=BITS[record.bits]).view(record.torch).to(torch.float64).tolist()
    chosen = [0.0, float("inf"), info.max, info.smallest_normal, *least, 0.3, 1.0, 127.5, 1e4, 2.0**15]
    return rounded(np.array([float("nan"), *chosen, *(-value for value in chosen)]), record.torch)


def of_every_exponent(label: str, count: int, record: Float) -> torch.Tensor:
    """Finite numbers of every exponent of the dtype, subnormal numbers included."""
    info = torch.finfo(record.torch)
    least, most = (round(math.log2(end)) for end in (info.smallest_normal, info.max))
    return rounded(spread(label, count, record.precision, least - record.precision, most), record.torch)


def of_any_bits(label: str, count: int, record: Float) -> torch.Tensor:
    """Random bits: numbers of every exponent, infinities, and NaN with any payload."""
    bits = torch.from_numpy((random_bits(label, count) >> np.uint64(64 - record.bits)).astype(np.int64))
    return bits.to(BITS[record.bits]).view(record.torch)
