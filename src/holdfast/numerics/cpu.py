"""The arithmetic of the CPU kernels: rounding, and conversion between stored dtypes and the compute type.

Numba has no 16-bit floats. They are passed as bits and converted in integer arithmetic, which vectorizes on
every CPU. Functions that take an address expect contiguous elements; ``like`` is any value of the compute
type.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload

from holdfast.backends.cpu import emit, jit, load_lanes, on_demand, pointer, processor_has, store_lanes
from holdfast.core.dtypes import ZERO_POINT_LIMIT
from holdfast.core.formats import E4M3FN, Format
from holdfast.numerics.exponential import EXPONENTIALS

# The kind of an operand's elements. The low four bits are the itemsize in bytes. A kind that has no other
# bits is the compute type.
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = 0x12, 0x22, 0x34, 0x48
INT8, UINT8, INT16, UINT16, ZERO_POINT, FLOAT8_E4M3FN = 0x51, 0x61, 0x72, 0x82, 0x94, 0xA1
ITEM_SIZE = 0x0F
#: Flag of a floating kind: the elements are zero points, and ``widen`` rounds and saturates them.
ROUNDED = 0x100

_KINDS = {
    torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.float32: FLOAT32, torch.float64: FLOAT64,
    torch.int8: INT8, torch.uint8: UINT8, torch.int16: INT16, torch.uint16: UINT16, torch.int32: ZERO_POINT,
    torch.float8_e4m3fn: FLOAT8_E4M3FN,
}  # fmt: skip


def kind(dtype: torch.dtype, compute: torch.dtype) -> int:
    """The kind of elements of ``dtype``, for kernels that compute in ``compute``."""
    return compute.itemsize if dtype == compute else _KINDS[dtype]


def zero_point_kind(dtype: torch.dtype) -> int:
    """The kind of zero points of ``dtype``."""
    return _KINDS[dtype] | ROUNDED if dtype.is_floating_point else _KINDS[dtype]


@emit
def rint(typingctx, value):
    """Round half to even, in one instruction."""

    def build(context, builder, signature, args):
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [args[0].type]), args)

    return value(value), build


def rint_lanes(builder: Any, vector: Any) -> Any:
    """Emit ``rint`` of a vector."""
    return _of_lanes(builder, "rint", vector)


def fma_lanes(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c of vectors, rounded once."""
    return _of_lanes(builder, "fma", a, b, c)


def _of_lanes(builder: Any, operation: str, *vectors: Any) -> Any:
    """Emit a call of LLVM's function of this name for vectors of one type."""
    kind = vectors[0].type
    name = f"llvm.{operation}.v{kind.count}{kind.element.intrinsic_name}"
    known = builder.module.globals.get(name)
    function = known or ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(vectors)), name)
    return builder.call(function, vectors)


@emit
def zero(typingctx, like):
    """+0 of the type of ``like``."""
    return like(like), lambda context, builder, signature, args: args[0].type(0.0)


@emit
def as_real(typingctx, integer, like):
    """An integer rounded to the type of ``like``. Numba would compute a float32 and an int32 in float64."""

    def build(context, builder, signature, args):
        return builder.sitofp(args[0], args[1].type)

    return like(integer, like), build


