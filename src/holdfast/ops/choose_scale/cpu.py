"""Numba: the range of the elements of each scale, and the scale for that range.

A segment is the elements of one scale. The bits of two floats of equal sign, read as integers, have the order
of the floats, with NaN above infinity. So the extremes of a segment are maxima of integers: they need no
conversion and do not depend on the order. A unit of work is a block of segments, or a piece of each segment
of a block. The maxima of pieces go to the workspace, and a second kernel joins them.
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

from holdfast.backends.cpu import compile_kernel, emit, jit, kernel, outlined, pointer
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
from holdfast.numerics.cpu_walk import offset_of
from holdfast.ops.affine.plan import AffineKernel, ScaledDescriptor
from holdfast.ops.choose_scale import plan as plans
from holdfast.ops.choose_scale.plan import SCALE_FLOOR

#: Most segments per block, and bytes from one scratch run of a block to the next.
MOST_SEGMENTS = 4096
BLOCK_BYTES = step_of(MOST_SEGMENTS * 8)
#: Four runs: the extremes above and below zero, and the two results.
_SCRATCH = Scratch("choose_scale", Runs(4, MOST_SEGMENTS * 8))
#: Columns per step within a row of a segment.
CHUNK = 8192
#: Approximate elements per unit of work, and units that are enough for any number of threads.
UNIT_ELEMENTS = 32768
ENOUGH_UNITS = 64
#: Integer dtype for the bits of a float, by bytes.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# The result: low and high, a scale, or a scale and a zero point.
RANGE, SYMMETRIC, AFFINE = 0, 1, 2

_KINDS = {
    torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.float32: FLOAT32, torch.float64: FLOAT64,
}  # fmt: skip


@emit
def magnitude(typingctx, bits, mask):
    """The bits of the absolute value. ``mask`` has all bits set but the sign bit."""
    return bits(bits, mask), lambda context, builder, signature, args: builder.and_(*args)


@emit
def negated_bits(typingctx, bits, mask):
    """The bits of the float with the opposite sign."""

    def build(context, builder, signature, args):
        return builder.xor(args[0], builder.not_(args[1]))

    return bits(bits, mask), build


@emit
def larger(typingctx, a, b):
    """The larger of two integers of one type."""

    def build(context, builder, signature, args):
        return builder.select(builder.icmp_signed(">", *args), *args)

    return a(a, b), build


@emit
def zero_bits(typingctx, like):
    """0 of the integer type of ``like``."""
    return like(like), lambda context, builder, signature, args: args[0].type(0)


def real(bits, kind):
    """The float with these bits, in the compute type. ``kind`` is the dtype of 16 bits."""
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
def fold(run, step, count, mask, both, above, below):
    """Update ``above`` with the largest magnitude of a run.

    With ``both``, ``above`` is for positive elements and ``below`` for the magnitudes of negative ones.
    """
    outlined()
    bits = pointer(run, mask)
    if step != 1:
        for i in range(count):
            above = larger(bits[i * step] if both else magnitude(bits[i * step], mask), above)
            below = larger(negated_bits(bits[i * step], mask), below)
        return above, below
    if both:
        for i in range(count):
            above = larger(bits[i], above)
            below = larger(negated_bits(bits[i], mask), below)
    else:
        for i in range(count):
            above = larger(magnitude(bits[i], mask), above)
    return above, below


@jit
def fold_columns(run, step, count, mask, both, above, below):
    """``fold`` for each column on its own."""
    outlined()
    bits = pointer(run, mask)
    if step != 1:
        for i in range(count):
            above[i] = larger(bits[i * step] if both else magnitude(bits[i * step], mask), above[i])
            below[i] = larger(negated_bits(bits[i * step], mask), below[i])
        return
    if both:
        for i in range(count):
            above[i] = larger(bits[i], above[i])
            below[i] = larger(negated_bits(bits[i], mask), below[i])
    else:
        for i in range(count):
            above[i] = larger(magnitude(bits[i], mask), above[i])


@jit
def range_of(above, below, kind):
    """low and high from the largest bits of positive and of negative elements. Both are NaN if one is."""
    high = real(above, kind)
    low = zero(high) - real(below, kind)
    unknown = high + low
    return (unknown, unknown) if np.isnan(high) | np.isnan(low) else (low, high)


@jit
def scale_of_range(low, high, lowest, highest, floor, symmetric):
    """The scale that maps low to high onto the codes lowest to highest."""
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
    """lowest - rint(low / scale) in the compute type. A NaN quotient counts as 0."""
    t = low / scale
    t = zero(t) if np.isnan(t) else t
    return min(max(lowest - rint(t), lowest), highest)


@jit
def scatter_results(found, results, count, segment, over, operand):
    """Write the values of ``count`` segments, from ``segment`` on, to a result tensor."""
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
def put_results(extremes, count, segment, over, results, kind, mask, lowest, highest, floor):
    """Compute the results of ``count`` segments, from ``segment`` on, in the scratch, and write them.

    ``results`` is the addresses of the two result tensors, and RANGE, SYMMETRIC or AFFINE.
    """
    outlined()
    at_first, at_second, result = results
    above, below = pointer(extremes, mask), pointer(extremes + BLOCK_BYTES, mask)
    firsts, seconds = pointer(extremes + 2 * BLOCK_BYTES, floor), pointer(extremes + 3 * BLOCK_BYTES, floor)
    points = pointer(extremes + 3 * BLOCK_BYTES, np.int32)
    if result == RANGE:
        for i in range(count):
            firsts[i], seconds[i] = range_of(above[i], below[i], kind)
    elif result == SYMMETRIC:
        for i in range(count):
            low, high = range_of(above[i], below[i], kind)
            firsts[i] = scale_of_range(low, high, lowest, highest, floor, True)
    else:
        for i in range(count):
            low, high = range_of(above[i], below[i], kind)
            scale = scale_of_range(low, high, lowest, highest, floor, False)
            firsts[i] = scale
            points[i] = np.int32(zero_point_of_range(low, scale, lowest, highest))
    scatter_results(firsts, pointer(at_first, floor), count, segment, over, 2)
    if result == RANGE:
        scatter_results(seconds, pointer(at_second, floor), count, segment, over, 3)
    elif result == AFFINE:
        scatter_results(points, pointer(at_second, np.int32), count, segment, over, 3)


@jit
def keep_extremes(extremes, count, segment, piece, pieces, mask):
    """Store the extremes of one piece of ``count`` segments in the workspace.

    ``pieces`` is an address, the piece_count of pieces per segment, and the piece_count of segments.
    """
    address, of_segment, segments = pieces
    words = pointer(address, mask)
    above, below = pointer(extremes, mask), pointer(extremes + BLOCK_BYTES, mask)
    for i in range(count):
        words[piece * segments + segment + i] = above[i]
        words[(of_segment + piece) * segments + segment + i] = below[i]


@kernel
def _observe(
    first, last, walk, groups, over, within, pieces, results, extremes, kind, mask, lowest, highest, floor
):
    """Units ``first`` to ``last``. A unit is a block of segments, or one piece of each segment of a block.

    Either the columns of a row belong to one segment (``columns_within``), or each column is a segment of its
    own, in ``groups`` of adjacent segments. ``extremes`` is the address of the scratch.
    """
    x, item, step, columns, columns_within, rows, block, steps = walk
    _, of_segment, segments = pieces
    both = results[2] != SYMMETRIC or lowest != -highest
    above, below = pointer(extremes, mask), pointer(extremes + BLOCK_BYTES, mask)
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
                top = bottom = zero_bits(mask)
                row = begin // chunks if begin > 0 else 0
                column = (begin - row * chunks) * CHUNK
                for _ in range(begin, end):
                    run = start + (offset_of(row, within, 1) + column * step) * item
                    top, bottom = fold(run, step, min(CHUNK, columns - column), mask, both, top, bottom)
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
                above[i] = below[i] = zero_bits(mask)
            start = x + (offset_of(group, groups, 1) + column * step) * item
            for row in range(begin, end):
                fold_columns(start + offset_of(row, within, 1) * item, step, count, mask, both, above, below)
        if of_segment > 1:
            keep_extremes(extremes, count, segment, piece, pieces, mask)
        else:
            put_results(extremes, count, segment, over, results, kind, mask, lowest, highest, floor)


@kernel
def _join(first, last, over, pieces, results, extremes, kind, mask, lowest, highest, floor):
    """The results of segments ``first`` to ``last`` from the extremes of their pieces."""
    address, of_segment, segments = pieces
    words = pointer(address, mask)
    above, below = pointer(extremes, mask), pointer(extremes + BLOCK_BYTES, mask)
    for begin in range(first, last, MOST_SEGMENTS):
        count = min(MOST_SEGMENTS, last - begin)
        for i in range(count):
            above[i] = below[i] = zero_bits(mask)
        for piece in range(of_segment):
            for i in range(count):
                above[i] = larger(words[piece * segments + begin + i], above[i])
                below[i] = larger(words[(of_segment + piece) * segments + begin + i], below[i])
        put_results(extremes, count, begin, over, results, kind, mask, lowest, highest, floor)


class Partition(NamedTuple):
    """Segments per block, number of blocks, pieces per segment, and steps per piece."""

    block: int
    blocks: int
    pieces: int
    steps: int


def partition(walk: Segments) -> Partition:
    """Blocks of about UNIT_ELEMENTS elements. If there are few, long segments are divided into pieces."""
    if walk.columns_within:
        block = max(1, min(UNIT_ELEMENTS // max(walk.length, 1), walk.count, MOST_SEGMENTS))
        blocks, steps = -(-walk.count // block), walk.within.rows * -(-walk.columns // CHUNK)
        step = min(CHUNK, max(walk.columns, 1))
    else:
        block = min(MOST_SEGMENTS, walk.columns)
        blocks, steps, step = walk.over.rows * -(-walk.columns // block), walk.within.rows, block
    pieces = max(1, min(-(-ENOUGH_UNITS // blocks), steps * step // UNIT_ELEMENTS))
    return Partition(block, blocks, pieces, -(-steps // pieces))


def _table(space: Space, *, columns: bool) -> np.ndarray[Any, Any]:
    """Loop sizes in row 0, then the strides of each operand; with or without the loop over columns."""
    last = None if columns or len(space.sizes) == 1 else -1
    return np.array([space.sizes[:last], *(strides[:last] for strides in space.strides)], np.int64)


@cache
def _compile(item: int) -> None:
    """Compile the kernels for elements of ``item`` bytes, by calls without work."""
    loops, rule = np.ones((4, 1), np.int64), kernel_constants(item, 0, 0)
    walk, pieces, results = (0, item, 1, 1, True, 1, 1, 1), (0, 1, 1), (0, 0, RANGE)
    compile_kernel(_observe, 0, 0, walk, loops, loops, loops, pieces, results, 0, FLOAT32, *rule)
    compile_kernel(_join, 0, 0, loops, pieces, results, 0, FLOAT32, *rule)


def kernel_constants(item: int, lowest: int, highest: int) -> tuple[Any, ...]:
    """All bits but the sign bit, as an integer of ``item`` bytes; lowest and highest code; least scale."""
    compute = np.float64 if item == 8 else np.float32
    mask = {2: np.int16, 4: np.int32, 8: np.int64}[item](2 ** (8 * item - 1) - 1)
    return mask, compute(lowest), compute(highest), compute(SCALE_FLOOR)


class Observer:
    """The launches that compute extremes. ``result`` is RANGE, SYMMETRIC (a scale) or AFFINE."""

    def __init__(self, desc: ScaledDescriptor, result: int, ends: tuple[int, int]) -> None:
        self.desc, self.result, self.item = desc, result, desc.input_dtype.itemsize
        self.kernel_constants = kernel_constants(self.item, *ends)
        self.most_pieces = 1
        if not desc.empty:
            walk = segments_by_memory(desc.view, [contiguous_strides(desc.shape)], ())
            self.most_pieces = partition(walk).pieces
        words = 2 * self.most_pieces * desc.view.scale_count if self.most_pieces > 1 else 0
        self.layout = WorkspaceLayout()
        self.maxima = self.layout.take(words, _WORDS[self.item])

    def compile(self) -> None:
        _compile(self.item)

    def prepare(self, first: torch.Tensor, second: torch.Tensor | None, x: torch.Tensor) -> Launch[Any]:
        """A launch with the operands ``first``, ``second`` and ``x``, in this order."""
        self.compile()
        walk = segments_by_memory(self.desc.view, [x.stride()], (first, second))
        block, blocks, piece_count, steps = partition(walk)
        if piece_count > self.most_pieces:
            steps, piece_count = -(-steps * piece_count // self.most_pieces), self.most_pieces
        step = walk.over.strides[0][-1] + walk.within.strides[0][-1]
        loops = (self.item, step, walk.columns, walk.columns_within, walk.within.rows, block, steps)
        groups, within = _table(walk.over, columns=False), _table(walk.within, columns=False)
        over = _table(walk.over, columns=not walk.columns_within)
        tail = (_KINDS[x.dtype], *self.kernel_constants)
        elements, count, result = walk.length * walk.count, walk.count, self.result

        def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
            at_first, at_second, at = addresses
            place = first_address(workspace) + self.maxima.offset
            pieces, results = (place, piece_count, count), (at_first, at_second, result)

            def observe(begin: int, end: int) -> None:
                scratch = _SCRATCH.of_thread()
                _observe(begin, end, (at, *loops), groups, over, within, pieces, results, scratch, *tail)

            def join(begin: int, end: int) -> None:
                _join(begin, end, over, pieces, results, _SCRATCH.of_thread(), *tail)

            parallel(observe, blocks * piece_count, elements)
            if piece_count > 1:
                parallel(join, count, count * piece_count)

        return launch


class ObserveRange(AffineKernel[plans.ObserveRangeDescriptor]):
    """``low`` and ``high`` of each scale as a kernel."""

    def __init__(self, desc: plans.ObserveRangeDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.observer = Observer(desc, RANGE, (0, 0))
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        self.observer.compile()

    def prepare(self, args: plans.ObserveRangeArgs) -> Launch[plans.ObserveRangeArgs]:
        return self.observer.prepare(args.low, args.high, args.x)


class ChooseScale(AffineKernel[plans.ChooseScaleDescriptor]):
    """The scale of each segment, and the zero point unless symmetric, as a kernel."""

    def __init__(self, desc: plans.ChooseScaleDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        result = SYMMETRIC if desc.symmetric else AFFINE
        self.observer = Observer(desc, result, desc.ends(*desc.code_range))
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        self.observer.compile()

    def prepare(self, args: plans.ChooseScaleArgs) -> Launch[plans.ChooseScaleArgs]:
        return self.observer.prepare(args.scale, args.zero_point, args.x)
