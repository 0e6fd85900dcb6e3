"""The arithmetic in NumPy: the definition that all other backends must match.

Every operation is a single IEEE-754 operation, rounded to nearest, ties to even. The compute type is float32,
or float64 for float64 tensors. Results are rounded to the output dtype once, when they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.descriptor import Descriptor
from holdfast.core.dtypes import ZERO_POINT_LIMIT, Float
from holdfast.core.formats import Format
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.numerics.exponential import EXPONENTIALS

Array = npt.NDArray[Any]

D = TypeVar("D", bound=Descriptor)

_NUMPY = {"float32": np.float32, "float64": np.float64}


class ReferenceKernel(DescribedKernel[D]):
    """A kernel in NumPy. A subclass defines ``run``, which writes the outputs in ``args``."""

    def run(self, args: Any) -> None:
        raise NotImplementedError

    def prepare(self, args: Any) -> Launch[Any]:
        return self._launch

    @torch.inference_mode()  # outputs may require a gradient or be inference tensors
    def _launch(self, stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
        self.run(args)


def compute_type(compute: Float) -> type[np.float32] | type[np.float64]:
    """The NumPy type of a compute dtype."""
    return _NUMPY[compute.name]  # type: ignore[return-value]


def widen(tensor: torch.Tensor, compute: Float) -> Array:
    """The values of a tensor in the compute type; exact."""
    return tensor.detach().to(compute.torch).numpy()


def narrow_bfloat16(values: Array) -> Array:
    """float32 values rounded to the bits of bfloat16, ties to even; NaN stays NaN."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def store(out: torch.Tensor, values: Array) -> None:
    """Write ``values`` to ``out``. Floats are rounded once to the dtype of ``out``."""
    with np.errstate(over="ignore"):
        if out.dtype == torch.bfloat16:
            made = torch.from_numpy(np.ascontiguousarray(narrow_bfloat16(values))).view(torch.bfloat16)
        elif out.dtype == torch.float16:
            made = torch.from_numpy(np.ascontiguousarray(values.astype(np.float16)))
        elif out.dtype == torch.uint16:
            made = torch.from_numpy(np.ascontiguousarray(values.astype(np.uint16)))
        elif values.dtype == np.uint8:  # 8-bit codes are stored unchanged
            made = torch.from_numpy(np.ascontiguousarray(values)).view(out.dtype)
        else:
            made = torch.from_numpy(np.ascontiguousarray(values)).to(out.dtype)
    out.detach().copy_(made.reshape(out.shape))


def accumulated(old: torch.Tensor, values: Array, compute: Float) -> Array:
    """``old + values``, added in the compute type."""
    with np.errstate(all="ignore"):
        total: Array = widen(old, compute) + values
        return total


def store_gradient(out: torch.Tensor, values: Array, accumulate: bool, compute: Float) -> None:
    """Write ``values`` to ``out``, or with ``accumulate`` add them to it."""
    store(out, accumulated(out, values, compute) if accumulate else values)


def saturated(zero_point: Array) -> Array:
    """The zero point, clamped to ``ZERO_POINT_LIMIT``."""
    return np.clip(zero_point, -ZERO_POINT_LIMIT, ZERO_POINT_LIMIT).astype(np.int64)


def bounds(zero_point: Array, q_min: int, q_max: int, compute: Float) -> tuple[Array, Array, Array]:
    """The saturated zero point z, ``q_min - z`` and ``q_max - z``; exact in the compute type."""
    z = saturated(zero_point)
    kind = compute_type(compute)
    return z, (q_min - z).astype(kind), (q_max - z).astype(kind)


def rounded_quotient(x: Array, scale: Array) -> Array:
    """rint(x / scale), ties to even."""
    with np.errstate(all="ignore"):
        return np.rint(x / scale)


def nearest(t: Array, codes: Format) -> Array:
    """t rounded to the mantissa of a float format, ties to even, with an unlimited upper exponent.

    Below the least normal number, t is rounded to subnormal numbers. Keeps NaN, infinities, signs of zeros.
    """
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(t)[1] - 1, 1 - codes.exponent_bias)
        step = np.ldexp(t.dtype.type(1), exponent - codes.mantissa_bits)
        return np.asarray(np.rint(t / step) * step, t.dtype)


def encode(values: Array, codes: Format) -> Array:
    """The codes of values of a float format. NaN becomes ``codes.nan``, or 0 if that is None."""
    magnitudes = _values(codes)[: codes.highest_code + 1]
    found = np.searchsorted(magnitudes, np.abs(values)) | np.signbit(values) << (codes.bits - 1)
    return np.where(np.isnan(values), codes.nan or 0, found).astype(np.uint8)


def decode(found: Array, codes: Format, compute: Float) -> Array:
    """The values of codes of a float format; exact."""
    return _values(codes).astype(compute_type(compute))[found]


@cache
def _values(codes: Format) -> Array:
    return np.array([codes.value(code) for code in range(2**codes.bits)])


def exp_below_zero(v: Array, compute: Float) -> Array:
    """exp(v) for v <= 0. v is clamped to ``floor``, so that the result is normal; NaN becomes ``floor``."""
    known, kind = EXPONENTIALS[compute.name], compute_type(compute)
    with np.errstate(all="ignore"):
        v = np.fmax(v, kind(known.floor))
        k = np.rint(v * kind(known.log2_e))
        r = (v - k * kind(known.ln2_hi)) - k * kind(known.ln2_lo)
        *lower, highest = map(kind, known.coefficients)
        q = np.full_like(r, highest)
        for c in reversed(lower):
            q = c + r * q
        p = kind(1) + (r + (r * r) * q)
        scaled: Array = np.ldexp(p, k.astype(np.int32))
        return scaled


def tanh_slope(t: Array, compute: Float) -> Array:
    """1 - tanh(t)**2, computed as 4e / (1 + e)**2 with e = exp(-2|t|)."""
    kind = compute_type(compute)
    with np.errstate(all="ignore"):
        e = exp_below_zero(kind(-2) * np.abs(t), compute)
        return (kind(4) * e) / (kind(1) + e * (kind(2) + e))
