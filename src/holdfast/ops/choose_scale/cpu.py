"""The range of each scale's elements, and the scale that follows from it, on the CPU.

The bits of two floats of one sign compare as integers like the floats themselves, and NaN above infinity.
So the extremes of a segment are maxima of integers, which need no conversion and come out the same in any
order. A unit of work is some segments, or a piece of some; pieces leave their maxima in the workspace, to
be joined.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload

from holdfast.backends.cpu import BLOCK, compile_kernel, emit, jit, kernel, outlined, pointer, prefetch
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import parallel
from holdfast.core.plan import Launch
from holdfast.core.segments import Segments, segments_by_memory
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space, contiguous_strides
from holdfast.core.workspace_layout import WorkspaceLayout, first_address
from holdfast.numerics.cpu import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    reinterpret,
    rint,
    widen_bfloat16,
    widen_float16,
    zero,
)
from holdfast.ops.affine.plan import AffineKernel, ScaledDescriptor
from holdfast.ops.choose_scale.plan import (
    SCALE_FLOOR,
    ChooseScaleArgs,
    ChooseScaleDescriptor,
    ObserveRangeArgs,
    ObserveRangeDescriptor,
)

#: Segments that are finished in one go, and the bytes from one of their scratch runs to the next.
MOST_SEGMENTS = 4096
BLOCK_BYTES = step_of(MOST_SEGMENTS * 8)
#: The extremes above and below, and the two results.
_SCRATCH = Scratch("choose_scale", Runs(4, MOST_SEGMENTS * 8))
#: Columns of a row within a segment: longer ones are cut.
CHUNK = 8192
#: Elements of a unit of work, about; and how many units are enough for any number of threads.
UNIT = 32768
UNITS = 64
#: The integers that have the bits of a float of so many bytes.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# What is wanted of the extremes.
RANGE, SYMMETRIC, AFFINE = 0, 1, 2

_KINDS = {
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
}


@emit
def magnitude(typingctx, bits, most):
    """The bits of the absolute value; ``most`` is all bits but the sign."""

    def build(context, builder, signature, args):
        return builder.and_(*args)

    return bits(bits, most), build


@emit
def opposite(typingctx, bits, most):
    """The bits of the float with the other sign."""

    def build(context, builder, signature, args):
        return builder.xor(args[0], builder.not_(args[1]))

    return bits(bits, most), build


@emit
def larger(typingctx, a, b):
    """The larger one of two integers of one type."""

    def build(context, builder, signature, args):
        return builder.select(builder.icmp_signed(">", *args), *args)

    return a(a, b), build


@emit
def nothing(typingctx, like):
    """0 of the integer type of ``like``."""

    def build(context, builder, signature, args):
        return args[0].type(0)

    return like(like), build


def real(bits, kind):
    """The float that has these bits, in the compute type; 16 bits are of ``kind``."""
    raise NotImplementedError("called from kernels only")


@overload(real)
def _real(bits, kind):
    if bits == types.int64:
        return lambda bits, kind: reinterpret(bits, np.float64)
    if bits == types.int32:
        return lambda bits, kind: reinterpret(bits, np.float32)

    def half(bits, kind):
        return widen_float16(np.uint16(bits)) if kind == FLOAT16 else widen_bfloat16(np.uint16(bits))

    return half


@jit
def fold(run, step, count, most, both, above, below):
    """The largest of ``above`` and of the magnitudes in a run; with ``both``, of each sign on its own."""
    outlined()
    bits = pointer(run, most)
    if step != 1:
        for i in range(count):
            above = larger(bits[i * step] if both else magnitude(bits[i * step], most), above)
            below = larger(opposite(bits[i * step], most), below)
        return above, below
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        if count > BLOCK:
            prefetch(bits, begin)
        if both:
            for i in range(begin, end):
                above = larger(bits[i], above)
                below = larger(opposite(bits[i], most), below)
        else:
            for i in range(begin, end):
                above = larger(magnitude(bits[i], most), above)
    return above, below


@jit
def fold_columns(run, step, count, most, both, above, below):
    """The same for each of some columns on its own."""
    outlined()
    bits = pointer(run, most)
    if step != 1:
        for i in range(count):
            above[i] = larger(bits[i * step] if both else magnitude(bits[i * step], most), above[i])
            below[i] = larger(opposite(bits[i * step], most), below[i])
        return
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        prefetch(bits, begin)
        if both:
            for i in range(begin, end):
                above[i] = larger(bits[i], above[i])
                below[i] = larger(opposite(bits[i], most), below[i])
        else:
            for i in range(begin, end):
                above[i] = larger(magnitude(bits[i], most), above[i])


@jit
def offset_of(index, loops, operand):
    """Where an index begins, in elements: its number taken apart into the loops, innermost first."""
    offset = 0
    for d in range(loops.shape[1] - 1, 0, -1):
        rest = index // loops[0, d]
        offset += (index - rest * loops[0, d]) * loops[operand, d]
        index = rest
    return offset + index * loops[operand, 0]


@jit
def range_of(above, below, kind):
    """low and high, from the largest bits of positive and of negative elements; both NaN if one is."""
    high = real(above, kind)
    low = zero(high) - real(below, kind)
    unknown = high + low
    return (unknown, unknown) if np.isnan(high) | np.isnan(low) else (low, high)


@jit
def scale_of_range(low, high, lowest, highest, floor, symmetric):
    """The scale that spreads low to high over the codes lowest to highest."""
    if symmetric:
        up, down = high / highest, low / lowest
        scale = down if down > up else up
    else:
        half = np.float32(0.5)
        scale = (high * half - low * half) / (highest - lowest)
        scale = scale + scale
    return floor if scale < floor else scale


@jit
def zero_point_of_range(low, scale, lowest, highest):
    """lowest - rint(low / scale), the quotient taken for 0 where it is NaN; in the compute type."""
    t = low / scale
    t = zero(t) if np.isnan(t) else t
    return min(max(lowest - rint(t), lowest), highest)


@jit
def spread(found, results, count, segment, over, operand):
    """Write a value for each of ``count`` segments to where it belongs."""
    inner = over[0, over.shape[1] - 1]
    step = over[operand, over.shape[1] - 1]
    done = 0
    while done < count:
        offset = offset_of(segment + done, over, operand)
        run = min(count - done, inner - (segment + done) % inner)
        for i in range(run):
            results[offset + i * step] = found[done + i]
        done += run


@jit
def put(extremes, count, segment, over, results, kind, most, lowest, highest, floor):
    """Write what is wanted of ``count`` segments from ``segment`` on, beside their extremes and then out.

    ``results`` is the addresses of the two results and what is wanted.
    """
    outlined()
    at_first, at_second, wanted = results
    above, below = pointer(extremes, most), pointer(extremes + BLOCK_BYTES, most)
    firsts, seconds = pointer(extremes + 2 * BLOCK_BYTES, floor), pointer(extremes + 3 * BLOCK_BYTES, floor)
    points = pointer(extremes + 3 * BLOCK_BYTES, np.int32)
    if wanted == RANGE:
        for i in range(count):
            firsts[i], seconds[i] = range_of(above[i], below[i], kind)
    elif wanted == SYMMETRIC:
        for i in range(count):
            low, high = range_of(above[i], below[i], kind)
            firsts[i] = scale_of_range(low, high, lowest, highest, floor, True)
    else:
        for i in range(count):
            low, high = range_of(above[i], below[i], kind)
            scale = scale_of_range(low, high, lowest, highest, floor, False)
            firsts[i] = scale
            points[i] = np.int32(zero_point_of_range(low, scale, lowest, highest))
    spread(firsts, pointer(at_first, floor), count, segment, over, 2)
    if wanted == RANGE:
        spread(seconds, pointer(at_second, floor), count, segment, over, 3)
    elif wanted == AFFINE:
        spread(points, pointer(at_second, np.int32), count, segment, over, 3)


@jit
def keep(extremes, count, segment, piece, pieces, most):
    """Leave the extremes of a piece of some segments in the workspace.

    ``pieces`` is an address, how many pieces each segment has, and how many segments there are.
    """
    address, of_segment, segments = pieces
    words = pointer(address, most)
    above, below = pointer(extremes, most), pointer(extremes + BLOCK_BYTES, most)
    for i in range(count):
        words[piece * segments + segment + i] = above[i]
        words[(of_segment + piece) * segments + segment + i] = below[i]


@kernel
def _observe(
    first, last, walk, groups, over, within, pieces, results, extremes, kind, most, lowest, highest, floor
):
    """Units ``first`` to ``last`` of a walk: each a block of segments, or a piece of one.

    The columns run within the segments; or segments lie side by side, a column each, in ``groups`` of these.
    ``extremes`` is the address of the scratch.
    """
    x, item, step, columns, columns_within, rows, block, steps = walk
    _, of_segment, segments = pieces
    both = results[2] != SYMMETRIC or lowest != -highest
    above, below = pointer(extremes, most), pointer(extremes + BLOCK_BYTES, most)
    across, chunks = (columns + block - 1) // block, (columns + CHUNK - 1) // CHUNK
    for unit in range(first, last):
        place = unit // of_segment
        piece = unit - place * of_segment
        begin, end = piece * steps, min(piece * steps + steps, rows * chunks if columns_within else rows)
        if columns_within:
            segment = place * block
            count = min(block, segments - segment)
            for i in range(count):
                start = x + offset_of(segment + i, groups, 1) * item
                top = bottom = nothing(most)
                row = begin // chunks if begin > 0 else 0
                column = (begin - row * chunks) * CHUNK
                for _ in range(begin, end):
                    run = start + (offset_of(row, within, 1) + column * step) * item
                    top, bottom = fold(run, step, min(CHUNK, columns - column), most, both, top, bottom)
                    column += CHUNK
                    if column >= columns:
                        row, column = row + 1, 0
                above[i], below[i] = top, bottom
        else:
            group = place // across
            column = (place - group * across) * block
            count = min(block, columns - column)
            segment = group * columns + column
            for i in range(count):
                above[i] = below[i] = nothing(most)
            start = x + (offset_of(group, groups, 1) + column * step) * item
            for row in range(begin, end):
                fold_columns(start + offset_of(row, within, 1) * item, step, count, most, both, above, below)
        if of_segment > 1:
            keep(extremes, count, segment, piece, pieces, most)
        else:
            put(extremes, count, segment, over, results, kind, most, lowest, highest, floor)


@kernel
def _join(first, last, over, pieces, results, extremes, kind, most, lowest, highest, floor):
    """What is wanted of segments ``first`` to ``last``, each from its pieces."""
    address, of_segment, segments = pieces
    words = pointer(address, most)
    above, below = pointer(extremes, most), pointer(extremes + BLOCK_BYTES, most)
    for begin in range(first, last, MOST_SEGMENTS):
        count = min(MOST_SEGMENTS, last - begin)
        for i in range(count):
            above[i] = below[i] = nothing(most)
        for piece in range(of_segment):
            for i in range(count):
                above[i] = larger(words[piece * segments + begin + i], above[i])
                below[i] = larger(words[(of_segment + piece) * segments + begin + i], below[i])
        put(extremes, count, begin, over, results, kind, most, lowest, highest, floor)


class Cut(NamedTuple):
    """How a walk is cut: the segments of a block, the blocks, the pieces of each, the steps of a piece."""

    block: int
    blocks: int
    pieces: int
    steps: int


def cut(walk: Segments) -> Cut:
    """Blocks of a few tens of thousands of elements; long segments in pieces, if there are few of them."""
    if walk.columns_within:
        block = max(1, min(UNIT // max(walk.length, 1), walk.count, MOST_SEGMENTS))
        blocks, steps = -(-walk.count // block), walk.within.rows * -(-walk.columns // CHUNK)
        step = min(CHUNK, max(walk.columns, 1))
    else:
        block = min(MOST_SEGMENTS, walk.columns)
        blocks, steps, step = walk.over.rows * -(-walk.columns // block), walk.within.rows, block
    pieces = max(1, min(-(-UNITS // blocks), steps * step // UNIT))
    return Cut(block, blocks, pieces, -(-steps // pieces))


def _table(space: Space, *, columns: bool) -> np.ndarray[Any, Any]:
    """The sizes of the loops and each operand's strides, the loop over columns left out or in."""
    last = None if columns or len(space.sizes) == 1 else -1
    return np.array([space.sizes[:last], *(strides[:last] for strides in space.strides)], np.int64)


