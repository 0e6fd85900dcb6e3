"""The arithmetic in Triton. Kernels that use it are compiled with ``enable_fp_fusion=False``.

Every operation is a single IEEE-754 operation, except divisions. They use faster sequences that give the
correctly rounded quotient; the docstrings say why.
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

#: Triton's interpreter does not fuse ``tl.fma`` and converts bfloat16 incorrectly: both have code for it.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
ZERO_POINT_LIMIT = tl.constexpr(dtypes.ZERO_POINT_LIMIT)
#: 1.5 * 2^23. float32 numbers near it have an ULP of 1, and their low bits hold the integer part.
MAGIC = tl.constexpr(12582912)
MAGIC_BITS = tl.constexpr(0x4B400000)
#: Every float32 or float64 number of at least this magnitude is an integer.
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

    float32 is computed in float64. There q is within one ULP of x / s, so its remainder is exact and the
    second fma gives RN64(x / s). Rounding this to float32 equals rounding x / s: a quotient of float32
    numbers is either on a rounding boundary, and then exact in float64, or further from it than the error of
    float64. Where the remainder is NaN, q is infinite, zero or NaN like x / s. A zero keeps the sign of q.
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
    """1 / s as the sum of two float64 numbers of the same sign, for ``exact_quotient``.

    The first is an approximation, reduced to be smaller than 1 / s by about 2^-18 in relative terms. The
    second is computed from the remainder; the sum has a relative error of 2^-70. If s is zero, both are
    infinite; if s is infinite, both are zero.
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
    """x / s, correctly rounded, for all x and s.

    float32 is computed in float64, with most + rest = 1 / s. Before rounding, the sum of the products has a
    relative error of 2^-70. If a quotient of float32 numbers is a float32 or half-way between two, it has at
    most 25 bits, and the sum rounds to it in float64. Any other quotient differs from these by more than
    2^-49 of itself, which is more than the error of float64. Both products have the sign of x / s, so
    infinities and zeros are correct.
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
    """1 / s in float64, with a relative error of less than 2^-52.

    QUICK needs a third of the instructions of a division, which matters if each column has its own scale. A
    division contains a branch, and the compiler starts all loads before it, so kernels with much arithmetic
    are faster with a division.
    """
    if QUICK and not INTERPRETED:
        most, rest = reciprocal(s)
        return most + rest
    else:
        return 1.0 / s.to(tl.float64)


@triton.jit
def code_quotient(x, s, QUICK: tl.constexpr):
    """x / s for computing a code: correctly rounded if its magnitude is at least 2^-126.

    There a quotient of float32 numbers is never on a rounding boundary of float32, and differs from every
    boundary by at least 2^-49 of itself. The product with 1 / s has a relative error of less than 2^-51. A
    smaller quotient has the code of zero, whatever its last bit.
    """
    if x.dtype == tl.float64:
        return x / s
    else:
        return (x.to(tl.float64) * inverse(s, QUICK)).to(tl.float32)


@triton.jit
def divisor(s):
    """(unit, rs, rl) with x / s = (x * unit) * (rs + rl) for computing a code; rs and rl have the same sign.

    ``unit``, a power of two, scales s so that no step underflows. If s is zero, infinite or NaN, then x * (1
    / s) is infinite, zero or NaN exactly where x / s is.
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
    """``code`` in float32 only, for x of at most 11 bits, codes of at most 8 bits, and z of at most 2^13.

    The sum equals the rounded quotient except for a few significands of x and s, which an exhaustive search
    found. For these the quotient and the sum need 16 bits or more: neither is half-way between two codes, and
    both have the same code. The conversion rounds half to even, saturates, and maps NaN to 0.
    """
    unit, rs, rl = divisor(s)
    x = x * unit
    r = libdevice.float2int_rn(tl.fma(x, rs, x * rl))
    return tl.minimum(tl.maximum(r, q_min - z), q_max - z) + z


