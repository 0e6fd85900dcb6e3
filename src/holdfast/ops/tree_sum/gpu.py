"""The tree sum, in Triton.

A tile has one row per block and one column per lane; a loop adds the rows of the blocks to it. The blocks of
a tile belong to neighbouring segments, or follow each other in one segment. A program owns all lanes of its
blocks, or one split of them: neighbouring lanes that form a subtree. So there are no atomics and no waiting.
Programs store their sums in the workspace, and a small kernel per further level adds them.
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
from holdfast.backends.tuning import Tuned, constants_of, warps_for
from holdfast.core.dtypes import Float
from holdfast.core.granularity import ScaleView
from holdfast.core.segments import Segments, segment_length, segments_in_order
from holdfast.core.workspace_layout import Region, WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.tree_sum import blocks as block_sizes
from holdfast.ops.tree_sum.blocks import blocks_of

LANES = tl.constexpr(block_sizes.LANES)
BLOCK = tl.constexpr(block_sizes.BLOCK)

#: Pipeline stages of the loop over rows.
STAGES = tl.constexpr(4)


@dataclass(frozen=True)
class Tuning:
    """Tuning of the tree sum."""

    #: Elements of a tile, and its bytes if blocks have a single row.
    tile: int = 1024
    single_tile_bytes: int = 2048
    #: Contiguous bytes that a tile reads where segments are side by side.
    column_bytes: int = 256
    #: Sums per tile of a further level.
    sums: int = 1024
    #: Maximum number of warps of a program.
    warps: int = 4


TUNING = Tuned(gpu=Tuning())


@triton.jit
def sum_lanes(lanes, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Add neighbouring lanes until one is left: [COUNT, WIDTH] to [COUNT]."""
    for k in tl.static_range(8):
        if WIDTH >> k > 1:
            lanes = tl.sum(tl.reshape(lanes, (COUNT, WIDTH >> (k + 1), 2)), axis=2)
    return tl.reshape(lanes, (COUNT,))