@cache
def _compile(item: int) -> None:
    """Compile the kernels for elements of ``item`` bytes, by calls that do nothing."""
    loops, rule = np.ones((4, 1), np.int64), numbers(item, 0, 0)
    walk, pieces, results = (0, item, 1, 1, True, 1, 1, 1), (0, 1, 1), (0, 0, RANGE)
    compile_kernel(_observe, 0, 0, walk, loops, loops, loops, pieces, results, 0, FLOAT32, *rule)
    compile_kernel(_join, 0, 0, loops, pieces, results, 0, FLOAT32, *rule)


def numbers(item: int, lowest: int, highest: int) -> tuple[Any, ...]:
    """All bits but the sign, as an integer of ``item`` bytes; the ends of the codes and the least scale."""
    compute = np.float64 if item == 8 else np.float32
    most = {2: np.int16, 4: np.int32, 8: np.int64}[item](2 ** (8 * item - 1) - 1)
    return most, compute(lowest), compute(highest), compute(SCALE_FLOOR)


class Observer:
    """The launches that find extremes. ``wanted`` of them is RANGE, SYMMETRIC (a scale) or AFFINE."""

    def __init__(self, desc: ScaledDescriptor, wanted: int, ends: tuple[int, int]) -> None:
        self.desc, self.wanted, self.item = desc, wanted, desc.input_dtype.itemsize
        self.numbers = numbers(self.item, *ends)
        self.most_pieces = 1
        if not desc.empty:
            self.most_pieces = cut(segments_by_memory(desc.view, [contiguous_strides(desc.shape)], ())).pieces
        words = 2 * self.most_pieces * desc.view.scale_count if self.most_pieces > 1 else 0
        self.layout = WorkspaceLayout()
        self.maxima = self.layout.take(words, _WORDS[self.item])

    def compile(self) -> None:
        _compile(self.item)

    def prepare(self, first: torch.Tensor, second: torch.Tensor | None, x: torch.Tensor) -> Launch[Any]:
        """A launch whose operands are ``first``, ``second`` and ``x``, in this order."""
        self.compile()
        walk = segments_by_memory(self.desc.view, [x.stride()], (first, second))
        block, blocks, number, steps = cut(walk)
        if number > self.most_pieces:
            steps, number = -(-steps * number // self.most_pieces), self.most_pieces
        step = walk.over.strides[0][-1] + walk.within.strides[0][-1]
        loops = (self.item, step, walk.columns, walk.columns_within, walk.within.rows, block, steps)
        groups, within = _table(walk.over, columns=False), _table(walk.within, columns=False)
        over = _table(walk.over, columns=not walk.columns_within)
        tail = (_KINDS[x.dtype], *self.numbers)
        elements, count, wanted = walk.length * walk.count, walk.count, self.wanted

        def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
            at_first, at_second, at = addresses
            place = first_address(workspace) + self.maxima.offset
            pieces, results = (place, number, count), (at_first, at_second, wanted)

            def observe(begin: int, end: int) -> None:
                scratch = _SCRATCH.of_thread()
                _observe(begin, end, (at, *loops), groups, over, within, pieces, results, scratch, *tail)

            def join(begin: int, end: int) -> None:
                _join(begin, end, over, pieces, results, _SCRATCH.of_thread(), *tail)

            parallel(observe, blocks * number, elements)
            if number > 1:
                parallel(join, count, count * number)

        return launch


class ObserveRange(AffineKernel[ObserveRangeDescriptor]):
    """The range of each scale's elements."""

    def __init__(self, desc: ObserveRangeDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.observer = Observer(desc, RANGE, (0, 0))
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        self.observer.compile()

    def prepare(self, args: ObserveRangeArgs) -> Launch[ObserveRangeArgs]:
        return self.observer.prepare(args.low, args.high, args.x)


class ChooseScale(AffineKernel[ChooseScaleDescriptor]):
    """The scale of each segment, and where it is not symmetric the zero point."""

    def __init__(self, desc: ChooseScaleDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        wanted = SYMMETRIC if desc.symmetric else AFFINE
        self.observer = Observer(desc, wanted, desc.ends(*desc.code_range))
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        self.observer.compile()

    def prepare(self, args: ChooseScaleArgs) -> Launch[ChooseScaleArgs]:
        return self.observer.prepare(args.scale, args.zero_point, args.x)
