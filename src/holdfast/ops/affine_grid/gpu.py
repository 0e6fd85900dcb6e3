"""affine_grid in Triton.

A forward program computes one tile of places. A backward program sums one block of the tree sum for one row
of dtheta; a second kernel adds the block sums, level by level.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned, constants_of
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, quotient, widen
from holdfast.ops.affine_grid import plan as plans
from holdfast.ops.grid_sample.gpu_coordinates import offset_of, unravel
from holdfast.ops.tree_sum import blocks as block_sizes
from holdfast.ops.tree_sum.blocks import blocks_of
from holdfast.ops.tree_sum.gpu import filled_rows, sum_lanes

LANES = tl.constexpr(block_sizes.LANES)
ROWS = tl.constexpr(block_sizes.ROWS)
BLOCK = tl.constexpr(block_sizes.BLOCK)


@dataclass(frozen=True)
class Tuning:
    """Tuning of affine_grid: places per tile, and warps per program."""

    tile: int = 512
    warps: int = 4


TUNING = Tuned(gpu=Tuning())


@triton.jit
def coordinate(index, size, ALIGNED: tl.constexpr, COMPUTE: tl.constexpr):
    """Coordinates of the places ``index`` of an axis, from -1 to 1."""
    steps = tl.zeros(index.shape, tl.int32) + (tl.maximum(size - 1, 1) if ALIGNED else size)
    return quotient((2 * index.to(tl.int32) - (size - 1)).to(COMPUTE), steps.to(COMPUTE))


@triton.jit
def affine_grid(
    grid, theta, places, tiles, sizes, strides, axis_step, theta_strides,
    AXES: tl.constexpr, ALIGNED: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid values of a tile of places of one image."""
    program = tl.program_id(0)
    n = (program // tiles).to(tl.int64)
    place = (program % tiles).to(INDEX) * TILE + tl.arange(0, TILE)
    inside = place < places
    x, y, z = unravel(place, sizes, AXES)
    out = grid + offset_of(n, x, y, z, strides)
    along_x = coordinate(x, sizes[0], ALIGNED, COMPUTE)
    along_y = coordinate(y, sizes[1], ALIGNED, COMPUTE)
    along_z = coordinate(z, sizes[2], ALIGNED, COMPUTE)
    for j in tl.static_range(AXES):
        row = theta + n * theta_strides[0] + j * theta_strides[1]
        step = theta_strides[2]
        total = widen(tl.load(row), COMPUTE) * along_x + widen(tl.load(row + step), COMPUTE) * along_y
        if AXES == 3:
            total += widen(tl.load(row + 2 * step), COMPUTE) * along_z
        total += widen(tl.load(row + AXES * step), COMPUTE)
        tl.store(out + j * axis_step, narrow(total, grid.dtype.element_ty), mask=inside)


@triton.jit
def sum_places(
    sums, dgrid, places, blocks, sizes, strides, axis_step,
    AXES: tl.constexpr, ALIGNED: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Block sums of one row of dtheta over one block of places."""
    program = tl.program_id(0)
    block = program % blocks
    theta_row = program // blocks
    n, j = (theta_row // AXES).to(tl.int64), theta_row % AXES
    source = dgrid + j * axis_step
    of_x, of_y = tl.zeros([LANES], COMPUTE), tl.zeros([LANES], COMPUTE)
    of_z, of_one = tl.zeros([LANES], COMPUTE), tl.zeros([LANES], COMPUTE)
    for row in range(filled_rows(block.to(INDEX) + tl.arange(0, 1), places, ROWS)):
        place = block.to(INDEX) * BLOCK + row * LANES + tl.arange(0, LANES)
        x, y, z = unravel(place, sizes, AXES)
        change = tl.load(source + offset_of(n, x, y, z, strides), mask=place < places, other=0.0)
        change = widen(change, COMPUTE)
        of_x += change * coordinate(x, sizes[0], ALIGNED, COMPUTE)
        of_y += change * coordinate(y, sizes[1], ALIGNED, COMPUTE)
        if AXES == 3:
            of_z += change * coordinate(z, sizes[2], ALIGNED, COMPUTE)
        of_one += change
    first = sums + theta_row.to(tl.int64) * (AXES + 1) * blocks + block + tl.arange(0, 1)
    tl.store(first, sum_lanes(tl.reshape(of_x, (1, LANES)), 1, LANES))
    tl.store(first + blocks, sum_lanes(tl.reshape(of_y, (1, LANES)), 1, LANES))
    if AXES == 3:
        tl.store(first + 2 * blocks, sum_lanes(tl.reshape(of_z, (1, LANES)), 1, LANES))
    tl.store(first + AXES * blocks, sum_lanes(tl.reshape(of_one, (1, LANES)), 1, LANES))


@triton.jit
def sum_blocks(
    out, sums, length, blocks, theta_strides,
    AXES: tl.constexpr, FINAL: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """A further level: reduce the ``length`` sums of each element of dtheta to ``blocks`` sums."""
    program = tl.program_id(0)
    block = program % blocks
    element = (program // blocks).to(tl.int64)
    lanes = tl.zeros([LANES], COMPUTE)
    for row in range(filled_rows(block + tl.arange(0, 1), length, ROWS)):
        place = block * BLOCK + row * LANES + tl.arange(0, LANES)
        lanes += tl.load(sums + element * length + place, mask=place < length, other=0.0)
    total = sum_lanes(tl.reshape(lanes, (1, LANES)), 1, LANES)
    if FINAL:
        n, j, k = element // (AXES * (AXES + 1)), element // (AXES + 1) % AXES, element % (AXES + 1)
        offset = n * theta_strides[0] + j * theta_strides[1] + k * theta_strides[2]
        target = out + offset + tl.arange(0, 1)
        if ACCUMULATE:
            total = widen(tl.load(target), COMPUTE) + total
        tl.store(target, narrow(total, out.dtype.element_ty))
    else:
        tl.store(out + element * blocks + block + tl.arange(0, 1), total)


def _walk(desc: plans.MapDescriptor, grid: torch.Tensor) -> dict[str, Any]:
    """Kernel parameters of a grid: sizes in the order x, y, z; strides of n, x, y, z; stride of the axis."""
    steps = (*reversed(grid.stride()[1:-1]), 0)[:3]
    return {
        "places": desc.places, "sizes": tuple(max(size, 1) for size in (*reversed(desc.output_size), 1)[:3]),
        "strides": (grid.stride(0), *steps), "axis_step": grid.stride(-1),
    }  # fmt: skip


def _constants(desc: plans.MapDescriptor) -> dict[str, Any]:
    return {
        "AXES": desc.axes,
        "ALIGNED": desc.align_corners,
        "COMPUTE": tl.float64 if desc.compute.bits == 64 else tl.float32,
        "INDEX": tl.int32 if desc.places < 2**31 - 2 * block_sizes.BLOCK else tl.int64,
    }


class AffineGrid(DescribedKernel[plans.AffineGridDescriptor]):
    def compile(self) -> None:
        self.prepare(plans.AffineGridArgs.described(self.desc))

    def prepare(self, args: plans.AffineGridArgs) -> Launch[plans.AffineGridArgs]:
        desc, tuning = self.desc, TUNING.on(self.device)
        tiles = -(-desc.places // tuning.tile)
        steps = Steps(self.device, args)
        steps.add(
            affine_grid, desc.batch * tiles, _walk(desc, args.grid), _constants(desc), constants_of(tuning),
            tiles=tiles, theta_strides=tuple(args.theta.stride()), num_warps=tuning.warps,
        )  # fmt: skip
        return steps.launch


class AffineGridBackward(DescribedKernel[plans.AffineGridBackwardDescriptor]):
    """``sum_places``, then ``sum_blocks`` until one sum is left."""

    def __init__(self, desc: plans.AffineGridBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        layout, self.elements = WorkspaceLayout(), desc.batch * desc.axes * (desc.axes + 1)
        self.lengths = [blocks_of(desc.places)]
        while self.lengths[-1] > block_sizes.BLOCK:
            self.lengths.append(blocks_of(self.lengths[-1]))
        self.sums = [layout.take(self.elements * length, desc.compute.torch) for length in self.lengths]
        self.set_workspace(layout)

    def compile(self) -> None:
        self.prepare(plans.AffineGridBackwardArgs.described(self.desc))

    def prepare(self, args: plans.AffineGridBackwardArgs) -> Launch[plans.AffineGridBackwardArgs]:
        desc, constants, warps = self.desc, _constants(self.desc), TUNING.on(self.device).warps
        steps = Steps(self.device, args)
        steps.add(
            sum_places, desc.batch * desc.axes * self.lengths[0], _walk(desc, args.dgrid), constants,
            sums=self.sums[0], blocks=self.lengths[0], num_warps=warps,
        )  # fmt: skip
        for level, length in enumerate(self.lengths):
            final = level + 1 == len(self.lengths)
            blocks = 1 if final else self.lengths[level + 1]
            steps.add(
                sum_blocks, self.elements * blocks, constants,
                out="dtheta" if final else self.sums[level + 1], sums=self.sums[level], length=length,
                blocks=blocks, theta_strides=tuple(args.dtheta.stride()),
                FINAL=final, ACCUMULATE=args.accumulate, num_warps=warps,
            )  # fmt: skip
        return steps.launch
