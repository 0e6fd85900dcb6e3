"""Every input through fake quantization, and through its gradient by each estimator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from holdfast.core.case import poisoned_output
from holdfast.core.dtypes import CODES, dtype_name
from holdfast.core.granularity import PerChannel
from holdfast.core.sweep import (
    CHUNK,
    PAIRS,
    Float32Sweep,
    Sweep,
    every_16_bit,
    gradients_16_bit,
    scales,
    zero_points,
)
from holdfast.ops.fake_quantize.plan import (
    FakeQuantizeArgs,
    FakeQuantizeBackwardArgs,
    FakeQuantizeBackwardDescriptor,
    FakeQuantizeBackwardPlan,
    FakeQuantizeDescriptor,
    FakeQuantizePlan,
    SteKind,
)

_RANGES = tuple(CODES[name].torch for name in ("int2", "int4", "int8"))


def sweeps() -> Iterator[Sweep]:
    """All 16-bit inputs, in ranges of 2, 4 and 8 bits."""
    for real in (torch.float16, torch.bfloat16):
        for codes in _RANGES:
            yield _forward(real, codes)
            for ste in SteKind:
                yield _backward(real, codes, ste)


def _forward(real: torch.dtype, codes: torch.dtype) -> Sweep:
    shape = (len(PAIRS), 2**16)
    desc = FakeQuantizeDescriptor(shape=shape, granularity=PerChannel(0), input_dtype=real, dtype=codes)

    def make() -> FakeQuantizeArgs:
        return FakeQuantizeArgs(
            x=every_16_bit(real), scale=scales(), zero_point=zero_points(), y=poisoned_output(shape, real)
        )

    name = f"every {dtype_name(real)} as {dtype_name(codes)}"
    return Sweep(FakeQuantizePlan, name, shape[0] * shape[1], desc, make)


def _backward(real: torch.dtype, codes: torch.dtype, ste: SteKind) -> Sweep:
    """Every input twice over: as x, with gradients around 1, and as dy, where x is near zero."""
    shape = (2, len(PAIRS), 2**16)
    desc = FakeQuantizeBackwardDescriptor(
        shape=shape, granularity=PerChannel(1), input_dtype=real, dtype=codes, ste=ste
    )

    def make() -> FakeQuantizeBackwardArgs:
        every = every_16_bit(real)
        near_zero = (0.375 * scales()).to(real)[:, None].expand(every.shape)
        return FakeQuantizeBackwardArgs(
            x=torch.stack([every, near_zero]),
            dy=torch.stack([gradients_16_bit(real), every]),
            scale=scales(),
            zero_point=zero_points(),
            dx=poisoned_output(shape, real),
        )

    name = f"every {dtype_name(real)} through {dtype_name(codes)}, {ste}"
    values = shape[0] * shape[1] * shape[2]
    return Sweep(FakeQuantizeBackwardPlan, name, values, desc, make)


def _faked(
    scale: float, zero_point: int, x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor
) -> FakeQuantizeArgs:
    return FakeQuantizeArgs(x=x, scale=scale, zero_point=zero_point, y=y)


def _gradient(
    scale: float, zero_point: int, x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor
) -> FakeQuantizeBackwardArgs:
    return FakeQuantizeBackwardArgs(dy=dy, x=x, scale=scale, zero_point=zero_point, dx=dx)


def _forward_trial(scale: float, zero_point: int) -> Float32Sweep:
    return Float32Sweep(
        FakeQuantizePlan,
        f"scale {scale!r}, zero point {zero_point}",
        FakeQuantizeDescriptor(shape=(CHUNK,), dtype=torch.int8),
        partial(_faked, scale, zero_point),
        torch.float32,
    )


def _backward_trial(ste: SteKind, scale: float, zero_point: int) -> Float32Sweep:
    return Float32Sweep(
        FakeQuantizeBackwardPlan,
        f"{ste}, scale {scale!r}, zero point {zero_point}",
        FakeQuantizeBackwardDescriptor(shape=(CHUNK,), dtype=torch.int8, ste=ste),
        partial(_gradient, scale, zero_point),
        torch.float32,
    )


#: One scale for each estimator, since each trial takes seconds; two for the one with an exponential.
FLOAT32 = (
    *(_forward_trial(*pair) for pair in (*PAIRS[:2], PAIRS[3], (7e-39, -77))),
    *(_backward_trial(ste, *PAIRS[1]) for ste in SteKind if ste is not SteKind.IDENTITY),
    _backward_trial(SteKind.TANH, *PAIRS[0]),
)
