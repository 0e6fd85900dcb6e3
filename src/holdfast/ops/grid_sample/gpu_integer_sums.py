"""Integer sums of the image gradient, in Triton: the scale of a plane, terms, accumulators and results.

An accumulator is an int64. It starts at a bias, so that every sum is positive, and its two highest bits mark
terms that are inf and -inf; both bits mark NaN. float64 has a second accumulator for the fractions.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.ops.grid_sample import plan

BIAS = tl.constexpr(2**plan.SUM_BITS)
SUM_MASK = tl.constexpr(2 ** (plan.SUM_BITS + 1) - 1)
#: Number of mantissa bits, and exponent bias minus one.
MANTISSA_32, FIRST_32 = tl.constexpr(23), tl.constexpr(126)
MANTISSA_64, FIRST_64 = tl.constexpr(52), tl.constexpr(1022)


@triton.jit
def power_of_two(exponent, COMPUTE: tl.constexpr):
    """2**exponent, a normal number of type COMPUTE."""
    exponent = exponent + tl.full([], 0, tl.int32)
    if COMPUTE == tl.float64:
        return ((exponent.to(tl.int64) + (FIRST_64 + 1)) << MANTISSA_64).to(tl.float64, bitcast=True)
    else:
        return ((exponent + (FIRST_32 + 1)) << MANTISSA_32).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, shift, COMPUTE: tl.constexpr):
    """x times 2**shift, in two multiplications by representable factors."""
    half = shift >> 1
    return (x * power_of_two(half, COMPUTE)) * power_of_two(shift - half, COMPUTE)


@triton.jit
def exponent_field(x):
    """The biased exponent of each number; its maximum for numbers that are not finite."""
    if x.dtype == tl.float64:
        return ((x.to(tl.int64, bitcast=True) >> MANTISSA_64) & (2 * FIRST_64 + 3)).to(tl.int32)
    else:
        return (x.to(tl.int32, bitcast=True) >> MANTISSA_32) & (2 * FIRST_32 + 3)


@triton.jit
def finite_or_zero(x):
    FIRST: tl.constexpr = FIRST_64 if x.dtype == tl.float64 else FIRST_32
    return tl.where(exponent_field(x) < 2 * FIRST + 3, x, 0.0)


@triton.jit
def plane_shift(field, fraction_bits, COMPUTE: tl.constexpr):
    """Shift of a plane, given its largest finite exponent field."""
    FIRST: tl.constexpr = FIRST_64 if COMPUTE == tl.float64 else FIRST_32
    return fraction_bits + FIRST - tl.maximum(field, 1)


@triton.jit
def fraction_word(term, fraction_bits):
    """The fraction of a float64 term in ``fraction_bits`` bits, truncated."""
    rest = term - term.to(tl.int64).to(tl.float64)
    return (rest * power_of_two(fraction_bits, tl.float64)).to(tl.int64)


@triton.jit
def special_bits(term):
    """The marks of terms: bit 62 for inf, bit 63 for -inf, both for NaN, none for finite terms."""
    one = tl.full(term.shape, 1, tl.int64)
    bits = tl.where(term < float("inf"), 0, one << 62) | tl.where(term > float("-inf"), 0, one << 63)
    return bits


@triton.jit
def converted(total, fraction, shift, fraction_bits, COMPUTE: tl.constexpr):
    """The result of an accumulator, and of the accumulator of the fractions for float64."""
    value = ((total & SUM_MASK) - BIAS).to(COMPUTE)
    if COMPUTE == tl.float64:
        value += ((fraction & SUM_MASK) - BIAS).to(COMPUTE) * power_of_two(-fraction_bits, COMPUTE)
    value = scaled(value, -shift, COMPUTE)
    marks = (total >> 62) & 3
    value = tl.where(marks == 1, float("inf"), tl.where(marks == 2, float("-inf"), value))
    return tl.where(marks == 3, float("nan"), value)
