"""Pack sub-byte codes into bytes, and unpack them, in plain torch operations on any device.

The last axis is packed, low bits first: byte ``i`` of 4-bit codes holds code ``2 i`` in its low half and code
``2 i + 1`` in its high half. Unused bits of the last byte are 0.

Bits are shifted by functions, because the operators ``<<`` and ``>>`` leave DTensors as they are.
"""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from holdfast.core.checks import INT64, require_dtype, require_memory, require_tensor, whole_number
from holdfast.core.errors import InvalidArgs
from holdfast.core.formats import INTEGERS, Format, format_of

__all__ = ["pack", "unpack"]


def pack(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pack ``codes`` of a 2-bit or 4-bit ``dtype``, one per int8 or uint8 element, into bytes.

    >>> import torch, holdfast as hf
    >>> hf.pack(torch.tensor([1, -2, 7], dtype=torch.int8), torch.int4)
    tensor([225,   7], dtype=torch.uint8)
    """
    code = _sub_byte(dtype)
    require_tensor("codes", codes)
    if not is_compiling():
        require_memory("codes", codes)
    if codes.dtype != code.storage:
        raise InvalidArgs(
            f"codes have dtype {codes.dtype}; unpacked {dtype} codes must be {code.storage}, one per element."
        )
    if codes.dim() == 0:
        raise InvalidArgs("codes have rank 0 and no last axis to pack; reshape them to (1,).")
    per_byte = code.per_byte
    fields = torch.nn.functional.pad(codes.view(torch.uint8), (0, -codes.shape[-1] % per_byte))
    fields = fields.unflatten(-1, (-1, per_byte)) & (2**code.bits - 1)
    packed: torch.Tensor = fields[..., 0]
    for p in range(1, per_byte):
        packed = packed | torch.bitwise_left_shift(fields[..., p], p * code.bits)
    return packed


def unpack(packed: torch.Tensor, dtype: torch.dtype, length: int | None = None) -> torch.Tensor:
    """The first ``length`` codes along the last axis of ``packed``, one per int8 or uint8 element.

    ``length`` is required, since the last byte may not be full.

    >>> import torch, holdfast as hf
    >>> hf.unpack(torch.tensor([225, 7], dtype=torch.uint8), torch.int4, length=3)
    tensor([ 1, -2,  7], dtype=torch.int8)
    """
    code = _sub_byte(dtype)
    require_tensor("packed", packed)
    if not is_compiling():
        require_memory("packed", packed)
    if packed.dtype != torch.uint8:
        raise InvalidArgs(f"packed codes have dtype {packed.dtype}; they must be torch.uint8.")
    if packed.dim() == 0:
        raise InvalidArgs("packed codes have rank 0 and no last axis to unpack; reshape them to (1,).")
    length = packed_length(length, packed.shape[-1], code)
    mask = 2**code.bits - 1
    fields = [torch.bitwise_right_shift(packed, p * code.bits) & mask for p in range(code.per_byte)]
    codes = torch.stack(fields, dim=-1).flatten(-2)[..., :length]
    if not code.signed:
        return codes.contiguous()
    spare = 8 - code.bits
    return torch.bitwise_right_shift(torch.bitwise_left_shift(codes, spare).view(torch.int8), spare)


def packed_length(length: int | None, size: int, code: Format) -> int:
    """Check ``length``, the number of codes in ``size`` bytes along the last axis. None is refused."""
    most = size * code.per_byte
    if length is None and not size:
        return 0
    if length is None:
        raise InvalidArgs(
            f"length is not given, and {size} bytes of {code.torch} may hold {most - code.per_byte + 1} to "
            f"{most} codes; pass length=, the size of the last axis before packing."
        )
    length = whole_number("length", length, *INT64)
    if not most - code.per_byte < length <= most:
        raise InvalidArgs(
            f"length is {length}; {size} bytes of {code.torch} hold {most} codes, of which only the last "
            f"{code.per_byte - 1} may be unused."
        )
    return length


def _sub_byte(dtype: torch.dtype) -> Format:
    require_dtype("dtype", dtype)
    code = format_of(dtype, "dtype")
    if code.per_byte == 1:
        accepted = ", ".join(f"torch.{name}" for name, known in INTEGERS.items() if known.per_byte > 1)
        raise InvalidArgs(f"dtype is {dtype}; only codes of less than a byte are packed: {accepted}.")
    return code
