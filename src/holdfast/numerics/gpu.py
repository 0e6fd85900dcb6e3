"""The arithmetic, in Triton. Kernels that use it are compiled with ``enable_fp_fusion=False``.

Everything here is an IEEE-754 operation rounded on its own, but for divisions: those are computed in other
ways that are proven to give the correctly rounded quotient.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from holdfast.core import dtypes

#: Triton's interpreter does not fuse ``tl.fma`` and converts bfloat16 wrongly: there both are spelled out.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
ZERO_POINT_LIMIT = tl.constexpr(dtypes.ZERO_POINT_LIMIT)
#: 1.5 * 2^23: a float32 near it has an ulp of 1, and its integer part in its low bits.
MAGIC = tl.constexpr(12582912)
MAGIC_BITS = tl.constexpr(0x4B400000)
#: From here on every float64 is an integer.
WHOLE_64 = tl.constexpr(4503599627370496.0)


@triton.jit
def quotient(x, s):
    """x / s, correctly rounded.

    In float32 through float64: q is within an ulp of x / s there, so its remainder is exact and the second
    line gives RN64(x / s); rounding that to float32 is rounding x / s itself, since a quotient of float32
    numbers is either on a rounding boundary, and then exact in float64, or further from it than float64's
    error. Where the remainder is not a number, q is already infinite, zero or NaN as x / s is; a zero keeps
    the sign of q.
    """
    if x.dtype == tl.float64:
        return x / s
    elif INTERPRETED:
        return tl.div_rn(x, s)
    else:
        wide = x.to(tl.float64)
        divisor = s.to(tl.float64)
        rs = 1.0 / divisor
        q = wide * rs
        exact = tl.fma(tl.fma(q, -divisor, wide), rs, q)
        return tl.where(tl.abs(exact) > 0, exact, q).to(tl.float32)


@triton.jit
def code_quotient(x, s):
    """x / s for finding a code: correctly rounded where its magnitude is at least 2^-126.

    There a quotient of float32 numbers is never on a rounding boundary of float32, and at least 2^-49 of
    itself away from the next one; the product with RN64(1 / s) is off by less than 2^-52 of itself. A smaller
    quotient has the code of zero whatever its last bit.
    """
    if x.dtype == tl.float64:
        return x / s
    else:
        return (x.to(tl.float64) * (1.0 / s.to(tl.float64))).to(tl.float32)


@triton.jit
def divisor(s):
    """(unit, s, rs, rl) such that x / s is (x * unit) / s for finding a code, and 1 / s is rs + rl.

    A power of two brings the scale to where no step of ``fused_quotient`` underflows. For a scale that is
    zero, infinite or NaN, x * (1 / s) / 1 is infinite, zero or NaN exactly where x / s is.
    """
    size = tl.abs(s)
    ordinary = (size > 0) & (size < float("inf"))
    power = tl.where(size < 2.0**-100, 2.0**100, tl.where(size > 2.0**100, 2.0**-100, 1.0))
    s = tl.where(ordinary, s * power, s)
    rs = tl.div_rn(tl.full(s.shape, 1.0, tl.float32), s)
    unit = tl.where(ordinary, power, rs)
    s = tl.where(ordinary, s, 1.0)
    rs = tl.where(ordinary, rs, 1.0)
    return unit, s, rs, tl.fma(-s, rs, 1.0) * rs


@triton.jit
def fused_quotient(x, s, lo, hi):
    """clamp(x / s, lo, hi) for finding a code with bounds up to 2^16, in float32 alone; NaN gives 0.

    It is correctly rounded from 0.25 on, and a smaller quotient has the code of zero. By Markstein's theorem:
    q is within one ulp of x / s, so that its remainder is exact, and q + remainder * RN(1 / s), rounded once,
    is RN(x / s). Clamping x to lo * s and hi * s keeps q finite; these products are off by less than 2^-23 of
    themselves, which rounding to a code removes. It takes more steps than ``code_quotient`` but no conversion
    to float64, which is what packed codes would wait for.
    """
    unit, s, rs, rl = divisor(s)
    one_end = lo.to(tl.float32) * s
    other_end = hi.to(tl.float32) * s
    x = x * unit
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, tl.minimum(one_end, other_end)), tl.maximum(one_end, other_end))
    q = tl.fma(x, rs, x * rl)
    return tl.fma(tl.fma(q, -s, x), rs, q)


@triton.jit
def code(x, s, q_min, q_max, z, FUSED: tl.constexpr):
    """int(clamp(rint(x / s), q_min - z, q_max - z)) + z, with NaN taken for 0.

    In float32, adding 1.5 * 2^23 rounds a quotient to an integer, half to even, in the low bits of the sum.
    Bounds beyond 2^22 would leave that binade; then an even number near them goes along, which moves no tie.
    """
    lo = q_min - z
    hi = q_max - z
    if FUSED and x.dtype == tl.float32:
        t = fused_quotient(x, s, lo, hi)
    else:
        t = code_quotient(x, s)
        t = tl.where(t == t, t, 0.0)
        t = tl.minimum(tl.maximum(t, lo.to(t.dtype)), hi.to(t.dtype))
    if t.dtype == tl.float64:
        whole = tl.where(t < 0, -WHOLE_64, WHOLE_64)
        return ((t + whole) - whole).to(tl.int32) + z
    else:
        base = tl.where(tl.abs(z) > 2**21, lo & -2, 0)
        near = t + (tl.full(base.shape, MAGIC, tl.int32) - base).to(tl.float32)
        return near.to(tl.int32, bitcast=True) + (z + base - MAGIC_BITS)


@triton.jit
def least_rounding_up_to(lo, DTYPE: tl.constexpr):
    """The least t with rint(t) >= lo: lo - 0.5 if lo is even, else the next number above that."""
    BITS: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    bound = lo.to(DTYPE)
    half = bound - 0.5
    bits = half.to(BITS, bitcast=True)
    above = tl.where(half > 0, bits + 1, bits - 1).to(DTYPE, bitcast=True)
    edge = tl.where(lo % 2 == 0, half, above)
    return tl.where(bound - half == 0.5, edge, bound)


@triton.jit
def in_range(x, s, q_min, q_max, z):
    """q_min <= rint(x / s) + z <= q_max; false for NaN. Rounding is symmetric: both ends use one function."""
    t = code_quotient(x, s)
    low = least_rounding_up_to(q_min - z, t.dtype)
    high = -least_rounding_up_to(z - q_max, t.dtype)
    return (low <= t) & (t <= high)


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """x in the compute type DTYPE; exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """x rounded to DTYPE, to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
