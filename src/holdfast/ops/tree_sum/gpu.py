"""The tree sum, in Triton.

A tile has a block in each of its rows, and its lanes in the columns; the rows of the blocks pass through it
one after another. The blocks of a tile are of neighbouring segments, or follow each other in one segment. A
program may own all lanes of its blocks, or a piece: lanes that meet on the way down the tree before they meet
others. So nothing is added atomically and nothing waits. What a program has added goes to the workspace, and
a small kernel for each further level adds that.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import double_bits, loop_offsets
from holdfast.backends.steps import StepOperand, Steps
from holdfast.core.dtypes import Float
from holdfast.core.granularity import ScaleView
from holdfast.core.segments import Segments, segment_length, segments_in_order
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.tree_sum import blocks as cut
from holdfast.ops.tree_sum.blocks import blocks_of

LANES = tl.constexpr(cut.LANES)
BLOCK = tl.constexpr(cut.BLOCK)

#: Elements of a tile, the bytes of one if a single row passes through it, and the warps that share it.
TILE = 1024
SINGLE_TILE_BYTES = 2048
WARPS = 4
#: Rows of a tile that are on their way at a time.
STAGES = tl.constexpr(4)
#: Bytes along a row of memory that a tile takes where segments lie side by side.
COLUMN_BYTES = 256
#: Sums that a program of a further level adds at a time.
SUMS = 1024
#: Stands for the bits of a number while a kernel is compiled: it needs 64 of them.
WIDE = 2**62


@triton.jit
def halved(lanes, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Neighbouring lanes added until there is one: [COUNT, WIDTH] to [COUNT]."""
    for k in tl.static_range(8):
        if WIDTH >> k > 1:
            lanes = tl.sum(tl.reshape(lanes, (COUNT, WIDTH >> (k + 1), 2)), axis=2)
    return tl.reshape(lanes, (COUNT,))


