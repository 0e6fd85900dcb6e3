"""The dtypes that the kernels know, as records.

A float says what it computes in; a code dtype says how many bits a code has and which torch dtype carries
it when it is not packed. torch's own dtypes are the markers: ``torch.int4`` is only ever a name here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import dtype as TorchDtype

from holdfast.core.errors import InvalidDescriptor

#: Codes have at most 16 bits, also where a float carries them.
LARGEST_CODE = 2**16
#: Zero points beyond this saturate, so that a code less a zero point is exact in float32.
ZERO_POINT_LIMIT = 2**23


@dataclass(frozen=True)
class Float:
    """A floating dtype: ``precision`` counts the significand's bits, the hidden one included."""

    torch: TorchDtype
    name: str
    bits: int
    precision: int
    compute_name: str

    @property
    def compute(self) -> Float:
        """The type that arithmetic on this dtype happens in."""
        return FLOATS[self.compute_name]

    @property
    def storage(self) -> TorchDtype:
        return self.torch

    @property
    def code_range(self) -> tuple[int, int]:
        """The codes that this dtype can carry: integers that it holds exactly."""
        most = min(2**self.precision, LARGEST_CODE)
        return -most, most


@dataclass(frozen=True)
class Code:
    """An integer dtype for codes: ``storage`` carries one; ``per_byte`` of them share a byte if packed."""

    torch: TorchDtype
    name: str
    bits: int
    signed: bool
    storage: TorchDtype

    @property
    def code_range(self) -> tuple[int, int]:
        if self.signed:
            return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        return 0, 2**self.bits - 1

    @property
    def per_byte(self) -> int:
        return 8 // self.bits if self.bits < 8 else 1


#: What codes can be carried in: an integer dtype, or a floating one (then they are differentiable).
CodeCarrier = Code | Float

FLOATS: dict[str, Float] = {
    f.name: f
    for f in (
        Float(torch.float16, "float16", 16, 11, "float32"),
        Float(torch.bfloat16, "bfloat16", 16, 8, "float32"),
        Float(torch.float32, "float32", 32, 24, "float32"),
        Float(torch.float64, "float64", 64, 53, "float64"),
    )
}

# torch's stubs do not name the sub-byte dtypes yet.
CODES: dict[str, Code] = {
    c.name: c
    for c in (
        Code(torch.int2, "int2", 2, True, torch.int8),  # type: ignore[attr-defined]
        Code(torch.uint2, "uint2", 2, False, torch.uint8),  # type: ignore[attr-defined]
        Code(torch.int4, "int4", 4, True, torch.int8),  # type: ignore[attr-defined]
        Code(torch.uint4, "uint4", 4, False, torch.uint8),  # type: ignore[attr-defined]
        Code(torch.int8, "int8", 8, True, torch.int8),
        Code(torch.uint8, "uint8", 8, False, torch.uint8),
        Code(torch.int16, "int16", 16, True, torch.int16),
        Code(torch.uint16, "uint16", 16, False, torch.uint16),
    )
}

_NAMES: dict[TorchDtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, TorchDtype)
}

_BY_TORCH: dict[TorchDtype, CodeCarrier] = {
    **{record.torch: record for record in FLOATS.values()},
    **{record.torch: record for record in CODES.values()},
}


def dtype_name(dtype: torch.dtype) -> str:
    """What ``parse_dtype`` reads back. torch's operators take a dtype by this name: a program of
    ``torch.export`` cannot be saved with a dtype of less than a byte.
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
    """The record of a floating dtype, or a sentence that says what ``what`` accepts."""
    record = _BY_TORCH.get(dtype)
    if not isinstance(record, Float):
        raise InvalidDescriptor(
            f"{what} is {dtype}; accepted are {_names(FLOATS)}. Convert the tensor to one of these first."
        )
    return record


def code_dtype(dtype: torch.dtype, what: str) -> CodeCarrier:
    """The record of a dtype that can carry codes: an integer one, or a floating one."""
    record = _BY_TORCH.get(dtype)
    if record is None:
        raise InvalidDescriptor(
            f"{what} is {dtype}; accepted are {_names(CODES)} for integer codes and {_names(FLOATS)} "
            "for codes carried as floats."
        )
    return record


def _names(records: dict[str, Float] | dict[str, Code]) -> str:
    return ", ".join(f"torch.{name}" for name in records)
