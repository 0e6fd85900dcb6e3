"""Exhaustive sweeps of dynamic_fake_quantize over 16-bit inputs, with largest magnitudes of every size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.core.dtypes import dtype_name
from holdfast.core.formats import INT4
from holdfast.core.sweep import Sweep
from holdfast.ops.dynamic_fake_quantize.plan import DynamicFakeQuantizePlan
from holdfast.ops.dynamic_quantize.sweeps import LARGEST, sweep


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
    name = f"every {dtype_name(real)} as {dtype_name(codes)}"
    return sweep(DynamicFakeQuantizePlan, name, real, symmetric, narrow, dtype=codes)
