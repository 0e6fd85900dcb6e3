"""The arithmetic, in Triton. Kernels that use it are compiled with ``enable_fp_fusion=False``.

Everything here is an IEEE-754 operation rounded on its own, but for divisions: those are computed in other
ways that are proven to give the correctly rounded quotient.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

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
def reciprocal(s):
    """1 / s as the sum of two float64 of the same sign, for ``exact_quotient``.

    The first is an approximation, made less than 1 / s by about 2^-18 of it; what is missing follows from the
    remainder, to 2^-70 of the whole. For a scale of zero both are infinite, for an infinite one both are
    zero.
    """
    if s.dtype == tl.float64 or INTERPRETED:
        return s, s
    else:
        tiny = tl.abs(s) < 2.0**-100
        near = 1.0 / tl.where(tiny, s * 2.0**60, s)
        most = near.to(tl.float64) * tl.where(tiny, 2.0**60 - 2.0**42, 1 - 2.0**-18).to(tl.float64)
        missing = tl.fma(-s.to(tl.float64), most, 1.0)
        rest = most * tl.fma(missing, tl.fma(missing, missing, missing), missing)
        return most, tl.where(missing > 0, rest, most)


@triton.jit
def exact_quotient(x, s, most, rest):
    """x / s, correctly rounded, whatever x and s are.

    In float32 through float64, with most + rest = 1 / s: before it is rounded, the sum is off by 2^-70 of
    itself. A quotient of float32 numbers that is a float32 or lies half-way between two has 25 bits, and
    float64 rounds to it; any other is further than 2^-49 of itself from these, which is more than float64's
    error. Both products have the sign of x / s, so that infinities and zeros come out as they should.
    """
    if x.dtype == tl.float64:
        return x / s
    elif INTERPRETED:
        return tl.div_rn(x, s)
    else:
        wide = x.to(tl.float64)
        return tl.fma(wide, most, wide * rest).to(tl.float32)


@triton.jit
def inverse(s, QUICK: tl.constexpr):
    """1 / s in float64, off by less than 2^-52 of itself.

    QUICK takes a third of the instructions of a division, which counts where each column has a scale of its
    own. But a division has a branch, before which all loads are begun: a kernel that computes for long is
    faster with one.
    """
    if QUICK and not INTERPRETED:
        most, rest = reciprocal(s)
        return most + rest
    else:
        return 1.0 / s.to(tl.float64)


@triton.jit
def code_quotient(x, s, QUICK: tl.constexpr):
    """x / s for finding a code: correctly rounded where its magnitude is at least 2^-126.

    There a quotient of float32 numbers is never on a rounding boundary of float32, and at least 2^-49 of
    itself away from the next one; the product with 1 / s is off by less than 2^-51 of itself. A smaller
    quotient has the code of zero whatever its last bit.
    """
    if x.dtype == tl.float64:
        return x / s
    else:
        return (x.to(tl.float64) * inverse(s, QUICK)).to(tl.float32)


@triton.jit
def divisor(s):
    """(unit, rs, rl) such that x / s is (x * unit) * (rs + rl) for finding a code; rs and rl have one sign.

    A power of two brings the scale to where no step underflows. For a scale that is zero, infinite or NaN,
    x * (1 / s) is infinite, zero or NaN exactly where x / s is.
    """
    one = tl.full(s.shape, 1.0, tl.float32)
    size = tl.abs(s)
    ordinary = (size > 0) & (size < float("inf"))
    unit = tl.where(size < 2.0**-100, 2.0**100, tl.where(size > 2.0**100, 2.0**-100, 1.0))
    unit = tl.where(ordinary, unit, tl.div_rn(one, s))
    s = tl.where(ordinary, s * unit, 1.0)
    rs = tl.div_rn(one, s)
    bits = rs.to(tl.int32, bitcast=True)
    rs = tl.where(tl.fma(-s, rs, 1.0) > 0, bits, bits - 1).to(tl.float32, bitcast=True)
    return unit, rs, tl.div_rn(tl.fma(-s, rs, 1.0), s)


@triton.jit
def short_code(x, s, q_min, q_max, z):
    """``code`` where x has at most 11 bits, codes have at most 8, and z is at most 2^13, in float32 alone.

    The sum is the rounded quotient but for a few significands of x and s, which were found by trying all of
    them. There both the quotient and the sum have 16 bits or more: neither lies half-way between two codes,
    and they have the same code. The conversion rounds half to even, saturates, and takes NaN for 0.
    """
    unit, rs, rl = divisor(s)
    x = x * unit
    r = libdevice.float2int_rn(tl.fma(x, rs, x * rl))
    return tl.minimum(tl.maximum(r, q_min - z), q_max - z) + z


@triton.jit
def code(x, s, q_min, q_max, z):
    """int(clamp(rint(x / s), q_min - z, q_max - z)) + z, with NaN taken for 0.

    In float32, adding 1.5 * 2^23 rounds a quotient to an integer, half to even, in the low bits of the sum.
    Bounds beyond 2^22 would leave that binade; then an even number near them goes along, which moves no tie.
    """
    lo = q_min - z
    hi = q_max - z
    t = code_quotient(x, s, True)
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
def in_range(x, s, q_min, q_max, z, QUICK: tl.constexpr):
    """q_min <= rint(x / s) + z <= q_max; false for NaN. Rounding is symmetric: both ends use one function."""
    t = code_quotient(x, s, QUICK)
    low = least_rounding_up_to(q_min - z, t.dtype)
    high = -least_rounding_up_to(z - q_max, t.dtype)
    return (low <= t) & (t <= high)


@triton.jit
def open_range(s, q_min, q_max, z):
    """(below, above): for float32 x, ``in_range`` is below < x < above.

    A quotient is rounded to ``low`` or more if it lies above the middle between that and the number before.
    The middle has 25 bits, the last of them 1, so its product with s is exact in float64 and no float32: no
    quotient is the middle, and x / s lies above it where x lies above the product (below it, if s is
    negative). If s is 0 or NaN, nothing lies between the ends; if it is infinite, so are they.
    """
    low = least_rounding_up_to(q_min - z, tl.float32)
    high = -least_rounding_up_to(z - q_max, tl.float32)
    one = middle_before(low) * s.to(tl.float64)
    other = -middle_before(-high) * s.to(tl.float64)
    return rounded_down(tl.minimum(one, other)), -rounded_down(-tl.maximum(one, other))


@triton.jit
def middle_before(x):
    """The middle between x, a float32 that is not 0, and the float32 before it; in float64."""
    return 0.5 * (x.to(tl.float64) + float32_before(x).to(tl.float64))


@triton.jit
def float32_before(x):
    """The greatest float32 below x, which is neither -inf nor +0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)


