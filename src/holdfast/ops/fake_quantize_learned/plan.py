"""The plan of fake_quantize_learned: all gradients of fake quantization in one pass over dy and x.

The scale and the zero point are learned as in LSQ and LSQ+: rounding passes the gradient through, clamping
does not. Let t = x / scale, r = rint(t), lo = q_min - zero_point and hi = q_max - zero_point. Then::

    dscale      = factor * sum of dy * (r - t) where lo <= r <= hi, dy * lo below, dy * hi above
    dzero_point = factor * sum of -(dy * scale) where r is below lo or above hi

over the elements that share the scale. The term of an element with t = NaN is 0. The sums do not depend on
the estimator of dx.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.contract import error_in_ulp
from holdfast.core.declaration import Output, arguments
from holdfast.core.descriptor import Expected
from holdfast.core.dtypes import float_dtype
from holdfast.core.errors import InvalidDescriptor
from holdfast.core.plan import Args
from holdfast.core.segments import segment_length
from holdfast.ops.affine.plan import Scale, ZeroPoint
from holdfast.ops.fake_quantize.plan import (
    EstimatedDescriptor,
    FakeCodesPlan,
    estimator_ulp,
    refused_learning,
)
from holdfast.ops.tree_sum.blocks import rounding_errors


@dataclass(frozen=True, kw_only=True)
class FakeQuantizeLearnedBackwardDescriptor(EstimatedDescriptor):
    """The gradients with respect to x (by the estimator ``ste``), the scale, and a learned zero point.

    ``scale_dtype`` is the dtype of the scale and its gradient. ``zero_point_dtype`` is the dtype of the zero
    point and its gradient, or None if the zero point is not learned. ``grad_factor`` multiplies both
    gradients.
    """

    scale_dtype: torch.dtype = torch.float32
    zero_point_dtype: torch.dtype | None = None
    grad_factor: float = 1.0

    @property
    def empty(self) -> bool:
        """A tensor without elements may still have scales, whose gradients are zero."""
        return super().empty and not self.view.scale_count

    def expected(self, name: str) -> Expected:
        if name == "dscale":
            return self.view.scale_shape, self.scale_dtype
        if name == "dzero_point":
            return self.view.scale_shape, self.zero_point_dtype or torch.float32
        return self.shape, self.input_dtype

    def validate(self) -> None:
        super().validate()
        if self.codes.is_float:
            raise InvalidDescriptor(refused_learning(self.codes))
        accepted = dict.fromkeys((torch.float32, self.input_dtype))
        for name, dtype in (("scale_dtype", self.scale_dtype), ("zero_point_dtype", self.zero_point_dtype)):
            if dtype not in accepted and not (dtype is None and name == "zero_point_dtype"):
                named = " or ".join(map(str, accepted))
                raise InvalidDescriptor(f"{name} is {dtype}; to be learned, it must be {named}.")


@arguments
class FakeQuantizeLearnedBackwardArgs(Args):
    """Reads ``dy`` and the forward's ``x``, ``scale`` and ``zero_point``; writes the gradients.

    With ``accumulate`` it adds to the gradients instead. If the descriptor has a ``zero_point_dtype``, both
    ``zero_point`` and ``dzero_point`` are tensors of that dtype; else ``dzero_point`` is None.
    """

    dy: torch.Tensor
    x: torch.Tensor
    scale: Scale
    dx: Output
    dscale: Output
    dzero_point: Output | None = None
    zero_point: ZeroPoint = None
    accumulate: bool = False


class FakeQuantizeLearnedBackwardPlan(
    FakeCodesPlan[FakeQuantizeLearnedBackwardDescriptor, FakeQuantizeLearnedBackwardArgs]
):
    """dx, dscale and dzero_point of fake quantization with a learned scale and zero point."""

    def mode(self) -> str:
        learned = "scale" if self.descriptor.zero_point_dtype is None else "scale and zero point"
        return f"{super().mode()}, {self.descriptor.ste}, {learned}"

    def bytes_moved(self) -> int:
        desc = self.descriptor
        per_scale = 2 * desc.scale_dtype.itemsize
        per_scale += 2 * desc.zero_point_dtype.itemsize if desc.zero_point_dtype else 0
        return 3 * math.prod(desc.shape) * desc.input_dtype.itemsize + desc.view.scale_count * per_scale

    def ulp(self) -> dict[str, float]:
        """Errors of dscale and dzero_point are in ULP of the sum of magnitudes, since a sum may cancel.

        The sum of magnitudes is the factor times the sum of |dy| * (|code - zero_point| + 1) for dscale, and
        of |dy * scale| over the elements out of range for dzero_point. Errors are relative to the codes of
        the forward.

        Let u = 2^-p. The error of dy * (r - t) is u |dy t| from the quotient and u |dy (r - t)| from the
        product. It is at most u times the term's magnitude, since |t| + |r - t| <= |r| + 1. Any other term is
        a product, rounded once. The sum, the factor and their product add the other roundings.
        """
        desc, compute = self.descriptor, self.descriptor.real.compute
        errors = rounding_errors(segment_length(desc.view)) + 3
        dtypes = {"dscale": desc.scale_dtype, "dzero_point": desc.zero_point_dtype or torch.float32}
        return {
            "dx": estimator_ulp(desc.ste, desc.real),
            **{name: error_in_ulp(errors, compute, float_dtype(of, name)) for name, of in dtypes.items()},
        }

    def _refused_operand(self, name: str, operand: Any) -> str:
        desc = self.descriptor
        if name == "dzero_point" and desc.zero_point_dtype is None:
            if operand is None:
                return ""
            return (
                "dzero_point is given, but the descriptor has no zero_point_dtype, so that there is no such "
                "gradient; leave it out, or give the descriptor the dtype of the zero point."
            )
        reason = super()._refused_operand(name, operand)
        if reason:
            return reason
        given = getattr(operand, "dtype", type(operand).__name__)
        if name == "scale" and given not in ("float", "int", desc.scale_dtype):
            return f"scale has dtype {given}; the descriptor asks for {desc.scale_dtype}."
        if name == "zero_point" and desc.zero_point_dtype not in (None, given):
            return f"zero_point is {given}; to be learned it must be a tensor of {desc.zero_point_dtype}."
        return ""
