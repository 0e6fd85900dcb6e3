"""Codes of up to 8 bits, written as bytes in blocks of ``ROW_BLOCK`` elements with one scale.

Three functions compute the codes ``begin`` to ``end``, which are whole blocks, with the same bits. ``x`` may
hold bits of bfloat16. ``_codes_by_estimate`` is the fastest; it needs an instruction of x86, and fails near
ties. ``codes_by_reciprocal`` needs a fused multiply-add, and a scale that is neither tiny nor huge.
``codes_by_division`` serves everything.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from holdfast.backends.cpu import (
    BYTES,
    LINE,
    counted_loop,
    emit,
    jit,
    outlined,
    prefetch_line,
    processor_has,
    splat,
    stack_slot,
    store_lanes,
)
from holdfast.numerics.cpu import fma_lanes, load_real_lanes, multiplies_and_adds, rint_lanes
from holdfast.ops.affine.cpu import ROW_BLOCK

#: Prefetch distance, bytes; and minimum elements of a tensor for which estimates prefetch. A smaller one may
#: be in the caches, where a prefetch only takes time.
_AHEAD, _PREFETCHED_FROM = 4096, 2**23
#: Elements that are estimated together. If one is near a tie, all are computed again.
SPAN = 4 * ROW_BLOCK
#: Maximum of a quotient in range for an estimate.
_MOST = 256
#: What is added to an estimate, in its unit of 2**-16. The error is smaller.
_EXCESS = 4

_BYTE, _HALF, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)


def _prefetch_after(builder: Any, x: Any, index: Any, count: int = ROW_BLOCK) -> None:
    """Emit the prefetch of ``count`` elements at a distance after ``x[index]``."""
    size = {"float": 4, "double": 8}.get(str(x.type.pointee), 2)
    start = builder.bitcast(builder.gep(x, [index]), BYTES)
    for offset in range(_AHEAD, _AHEAD + count * size, LINE):
        prefetch_line(builder, builder.gep(start, [_WORD(offset)]))


@emit
def _prefetch_span(typingctx, x, begin):
    """Prefetch ``SPAN`` elements at a distance after ``x[begin]``."""

    def build(context, builder, signature, args):
        _prefetch_after(builder, args[0], args[1], SPAN)
        return context.get_dummy_value()

    return types.none(x, begin), build


def _over_blocks(builder: Any, begin: Any, end: Any) -> Any:
    """Emit a loop over the blocks of ``begin`` to ``end``. Yields the number of a block."""
    return counted_loop(builder, builder.sdiv(builder.sub(end, begin), begin.type(ROW_BLOCK)))


def _first_of(builder: Any, begin: Any, block: Any) -> Any:
    """Emit the index of the first element of a block."""
    return builder.add(begin, builder.mul(block, begin.type(ROW_BLOCK)))


@emit
def codes_by_division(typingctx, x, codes, begin, end, s, z, q_min, q_max):
    """Codes as ``code`` in ``cpu.py`` defines them."""

    def build(context, builder, signature, args):
        x, codes, begin, end, *scalars = args
        s, z, q_min, q_max = (splat(builder, value, ROW_BLOCK) for value in scalars)
        lo, hi = builder.fsub(q_min, z), builder.fsub(q_max, z)
        with _over_blocks(builder, begin, end) as block:
            index = _first_of(builder, begin, block)
            t = builder.fdiv(load_real_lanes(builder, x, index, ROW_BLOCK, s.type.element), s)
            _prefetch_after(builder, x, index)
            t = builder.select(builder.fcmp_ordered("ord", t, t), t, ir.Constant(t.type, [0.0] * ROW_BLOCK))
            t = builder.select(builder.fcmp_ordered(">", t, lo), t, lo)
            t = builder.select(builder.fcmp_ordered("<", t, hi), t, hi)
            near = builder.fadd(rint_lanes(builder, t), z)
            wide = builder.fptosi(near, ir.VectorType(_WORD, ROW_BLOCK))
            store_lanes(builder, builder.trunc(wide, ir.VectorType(_BYTE, ROW_BLOCK)), codes, index)
        return context.get_dummy_value()

    return types.none(x, codes, begin, end, s, z, q_min, q_max), build


_FUSED = multiplies_and_adds()


@jit
def is_ordinary(s, z, q_min, q_max):
    """Whether ``codes_by_reciprocal`` serves this scale and range of codes."""
    widest, most = np.float32(2.0**60), np.float32(2.0**22)
    lo, hi = q_min - z, q_max - z
    return _FUSED and abs(s) > 1 / widest and abs(s) < widest and lo >= -most and hi <= most


@emit
def codes_by_reciprocal(typingctx, x, codes, begin, end, s, z, q_min, q_max):
    """Codes without a division for each element, for ``is_ordinary`` scales.

    x is clamped to RN(lo s) and RN(hi s) first. Their quotients are within 1/4 of lo and hi, so that no
    quotient needs to be clamped, and none overflows. r + e approximates 1 / s, so q is within an ulp of x / s
    and its remainder x - q s is exact. By Markstein's theorem q + remainder * r, rounded once, is the
    correctly rounded quotient. A quotient below 2**-30, whose remainder may underflow, need not be: its code
    is that of 0. 1.5 * 2**23 plus a quotient is rounded to an integer, whose low bits are those of the code.
    """

    def build(context, builder, signature, args):
        x, codes, begin, end, s, z, q_min, q_max = args
        kind, lanes = s.type, ROW_BLOCK
        bits, fraction = (32, 23) if kind == ir.FloatType() else (64, 52)

        def first_if(order, a, b):
            return builder.select(builder.fcmp_ordered(order, a, b), a, b)

        ends = [builder.fmul(builder.fsub(q, z), s) for q in (q_min, q_max)]
        reciprocal = builder.fdiv(kind(1.0), s)
        error = builder.fmul(builder.fma(builder.fneg(s), reciprocal, kind(1.0)), reciprocal)
        scalars = first_if("<", *ends), first_if(">", *ends), reciprocal, error, builder.fneg(s)
        least, greatest, r, e, opposite = (splat(builder, value, lanes) for value in scalars)
        whole = ir.VectorType(kind, lanes)
        zeros, rounding = ir.Constant(whole, [0.0] * lanes), ir.Constant(whole, [1.5 * 2.0**fraction] * lanes)
        shift = splat(builder, builder.trunc(builder.fptosi(z, _WORD), _BYTE), lanes)
        with _over_blocks(builder, begin, end) as block:
            index = _first_of(builder, begin, block)
            given = load_real_lanes(builder, x, index, lanes, kind)
            _prefetch_after(builder, x, index)
            given = builder.select(builder.fcmp_ordered("ord", given, given), given, zeros)
            given = first_if("<", first_if(">", given, least), greatest)
            q = fma_lanes(builder, given, r, builder.fmul(given, e))
            q = fma_lanes(builder, fma_lanes(builder, q, opposite, given), r, q)
            near = builder.bitcast(builder.fadd(q, rounding), ir.VectorType(ir.IntType(bits), lanes))
            low = builder.trunc(near, ir.VectorType(_BYTE, lanes))
            store_lanes(builder, builder.add(low, shift), codes, index)
        return context.get_dummy_value()

    return types.none(x, codes, begin, end, s, z, q_min, q_max), build


def _rounding_lanes() -> int:
    """Lanes of the x86 instruction that converts floats to integers; 0 if the processor does not have it."""
    if platform.machine() not in ("x86_64", "AMD64") or not _FUSED:
        return 0
    return 16 if processor_has("avx512bw") else 8 if processor_has("avx2") else 0


_LANES = _rounding_lanes()


def _to_integers(builder: Any, values: Any) -> Any:
    """Emit the nearest int32 of each of ``_LANES`` float32; -2**31 for NaN and what does not fit."""
    words = ir.VectorType(_WORD, _LANES)
    if _LANES == 8:
        name, more = "llvm.x86.avx.cvt.ps2dq.256", []
    else:  # where masked out, which lanes, and the rounding of the other instructions
        name = "llvm.x86.avx512.mask.cvtps2dq.512"
        more = [ir.Constant(words, [0] * _LANES), _HALF(-1), _WORD(4)]
    kinds = [values.type, *(value.type for value in more)]
    known = builder.module.globals.get(name)
    function = known or ir.Function(builder.module, ir.FunctionType(words, kinds), name)
    return builder.call(function, [values, *more])


def _constant(kind: Any, value: int) -> Any:
    """A vector of equal integers."""
    return ir.Constant(kind, [value] * kind.count)


def _high_halves(builder: Any, near: list[Any], lo: Any, hi: Any) -> Any:
    """Emit the high halves of a block of integers as bytes, clamped to ``lo`` and ``hi``."""
    words, halves = near[0].type, ir.VectorType(_HALF, 2 * _LANES)
    pairs = []  # the high halves of two vectors, alternating
    for even, odd in zip(near[::2], near[1::2], strict=True):
        low, high = builder.lshr(even, _constant(words, 16)), builder.and_(odd, _constant(words, 0xFFFF0000))
        pair = builder.bitcast(builder.or_(low, high), halves)
        pair = builder.select(builder.icmp_signed(">", pair, lo), pair, lo)
        pair = builder.select(builder.icmp_signed("<", pair, hi), pair, hi)
        pairs.append(builder.bitcast(pair, ir.VectorType(_BYTE, 4 * _LANES)))
    first_bytes = [4 * _LANES * pair + 2 * odd for pair in range(len(pairs)) for odd in range(2)]
    places = [first + 4 * lane for first in first_bytes for lane in range(_LANES)]
    return builder.shuffle_vector(pairs[0], pairs[-1], ir.Constant(ir.VectorType(_WORD, ROW_BLOCK), places))


@emit
def _codes_by_estimate(typingctx, x, codes, begin, end, s, z, q_min, q_max):
    """Codes in float32, for scales that are ``is_ordinary`` and quotients of at most ``_MOST``.

    Returns True if a quotient is too close to a tie, or is NaN or huge; the codes are then wrong.

    Let Q be x / s, rounded to float32, and n the integer nearest to RN(x r 2**16 + 2**15 + 4), where r is
    RN(1 / s). If abs(Q) < 257.5, n - 4 differs from Q 2**16 + 2**15 by less than 4: by at most 2.02 as r and
    Q are rounded, and by at most 1 as the sum and n are. So if the low 16 bits of n are 8 or more, Q + 1/2 is
    not an integer, and its floor is n >> 16. Larger quotients have n >> 16 out of range, since n does not
    decrease as Q grows. If n is not an int32, the instruction gives -2**31, whose low bits are 0.
    """

    def build(context, builder, signature, args):
        x, codes, begin, end, s, z, q_min, q_max = args
        words, halves = ir.VectorType(_WORD, _LANES), ir.VectorType(_HALF, 2 * _LANES)

        def integers(value, kind, lanes):
            return splat(builder, builder.trunc(builder.fptosi(value, _WORD), kind), lanes)

        reciprocal = builder.fmul(builder.fdiv(s.type(1.0), s), s.type(2.0**16))
        r, offset = (splat(builder, value, _LANES) for value in (reciprocal, s.type(2.0**15 + _EXCESS)))
        lo, hi = (integers(builder.fsub(q, z), _HALF, 2 * _LANES) for q in (q_min, q_max))
        shift = integers(z, _BYTE, ROW_BLOCK)
        least_bits = stack_slot(builder, halves)  # its even halves are of the low bits
        builder.store(_constant(halves, 0xFFFF), least_bits)
        with _over_blocks(builder, begin, end) as block:
            index, near = _first_of(builder, begin, block), []
            for lane in range(0, ROW_BLOCK, _LANES):
                place = builder.add(index, index.type(lane))
                total = fma_lanes(builder, load_real_lanes(builder, x, place, _LANES, s.type), r, offset)
                near.append(_to_integers(builder, total))
                bits, least = builder.bitcast(near[-1], halves), builder.load(least_bits)
                builder.store(
                    builder.select(builder.icmp_unsigned("<", bits, least), bits, least), least_bits
                )
            store_lanes(builder, builder.add(_high_halves(builder, near, lo, hi), shift), codes, index)
        low_bits = builder.and_(builder.bitcast(builder.load(least_bits), words), _constant(words, 0xFFFF))
        is_unsure = builder.icmp_unsigned("<", low_bits, _constant(words, 2 * _EXCESS))
        lanes = builder.bitcast(is_unsure, ir.IntType(_LANES))
        return builder.icmp_unsigned("!=", lanes, lanes.type(0))

    return types.boolean(x, codes, begin, end, s, z, q_min, q_max), build


def most_codes_by_estimate(x, codes, begin, end, elements, s, z, q_min, q_max):
    """Codes by estimates, while few of them fail. Returns the end of what was written.

    The scale is ``is_ordinary``. Fewer than ``SPAN`` elements are not worth the call. The whole tensor has
    ``elements``.
    """
    raise NotImplementedError("called from kernels only")


@overload(most_codes_by_estimate)
def _most_codes_by_estimate(x, codes, begin, end, elements, s, z, q_min, q_max):
    if s != types.float32 or _LANES == 0:
        return lambda x, codes, begin, end, elements, s, z, q_min, q_max: begin

    def write(x, codes, begin, end, elements, s, z, q_min, q_max):
        outlined()
        most, part, failed = np.float32(_MOST), begin, 0
        if q_min - z < -most or q_max - z > most:
            return begin
        while part < end and 4 * failed <= part - begin + 2 * SPAN:
            stop = min(part + SPAN, end)
            if elements >= _PREFETCHED_FROM:
                _prefetch_span(x, part)
            if _codes_by_estimate(x, codes, part, stop, s, z, q_min, q_max):
                codes_by_reciprocal(x, codes, part, stop, s, z, q_min, q_max)
                failed += SPAN
            part = stop
        return part

    return write
