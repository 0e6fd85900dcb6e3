"""Sweeps: problems over every value of a type, listed in an op's ``sweeps.py``.

Its ``sweeps()`` yields a ``Sweep`` for each problem over all 16-bit values or all codes. Its ``FLOAT32``,
which is optional, lists the problems over all float32 values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.plan import AnyPlan, Args

#: A scale and a zero point for each row: inexact scales and powers of two, odd and large zero points.
PAIRS = (
    (0.1, 0), (1 / 3, 3), (0.007, -5), (0.125, 1), (2.0**-20, -128), (1.0, 127), (96.5, -7), (0.3, 2**22 + 1),
)  # fmt: skip
#: Number of float32 values per chunk.
CHUNK = 2**26


@dataclass(frozen=True)
class Sweep:
    """A problem, small enough for the reference, over ``values`` values. ``make`` returns its args."""

    plan: AnyPlan
    name: str
    values: int
    descriptor: Any
    make: Callable[[], Any]


@dataclass(frozen=True)
class Float32Sweep:
    """A problem of ``CHUNK`` elements, run on every float32 value chunk by chunk.

    ``args(x, gradient, output)`` makes the args; the output has ``out`` elements of ``dtype``.
    """

    plan: AnyPlan
    name: str
    descriptor: Any
    args: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Args]
    dtype: torch.dtype
    out: int = CHUNK


def every_16_bit(real: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit type, one row for each of ``PAIRS``."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(real)
    return every.expand(len(PAIRS), -1)


def gradients_16_bit(real: torch.dtype) -> torch.Tensor:
    """Gradients from 1 to 2, in the shape of ``every_16_bit``."""
    gradient = torch.arange(2**16, dtype=torch.int32)
    scatter(gradient, gradient)
    return gradient.view(torch.float32).to(real).expand(len(PAIRS), -1)


def scales() -> torch.Tensor:
    return torch.tensor([scale for scale, _ in PAIRS], dtype=torch.float32)


def zero_points() -> torch.Tensor:
    return torch.tensor([zero_point for _, zero_point in PAIRS], dtype=torch.int32)


def scatter(whole: torch.Tensor, out: torch.Tensor) -> None:
    """Hash each int32 of ``whole`` to the bits of a float32 in [1, 2)."""
    torch.mul(whole, -1640531535, out=out)
    out.bitwise_and_(0x007FFFFF).bitwise_or_(0x3F800000)
