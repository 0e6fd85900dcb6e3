"""Exhaustive sweeps of quantize and its gradient over all 16-bit and all float32 inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import FLOAT_FORMATS, INT4, format_of
from holdfast.core.sweep import PAIRS, Float32Sweep, Sweep, sweep_16_bit
from holdfast.ops.affine.cases import STORED, stored_name
from holdfast.ops.quantize import plan as plans

#: (scale, zero point) of the float32 sweeps. Each takes seconds.
FLOAT32_PAIRS = (PAIRS[0], PAIRS[1], PAIRS[3], (7e-39, -77))


def sweeps() -> Iterator[Sweep]:
    """All 16-bit inputs to every code dtype."""
    for real in (torch.float16, torch.bfloat16):
        for codes, packed in STORED:
            yield _quantize(real, codes, packed)
            if packed:  # without zero points the GPU kernel divides differently
                yield _quantize(real, codes, packed, symmetric=True)
            else:
                yield _quantize_backward(real, codes)
        for float_codes in FLOAT_FORMATS.values():
            yield _quantize(real, float_codes.torch, False, symmetric=True)
            yield _quantize_backward(real, float_codes.torch)


def _quantize(real: torch.dtype, codes: torch.dtype, packed: bool, symmetric: bool = False) -> Sweep:
    desc = plans.QuantizePerChannelDescriptor(
        shape=(len(PAIRS), 2**16), axis=0, input_dtype=real, output_dtype=codes, packed=packed
    )
    name = f"every {dtype_name(real)} to {stored_name(codes, packed)}" + ", symmetric" * symmetric
    return sweep_16_bit(plans.QuantizePerChannelPlan, name, desc, zero_point=not symmetric)


def _quantize_backward(real: torch.dtype, codes: torch.dtype) -> Sweep:
    shape, zero_point = (2, len(PAIRS), 2**16), format_of(codes, "codes").zero_point
    desc = plans.QuantizePerChannelBackwardDescriptor(
        shape=shape, axis=1, input_dtype=real, output_dtype=codes
    )
    name = f"every {dtype_name(real)} through {dtype_name(codes)}"
    return sweep_16_bit(plans.QuantizePerChannelBackwardPlan, name, desc, zero_point=zero_point)


def _float32() -> Iterator[Float32Sweep]:
    forward, backward = plans.QuantizePerTensorPlan, plans.QuantizePerTensorBackwardPlan
    packed: dict[str, Any] = {"output_dtype": INT4.torch, "packed": True}
    for scale, zero_point in FLOAT32_PAIRS:
        pair = f"scale {scale!r}, zero point {zero_point}"
        yield Float32Sweep(forward, pair, {}, scale, zero_point)
        yield Float32Sweep(backward, pair, {}, scale, zero_point)
        yield Float32Sweep(forward, f"scale {scale!r}, packed", packed, scale)
    for codes in FLOAT_FORMATS.values():
        for scale in (1.0, 0.1):
            name, fields = f"scale {scale!r}, {codes.name}", {"output_dtype": codes.torch}
            yield from (Float32Sweep(plan, name, fields, scale) for plan in (forward, backward))


FLOAT32 = tuple(_float32())
