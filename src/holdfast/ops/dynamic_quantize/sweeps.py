"""Exhaustive sweeps of dynamic_quantize over 16-bit inputs, with largest magnitudes of every size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.case import poisoned_output
from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import INT4
from holdfast.core.granularity import PerToken
from holdfast.core.sweep import Sweep
from holdfast.ops.affine.cases import stored_name
from holdfast.ops.dynamic_quantize.plan import (
    DynamicQuantizeArgs,
    DynamicQuantizeDescriptor,
    DynamicQuantizePlan,
)

#: The bits of the largest finite magnitude.
LARGEST = {torch.float16: 0x7BFF, torch.bfloat16: 0x7F7F}
#: Rows, each with its own largest magnitude, and values per row.
SHAPE = 67, 2**15


def sweeps() -> Iterator[Sweep]:
    """Symmetric and with a zero point, unpacked and packed."""
    for real in LARGEST:
        yield _dynamic_quantize(real, torch.int8)
        yield _dynamic_quantize(real, torch.int8, narrow=False)
        yield _dynamic_quantize(real, torch.uint8, symmetric=False)
        yield _dynamic_quantize(real, INT4.torch, packed=True)
        yield _dynamic_quantize(real, torch.int16)
        yield _dynamic_quantize(real, torch.float8_e4m3fn)


def values(real: torch.dtype) -> torch.Tensor:
    """Each row has every value from 0 to its largest one, then negative ones."""
    largest = torch.linspace(1, LARGEST[real], SHAPE[0]).to(torch.int32)[:, None]
    bits = torch.arange(SHAPE[1], dtype=torch.int32).expand(SHAPE)
    bits = torch.where(bits <= largest, bits, bits.remainder(largest + 1) - 2**15)
    return bits.to(torch.int16).view(real)


def _dynamic_quantize(
    real: torch.dtype,
    codes: torch.dtype,
    packed: bool = False,
    symmetric: bool = True,
    narrow: bool | None = None,
) -> Sweep:
    desc = DynamicQuantizeDescriptor(
        shape=SHAPE, input_dtype=real, output_dtype=codes, granularity=PerToken(),
        symmetric=symmetric, narrow=narrow, packed=packed,
    )  # fmt: skip

    def make() -> DynamicQuantizeArgs:
        return DynamicQuantizeArgs(
            x=values(real),
            q=poisoned_output(desc.code_shape, desc.code_storage),
            scale=poisoned_output(*desc.expected("scale")),
            zero_point=None if symmetric else poisoned_output(*desc.expected("zero_point")),
        )

    name = f"every {dtype_name(real)} to {stored_name(codes, packed)}" + ", whole range" * (narrow is False)
    return Sweep(DynamicQuantizePlan, name, SHAPE[0] * SHAPE[1], desc, make)
