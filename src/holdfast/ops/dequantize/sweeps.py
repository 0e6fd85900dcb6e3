"""Every code through dequantize."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.case import poisoned_output
from holdfast.core.dtypes import CODES, FLOATS, dtype_name
from holdfast.core.sweep import PAIRS, Sweep, scales, zero_points
from holdfast.ops.affine.cases import STORED, stored_name
from holdfast.ops.dequantize.plan import (
    DequantizeArgs,
    DequantizePerChannelDescriptor,
    DequantizePerChannelPlan,
)
from holdfast.ops.packing.torch_op import pack


def sweeps() -> Iterator[Sweep]:
    """All codes of every type, to every floating dtype."""
    for real in (record.torch for record in FLOATS.values()):
        for codes, packed in STORED:
            yield _dequantize(real, codes, packed)


def _dequantize(real: torch.dtype, codes: torch.dtype, packed: bool) -> Sweep:
    record = CODES[dtype_name(codes)]
    low, high = record.code_range
    shape = (len(PAIRS), high - low + 1)
    desc = DequantizePerChannelDescriptor(
        shape=shape, axis=0, input_dtype=codes, output_dtype=real, packed=packed
    )

    def make() -> DequantizeArgs:
        every = torch.arange(low, high + 1, dtype=torch.int32).to(record.storage).expand(shape)
        return DequantizeArgs(
            q=pack(every, codes) if packed else every,
            scale=scales(),
            zero_point=zero_points(),
            y=poisoned_output(shape, real),
        )

    name = f"every {stored_name(codes, packed)} to {dtype_name(real)}"
    return Sweep(DequantizePerChannelPlan, name, shape[0] * shape[1], desc, make)
