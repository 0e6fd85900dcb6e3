"""The arithmetic, in Triton. Kernels that use it are compiled with ``enable_fp_fusion=False``.

Everything here is an IEEE-754 operation rounded on its own, but for divisions: those are computed in other
ways that are proven to give the correctly rounded quotient.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from holdfast.core import dtypes
from holdfast.numerics.exponential import EXPONENTIALS

#: Triton's interpreter does not fuse ``tl.fma`` and converts bfloat16 wrongly: there both are spelled out.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
ZERO_POINT_LIMIT = tl.constexpr(dtypes.ZERO_POINT_LIMIT)
#: 1.5 * 2^23: a float32 near it has an ulp of 1, and its integer part in its low bits.
MAGIC = tl.constexpr(12582912)
MAGIC_BITS = tl.constexpr(0x4B400000)
#: From here on every number of the type is an integer.
WHOLE_32 = tl.constexpr(8388608.0)
WHOLE_64 = tl.constexpr(4503599627370496.0)

_EXP_32, _EXP_64 = EXPONENTIALS["float32"], EXPONENTIALS["float64"]
FLOOR_32, FLOOR_64 = tl.constexpr(_EXP_32.floor), tl.constexpr(_EXP_64.floor)
LOG2_E_32, LOG2_E_64 = tl.constexpr(_EXP_32.log2_e), tl.constexpr(_EXP_64.log2_e)
LN2_HI_32, LN2_HI_64 = tl.constexpr(_EXP_32.ln2_hi), tl.constexpr(_EXP_64.ln2_hi)
LN2_LO_32, LN2_LO_64 = tl.constexpr(_EXP_32.ln2_lo), tl.constexpr(_EXP_64.ln2_lo)
C2, C3, C4, C5, C6 = map(tl.constexpr, _EXP_32.coefficients)
D2, D3, D4, D5, D6, D7, D8, D9, D10, D11, D12 = map(tl.constexpr, _EXP_64.coefficients)
MAGIC_64 = tl.constexpr(_EXP_64.magic)


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
def doubled_quotient(x, s):
    """2x / s, as ``code_quotient`` is x / s."""
    if x.dtype == tl.float64:
        return 2.0 * (x / s)
    else:
        return (x.to(tl.float64) * (2.0 / s.to(tl.float64))).to(tl.float32)


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
    """clamp(x / s, lo, hi) for finding a code with bounds up to 2^16, in float32 alone; NaN stays NaN.

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
    x = tl.maximum(x, tl.minimum(one_end, other_end), propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, tl.maximum(one_end, other_end), propagate_nan=tl.PropagateNan.ALL)
    q = tl.fma(x, rs, x * rl)
    return tl.fma(tl.fma(q, -s, x), rs, q)


