"""Exhaustive sweeps of fake_quantize and of its gradient by each estimator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import FLOAT_FORMATS, INT2, INT4, INT8, Format
from holdfast.core.granularity import PerChannel
from holdfast.core.sweep import PAIRS, Float32Sweep, Sweep, sweep_16_bit
from holdfast.ops.fake_quantize import plan as plans
from holdfast.ops.fake_quantize.plan import SteKind

_FORMATS = (INT2, INT4, INT8, *FLOAT_FORMATS.values())


def sweeps() -> Iterator[Sweep]:
    """All 16-bit inputs with integer codes of 2, 4 and 8 bits and with every float format."""
    for real in (torch.float16, torch.bfloat16):
        for codes in _FORMATS:
            yield _forward(real, codes)
            for ste in SteKind:
                yield _backward(real, codes, ste)


def _forward(real: torch.dtype, codes: Format) -> Sweep:
    desc = plans.FakeQuantizeDescriptor(
        shape=(len(PAIRS), 2**16), granularity=PerChannel(0), input_dtype=real, dtype=codes.torch
    )
    name = f"every {dtype_name(real)} as {codes.name}"
    return sweep_16_bit(plans.FakeQuantizePlan, name, desc, zero_point=codes.zero_point)


def _backward(real: torch.dtype, codes: Format, ste: SteKind) -> Sweep:
    shape, name = (2, len(PAIRS), 2**16), f"every {dtype_name(real)} through {codes.name}, {ste}"
    desc = plans.FakeQuantizeBackwardDescriptor(
        shape=shape, granularity=PerChannel(1), input_dtype=real, dtype=codes.torch, ste=ste
    )
    plan = plans.FakeQuantizeBackwardPlan
    return sweep_16_bit(plan, name, desc, zero_point=codes.zero_point, other_x=0.375)


def _float32() -> Iterator[Float32Sweep]:
    for scale, zero_point in (*PAIRS[:2], PAIRS[3], (7e-39, -77)):
        name = f"scale {scale!r}, zero point {zero_point}"
        yield Float32Sweep(plans.FakeQuantizePlan, name, {"dtype": torch.int8}, scale, zero_point)
    # One scale per estimator, since a sweep takes seconds; two scales for tanh.
    estimators = [(ste, PAIRS[1]) for ste in SteKind if ste is not SteKind.IDENTITY]
    for ste, (scale, zero_point) in (*estimators, (SteKind.TANH, PAIRS[0])):
        name, fields = f"{ste}, scale {scale!r}, zero point {zero_point}", {"dtype": torch.int8, "ste": ste}
        yield Float32Sweep(plans.FakeQuantizeBackwardPlan, name, fields, scale, zero_point)
    for codes in FLOAT_FORMATS.values():
        yield Float32Sweep(plans.FakeQuantizePlan, f"scale 0.1, {codes.name}", {"dtype": codes.torch}, 0.1)


FLOAT32 = tuple(_float32())
