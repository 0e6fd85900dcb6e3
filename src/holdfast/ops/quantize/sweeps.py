"""Exhaustive sweeps of quantize and its gradient over all 16-bit and all float32 inputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from holdfast.core import sweep
from holdfast.core.case import poisoned_output
from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import FLOAT_FORMATS, INT4, Format, format_of
from holdfast.ops.affine.cases import STORED, stored_name
from holdfast.ops.quantize import plan as plans

#: (scale, zero point) of the float32 sweeps. Each takes seconds.
FLOAT32_PAIRS = (sweep.PAIRS[0], sweep.PAIRS[1], sweep.PAIRS[3], (7e-39, -77))


def sweeps() -> Iterator[sweep.Sweep]:
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


def _quantize(real: torch.dtype, codes: torch.dtype, packed: bool, symmetric: bool = False) -> sweep.Sweep:
    shape = (len(sweep.PAIRS), 2**16)
    desc = plans.QuantizePerChannelDescriptor(
        shape=shape, axis=0, input_dtype=real, output_dtype=codes, packed=packed
    )

    def make() -> plans.QuantizeArgs:
        return plans.QuantizeArgs(
            x=sweep.every_16_bit(real),
            scale=sweep.scales(),
            zero_point=None if symmetric else sweep.zero_points(),
            q=poisoned_output(desc.code_shape, desc.code_storage),
        )

    name = f"every {dtype_name(real)} to {stored_name(codes, packed)}" + ", symmetric" * symmetric
    return sweep.Sweep(plans.QuantizePerChannelPlan, name, shape[0] * shape[1], desc, make)


def _quantize_backward(real: torch.dtype, codes: torch.dtype) -> sweep.Sweep:
    """Every 16-bit number twice: as x, with dy around 1, and as dy, with x in range."""
    shape = (2, len(sweep.PAIRS), 2**16)
    desc = plans.QuantizePerChannelBackwardDescriptor(
        shape=shape, axis=1, input_dtype=real, output_dtype=codes
    )

    def make() -> plans.QuantizeBackwardArgs:
        every = sweep.every_16_bit(real)
        in_range = torch.zeros((), dtype=real).expand(every.shape)
        return plans.QuantizeBackwardArgs(
            x=torch.stack([every, in_range]),
            dy=torch.stack([sweep.gradients_16_bit(real), every]),
            scale=sweep.scales(),
            zero_point=sweep.zero_points() if format_of(codes, "codes").zero_point else None,
            dx=poisoned_output(shape, real),
        )

    name = f"every {dtype_name(real)} through {dtype_name(codes)}"
    values = shape[0] * shape[1] * shape[2]
    return sweep.Sweep(plans.QuantizePerChannelBackwardPlan, name, values, desc, make)


def _codes(
    scale: float, zero_point: int | None, x: torch.Tensor, dy: torch.Tensor, q: torch.Tensor
) -> plans.QuantizeArgs:
    return plans.QuantizeArgs(x=x, scale=scale, zero_point=zero_point, q=q)


def _gradient(
    scale: float, zero_point: int | None, x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor
) -> plans.QuantizeBackwardArgs:
    return plans.QuantizeBackwardArgs(dy=dy, x=x, scale=scale, zero_point=zero_point, dx=dx)


def _trials(scale: float, zero_point: int) -> Iterator[sweep.Float32Sweep]:
    pair = f"scale {scale!r}, zero point {zero_point}"
    yield sweep.Float32Sweep(
        plans.QuantizePerTensorPlan,
        pair,
        plans.QuantizePerTensorDescriptor(shape=(sweep.CHUNK,)),
        partial(_codes, scale, zero_point),
        torch.int8,
    )
    yield sweep.Float32Sweep(
        plans.QuantizePerTensorBackwardPlan,
        pair,
        plans.QuantizePerTensorBackwardDescriptor(shape=(sweep.CHUNK,)),
        partial(_gradient, scale, zero_point),
        torch.float32,
    )
    yield sweep.Float32Sweep(
        plans.QuantizePerTensorPlan,
        f"scale {scale!r}, packed",
        plans.QuantizePerTensorDescriptor(shape=(sweep.CHUNK,), output_dtype=INT4.torch, packed=True),
        partial(_codes, scale, None),
        torch.uint8,
        sweep.CHUNK // 2,
    )


def _float_trials(scale: float, codes: Format) -> Iterator[sweep.Float32Sweep]:
    name = f"scale {scale!r}, {codes.name}"
    yield sweep.Float32Sweep(
        plans.QuantizePerTensorPlan,
        name,
        plans.QuantizePerTensorDescriptor(shape=(sweep.CHUNK,), output_dtype=codes.torch),
        partial(_codes, scale, None),
        codes.storage,
    )
    yield sweep.Float32Sweep(
        plans.QuantizePerTensorBackwardPlan,
        name,
        plans.QuantizePerTensorBackwardDescriptor(shape=(sweep.CHUNK,), output_dtype=codes.torch),
        partial(_gradient, scale, None),
        torch.float32,
    )


FLOAT32 = (
    *(trial for pair in FLOAT32_PAIRS for trial in _trials(*pair)),
    *(trial for codes in FLOAT_FORMATS.values() for s in (1.0, 0.1) for trial in _float_trials(s, codes)),
)
