"""Plans of dequantize: codes to real numbers, and the gradient with respect to codes stored as floats.

``y = (q - zero_point) * scale``. One kernel covers the four granularities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Expected
from holdfast.core.dtypes import Float, float_dtype
from holdfast.core.formats import Format, format_of
from holdfast.core.plan import Args
from holdfast.ops.affine.plan import (
    AffineDescriptor,
    AffinePlan,
    Scale,
    ZeroPoint,
    define_granularities,
    one_rounding_ulp,
)


@dataclass(frozen=True, kw_only=True)
class DequantizeBackwardDescriptor(AffineDescriptor):
    """``input_dtype`` is the dtype of the codes. A floating one is also the dtype of ``dq``."""

    input_dtype: torch.dtype = torch.int8
    output_dtype: torch.dtype = torch.float32

    @property
    def real(self) -> Float:
        return float_dtype(self.output_dtype, "output_dtype")

    @property
    def codes(self) -> Format:
        return format_of(self.input_dtype, "input_dtype")

    def expected(self, name: str) -> Expected:
        return self.shape, self.gradient_of_codes if name == "dq" else self.output_dtype


@dataclass(frozen=True, kw_only=True)
class DequantizeDescriptor(DequantizeBackwardDescriptor):
    """``shape`` is the shape of ``y``. ``packed``: several codes per byte along the last axis."""

    packed: bool = False

    @property
    def is_packed(self) -> bool:
        return self.packed

    def expected(self, name: str) -> Expected:
        return (self.code_shape, self.code_storage) if name == "q" else (self.shape, self.output_dtype)


@arguments
class DequantizeArgs(Args):
    """Reads ``q``, writes ``y``."""

    q: torch.Tensor
    scale: Scale
    y: Output
    zero_point: ZeroPoint = None


@arguments
class DequantizeBackwardArgs(Args):
    """Reads ``dy``. Writes ``dq``, or adds to it with ``accumulate``."""

    dy: torch.Tensor
    scale: Scale
    dq: Output
    accumulate: bool = False


class DequantizePlan(AffinePlan[DequantizeDescriptor, DequantizeArgs], abstract=True):
    """y = (q - zero_point) * scale."""

    def ulp(self) -> dict[str, float]:
        # Floating codes may be fractions: then subtracting the zero point rounds too.
        real = self.descriptor.real
        subtracted = 2.0 ** (real.precision - real.compute.precision)
        return {"y": one_rounding_ulp(real, real.compute) + subtracted * self.descriptor.codes.carried}


class DequantizeBackwardPlan(AffinePlan[DequantizeBackwardDescriptor, DequantizeBackwardArgs], abstract=True):
    """dq = dy * scale."""

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        return {"dq": one_rounding_ulp(float_dtype(desc.gradient_of_codes, "dq"), desc.real.compute)}


define_granularities(DequantizePlan)
define_granularities(DequantizeBackwardPlan)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The classes that ``define_granularities`` makes."""
