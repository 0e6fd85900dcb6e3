"""Exhaustive sweeps of fake_quantize and of its gradient by each estimator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from holdfast.core import sweep
from holdfast.core.case import poisoned_output
from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import FLOAT_FORMATS, INT2, INT4, INT8, Format
from holdfast.core.granularity import PerChannel
from holdfast.ops.fake_quantize import plan as plans
from holdfast.ops.fake_quantize.plan import SteKind

_FORMATS = (INT2, INT4, INT8, *FLOAT_FORMATS.values())


def sweeps() -> Iterator[sweep.Sweep]:
    """All 16-bit inputs with integer codes of 2, 4 and 8 bits and with every float format."""
    for real in (torch.float16, torch.bfloat16):
        for codes in _FORMATS:
            yield _forward(real, codes)
            for ste in SteKind:
                yield _backward(real, codes, ste)


def _forward(real: torch.dtype, codes: Format) -> sweep.Sweep:
    shape = (len(sweep.PAIRS), 2**16)
    desc = plans.FakeQuantizeDescriptor(
        shape=shape, granularity=PerChannel(0), input_dtype=real, dtype=codes.torch
    )

    def make() -> plans.FakeQuantizeArgs:
        return plans.FakeQuantizeArgs(
            x=sweep.every_16_bit(real),
            scale=sweep.scales(),
            zero_point=sweep.zero_points() if codes.zero_point else None,
            y=poisoned_output(shape, real),
        )

    name = f"every {dtype_name(real)} as {codes.name}"
    return sweep.Sweep(plans.FakeQuantizePlan, name, shape[0] * shape[1], desc, make)


def _backward(real: torch.dtype, codes: Format, ste: SteKind) -> sweep.Sweep:
    """Every 16-bit number twice: as x, with dy around 1, and as dy, with x near zero."""
    shape = (2, len(sweep.PAIRS), 2**16)
    desc = plans.FakeQuantizeBackwardDescriptor(
        shape=shape, granularity=PerChannel(1), input_dtype=real, dtype=codes.torch, ste=ste
    )

    def make() -> plans.FakeQuantizeBackwardArgs:
        every = sweep.every_16_bit(real)
        near_zero = (0.375 * sweep.scales()).to(real)[:, None].expand(every.shape)
        return plans.FakeQuantizeBackwardArgs(
            x=torch.stack([every, near_zero]),
            dy=torch.stack([sweep.gradients_16_bit(real), every]),
            scale=sweep.scales(),
            zero_point=sweep.zero_points() if codes.zero_point else None,
            dx=poisoned_output(shape, real),
        )

    name = f"every {dtype_name(real)} through {codes.name}, {ste}"
    values = shape[0] * shape[1] * shape[2]
    return sweep.Sweep(plans.FakeQuantizeBackwardPlan, name, values, desc, make)


def _faked(
    scale: float, zero_point: int | None, x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor
) -> plans.FakeQuantizeArgs:
    return plans.FakeQuantizeArgs(x=x, scale=scale, zero_point=zero_point, y=y)


def _gradient(
    scale: float, zero_point: int, x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor
) -> plans.FakeQuantizeBackwardArgs:
    return plans.FakeQuantizeBackwardArgs(dy=dy, x=x, scale=scale, zero_point=zero_point, dx=dx)


def _forward_trial(scale: float, zero_point: int) -> sweep.Float32Sweep:
    return sweep.Float32Sweep(
        plans.FakeQuantizePlan,
        f"scale {scale!r}, zero point {zero_point}",
        plans.FakeQuantizeDescriptor(shape=(sweep.CHUNK,), dtype=torch.int8),
        partial(_faked, scale, zero_point),
        torch.float32,
    )


def _float_trial(scale: float, codes: Format) -> sweep.Float32Sweep:
    return sweep.Float32Sweep(
        plans.FakeQuantizePlan,
        f"scale {scale!r}, {codes.name}",
        plans.FakeQuantizeDescriptor(shape=(sweep.CHUNK,), dtype=codes.torch),
        partial(_faked, scale, None),
        torch.float32,
    )


def _backward_trial(ste: SteKind, scale: float, zero_point: int) -> sweep.Float32Sweep:
    return sweep.Float32Sweep(
        plans.FakeQuantizeBackwardPlan,
        f"{ste}, scale {scale!r}, zero point {zero_point}",
        plans.FakeQuantizeBackwardDescriptor(shape=(sweep.CHUNK,), dtype=torch.int8, ste=ste),
        partial(_gradient, scale, zero_point),
        torch.float32,
    )


#: One scale per estimator, since a sweep takes seconds; two scales for tanh.
FLOAT32 = (
    *(_forward_trial(*pair) for pair in (*sweep.PAIRS[:2], sweep.PAIRS[3], (7e-39, -77))),
    *(_backward_trial(ste, *sweep.PAIRS[1]) for ste in SteKind if ste is not SteKind.IDENTITY),
    _backward_trial(SteKind.TANH, *sweep.PAIRS[0]),
    *(_float_trial(0.1, codes) for codes in FLOAT_FORMATS.values()),
)