@triton.jit
def code(x, s, q_min, q_max, z):
    """int(clamp(rint(x / s), q_min - z, q_max - z)) + z, where a NaN quotient counts as 0.

    In float32, adding 1.5 * 2^23 rounds a quotient half to even, and the low bits of the sum are the integer.
    Bounds beyond 2^22 would leave that binade. Then an even number ``base`` near the bounds is subtracted
    too, which does not change ties.
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
    """The least t with rint(t) >= lo: lo - 0.5 if lo is even, otherwise the next number above lo - 0.5."""
    BITS: tl.constexpr = tl.int64 if DTYPE == tl.float64 else tl.int32
    bound = lo.to(DTYPE)
    half = bound - 0.5
    bits = half.to(BITS, bitcast=True)
    above = tl.where(half > 0, bits + 1, bits - 1).to(DTYPE, bitcast=True)
    edge = tl.where(lo % 2 == 0, half, above)
    return tl.where(bound - half == 0.5, edge, bound)


@triton.jit
def in_range(x, s, q_min, q_max, z, QUICK: tl.constexpr):
    """q_min <= rint(x / s) + z <= q_max; false for NaN. Both ends use one function: rounding is symmetric."""
    t = code_quotient(x, s, QUICK)
    low = least_rounding_up_to(q_min - z, t.dtype)
    high = -least_rounding_up_to(z - q_max, t.dtype)
    return (low <= t) & (t <= high)


@triton.jit
def open_range(s, q_min, q_max, z):
    """(below, above) such that, for float32 x, ``in_range`` is below < x < above.

    A quotient is rounded to ``low`` or more if it is above the midpoint of ``low`` and the float32 before it.
    The midpoint has 25 bits and its last bit is 1. So its product with s is exact in float64 and is not a
    float32: no quotient equals the midpoint, and x / s is above it exactly if x is above the product (below
    it if s is negative). If s is 0 or NaN, the interval is empty; if s is infinite, both ends are infinite.
    """
    low = least_rounding_up_to(q_min - z, tl.float32)
    high = -least_rounding_up_to(z - q_max, tl.float32)
    one = middle_before(low) * s.to(tl.float64)
    other = -middle_before(-high) * s.to(tl.float64)
    return rounded_down(tl.minimum(one, other)), -rounded_down(-tl.maximum(one, other))


@triton.jit
def middle_before(x):
    """The midpoint of x, a float32 that is not 0, and the float32 before it; in float64."""
    return 0.5 * (x.to(tl.float64) + float32_before(x).to(tl.float64))


@triton.jit
def float32_before(x):
    """The greatest float32 below x, which is neither -inf nor +0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)


@triton.jit
def rounded_down(x):
    """The greatest float32 that is at most x, a float64."""
    near = x.to(tl.float32)
    return tl.where(near.to(tl.float64) > x, float32_before(near), near)