@triton.jit
def tile_place(
    tiles, SEGMENTS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, INDEX: tl.constexpr
):
    """The segments, the blocks and the piece of this program; there is one segment or one block."""
    program = tl.program_id(0)
    tile = (program % tiles).to(INDEX)
    other = program // tiles
    piece = other % PIECES
    other = (other // PIECES).to(INDEX)
    if BLOCKS > 1:
        return other + tl.arange(0, 1), tile * BLOCKS + tl.arange(0, BLOCKS), piece
    else:
        return tile * SEGMENTS + tl.arange(0, SEGMENTS), other + tl.arange(0, 1), piece


@triton.jit
def rows_inside(block, length, ROWS: tl.constexpr):
    """How many rows of these blocks have elements; the first block has the most."""
    left = (length - tl.min(block, axis=0) * BLOCK + (LANES - 1)) // LANES
    return tl.minimum(left, ROWS).to(tl.int32)


@triton.jit
def number(bits, DTYPE: tl.constexpr):
    """A number of the host, which comes as the bits of a float64, rounded to DTYPE once."""
    return (tl.zeros([1], tl.int64) + bits).to(tl.float64, bitcast=True).to(DTYPE)


@triton.jit
def put_sums(
    out, lanes, segment, block, piece, segments, blocks, factor_bits, floor_bits, over, out_over,
    FINAL: tl.constexpr, ACCUMULATE: tl.constexpr, FLOOR: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Halve the lanes. Store the sums for the next level or, if there is none, the sums times the factor.

    Lanes of one term each may be -0; a zero that is added last makes up for the one that is added first.
    """
    total = halved(lanes, COUNT, WIDTH) + 0.0
    inside = (segment < segments) & (block < blocks)
    if FINAL:
        total = total * number(factor_bits, lanes.dtype)
        if FLOOR:
            floor = number(floor_bits, lanes.dtype)
            total = tl.where(total < floor, floor, total)
        place = out + loop_offsets(segment, over, out_over)
        if ACCUMULATE:
            total = widen(tl.load(place, mask=inside), lanes.dtype) + total
        tl.store(place, narrow(total, out.dtype.element_ty), mask=inside)
    else:
        place = out + ((segment.to(tl.int64) * blocks + block) * PIECES + piece)
        tl.store(place, total, mask=inside)


@triton.jit(do_not_specialize=["factor_bits", "floor_bits", "segments", "blocks", "length", "tiles"])
def add_sums(
    first_out, second_out, first, second,
    factor_bits, floor_bits,
    segments, blocks, length, tiles, over, first_over, second_over,
    TWO: tl.constexpr, FINAL: tl.constexpr, ACCUMULATE: tl.constexpr, FLOOR: tl.constexpr,
    PIECES: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """A further level of one tree for each segment, or of two: it adds ``length`` sums, each in PIECES."""
    COMPUTE: tl.constexpr = first.dtype.element_ty
    segment, block, piece = tile_place(tiles, SEGMENTS, 1, 1, INDEX)
    for k in tl.static_range(2 if TWO else 1):
        source = first if k == 0 else second
        lanes = tl.zeros([SEGMENTS, WIDTH], COMPUTE)
        for row in tl.static_range(ROWS):
            element = (block * BLOCK)[:, None] + (tl.arange(0, WIDTH) + row * LANES)[None, :]
            inside = (segment < segments)[:, None] & (element < length)
            place = source + ((segment.to(tl.int64) * length)[:, None] + element) * PIECES
            part = tl.arange(0, PIECES)[None, None, :]
            sums = tl.load(place[:, :, None] + part, mask=inside[:, :, None] & (part >= 0), other=0.0)
            sums = halved(tl.reshape(sums, (SEGMENTS * WIDTH, PIECES)), SEGMENTS * WIDTH, PIECES)
            lanes += tl.reshape(sums, (SEGMENTS, WIDTH))
        put_sums(
            first_out if k == 0 else second_out, lanes, segment, block, piece, segments, blocks,
            factor_bits, floor_bits, over, first_over if k == 0 else second_over,
            FINAL, ACCUMULATE, FLOOR, SEGMENTS, WIDTH, 1,
        )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """What a program of the first level takes at a time: ``segments`` or ``blocks`` rows of ``width`` lanes.

    ``tiles`` of these cover the segments, or the blocks of one. If ``even``, each of their elements exists.
    """

    segments: int
    blocks: int
    pieces: int
    width: int
    rows: int
    tiles: int
    programs: int
    even: bool

    @property
    def warps(self) -> int:
        return _warps(self.segments * self.blocks * self.width)

    @property
    def constants(self) -> dict[str, Any]:
        """The tile as constants of a kernel."""
        return {
            "EVEN": self.even,
            "PIECES": self.pieces,
            "SEGMENTS": self.segments,
            "BLOCKS": self.blocks,
            "WIDTH": self.width,
            "ROWS": self.rows,
        }


def tile_of(segments: Segments, itemsize: int, pieces: int) -> Tile:
    """The tile for ``segments`` of elements of ``itemsize`` bytes, of at most ``pieces`` pieces.

    It is as full as it can be. Where segments lie side by side in memory it is some of them wide, and has as
    many lanes as there is room for.
    """
    count, length = segments.count, segments.length
    blocks, lanes, rows = _block(length)
    elements = SINGLE_TILE_BYTES // itemsize if rows == 1 else TILE
    if segments.over.strides[0][-1] == 1 and segments.within.strides[0][-1] != 1:
        columns = min(triton.next_power_of_2(segments.over.sizes[-1]), COLUMN_BYTES // itemsize)
        width = max(min(lanes, elements // columns), lanes // pieces)
        by_segment, by_block = min(columns, elements // width), 1
    else:
        width, most = lanes, elements // lanes
        by_segment, by_block = (min(most, triton.next_power_of_2(max(n, 1))) for n in (count, blocks))
        if _filled(count, by_segment) > _filled(blocks, by_block):
            by_block = 1
        else:
            by_segment = 1
    tiles = -(-blocks // by_block) if by_block > 1 else -(-count // by_segment)
    programs = tiles * (lanes // width) * (count if by_block > 1 else blocks)
    even = count % by_segment == 0 and length == blocks * rows * lanes and blocks % by_block == 0
    return Tile(by_segment, by_block, lanes // width, width, rows, tiles, programs, even)


def pieces_of(view: ScaleView, shape: tuple[int, ...], itemsize: int) -> int:
    """The pieces that contiguous tensors are summed in; others make do with as many.

    One row of lanes is not worth cutting.
    """
    found = segments_in_order(view, (torch.empty(shape, device="meta"),), ())
    return 1 if found.length <= cut.LANES else tile_of(found, itemsize, cut.LANES).pieces


def _block(length: int) -> tuple[int, int, int]:
    """How many blocks ``length`` elements make, and the lanes and rows that are needed of one."""
    lanes = min(cut.LANES, triton.next_power_of_2(max(length, 1)))
    return blocks_of(length), lanes, min(cut.ROWS, max(1, -(-length // cut.LANES)))


def _filled(count: int, size: int) -> float:
    """The elements of a tile that exist, on average, if ``count`` rows come ``size`` at a time."""
    return count / -(-count // size) if count else 0.0


def _warps(elements: int) -> int:
    return max(1, min(WARPS, elements // 256))


def index_type(segments: Segments) -> tl.dtype:
    """The type that counts segments and the elements of one."""
    return tl.int32 if max(segments.count, segments.length) < 2**30 else tl.int64


def further_levels(length: int, pieces: int) -> list[tuple[int, int]]:
    """What each level after the first adds: how many sums of a segment, each in how many pieces."""
    left, found = blocks_of(length), []
    while left > 1 or pieces > 1:
        found.append((left, pieces))
        left, pieces = blocks_of(left), 1
    return found


def sums_of(
    count: int, further: Sequence[tuple[int, int]], compute: Float, trees: int
) -> tuple[list[list[Region]], WorkspaceLayout]:
    """Where the sums that each further level adds are, for each tree; and the workspace layout."""
    layout = WorkspaceLayout()
    sums = [
        [layout.take(count * left * pieces, compute.torch) for _ in range(trees)] for left, pieces in further
    ]
    return sums, layout


def most_sums(
    view: ScaleView, pieces: int, compute: Float, trees: int
) -> tuple[list[list[Region]], WorkspaceLayout]:
    """``sums_of`` for ``trees`` trees over the elements of each scale, in so many pieces at most.

    Sums in fewer pieces take the beginning of each.
    """
    return sums_of(view.scale_count, further_levels(segment_length(view), pieces), compute, trees)


def add_further(
    steps: Steps,
    segments: Segments,
    further: Sequence[tuple[int, int]],
    sums: Sequence[Sequence[Region]],
    outputs: Sequence[str],
    strides: Sequence[tuple[int, ...]],
    *,
    factor: float,
    floor: float | None = None,
    accumulate: bool = False,
) -> None:
    """Add the further levels to ``steps``.

    The totals of each tree go to one of ``outputs``, operands that have ``strides`` in the loops over
    segments.
    """
    for k, (left, pieces) in enumerate(further):
        final = k == len(further) - 1
        blocks, lanes, rows = _block(left)
        taken = max(1, min(SUMS // (lanes * pieces), triton.next_power_of_2(segments.count)))
        tiles = -(-segments.count // taken)
        to: Sequence[StepOperand] = outputs if final else sums[k + 1]
        steps.add(
            add_sums,
            tiles * blocks,
            first_out=to[0],
            second_out=to[-1],
            first=sums[k][0],
            second=sums[k][-1],
            factor_bits=double_bits(factor),
            floor_bits=double_bits(floor or 0.0),
            segments=segments.count,
            blocks=blocks,
            length=left,
            tiles=tiles,
            over=segments.over.sizes,
            first_over=strides[0],
            second_over=strides[-1],
            TWO=len(outputs) > 1,
            FINAL=final,
            ACCUMULATE=accumulate,
            FLOOR=floor is not None,
            PIECES=pieces,
            SEGMENTS=taken,
            WIDTH=lanes,
            ROWS=rows,
            INDEX=index_type(segments),
            num_warps=_warps(taken * lanes * pieces),
        )