@triton.jit
def rounded_down(x):
    """The greatest float32 that is not above x, a float64."""
    near = x.to(tl.float32)
    return tl.where(near.to(tl.float64) > x, float32_before(near), near)


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
        factor = tl.minimum(tl.maximum(inverse(s, True), -1e300), 1e300)
        factor = tl.where((factor == 0) & ((lo > 0) | (hi < 0)), 1e-300, factor)
        t = (x.to(tl.float64) * factor).to(tl.float32)
        t = tl.maximum(t, lo.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        t = tl.minimum(t, hi.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(tl.abs(z) > 2**21, lo & -2, 0)
        whole = (tl.full(base.shape, MAGIC, tl.int32) - base).to(tl.float32)
        return ((t + whole) - whole) * s


@triton.jit
def odd_float32(t):
    """t as a float32 that rounds on to fewer bits as t itself would.

    It is rounded towards zero, and its last bit set if anything was lost: no tie appears that was not there.
    """
    if t.dtype == tl.float64:
        near = t.to(tl.float32)
        back = near.to(tl.float64)
        bits = near.to(tl.int32, bitcast=True)
        bits = tl.where(tl.abs(back) > tl.abs(t), bits - 1, bits)
        return tl.where(back != t, bits | 1, bits).to(tl.float32, bitcast=True)
    else:
        return t


@triton.jit
def float_magnitude(bits, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """The bits of a float32 without its sign, rounded to MANTISSA bits, ties to even.

    It is rounded as if the exponent had no upper end; a carry moves into the exponent. NaN stays above all
    numbers. Below the least normal number of EXPONENT bits the steps are all those of the subnormal numbers,
    which is the distance of float32 numbers from LIFT on: adding it rounds.
    """
    BIAS: tl.constexpr = 2 ** (EXPONENT - 1) - 1
    DROPPED: tl.constexpr = 23 - MANTISSA
    LIFT: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> DROPPED) & 1
    near = (tl.minimum(magnitude, 0x7F800000 + 2**DROPPED) + (2 ** (DROPPED - 1) - 1) + odd) & -(2**DROPPED)
    lifted = (magnitude.to(tl.float32, bitcast=True) + LIFT) - LIFT
    return tl.where(magnitude < ((128 - BIAS) << 23), lifted.to(tl.int32, bitcast=True), near)


@triton.jit
def float_in_range(t, q_max, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Whether t, rounded to a float format, is at most q_max in magnitude; no NaN is."""
    bits = odd_float32(t).to(tl.int32, bitcast=True)
    return float_magnitude(bits, EXPONENT, MANTISSA) <= q_max.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def rounded_to_float(t, q_max, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """The nearest value of a float format up to q_max, as a float32; NaN and the sign of a zero stay."""
    single = odd_float32(t)
    bits = single.to(tl.int32, bitcast=True)
    magnitude = float_magnitude(bits, EXPONENT, MANTISSA)
    magnitude = tl.minimum(magnitude, q_max.to(tl.float32).to(tl.int32, bitcast=True))
    near = (magnitude | (bits ^ (bits & 0x7FFFFFFF))).to(tl.float32, bitcast=True)
    return tl.where(single == single, near, single)


@triton.jit
def float_code(t, q_max, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, NAN: tl.constexpr):
    """The code of ``rounded_to_float``, which is NAN where that is NaN."""
    BIAS: tl.constexpr = 2 ** (EXPONENT - 1) - 1
    LIFT: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    near = rounded_to_float(t, q_max, EXPONENT, MANTISSA)
    bits = near.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = (magnitude >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    lifted = magnitude.to(tl.float32, bitcast=True) + LIFT
    subnormal = lifted.to(tl.int32, bitcast=True) - ((151 - BIAS - MANTISSA) << 23)
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, code)
    code = code | ((bits >> (31 - EXPONENT - MANTISSA)) & (1 << (EXPONENT + MANTISSA)))
    return tl.where(near == near, code, NAN)


@triton.jit
def float_value(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, HIGHEST: tl.constexpr):
    """The values of codes of a float format, as float32; those above HIGHEST are NaN."""
    BIAS: tl.constexpr = 2 ** (EXPONENT - 1) - 1
    LIFT: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    codes = codes.to(tl.int32)
    magnitude = codes & (2 ** (EXPONENT + MANTISSA) - 1)
    value = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    subnormal = (magnitude + ((151 - BIAS - MANTISSA) << 23)).to(tl.float32, bitcast=True) - LIFT
    value = tl.where(magnitude < 2**MANTISSA, subnormal.to(tl.int32, bitcast=True), value)
    value = tl.where(magnitude > HIGHEST, 0x7FC00000, value)
    return (value | ((codes >> (EXPONENT + MANTISSA)) << 31)).to(tl.float32, bitcast=True)


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
def near_minus_reciprocal(b):
    """-1 / b as the hardware estimates it: within 2 ulp, infinite for zero and zero for an infinite b.

    It takes the minus of b along, where a division would need one more product for it.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 minus; neg.f32 minus, $1; rcp.approx.ftz.f32 $0, minus; }",
        "=f,f", [b], tl.float32, True, 1,
    )  # fmt: skip


@triton.jit
def nearer_minus_reciprocal(b, near):
    """A step of Newton's towards -1 / b."""
    return tl.fma(tl.fma(b, near, 1.0), near, near)


@triton.jit
def minus_reciprocal(b):
    """-1 / b, correctly rounded for every b from 2^-24 to 2^126; infinite for zero, zero for an infinite b.

    Two steps give it, from any estimate within 3 ulp, unless all 24 bits of b are ones: then -1 / b is just
    beyond the middle of a power of two and the next number, and the steps may end at the first. That there
    are no others was tried with every b.
    """
    near = near_minus_reciprocal(b)
    y = nearer_minus_reciprocal(b, nearer_minus_reciprocal(b, near))
    all_ones = (b.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
    y = (y.to(tl.int32, bitcast=True) | all_ones.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(y == y, y, near)


@triton.jit
def minus_quotient(p, b, y):
    """(p * y, -p / b) with y = -1 / b, the second correctly rounded if no step leaves the normal numbers.

    By Markstein's theorem, if y is correctly rounded. With the minus in y no step needs one of its own.
    """
    near = p * y
    return near, tl.fma(tl.fma(b, near, p), y, near)


@triton.jit
def tanh_argument(x, mid, s):
    """4(x - mid) / s but for its sign, twice: the first is NaN where it is, the second is for ``tanh_slope``.

    The second is correctly rounded where its magnitude is from 2^-25 to 160. Less gives the slope of zero and
    more that of 160, whatever it is; if the first is infinite, it may be NaN. ``unit``, a power of two,
    brings a scale to 1 or more (a subnormal one to 2^-22), so that no step leaves the normal numbers. As a
    factor of x and mid it changes no rounding, and it is never less than 1: a difference beyond the largest
    number is infinite with it too.
    """
    if x.dtype == tl.float64:
        argument = 4.0 * ((x - mid) / s)
        return argument, argument
    elif INTERPRETED:
        argument = 4.0 * tl.div_rn(x - mid, s)
        return argument, argument
    else:
        exponent = s.to(tl.int32, bitcast=True) & 0x7F800000
        unit = tl.maximum(0x7F000000 - exponent, 0x3F800000).to(tl.float32, bitcast=True)
        quarter = s * (unit * 0.25)
        difference = tl.fma(x, unit, mid * -unit)
        return minus_quotient(difference, quarter, minus_reciprocal(quarter))


@triton.jit
def tanh_slope(argument):
    """1 - tanh(t)**2 for an argument of 4t or -4t. It is 4e / (1 + e)**2, where e = exp(-2|t|).

    In float32 everything is scaled by powers of two and by -1, which changes no rounding. ``r`` is twice what
    exp is a polynomial of. The low bits of ``near`` hold 258 - k; shifted into the exponent and subtracted,
    they multiply by 2^k, divide by 4, and turn the sign. So ``e`` is minus a quarter of exp, ``b`` a
    sixteenth of (1 + exp)**2, and the result comes from -p / b as ``e`` comes from p. The products that are
    fused with a sum are exact: that changes no bit.
    """
    if argument.dtype == tl.float64:
        v = tl.minimum(tl.abs(argument) * 0.5, -FLOOR_64)
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
        v = tl.minimum(tl.abs(argument), -2 * FLOOR_32)
        near = v * (LOG2_E_32 / 2) + (MAGIC + 258)
        minus_k = near - (MAGIC + 258)
        r = tl.fma(minus_k, 2 * LN2_HI_32, -v) + minus_k * (2 * LN2_LO_32)
        q = C2 / 4 + r * (C3 / 8 + r * (C4 / 16 + r * (C5 / 32 + r * (C6 / 64))))
        p = 1.0 + tl.fma(r, 0.5, (r * r) * q)
        shift = near.to(tl.int32, bitcast=True) << 23
        e = (p.to(tl.int32, bitcast=True) - shift).to(tl.float32, bitcast=True)
        b = 0.0625 + e * (e - 0.5)
        if INTERPRETED:
            slope = -tl.div_rn(p, b)
        else:
            # One step is enough here: tried with every argument, and every estimate within 2 ulp.
            _, slope = minus_quotient(p, b, nearer_minus_reciprocal(b, near_minus_reciprocal(b)))
        return (slope.to(tl.int32, bitcast=True) - shift).to(tl.float32, bitcast=True)


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