@triton.jit
def code(x, s, q_min, q_max, z, FUSED: tl.constexpr):
    """int(clamp(rint(x / s), q_min - z, q_max - z)) + z, with NaN taken for 0.

    FUSED is for codes without a zero point: there one instruction rounds, and takes NaN for 0. Otherwise, in
    float32, adding 1.5 * 2^23 rounds a quotient to an integer, half to even, in the low bits of the sum.
    Bounds beyond 2^22 would leave that binade; then an even number near them goes along, which moves no tie.
    """
    lo = q_min - z
    hi = q_max - z
    if FUSED and x.dtype == tl.float32:
        return libdevice.float2int_rn(fused_quotient(x, s, lo, hi))
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
def rounded_to_code(x, s, q_min, q_max, z):
    """clamp(rint(x / s), q_min - z, q_max - z) * s, where a zero is +0 as that of an integer is.

    NaN stays NaN; a quotient that is NaN otherwise counts as 0. It is rounded as in ``code``: what is added
    is subtracted again, which leaves +0.

    In float32 the quotient is that of ``code_quotient``, and NaN passes through every step. Two changes of
    1 / s make that right where x is none. If s is 0, a huge number gives 0 for 0 / 0 and the bounds for all
    else. If s is infinite, every x gives NaN where 0 is a code, as inf * 0 does, and else infinities of one
    sign: then a tiny number keeps the quotient from being NaN.
    """
    lo = q_min - z
    hi = q_max - z
    if x.dtype == tl.float64:
        t = x / s
        t = tl.where(t == t, t, 0.0)
        t = tl.minimum(tl.maximum(t, lo.to(tl.float64)), hi.to(tl.float64))
        whole = tl.where(t < 0, -WHOLE_64, WHOLE_64)
        return ((t + whole) - whole) * tl.where(x == x, s, x)
    else:
        inverse = 1.0 / s.to(tl.float64)
        inverse = tl.minimum(tl.maximum(inverse, -1e300), 1e300)
        inverse = tl.where((inverse == 0) & ((lo > 0) | (hi < 0)), 1e-300, inverse)
        t = (x.to(tl.float64) * inverse).to(tl.float32)
        t = tl.maximum(t, lo.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        t = tl.minimum(t, hi.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(tl.abs(z) > 2**21, lo & -2, 0)
        whole = (tl.full(base.shape, MAGIC, tl.int32) - base).to(tl.float32)
        return ((t + whole) - whole) * s


@triton.jit
def whole_zero_point(z):
    """A floating zero point as an integer: rounded half to even, saturated, and 0 for NaN."""
    if z.dtype == tl.float64:
        whole = tl.where(z < 0, -WHOLE_64, WHOLE_64)
    else:
        z = widen(z, tl.float32)
        whole = tl.where(z < 0, -WHOLE_32, WHOLE_32)
    z = tl.where(z == z, z, 0.0)
    z = tl.minimum(tl.maximum(z, -1.0 * ZERO_POINT_LIMIT), 1.0 * ZERO_POINT_LIMIT)
    return ((z + whole) - whole).to(tl.int32)


@triton.jit
def minus_quotient(p, b):
    """-p / b, correctly rounded, for p from 2^-1 to 2 and b from 2^-4 to 2^-2.

    By Markstein's theorem, as in ``fused_quotient``: one step makes RN(-1 / b) of the hardware's estimate,
    which is within 2 ulp, and no step leaves the normal numbers. That every argument of ``tanh_slope`` gives
    the rounded quotient, whatever the estimate, was tried. With -1 / b no step needs a minus of its own.
    """
    if INTERPRETED:
        return -tl.div_rn(p, b)
    else:
        y = libdevice.fast_dividef(tl.full(b.shape, -1.0, tl.float32), b)
        y = tl.fma(tl.fma(b, y, 1.0), y, y)
        q = p * y
        return tl.fma(tl.fma(b, q, p), y, q)


@triton.jit
def tanh_slope(double):
    """1 - tanh(t)**2 with double = 2t. It is 4e / (1 + e)**2, where e = exp(-v), v = |double|.

    In float32 everything is scaled by powers of two and by -1, which changes no rounding. The low bits of
    ``near`` hold 258 - k; shifted into the exponent and subtracted, they multiply by 2^k, divide by 4, and
    turn the sign. So ``e`` is minus a quarter of exp(-v), ``b`` a sixteenth of (1 + exp(-v))**2, and the
    result comes from -p / b as ``e`` comes from p.
    """
    if double.dtype == tl.float64:
        v = tl.minimum(tl.abs(double), -FLOOR_64)
        near = v * LOG2_E_64 + MAGIC_64
        minus_k = near - MAGIC_64
        r = (minus_k * LN2_HI_64 - v) + minus_k * LN2_LO_64
        q = D6 + r * (D7 + r * (D8 + r * (D9 + r * (D10 + r * (D11 + r * D12)))))
        q = D2 + r * (D3 + r * (D4 + r * (D5 + r * q)))
        p = 1.0 + (r + (r * r) * q)
        bits = p.to(tl.int64, bitcast=True) - (near.to(tl.int64, bitcast=True) << 52)
        e = bits.to(tl.float64, bitcast=True)
        return (4.0 * e) / (1.0 + e * (2.0 + e))
    else:
        v = tl.minimum(tl.abs(double), -FLOOR_32)
        near = v * LOG2_E_32 + (MAGIC + 258)
        minus_k = near - (MAGIC + 258)
        r = (minus_k * LN2_HI_32 - v) + minus_k * LN2_LO_32
        q = C2 + r * (C3 + r * (C4 + r * (C5 + r * C6)))
        p = 1.0 + (r + (r * r) * q)
        shift = near.to(tl.int32, bitcast=True) << 23
        e = (p.to(tl.int32, bitcast=True) - shift).to(tl.float32, bitcast=True)
        b = 0.0625 + e * (e - 0.5)
        return (minus_quotient(p, b).to(tl.int32, bitcast=True) - shift).to(tl.float32, bitcast=True)


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """x in the compute type DTYPE; exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def widen_pair(word, DTYPE: tl.constexpr):
    """The two 16-bit floats in each word of 32 bits as float32, those in the low bits first; exact."""
    if DTYPE == tl.bfloat16:
        low, high = word << 16, word & -65536
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
        return low.to(DTYPE, bitcast=True).to(tl.float32), high.to(DTYPE, bitcast=True).to(tl.float32)


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
