"""Exhaustive sweeps of dynamic_fake_quantize over 16-bit inputs, with largest magnitudes of every size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.case import poisoned_output
from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import INT4
from holdfast.core.granularity import PerToken
from holdfast.core.sweep import Sweep
from holdfast.ops.dynamic_fake_quantize.plan import (
    DynamicFakeQuantizeArgs,
    DynamicFakeQuantizeDescriptor,
    DynamicFakeQuantizePlan,
)
from holdfast.ops.dynamic_quantize.sweeps import LARGEST, SHAPE, values


def sweeps() -> Iterator[Sweep]:
    """Symmetric and with a zero point, integers and float formats."""
    for real in LARGEST:
        yield _dynamic_fake_quantize(real, torch.int8)
        yield _dynamic_fake_quantize(real, torch.int8, narrow=False)
        yield _dynamic_fake_quantize(real, torch.uint8, symmetric=False)
        yield _dynamic_fake_quantize(real, INT4.torch)
        yield _dynamic_fake_quantize(real, torch.int16)
        yield _dynamic_fake_quantize(real, torch.float8_e4m3fn)


def _dynamic_fake_quantize(
    real: torch.dtype, codes: torch.dtype, symmetric: bool = True, narrow: bool | None = None
) -> Sweep:
    desc = DynamicFakeQuantizeDescriptor(
        shape=SHAPE, input_dtype=real, dtype=codes, granularity=PerToken(), symmetric=symmetric, narrow=narrow
    )

    def make() -> DynamicFakeQuantizeArgs:
        return DynamicFakeQuantizeArgs(
            x=values(real),
            y=poisoned_output(SHAPE, real),
            scale=poisoned_output(*desc.expected("scale")),
            zero_point=None if symmetric else poisoned_output(*desc.expected("zero_point")),
        )

    name = f"every {dtype_name(real)} as {dtype_name(codes)}" + ", whole range" * (narrow is False)
    return Sweep(DynamicFakeQuantizePlan, name, SHAPE[0] * SHAPE[1], desc, make)
