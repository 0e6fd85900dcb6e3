"""Sweeps: problems over every value of a type, listed in an op's ``sweeps.py``.

Its ``sweeps()`` yields a ``Sweep`` for each problem over all 16-bit values or all codes. Its ``FLOAT32``,
which is optional, lists the problems over all float32 values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.case import outputs_of
from holdfast.core.descriptor import Expected
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
    """A problem of ``CHUNK`` elements with one scale, run on every float32 value chunk by chunk.

    ``fields`` are those of the descriptor, besides the shape.
    """

    plan: AnyPlan
    name: str
    fields: dict[str, Any]
    scale: float
    zero_point: int | None = None

    @property
    def descriptor(self) -> Any:
        return self.plan.Descriptor(shape=(CHUNK,), **self.fields)

    @property
    def output(self) -> Expected:
        """Shape and dtype of the output."""
        found: Expected = self.descriptor.expected(self.plan.outputs[0])
        return found

    def args(self, x: torch.Tensor, dy: torch.Tensor, output: torch.Tensor) -> Args:
        given = {"x": x, "dy": dy, "scale": self.scale, "zero_point": self.zero_point}
        inputs: dict[str, Any] = {name: given[name] for name in self.plan.inputs}
        return self.plan.Args(**inputs, **{self.plan.outputs[0]: output})


def sweep_16_bit(
    plan: AnyPlan, name: str, desc: Any, *, zero_point: bool = True, other_x: float = 0.0
) -> Sweep:
    """Every 16-bit number as x, with each scale of ``PAIRS``.

    A gradient takes each number twice: as x, with dy around 1, and as dy, with ``other_x`` scales as x.
    """
    real = desc.input_dtype

    def make() -> Args:
        made: dict[str, Any] = {"x": every_16_bit(real), "scale": scales()}
        if "dy" in plan.inputs:
            near_zero = (other_x * scales()).to(real)[:, None].expand(made["x"].shape)
            made["dy"] = torch.stack([gradients_16_bit(real), made["x"]])
            made["x"] = torch.stack([made["x"], near_zero])
        made["zero_point"] = zero_points() if zero_point else None
        return plan.Args(**made, **outputs_of(plan.Args, desc, "contiguous"))

    return Sweep(plan, name, math.prod(desc.shape), desc, make)


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
