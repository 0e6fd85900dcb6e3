"""Records of the floating dtypes of real tensors, and names of dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import dtype as TorchDtype

from holdfast.core.errors import InvalidDescriptor

#: Zero points saturate at this magnitude, so that ``code - zero_point`` is exact in float32.
ZERO_POINT_LIMIT = 2**23


@dataclass(frozen=True)
class Float:
    """A floating dtype. ``precision`` is the number of bits of the significand, with the hidden bit."""

    torch: TorchDtype
    name: str
    bits: int
    precision: int
    compute_name: str

    @property
    def compute(self) -> Float:
        """The type in which kernels compute with this dtype."""
        return FLOATS[self.compute_name]


FLOATS: dict[str, Float] = {
    f.name: f
    for f in (
        Float(torch.float16, "float16", 16, 11, "float32"),
        Float(torch.bfloat16, "bfloat16", 16, 8, "float32"),
        Float(torch.float32, "float32", 32, 24, "float32"),
        Float(torch.float64, "float64", 64, 53, "float64"),
    )
}

_NAMES: dict[TorchDtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, TorchDtype)
}

_BY_TORCH = {record.torch: record for record in FLOATS.values()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, which ``parse_dtype`` reads.

    Operators take dtypes by name, because ``torch.export`` cannot save a program with a sub-byte dtype.
    """
    return _NAMES[dtype]


@lru_cache(maxsize=256)
def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``, with or without ``torch.`` in front."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidDescriptor(f"{name!r} is not a dtype of torch; write one such as 'float32' or 'int8'.")
    return dtype


def float_dtype(dtype: torch.dtype, what: str) -> Float:
    """The record of a floating dtype. ``what`` names the argument in the error message."""
    record = _BY_TORCH.get(dtype)
    if record is None:
        named = ", ".join(f"torch.{name}" for name in FLOATS)
        raise InvalidDescriptor(
            f"{what} is {dtype}; accepted are {named}. Convert the tensor to one of these first."
        )
    return record
