"""Number formats: the value of a code, and how codes are stored and scaled.

A format is a frozen record. Everything that depends on the format (the range, the storage, the packing, the
dtypes of a scale, whether there is a zero point, the code of NaN) is read from it. In the public functions a
torch dtype names a format: ``torch.int8`` is ``INT8``, ``torch.float8_e4m3fn`` is ``E4M3FN``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import dtype as TorchDtype

from holdfast.core.dtypes import FLOATS, Float
from holdfast.core.errors import InvalidDescriptor

#: Integer codes have at most 16 bits, also where a floating dtype carries them.
LARGEST_CODE = 2**16


@dataclass(frozen=True)
class Scales:
    """The scales that a format accepts.

    ``dtypes``: the dtypes of a scale tensor. ``real``: whether the dtype of the real tensor and a Python
    float are accepted too. ``block``: number of elements along the last axis that share a scale; if it is
    None, the granularity decides. ``per_tensor``: whether a further float32 scale multiplies them all.
    """

    dtypes: tuple[TorchDtype, ...] = (torch.float32,)
    real: bool = True
    block: int | None = None
    per_tensor: bool = False

    def accepted(self, real: TorchDtype) -> tuple[TorchDtype, ...]:
        """The accepted dtypes of a scale tensor for a real tensor of dtype ``real``."""
        return tuple(dict.fromkeys((*self.dtypes, real))) if self.real else self.dtypes


@dataclass(frozen=True)
class Format:
    """A number format. ``real = (value of the code - zero_point) * scale``.

    ``torch`` is the dtype that names the format, ``storage`` the dtype of a tensor with one code per element,
    ``bits`` the size of a code. ``code_range`` holds the least and the greatest value of a code. The quotient
    ``real / scale`` is rounded to the nearest value, ties to even; values outside ``code_range``, infinities
    included, saturate.

    If ``exponent_bits`` is 0, values are integers and a code equals its value. Otherwise a code has a sign,
    an exponent and a mantissa, as in IEEE 754: the bias is ``2**(exponent_bits - 1) - 1``, and exponent 0 is
    for subnormal numbers and zeros. ``nan`` is the code of NaN; if it is None, NaN is quantized to the code
    of 0.0. ``infinity`` is the code of +infinity: dequantize reads it, quantize never writes it.

    ``carried`` codes are integers in a floating dtype. They are differentiable. The caller chooses their
    range within ``code_range``.
    """

    torch: TorchDtype
    name: str
    bits: int
    storage: TorchDtype
    code_range: tuple[int, int]
    exponent_bits: int = 0
    mantissa_bits: int = 0
    nan: int | None = None
    infinity: int | None = None
    zero_point: bool = True
    carried: bool = False
    scales: Scales = Scales()

    @property
    def is_float(self) -> bool:
        """Whether a code has an exponent."""
        return self.exponent_bits > 0

    @property
    def signed(self) -> bool:
        return self.code_range[0] < 0

    @property
    def per_byte(self) -> int:
        """Codes per byte when packed, the first in the low bits; 1 if codes cannot be packed."""
        return 8 // self.bits if self.bits < 8 else 1

    @property
    def exponent_bias(self) -> int:
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def highest_code(self) -> int:
        """The code of the greatest value."""
        greatest = self.code_range[1]
        if not self.is_float:
            return greatest
        exponent = math.frexp(greatest)[1] - 1
        mantissa = int(greatest / 2.0 ** (exponent - self.mantissa_bits)) - 2**self.mantissa_bits
        return int((exponent + self.exponent_bias) * 2**self.mantissa_bits + mantissa)

    def value(self, code: int) -> float:
        """The value of a code.

        >>> from holdfast.core.formats import E4M3FN
        >>> E4M3FN.value(0x7E), E4M3FN.value(0x81), E4M3FN.value(0x7F)
        (448.0, -0.001953125, nan)
        """
        if not self.is_float:
            return float(code)
        magnitude = code & (2 ** (self.bits - 1) - 1)
        exponent, mantissa = divmod(magnitude, 2**self.mantissa_bits)
        significand = mantissa + (2**self.mantissa_bits if exponent else 0)
        value = math.ldexp(significand, max(exponent, 1) - self.exponent_bias - self.mantissa_bits)
        if value > self.code_range[1]:
            value = math.inf if magnitude == self.infinity else math.nan
        return -value if code > magnitude else value


def _integer(dtype: TorchDtype, name: str, bits: int, signed: bool, storage: TorchDtype) -> Format:
    half = 2 ** (bits - 1)
    return Format(dtype, name, bits, storage, (-half, half - 1) if signed else (0, 2 * half - 1))


def _carried(carrier: Float) -> Format:
    """The format of integers that a floating dtype holds exactly."""
    most = min(2**carrier.precision, LARGEST_CODE)
    return Format(carrier.torch, carrier.name, carrier.bits, carrier.torch, (-most, most), carried=True)


# torch's stubs do not name the sub-byte dtypes yet.
INT2 = _integer(torch.int2, "int2", 2, True, torch.int8)  # type: ignore[attr-defined]
UINT2 = _integer(torch.uint2, "uint2", 2, False, torch.uint8)  # type: ignore[attr-defined]
INT4 = _integer(torch.int4, "int4", 4, True, torch.int8)  # type: ignore[attr-defined]
UINT4 = _integer(torch.uint4, "uint4", 4, False, torch.uint8)  # type: ignore[attr-defined]
INT8 = _integer(torch.int8, "int8", 8, True, torch.int8)
UINT8 = _integer(torch.uint8, "uint8", 8, False, torch.uint8)
INT16 = _integer(torch.int16, "int16", 16, True, torch.int16)
UINT16 = _integer(torch.uint16, "uint16", 16, False, torch.uint16)

#: 8 bits: a sign, 4 of exponent, 3 of mantissa. No infinity; all ones are NaN.
E4M3FN = Format(
    torch.float8_e4m3fn, "float8_e4m3fn", bits=8, storage=torch.float8_e4m3fn, code_range=(-448, 448),
    exponent_bits=4, mantissa_bits=3, nan=0x7F, zero_point=False,
)  # fmt: skip

#: The integer formats, the float formats, and the integers carried in a floating dtype, by torch dtype name.
INTEGERS = {f.name: f for f in (INT2, UINT2, INT4, UINT4, INT8, UINT8, INT16, UINT16)}
FLOAT_FORMATS = {f.name: f for f in (E4M3FN,)}
CARRIED = {f.name: f for f in map(_carried, FLOATS.values())}

_BY_TORCH = {f.torch: f for f in (*INTEGERS.values(), *FLOAT_FORMATS.values(), *CARRIED.values())}


def format_of(dtype: torch.dtype, what: str) -> Format:
    """The format that a torch dtype names. ``what`` names the argument in the error message."""
    found = _BY_TORCH.get(dtype)
    if found is None:
        raise InvalidDescriptor(
            f"{what} is {dtype}; accepted are {_named(INTEGERS)} for integer codes, {_named(FLOAT_FORMATS)} "
            f"for floating codes and {_named(CARRIED)} for integer codes carried as floats."
        )
    return found


def _named(formats: dict[str, Format]) -> str:
    return ", ".join(f"torch.{name}" for name in formats)