@triton.jit
def rounded_to_code(x, s, q_min, q_max, z):
    """clamp(rint(x / s), q_min - z, q_max - z) * s, where a zero before the product is +0, like an integer 0.

    If x is NaN, the result is NaN; any other NaN quotient counts as 0. Rounding is as in ``code``: the number
    that is added is subtracted again, which leaves +0.

    In float32 the quotient is that of ``code_quotient``, and NaN propagates through every step. Two changes
    of 1 / s make the result right if x is not NaN. If s is 0, 1 / s is replaced by a huge number, which gives
    0 for 0 / 0 and the bounds for all other x. If s is infinite and 0 is in the range, every x gives NaN, as
    inf * 0 does. If s is infinite and 0 is not in the range, the result is an infinity, the same for all x;
    there 1 / s is replaced by a tiny number, so that the quotient is not NaN.
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
    """t rounded to odd in float32. Rounding that to fewer bits equals rounding t to fewer bits.

    It is rounded towards zero, and its last bit is set if the result is inexact: this creates no new ties.
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

    The upper exponent is unlimited; a carry increments the exponent. NaN stays above all numbers. Subnormal
    numbers of the format have the spacing of float32 numbers at LIFT: adding LIFT rounds to this spacing.
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
    """Whether t, rounded to a float format, has a magnitude of at most q_max; false for NaN."""
    bits = odd_float32(t).to(tl.int32, bitcast=True)
    return float_magnitude(bits, EXPONENT, MANTISSA) <= q_max.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def rounded_to_float(t, q_max, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """The nearest value of a float format, at most q_max, as a float32. Keeps NaN and the sign of a zero."""
    single = odd_float32(t)
    bits = single.to(tl.int32, bitcast=True)
    magnitude = float_magnitude(bits, EXPONENT, MANTISSA)
    magnitude = tl.minimum(magnitude, q_max.to(tl.float32).to(tl.int32, bitcast=True))
    near = (magnitude | (bits ^ (bits & 0x7FFFFFFF))).to(tl.float32, bitcast=True)
    return tl.where(single == single, near, single)


@triton.jit
def float_code(t, q_max, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, NAN: tl.constexpr):
    """The code of ``rounded_to_float(t)``; NAN if t is NaN."""
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
    """The values of codes of a float format, as float32. Magnitudes above HIGHEST are NaN."""
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
    """A floating zero point as an integer: rounded half to even and saturated; 0 for NaN."""
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
    """The hardware's estimate of -1 / b: within 2 ULP; infinite if b is zero, zero if b is infinite.

    A negation after the division would need an additional product.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 minus; neg.f32 minus, $1; rcp.approx.ftz.f32 $0, minus; }",
        "=f,f", [b], tl.float32, True, 1,
    )  # fmt: skip


@triton.jit
def nearer_minus_reciprocal(b, near):
    """One Newton step from the estimate ``near`` towards -1 / b."""
    return tl.fma(tl.fma(b, near, 1.0), near, near)


@triton.jit
def minus_reciprocal(b):
    """-1 / b, correctly rounded for b from 2^-24 to 2^126; infinite if b is zero, zero if b is infinite.

    Two Newton steps give it from any estimate within 3 ULP, unless all 24 bits of b are ones. Then -1 / b is
    just beyond the midpoint of a power of two and the next number, and the steps may end at the power of two.
    An exhaustive test over b found no other exception.
    """
    near = near_minus_reciprocal(b)
    y = nearer_minus_reciprocal(b, nearer_minus_reciprocal(b, near))
    all_ones = (b.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
    y = (y.to(tl.int32, bitcast=True) | all_ones.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(y == y, y, near)


@triton.jit
def minus_quotient(p, b, y):
    """(p * y, -p / b) with y = -1 / b. The second is correctly rounded if all steps stay in the normal range.

    This is Markstein's theorem, for a correctly rounded y. With the sign in y no step needs a negation.
    """
    near = p * y
    return near, tl.fma(tl.fma(b, near, p), y, near)


@triton.jit
def tanh_argument(x, mid, s):
    """4(x - mid) / s up to sign, twice: the first is NaN where it is NaN, the second is for ``tanh_slope``.

    The second is correctly rounded if its magnitude is from 2^-25 to 160. Smaller magnitudes have the slope
    at 0, larger ones the slope at 160. Where the first is infinite, the second may be NaN.

    ``unit``, a power of two, scales s to at least 1 (a subnormal s to at least 2^-22), so that all steps stay
    in the normal range. As a factor of x and mid it changes no rounding. It is at least 1, so a difference
    that overflows without it overflows with it too.
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
    """1 - tanh(t)**2 for an argument of 4t or -4t, computed as 4e / (1 + e)**2 with e = exp(-2|t|).

    In float32 all values are scaled by powers of two and by -1, which changes no rounding. ``r`` is twice the
    argument of the polynomial. The low bits of ``near`` hold 258 - k. Shifted to the exponent and subtracted,
    they multiply by 2^k, divide by 4 and change the sign. So ``e`` is -exp / 4, ``b`` is (1 + exp)**2 / 16,
    and the result follows from -p / b as ``e`` follows from p. The products that are fused with a sum are
    exact, so fusing changes no bit.
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
            # One Newton step is enough: tested exhaustively, for every estimate within 2 ULP.
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
    """The two 16-bit floats in each 32-bit word as float32, the low half first; exact."""
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