@triton.jit
def tile_coordinates(
    tiles, SEGMENTS: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr, INDEX: tl.constexpr
):
    """This program's segments, blocks and split; either segments or blocks has a single element."""
    program = tl.program_id(0)
    tile = (program % tiles).to(INDEX)
    other = program // tiles
    split = other % SPLITS
    other = (other // SPLITS).to(INDEX)
    if BLOCKS > 1:
        return other + tl.arange(0, 1), tile * BLOCKS + tl.arange(0, BLOCKS), split
    else:
        return tile * SEGMENTS + tl.arange(0, SEGMENTS), other + tl.arange(0, 1), split


@triton.jit
def filled_rows(block, length, ROWS: tl.constexpr):
    """Number of rows with elements in the fullest of these blocks, the first."""
    left = (length - tl.min(block, axis=0) * BLOCK + (LANES - 1)) // LANES
    return tl.minimum(left, ROWS).to(tl.int32)


@triton.jit
def from_double_bits(bits, DTYPE: tl.constexpr):
    """The float64 with these bits, rounded to DTYPE."""
    return (tl.zeros([1], tl.int64) + bits).to(tl.float64, bitcast=True).to(DTYPE)


@triton.jit
def store_sums(
    out, lanes, segment, block, split, segments, blocks, factor_bits, floor_bits, over, out_over,
    FINAL: tl.constexpr, ACCUMULATE: tl.constexpr, FLOOR: tl.constexpr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Reduce the lanes. Store the sums for the next level or, at the last level, the totals times the factor.

    A lane of a single term may be -0.0, since that term is not added to zero; adding zero here corrects it.
    """
    total = sum_lanes(lanes, COUNT, WIDTH) + 0.0
    inside = (segment < segments) & (block < blocks)
    if FINAL:
        total = total * from_double_bits(factor_bits, lanes.dtype)
        if FLOOR:
            floor = from_double_bits(floor_bits, lanes.dtype)
            total = tl.where(total < floor, floor, total)
        place = out + loop_offsets(segment, over, out_over)
        if ACCUMULATE:
            total = widen(tl.load(place, mask=inside), lanes.dtype) + total
        tl.store(place, narrow(total, out.dtype.element_ty), mask=inside)
    else:
        place = out + ((segment.to(tl.int64) * blocks + block) * SPLITS + split)
        tl.store(place, total, mask=inside)


@triton.jit(do_not_specialize=["factor_bits", "floor_bits", "segments", "blocks", "length", "tiles"])
def add_sums(
    first_out, second_out, first, second,
    factor_bits, floor_bits,
    segments, blocks, length, tiles, over, first_over, second_over,
    TWO: tl.constexpr, FINAL: tl.constexpr, ACCUMULATE: tl.constexpr, FLOOR: tl.constexpr,
    SPLITS: tl.constexpr, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """A further level of one or two trees per segment: add ``length`` sums, each stored in SPLITS parts."""
    COMPUTE: tl.constexpr = first.dtype.element_ty
    segment, block, split = tile_coordinates(tiles, SEGMENTS, 1, 1, INDEX)
    for k in tl.static_range(2 if TWO else 1):
        source = first if k == 0 else second
        lanes = tl.zeros([SEGMENTS, WIDTH], COMPUTE)
        for row in tl.static_range(ROWS):
            element = (block * BLOCK)[:, None] + (tl.arange(0, WIDTH) + row * LANES)[None, :]
            inside = (segment < segments)[:, None] & (element < length)
            place = source + ((segment.to(tl.int64) * length)[:, None] + element) * SPLITS
            part = tl.arange(0, SPLITS)[None, None, :]
            sums = tl.load(place[:, :, None] + part, mask=inside[:, :, None] & (part >= 0), other=0.0)
            sums = sum_lanes(tl.reshape(sums, (SEGMENTS * WIDTH, SPLITS)), SEGMENTS * WIDTH, SPLITS)
            lanes += tl.reshape(sums, (SEGMENTS, WIDTH))
        store_sums(
            first_out if k == 0 else second_out, lanes, segment, block, split, segments, blocks,
            factor_bits, floor_bits, over, first_over if k == 0 else second_over,
            FINAL, ACCUMULATE, FLOOR, SEGMENTS, WIDTH, 1,
        )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """Tile of a first-level program: ``segments`` or ``blocks`` rows of ``width`` lanes.

    ``tiles`` tiles cover the segments, or the blocks of one segment. ``even``: no element needs a mask.
    """

    segments: int
    blocks: int
    splits: int
    width: int
    rows: int
    tiles: int
    programs: int
    warps: int
    even: bool


def first_level(segments: Segments, tile: Tile) -> dict[str, Any]:
    """The parameters of a first-level kernel that follow from its segments and its tile."""
    return constants_of(tile) | {
        "segments": segments.count, "blocks": blocks_of(segments.length), "tiles": tile.tiles,
        "extent": (segments.length,), "over": segments.over.sizes, "within": segments.within.sizes,
        "INDEX": index_type(segments),
    }  # fmt: skip


def tile_of(segments: Segments, itemsize: int, splits: int, tuning: Tuning) -> Tile:
    """The tile for ``segments`` of elements of ``itemsize`` bytes, in at most ``splits`` splits.

    Rows are segments or blocks, whichever leaves fewer empty. Where segments are side by side in memory, a
    tile covers ``column_bytes`` of them, and as many lanes as fit.
    """
    count, length = segments.count, segments.length
    blocks, lanes, rows = _block(length)
    elements = tuning.single_tile_bytes // itemsize if rows == 1 else tuning.tile
    if segments.over.strides[0][-1] == 1 and segments.within.strides[0][-1] != 1:
        columns = min(triton.next_power_of_2(segments.over.sizes[-1]), tuning.column_bytes // itemsize)
        width = max(min(lanes, elements // columns), lanes // splits)
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
    warps = warps_for(by_segment * by_block * width, tuning.warps)
    return Tile(by_segment, by_block, lanes // width, width, rows, tiles, programs, warps, even)


def splits_of(view: ScaleView, shape: tuple[int, ...], itemsize: int, tuning: Tuning) -> int:
    """Maximum number of splits: the number for contiguous tensors. A single row of lanes is not split."""
    found = segments_in_order(view, (torch.empty(shape, device="meta"),), ())
    if found.length <= block_sizes.LANES:
        return 1
    return tile_of(found, itemsize, block_sizes.LANES, tuning).splits


def _block(length: int) -> tuple[int, int, int]:
    """Number of blocks of ``length`` elements, and the lanes and rows used per block."""
    lanes = min(block_sizes.LANES, triton.next_power_of_2(max(length, 1)))
    return blocks_of(length), lanes, min(block_sizes.ROWS, max(1, -(-length // block_sizes.LANES)))


def _filled(count: int, size: int) -> float:
    """Average number of used rows per tile, if ``count`` rows are cut into tiles of ``size``."""
    return count / -(-count // size) if count else 0.0


def index_type(segments: Segments) -> tl.dtype:
    """Index type of segments and of elements in a segment."""
    return tl.int32 if max(segments.count, segments.length) < 2**30 else tl.int64


def further_levels(length: int, splits: int) -> list[tuple[int, int]]:
    """(sums per segment, splits per sum) that each level after the first adds."""
    left, found = blocks_of(length), []
    while left > 1 or splits > 1:
        found.append((left, splits))
        left, splits = blocks_of(left), 1
    return found


def workspace_sums(
    count: int, further: Sequence[tuple[int, int]], compute: Float, trees: int
) -> tuple[list[list[Region]], WorkspaceLayout]:
    """Workspace regions for the sums that each further level adds, one per level and tree."""
    layout = WorkspaceLayout()
    sums = [
        [layout.take(count * left * splits, compute.torch) for _ in range(trees)] for left, splits in further
    ]
    return sums, layout


def max_sums(
    view: ScaleView, splits: int, compute: Float, trees: int
) -> tuple[list[list[Region]], WorkspaceLayout]:
    """``workspace_sums`` for ``trees`` trees over the elements of each scale, with ``splits`` splits at most.

    Fewer splits use the beginning of each region.
    """
    return workspace_sums(view.scale_count, further_levels(segment_length(view), splits), compute, trees)


def add_further_levels(
    steps: Steps,
    segments: Segments,
    further: Sequence[tuple[int, int]],
    sums: Sequence[Sequence[Region]],
    outputs: Sequence[str],
    strides: Sequence[tuple[int, ...]],
    tuning: Tuning,
    *,
    factor: float,
    floor: float | None = None,
    accumulate: bool = False,
) -> None:
    """Add the launches of the further levels to ``steps``.

    ``outputs`` are the operands for the totals, one per tree; ``strides`` are theirs in the loops over
    segments.
    """
    for k, (left, splits) in enumerate(further):
        final = k == len(further) - 1
        blocks, lanes, rows = _block(left)
        taken = max(1, min(tuning.sums // (lanes * splits), triton.next_power_of_2(segments.count)))
        tiles = -(-segments.count // taken)
        to: Sequence[StepOperand] = outputs if final else sums[k + 1]
        steps.add(
            add_sums, tiles * blocks,
            first_out=to[0], second_out=to[-1], first=sums[k][0], second=sums[k][-1],
            factor_bits=double_bits(factor), floor_bits=double_bits(floor or 0.0),
            segments=segments.count, blocks=blocks, length=left, tiles=tiles, over=segments.over.sizes,
            first_over=strides[0], second_over=strides[-1],
            TWO=len(outputs) > 1, FINAL=final, ACCUMULATE=accumulate, FLOOR=floor is not None,
            SPLITS=splits, SEGMENTS=taken, WIDTH=lanes, ROWS=rows, INDEX=index_type(segments),
            num_warps=warps_for(taken * lanes * splits, tuning.warps),
        )  # fmt: skip
