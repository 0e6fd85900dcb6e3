"""Exhaustive sweeps of dequantize over all codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.case import poisoned_output
from holdfast.core.dtypes import FLOATS, dtype_name
from holdfast.core.formats import FLOAT_FORMATS, INTEGERS, Format
from holdfast.core.sweep import PAIRS, Sweep, scales, zero_points
from holdfast.ops.affine.cases import STORED, stored_name
from holdfast.ops.dequantize import plan as plans
from holdfast.ops.packing.torch_op import pack


def sweeps() -> Iterator[Sweep]:
    """All codes of every dtype to every floating dtype."""
    for real in (record.torch for record in FLOATS.values()):
        for codes, packed in STORED:
            yield _dequantize(real, codes, packed)
        for float_codes in FLOAT_FORMATS.values():
            yield _dequantize_float(real, float_codes)


def _dequantize(real: torch.dtype, codes: torch.dtype, packed: bool) -> Sweep:
    record = INTEGERS[dtype_name(codes)]
    low, high = record.code_range
    shape = (len(PAIRS), high - low + 1)
    desc = plans.DequantizePerChannelDescriptor(
        shape=shape, axis=0, input_dtype=codes, output_dtype=real, packed=packed
    )

    def make() -> plans.DequantizeArgs:
        every = torch.arange(low, high + 1, dtype=torch.int32).to(record.storage).expand(shape)
        return plans.DequantizeArgs(
            q=pack(every, codes) if packed else every, scale=scales(), zero_point=zero_points(),
            y=poisoned_output(shape, real),
        )  # fmt: skip

    name = f"every {stored_name(codes, packed)} to {dtype_name(real)}"
    return Sweep(plans.DequantizePerChannelPlan, name, shape[0] * shape[1], desc, make)


def _dequantize_float(real: torch.dtype, codes: Format) -> Sweep:
    shape = (len(PAIRS), 2**codes.bits)
    desc = plans.DequantizePerChannelDescriptor(
        shape=shape, axis=0, input_dtype=codes.torch, output_dtype=real
    )

    def make() -> plans.DequantizeArgs:
        every = torch.arange(shape[1], dtype=torch.int32).to(torch.uint8).view(codes.storage).expand(shape)
        return plans.DequantizeArgs(q=every, scale=scales(), y=poisoned_output(shape, real))

    name = f"every {codes.name} to {dtype_name(real)}"
    return Sweep(plans.DequantizePerChannelPlan, name, shape[0] * shape[1], desc, make)
