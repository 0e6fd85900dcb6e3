"""``QuantizedTensor``: codes with their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.formats import Format
from holdfast.core.granularity import Granularity
from holdfast.ops.dequantize.torch_op import dequantize


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes with their scales, as they are deployed. ``dequantize()`` has the bits that training used.

    ``codes``: one code per element, in the shape of the tensor. ``scale``: as stored, in the shape that the
    granularity gives. ``zero_point``: int32 in the shape of ``scale``; None if it is 0. ``granularity``
    counts axes from 0. ``dtype``: the dtype of the dequantized tensor.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    format: Format
    granularity: Granularity
    dtype: torch.dtype

    def dequantize(self) -> torch.Tensor:
        """The values of the codes."""
        return dequantize(
            self.codes, widened(self.scale), self.zero_point, dtype=self.dtype, granularity=self.granularity,
            code_dtype=self.format.torch,
        )  # fmt: skip


def widened(scale: torch.Tensor) -> torch.Tensor:
    """A 16-bit scale in float32, which is exact."""
    return scale.float() if scale.element_size() == 2 else scale
