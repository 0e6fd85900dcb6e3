"""Exhaustive sweeps of dynamic_quantize over 16-bit inputs, with largest magnitudes of every size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.core.case import outputs_of
from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import INT4
from holdfast.core.granularity import PerToken
from holdfast.core.plan import AnyPlan, Args
from holdfast.core.sweep import Sweep
from holdfast.ops.affine.cases import stored_name
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizePlan

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


def sweep(
    plan: AnyPlan, name: str, real: torch.dtype, symmetric: bool, narrow: bool | None, **fields: Any
) -> Sweep:
    """``values`` in a plan with scales of its data. ``fields`` are those of its descriptor alone."""
    rule = {"granularity": PerToken(), "symmetric": symmetric, "narrow": narrow}
    described: Any = {"shape": SHAPE, "input_dtype": real, **rule, **fields}
    desc = plan.Descriptor(**described)

    def make() -> Args:
        outputs: Any = outputs_of(plan.Args, desc, "contiguous")
        if symmetric:
            del outputs["zero_point"]
        given: Any = {"x": values(real)}
        return plan.Args(**given, **outputs)

    name += ", whole range" * (narrow is False)
    return Sweep(plan, name, SHAPE[0] * SHAPE[1], desc, make)


def _dynamic_quantize(
    real: torch.dtype,
    codes: torch.dtype,
    packed: bool = False,
    symmetric: bool = True,
    narrow: bool | None = None,
) -> Sweep:
    name = f"every {dtype_name(real)} to {stored_name(codes, packed)}"
    fields = {"output_dtype": codes, "packed": packed}
    return sweep(DynamicQuantizePlan, name, real, symmetric, narrow, **fields)