@emit
def reinterpret(typingctx, value, like):
    """The bits of ``value`` as type ``like``."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(signature.return_type))

    return like.dtype(value, like), build


def to_odd_float32(value):
    """``value`` rounded to odd in float32. Rounding that to 16 bits equals rounding ``value`` to 16 bits."""
    raise NotImplementedError("called from kernels only")


@overload(to_odd_float32)
def _to_odd_float32(value):
    if value == types.float32:
        return lambda value: value

    def to_odd(value):
        # Round towards zero, and set the last bit if the result is inexact: this creates no new ties.
        single = np.float32(value)
        bits = reinterpret(single, np.uint32)
        if abs(np.float64(single)) > abs(value):
            bits = np.uint32(bits - 1)
        if np.float64(single) != value:
            bits = np.uint32(bits | 1)
        return reinterpret(bits, np.float32)

    return to_odd


def next_below(value):
    """The greatest number less than ``value``; -inf for -inf. ``value`` is not NaN."""
    raise NotImplementedError("called from kernels only")


@overload(next_below)
def _next_below(value):
    number: Any = np.float32 if value == types.float32 else np.float64
    bits: Any = np.int32 if value == types.float32 else np.int64

    def below(value):
        if value == number(-np.inf):
            return value
        if value == number(0):
            return -reinterpret(bits(1), number)
        step = bits(-1) if value > number(0) else bits(1)  # to the next smaller or larger magnitude
        return reinterpret(bits(reinterpret(value, bits) + step), number)

    return below


def tanh_slope(t):
    """1 - tanh(t)**2, computed as 4e / (1 + e)**2 with e = exp(-2|t|)."""
    raise NotImplementedError("called from kernels only")


@overload(tanh_slope, jit_options={"error_model": "numpy"})
def _tanh_slope(t):
    number: Any = np.float32 if t == types.float32 else np.float64
    bits: Any = np.uint32 if t == types.float32 else np.uint64
    known = EXPONENTIALS[t.name]
    floor, log2_e, magic = number(known.floor), number(known.log2_e), number(known.magic)
    ln2_hi, ln2_lo = number(known.ln2_hi), number(known.ln2_lo)
    one, two, four = number(1), number(2), number(4)
    exponent = bits(known.precision - 1)
    highest, *rest = map(number, reversed(known.coefficients))
    lower = tuple(rest)

    def slope(t):
        v = -two * abs(t)
        v = v if v > floor else floor
        # The low bits of ``near`` hold k = rint(v * log2_e). Shifted to the exponent, they multiply by 2^k.
        near = v * log2_e + magic
        k = near - magic
        r = (v - k * ln2_hi) - k * ln2_lo
        q = highest
        for c in lower:
            q = c + r * q
        p = one + (r + (r * r) * q)
        e = reinterpret(bits(reinterpret(p, bits) + (reinterpret(near, bits) << exponent)), number)
        return (four * e) / (one + e * (two + e))

    return slope


# Numba computes integers in 64 bits. Each step is cast back, so that a vector has more lanes.


@jit
def widen_float16(bits):
    magnitude = np.uint32(np.uint32(bits & 0x7FFF) << 13)
    sign = np.uint32(np.uint32(bits & 0x8000) << 16)
    # The exponent biases differ by 112. The product is exact, and makes subnormal numbers normal.
    scaled = reinterpret(reinterpret(magnitude, np.float32) * np.float32(2.0**112), np.uint32)
    if magnitude >= np.uint32(0x7C00 << 13):
        scaled = np.uint32(magnitude | 0x7F800000)
    return reinterpret(np.uint32(scaled | sign), np.float32)


@jit
def widen_bfloat16(bits):
    return reinterpret(np.uint32(np.uint32(bits) << 16), np.float32)


@jit
def narrow_float16(value):
    bits = reinterpret(value, np.uint32)
    magnitude = np.uint32(bits & 0x7FFFFFFF)
    odd = np.uint32((magnitude >> 13) & 1)
    # Subtract 112 from the exponent and round half to even. A carry increments the exponent, up to infinity.
    half = np.uint32(np.uint32(magnitude + odd + 0xC8000FFF) >> 13)
    # float32 numbers in [0.5, 1) have the spacing of subnormal float16 numbers: the addition rounds.
    lifted = reinterpret(reinterpret(magnitude, np.float32) + np.float32(0.5), np.uint32)
    if magnitude < np.uint32(0x38800000):
        half = np.uint32(lifted - 0x3F000000)
    if magnitude >= np.uint32(0x47800000):
        half = np.uint32(0x7C00)
    if magnitude > np.uint32(0x7F800000):
        half = np.uint32(0x7E00)
    return np.uint16(half | ((bits >> 16) & 0x8000))


@jit
def narrow_bfloat16(value):
    bits = reinterpret(value, np.uint32)
    odd = np.uint32((bits >> 16) & 1)
    rounded = np.uint32(np.uint32(bits + odd + 0x7FFF) >> 16)
    if np.uint32(bits & 0x7FFFFFFF) > np.uint32(0x7F800000):
        rounded = np.uint32((bits >> 16) | 0x0040)
    return np.uint16(rounded)


def load_real_lanes(builder: Any, elements: Any, index: Any, lanes: int, element: Any) -> Any:
    """Emit the load of a vector of the compute type ``element``. The elements may be bits of bfloat16."""
    vector = load_lanes(builder, elements, index, lanes)
    if elements.type.pointee == element:
        return vector
    words = builder.zext(vector, ir.VectorType(ir.IntType(32), lanes))
    shifted = builder.shl(words, ir.Constant(words.type, [16] * lanes))
    singles = builder.bitcast(shifted, ir.VectorType(ir.FloatType(), lanes))
    return singles if element == ir.FloatType() else builder.fpext(singles, ir.VectorType(element, lanes))


def _words(lanes: int, number: int) -> Any:
    """A constant vector of ``lanes`` equal 32-bit integers."""
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [number] * lanes)


def _rounded_to_bfloat16(builder: Any, values: Any) -> Any:
    """Emit the bits of a vector of float32; the high half of each is the nearest bfloat16."""
    lanes = values.type.count
    bits = builder.bitcast(values, ir.VectorType(ir.IntType(32), lanes))
    odd = builder.and_(builder.lshr(bits, _words(lanes, 16)), _words(lanes, 1))
    rounded = builder.add(builder.add(bits, _words(lanes, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", values, values)
    return builder.select(is_nan, builder.or_(bits, _words(lanes, 0x00400000)), rounded)


def store_real_lanes(builder: Any, values: Any, elements: Any, index: Any) -> None:
    """Emit the store of a vector of float32 to elements of that type, or rounded to bfloat16 bits."""
    if elements.type.pointee == values.type.element:
        store_lanes(builder, values, elements, index)
        return
    lanes = values.type.count
    words = ir.VectorType(ir.IntType(32), lanes)
    if values.type.element != ir.FloatType():
        values = builder.fptrunc(values, ir.VectorType(ir.FloatType(), lanes))
    wide = _rounded_to_bfloat16(builder, values)
    halves = builder.bitcast(wide, ir.VectorType(ir.IntType(16), 2 * lanes))
    high_halves = ir.Constant(words, list(range(1, 2 * lanes, 2)))  # in little-endian order
    store_lanes(builder, builder.shuffle_vector(halves, halves, high_halves), elements, index)


#: Maximum number of elements of a vector in ``load_columns``.
_LANES = 16


def converts_float16() -> bool:
    """Whether the processor converts float16 itself. Otherwise LLVM would call functions that are missing."""
    return processor_has("f16c")


def multiplies_and_adds() -> bool:
    """Whether the processor has ``fma``. Otherwise LLVM would call a function for each element."""
    return processor_has("fma")


def column_vectors(elements: Any, count: int, real: Any) -> list[Any]:
    """The LLVM types of the vectors of ``load_columns``."""
    in_pairs = elements.type.pointee == ir.IntType(16) and count > 1
    lanes = min(count // 2 if in_pairs else count, _LANES)
    return [ir.VectorType(real, lanes)] * (count // lanes)


def load_columns(builder: Any, elements: Any, count: int, real: Any) -> list[Any]:
    """Emit the load of ``count`` elements, a power of two, as vectors of the compute type ``real``.

    The elements are of that type, float16 (see ``converts_float16``), or bits of bfloat16. These are loaded
    in pairs: the vectors of even and of odd elements alternate. This takes fewer instructions than widening
    elements in their order.
    """
    kinds = column_vectors(elements, count, real)
    lanes, starts = kinds[0].count, [ir.IntType(64)(i * kinds[0].count) for i in range(len(kinds))]
    if elements.type.pointee == ir.HalfType():
        halves = [load_lanes(builder, elements, start, lanes) for start in starts]
        return [builder.fpext(vector, kinds[0]) for vector in halves]
    if elements.type.pointee == real or count == 1:
        return [load_real_lanes(builder, elements, start, lanes, real) for start in starts]
    pairs, found = builder.bitcast(elements, ir.IntType(32).as_pointer()), []
    for start in starts[: len(kinds) // 2]:
        both = load_lanes(builder, pairs, start, lanes, align=2)
        for bits in (builder.shl(both, _words(lanes, 16)), builder.and_(both, _words(lanes, 0xFFFF0000))):
            found.append(builder.bitcast(bits, kinds[0]))
    return found


def store_columns(
    builder: Any, vectors: list[Any], elements: Any, *, streamed: bool = False, exact: bool = False
) -> None:
    """Emit the store of vectors in the order of ``load_columns``, rounded to the type of the elements.

    ``streamed``: by non-temporal stores; see ``store_lanes``. ``exact``: they need not be rounded.
    """
    lanes, align = vectors[0].type.count, None
    if elements.type.pointee == ir.HalfType():
        vectors = [builder.fptrunc(vector, ir.VectorType(ir.HalfType(), lanes)) for vector in vectors]
    elif elements.type.pointee == ir.IntType(16) and len(vectors) == 1:
        store_real_lanes(builder, vectors[0], elements, ir.IntType(64)(0))
        return
    elif elements.type.pointee == ir.IntType(16):
        words = ir.VectorType(ir.IntType(32), lanes)
        bits = [
            builder.bitcast(vector, words) if exact else _rounded_to_bfloat16(builder, vector)
            for vector in vectors
        ]
        vectors = [
            builder.or_(builder.lshr(even, _words(lanes, 16)), builder.and_(odd, _words(lanes, 0xFFFF0000)))
            for even, odd in zip(bits[::2], bits[1::2], strict=True)
        ]
        elements, align = builder.bitcast(elements, ir.IntType(32).as_pointer()), 2
    for i, vector in enumerate(vectors):
        store_lanes(builder, vector, elements, ir.IntType(64)(i * lanes), align=align, streamed=streamed)


def real(elements, index):
    """Element ``index``. If the elements are 16-bit integers, they are the bits of bfloat16."""
    raise NotImplementedError("called from kernels only")


@overload(real)
def _real(elements, index):
    if elements.dtype == types.uint16:
        return lambda elements, index: widen_bfloat16(elements[index])
    return lambda elements, index: elements[index]


def store_real(elements, index, value):
    """Store ``value`` to element ``index``, rounded to bfloat16 if the elements are 16-bit integers."""
    raise NotImplementedError("called from kernels only")


@overload(store_real)
def _store_real(elements, index, value):
    def store(elements, index, value):
        elements[index] = value

    def store_rounded(elements, index, value):
        elements[index] = narrow_bfloat16(to_odd_float32(value))

    return store_rounded if elements.dtype == types.uint16 else store


def float_format(codes: Format) -> tuple[Any, Any, Any, Any]:
    """The functions of a float format: ``fits``, ``saturated``, ``encoded`` and ``decoded``.

    For t of either compute type, ``saturated(t)`` is the nearest value of the format as a float32, ties to
    even; it keeps NaN and the sign of a zero. ``encoded(t)`` is the code of that value, and ``decoded(code)``
    is the value of a code. ``fits(t)``: whether the rounded t is in the range of the format; false for NaN.

    A carry out of the mantissa increments the exponent. Subnormal numbers of the format have the spacing of
    float32 numbers at ``lift``: adding ``lift`` rounds to this spacing, and the low bits of the sum are the
    code of the subnormal number.
    """
    dropped, exponent_shift = 23 - codes.mantissa_bits, 127 - codes.exponent_bias
    below_half, kept = np.uint32(2 ** (dropped - 1) - 1), np.uint32(2**32 - 2**dropped)
    least_normal = np.uint32((exponent_shift + 1) << 23)
    lift = np.float32(2.0 ** (24 - codes.exponent_bias - codes.mantissa_bits))
    lift_bits = np.uint32(lift.view(np.uint32))
    rebias = np.uint32(exponent_shift << 23)
    highest = np.uint32(np.float32(codes.code_range[1]).view(np.uint32))
    highest_code, nan, sign = codes.highest_code, codes.nan or 0, codes.bits - 1
    subnormals = 2**codes.mantissa_bits

    def part(function: Any) -> Any:
        return jit(function, name=f"{function.__name__}_{codes.name}")

    @part
    def magnitude_of(bits):
        magnitude = np.uint32(bits & 0x7FFFFFFF)
        odd = np.uint32((magnitude >> dropped) & 1)
        near = np.uint32(np.uint32(magnitude + odd + below_half) & kept)
        if magnitude < least_normal:
            near = reinterpret((reinterpret(magnitude, np.float32) + lift) - lift, np.uint32)
        return near

    @part
    def fits(t):
        return magnitude_of(reinterpret(to_odd_float32(t), np.uint32)) <= highest

    @part
    def saturated(t):
        single = to_odd_float32(t)
        bits = reinterpret(single, np.uint32)
        near = np.uint32(min(magnitude_of(bits), highest) | np.uint32(bits & 0x80000000))
        return single if np.isnan(single) else reinterpret(near, np.float32)

    @part
    def encoded(t):
        single = to_odd_float32(t)
        bits = reinterpret(single, np.uint32)
        magnitude = min(magnitude_of(bits), highest)
        code = np.uint32(np.uint32(magnitude - rebias) >> dropped)
        if magnitude < least_normal:
            code = np.uint32(reinterpret(reinterpret(magnitude, np.float32) + lift, np.uint32) - lift_bits)
        code = np.uint32(code | np.uint32(np.uint32(bits >> 31) << sign))
        return np.uint8(nan) if np.isnan(single) else np.uint8(code)

    @part
    def decoded(code):
        magnitude = np.uint32(code & (2**sign - 1))
        value = reinterpret(np.uint32(np.uint32(magnitude << dropped) + rebias), np.float32)
        if magnitude < subnormals:
            value = reinterpret(np.uint32(magnitude + lift_bits), np.float32) - lift
        if magnitude > highest_code:
            value = np.float32(np.nan)
        negative = np.uint32(np.uint32(np.uint32(code) >> sign) << 31)
        return reinterpret(np.uint32(reinterpret(value, np.uint32) | negative), np.float32)

    return fits, saturated, encoded, decoded


fits_e4m3fn, saturated_e4m3fn, encoded_e4m3fn, decoded_e4m3fn = float_format(E4M3FN)


@jit
def clamped_zero_point(point):
    """An int32 zero point, clamped to ``ZERO_POINT_LIMIT``."""
    return min(max(point, np.int32(-ZERO_POINT_LIMIT)), np.int32(ZERO_POINT_LIMIT))


@on_demand
def widen(source, kind, first, last, target, like):
    """Convert elements ``first`` to ``last`` at ``source`` to the compute type, at ``target``."""
    wide = pointer(target, like)
    rounded = kind & ROUNDED
    kind ^= rounded
    if kind == FLOAT16:
        halves = pointer(source, np.uint16)
        for i in range(first, last):
            wide[i] = widen_float16(halves[i])
    elif kind == BFLOAT16:
        halves = pointer(source, np.uint16)
        for i in range(first, last):
            wide[i] = widen_bfloat16(halves[i])
    elif kind == FLOAT32:
        singles = pointer(source, np.float32)
        for i in range(first, last):
            wide[i] = singles[i]
    elif kind == FLOAT64:
        doubles = pointer(source, np.float64)
        for i in range(first, last):
            wide[i] = doubles[i]
    elif kind == INT8:
        bytes_ = pointer(source, np.int8)
        for i in range(first, last):
            wide[i] = np.int32(bytes_[i])
    elif kind == UINT8:
        unsigned_bytes = pointer(source, np.uint8)
        for i in range(first, last):
            wide[i] = np.int32(unsigned_bytes[i])
    elif kind == INT16:
        words = pointer(source, np.int16)
        for i in range(first, last):
            wide[i] = np.int32(words[i])
    elif kind == UINT16:
        unsigned_words = pointer(source, np.uint16)
        for i in range(first, last):
            wide[i] = np.int32(unsigned_words[i])
    elif kind == ZERO_POINT:
        points = pointer(source, np.int32)
        for i in range(first, last):
            wide[i] = clamped_zero_point(points[i])
    elif kind == FLOAT8_E4M3FN:
        floating_codes = pointer(source, np.uint8)
        for i in range(first, last):
            wide[i] = decoded_e4m3fn(floating_codes[i])
    if rounded:
        for i in range(first, last):
            point = zero(like) if np.isnan(wide[i]) else wide[i]
            wide[i] = rint(min(max(point, np.float32(-ZERO_POINT_LIMIT)), np.float32(ZERO_POINT_LIMIT)))


@on_demand
def narrow(source, count, kind, target, like):
    """Convert ``count`` values of the compute type at ``source`` to elements of ``kind``, at ``target``.

    Floats are rounded to nearest, ties to even; one-byte floats saturate. For an integer kind the values must
    be integers in its range.
    """
    wide = pointer(source, like)
    if kind == FLOAT16:
        halves = pointer(target, np.uint16)
        for i in range(count):
            halves[i] = narrow_float16(to_odd_float32(wide[i]))
    elif kind == BFLOAT16:
        halves = pointer(target, np.uint16)
        for i in range(count):
            halves[i] = narrow_bfloat16(to_odd_float32(wide[i]))
    elif kind == FLOAT32:
        singles = pointer(target, np.float32)
        for i in range(count):
            singles[i] = wide[i]
    elif kind == FLOAT64:
        doubles = pointer(target, np.float64)
        for i in range(count):
            doubles[i] = wide[i]
    elif kind == INT8 or kind == UINT8:
        bytes_ = pointer(target, np.int8)
        for i in range(count):
            bytes_[i] = np.int32(wide[i])
    elif kind == INT16 or kind == UINT16:
        words = pointer(target, np.int16)
        for i in range(count):
            words[i] = np.int32(wide[i])
    elif kind == FLOAT8_E4M3FN:
        floating_codes = pointer(target, np.uint8)
        for i in range(count):
            floating_codes[i] = encoded_e4m3fn(wide[i])


@on_demand
def unpack(source, halvings, signed, count, target):
    """Unpack codes that share bytes, low bits first, to one code per byte.

    There are ``2**halvings`` codes in a byte. Each packed byte becomes one word, whose bytes are its codes;
    the multiplication extends the sign bit of a code. Whole words are written: up to 3 bytes past ``count``.
    """
    shared = pointer(source, np.uint8)
    if halvings == 1:
        pairs = pointer(target, np.uint16)
        sign = np.uint16(0x0808 if signed else 0)
        for i in range((count + 1) >> 1):
            byte = np.uint16(shared[i])
            pair = np.uint16((byte | (byte << 4)) & 0x0F0F)
            pairs[i] = np.uint16(pair | np.uint16(np.uint16(pair & sign) * 0x1E))
    else:
        fours = pointer(target, np.uint32)
        signs = np.uint32(0x02020202 if signed else 0)
        for i in range((count + 3) >> 2):
            byte4 = np.uint32(shared[i])
            spread = np.uint32(byte4 | (byte4 << 6) | (byte4 << 12) | (byte4 << 18))
            four = np.uint32(spread & 0x03030303)
            fours[i] = np.uint32(four | np.uint32(np.uint32(four & signs) * 0x7E))


@on_demand
def pack(source, halvings, count, target):
    """Pack codes of one byte each, ``2**halvings`` per byte, low bits first; pad the last byte with zeros."""
    shared = pointer(target, np.uint8)
    whole = count >> halvings
    if halvings == 1:
        pairs = pointer(source, np.uint16)
        for i in range(whole):
            pair = pairs[i]
            shared[i] = np.uint8((pair & 0x0F) | ((pair >> 4) & 0xF0))
    else:
        fours = pointer(source, np.uint32)
        for i in range(whole):
            four = fours[i]
            shared[i] = np.uint8(
                (four & 0x03) | ((four >> 6) & 0x0C) | ((four >> 12) & 0x30) | ((four >> 18) & 0xC0)
            )
    rest = count - (whole << halvings)
    if rest > 0:
        codes = pointer(source + (whole << halvings), np.uint8)
        bits = 8 >> halvings
        last = 0
        for k in range(rest):
            last |= (codes[k] & ((1 << bits) - 1)) << (k * bits)
        shared[whole] = np.uint8(last)
