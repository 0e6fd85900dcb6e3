"""lsq_init in Triton: the tree sum of magnitudes."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import double_bits, loop_offsets
from holdfast.backends.steps import Steps
from holdfast.core.plan import Launch
from holdfast.core.segments import segments_in_order
from holdfast.numerics.gpu import widen
from holdfast.ops.affine.gpu import compile_contiguous
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.lsq_init.plan import LsqInitArgs, LsqInitDescriptor
from holdfast.ops.tree_sum.gpu import (
    BLOCK,
    LANES,
    TUNING,
    add_further_levels,
    filled_rows,
    first_level,
    further_levels,
    max_sums,
    splits_of,
    store_sums,
    tile_coordinates,
    tile_of,
)


@triton.jit(do_not_specialize=["factor_bits", "floor_bits", "segments", "blocks", "tiles"])
def sum_of_magnitudes(
    scale, x,
    factor_bits, floor_bits,
    segments, blocks, tiles, extent, over, within, x_over, scale_over, x_within,
    COMPUTE: tl.constexpr, FINAL: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """Sums of |x| for the blocks of one program."""
    COUNT: tl.constexpr = SEGMENTS * BLOCKS
    segment, block, split = tile_coordinates(tiles, SEGMENTS, BLOCKS, SPLITS, INDEX)
    first = (block * BLOCK + split * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    start = loop_offsets(segment, over, x_over)[:, None]
    sums = tl.zeros([COUNT, WIDTH], COMPUTE)
    for row in range(ROWS if EVEN else filled_rows(block, extent[0], ROWS)):
        element = first + row * LANES
        inside = tl.full([1, 1], True, tl.int1)
        if not EVEN:
            inside = (segment < segments)[:, None] & (element < extent[0])
        value = tl.load(x + start + loop_offsets(element, within, x_within), mask=inside, other=0.0)
        sums += tl.abs(widen(value, COMPUTE))
    store_sums(
        scale, sums, segment, block, split, segments, blocks, factor_bits, floor_bits, over, scale_over,
        FINAL, False, True, COUNT, WIDTH, SPLITS,
    )  # fmt: skip


class LsqInit(AffineKernel[LsqInitDescriptor]):
    """``sum_of_magnitudes`` and the kernels that add its sums."""

    def __init__(self, desc: LsqInitDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.tuning = TUNING.on(device)
        self.splits = splits_of(desc.view, desc.shape, desc.input_dtype.itemsize, self.tuning)
        self.sums, layout = max_sums(desc.view, self.splits, desc.real.compute, 1)
        self.set_workspace(layout)

    def compile(self) -> None:
        compile_contiguous(self, LsqInitArgs)

    def prepare(self, args: LsqInitArgs) -> Launch[LsqInitArgs]:
        desc, compute = self.desc, self.desc.real.compute
        found = segments_in_order(desc.view, (args.x,), (args.scale,))
        tile = tile_of(found, desc.input_dtype.itemsize, self.splits, self.tuning)
        further = further_levels(found.length, tile.splits)
        over, within = found.over, found.within
        steps = Steps(self.device, args)
        steps.add(
            sum_of_magnitudes, tile.programs, first_level(found, tile),
            scale=self.sums[0][0] if further else "scale",
            factor_bits=double_bits(desc.factor), floor_bits=double_bits(desc.floor),
            x_over=over.strides[0], scale_over=over.strides[1], x_within=within.strides[0],
            COMPUTE=tl.float64 if compute.bits == 64 else tl.float32, FINAL=not further, num_warps=tile.warps,
        )  # fmt: skip
        add_further_levels(
            steps, found, further, self.sums, ("scale",), over.strides[1:], self.tuning,
            factor=desc.factor, floor=desc.floor,
        )  # fmt: skip
        return steps.launch
