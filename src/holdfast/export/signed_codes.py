"""Signed codes, for targets that have no others."""

from __future__ import annotations

import torch

from holdfast.core.errors import Unsupported
from holdfast.core.formats import Format
from holdfast.qat import QuantizedTensor


def signed_codes(weight: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The codes and zero points of ``weight``, signed.

    For an unsigned format, half of the number of codes is subtracted from both, which changes no value.
    """
    if weight.format.signed:
        return weight.codes, weight.zero_point
    half = 2 ** (weight.format.bits - 1)
    zeros = (
        torch.zeros_like(weight.scale, dtype=torch.int32) if weight.zero_point is None else weight.zero_point
    )
    return (weight.codes.to(torch.int32) - half).to(torch.int8), zeros - half


def zero_point_code(name: str, zero_point: torch.Tensor, codes: Format, target: str) -> torch.Tensor:
    """Signed zero points as int8. Raise unless they are codes of the format."""
    lowest, highest = -(2 ** (codes.bits - 1)), 2 ** (codes.bits - 1) - 1
    if zero_point.numel() and not lowest <= int(zero_point.min()) <= int(zero_point.max()) <= highest:
        raise Unsupported(
            f"{name} has a zero point that is no code of {codes.torch}; {target} stores zero points as "
            "codes. Choose zero points in the range of the codes."
        )
    return zero_point.to(torch.int8)
