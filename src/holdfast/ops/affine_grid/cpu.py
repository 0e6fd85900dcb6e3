"""affine_grid on the CPU.

Kernels process rows of up to LANES places, with one scratch row per coordinate; the gradient adds each row to
the lanes of the tree sum. Every inner loop runs over places and vectorises.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from holdfast.backends.cpu import compile_kernel, jit, kernel, outlined, pointer
from holdfast.backends.threads import parallel
from holdfast.core.dtypes import Float
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import WorkspaceLayout, first_address, step_of
from holdfast.numerics.cpu import ITEM_SIZE, kind, zero
from holdfast.numerics.cpu_walk import (
    load_run,
    load_span,
    number,
    size_of,
    store_run,
    store_span,
    table_of,
    walk_of,
)
from holdfast.ops.affine_grid import plan as plans
from holdfast.ops.segment_sum.indexed import loops
from holdfast.ops.tree_sum import blocks
from holdfast.ops.tree_sum.blocks import blocks_of

LANES, BLOCK = blocks.LANES, blocks.BLOCK
#: Bytes of a scratch row (LANES places of the widest type), and the distance between rows.
_ROW_BYTES = LANES * 8
ROW = step_of(_ROW_BYTES)
# Scratch rows: 0 to 2 are the coordinates x, y and z; then stored elements, elements in the compute type, old
# values to accumulate to, a row of theta or dtheta, and the lanes of each element of a row of dtheta.
_RAW, _OWN, _OLD, _THETA, _LANES = 3, 4, 5, 6, 7
ROWS = _LANES + 4


@kernel
def _measure(sizes, divisors, along_at):
    """Write the coordinates along x, then y, then z."""
    along, at = pointer(along_at, divisors[0]), 0
    for a in range(3):
        size, divisor = sizes[a], divisors[a]
        for i in range(size):
            along[at + i] = np.float32(2 * i - (size - 1)) / divisor
        at += size


@jit
def _locate(begin, count, sizes, along_at, scratch, like):
    """Write x, y and z of ``count`` places from ``begin`` to the first three scratch rows."""
    outlined()
    along = pointer(along_at, like)
    x, y, z = pointer(scratch, like), pointer(scratch + ROW, like), pointer(scratch + 2 * ROW, like)
    width, height = sizes[0], sizes[1]
    done = 0
    while done < count:
        column, row = (begin + done) % width, (begin + done) // width
        here = min(width - column, count - done)
        of_y, of_z = along[width + row % height], along[width + height + row // height]
        for i in range(here):
            x[done + i] = along[column + i]
            y[done + i] = of_y
            z[done + i] = of_z
        done += here


@kernel
def _map(first, last, sizes, axes, theta, grid, walk, along_at, scratch, like):
    """Compute the grid. A unit is a row of up to LANES places of one image; units ``first`` to ``last``.

    ``grid`` is (address, kind, image stride, axis stride); ``theta`` is (the same, column stride). ``walk``
    is that over places.
    """
    places = sizes[0] * sizes[1] * sizes[2]
    rows = (places + LANES - 1) // LANES
    (theta_at, theta_kind, theta_step, row_step), column_step = theta
    grid_at, grid_kind, grid_step, axis_step = grid
    raw, own_at = scratch + _RAW * ROW, scratch + _OWN * ROW
    x, y, z = pointer(scratch, like), pointer(scratch + ROW, like), pointer(scratch + 2 * ROW, like)
    own = pointer(own_at, like)
    for unit in range(first, last):
        n, begin = unit // rows, unit % rows * LANES
        count = min(LANES, places - begin)
        _locate(begin, count, sizes, along_at, scratch, like)
        for j in range(axes):
            at = theta_at + (n * theta_step + j * row_step) * (theta_kind & ITEM_SIZE)
            t = pointer(
                load_run(at, theta_kind, column_step, axes + 1, raw, scratch + _THETA * ROW, like), like
            )
            if axes == 2:
                a, b, d = t[0], t[1], t[2]
                for i in range(count):
                    own[i] = (a * x[i] + b * y[i]) + d
            else:
                a, b, c, d = t[0], t[1], t[2], t[3]
                for i in range(count):
                    own[i] = ((a * x[i] + b * y[i]) + c * z[i]) + d
            target = grid_at + (n * grid_step + j * axis_step) * (grid_kind & ITEM_SIZE)
            store_span(own_at, target, grid_kind, walk, begin, begin + count, False, raw, raw, like)


@jit
def _clear(lanes, like):
    for i in range(LANES):
        lanes[i] = zero(like)


@jit
def _halved(lanes):
    """Add neighbouring lanes until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        for i in range(width):
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1]
    return lanes[0]


@jit
def _total(sums, count, lanes, like):
    """The tree sum of ``count`` block sums. ``sums`` is overwritten."""
    while count > 1:
        blocks = (count + BLOCK - 1) // BLOCK
        for block in range(blocks):
            _clear(lanes, like)
            for i in range(block * BLOCK, min(block * BLOCK + BLOCK, count)):
                lanes[i % LANES] += sums[i]
            sums[block] = _halved(lanes)
        count = blocks
    return sums[0]


@kernel
def _differentiate(
    first, last, sizes, axes, dtheta, dgrid, walk, blocks, accumulate, along_at, sums_at, scratch, like
):
    """Rows ``first`` to ``last`` of dtheta, counted over all images. Operands are as in ``_map``."""
    places = sizes[0] * sizes[1] * sizes[2]
    (theta_at, theta_kind, theta_step, row_step), column_step = dtheta
    grid_at, grid_kind, grid_step, axis_step = dgrid
    raw, own_at, old_at = scratch + _RAW * ROW, scratch + _OWN * ROW, scratch + _OLD * ROW
    own, result = pointer(own_at, like), pointer(scratch + _THETA * ROW, like)
    for unit in range(first, last):
        n, j = unit // axes, unit % axes
        source = grid_at + (n * grid_step + j * axis_step) * (grid_kind & ITEM_SIZE)
        for block in range(blocks):
            for k in range(axes + 1):
                _clear(pointer(scratch + (_LANES + k) * ROW, like), like)
            for begin in range(block * BLOCK, min(block * BLOCK + BLOCK, places), LANES):
                count = min(LANES, places - begin)
                _locate(begin, count, sizes, along_at, scratch, like)
                load_span(source, grid_kind, walk, begin, begin + count, raw, own_at, like)
                for k in range(axes + 1):
                    lanes = pointer(scratch + (_LANES + k) * ROW, like)
                    if k < axes:
                        along = pointer(scratch + k * ROW, like)
                        for i in range(count):
                            lanes[i] += own[i] * along[i]
                    else:
                        for i in range(count):
                            lanes[i] += own[i]
            for k in range(axes + 1):
                sums = pointer(sums_at + k * blocks * size_of(like), like)
                sums[block] = _halved(pointer(scratch + (_LANES + k) * ROW, like))
        for k in range(axes + 1):
            sums = pointer(sums_at + k * blocks * size_of(like), like)
            result[k] = _total(sums, blocks, pointer(scratch + _LANES * ROW, like), like)
        target = theta_at + (n * theta_step + j * row_step) * (theta_kind & ITEM_SIZE)
        if accumulate:
            old = pointer(load_run(target, theta_kind, column_step, axes + 1, raw, old_at, like), like)
            for k in range(axes + 1):
                result[k] = old[k] + result[k]
        store_run(scratch + _THETA * ROW, axes + 1, target, theta_kind, column_step, raw, like)


Operand = tuple[int, int, int, int]


def _operand(tensor: torch.Tensor, axis: int, compute: Float) -> Operand:
    """(address, kind, image stride, stride of ``axis``) of a tensor."""
    return tensor.data_ptr(), kind(tensor.dtype, compute.torch), tensor.stride(0), tensor.stride(axis)


class _MapKernel(DescribedKernel[plans.D]):
    """A kernel whose workspace holds the coordinates, and scratch for each thread."""

    #: Number of work items that the threads share.
    units: int

    def __init__(self, desc: plans.D, device: torch.device) -> None:
        super().__init__(desc, device)
        self.sizes = (*reversed(desc.output_size), 1)[:3]
        make = type(number(desc.compute))
        steps = (size - 1 if desc.align_corners else size for size in self.sizes)
        self.divisors = tuple(make(max(step, 1)) for step in steps)
        layout = WorkspaceLayout()
        self.along = layout.take(sum(self.sizes), desc.compute.torch)
        self.units = self.count_units()
        self.made_for_threads = torch.get_num_threads()
        self.slots = max(min(self.made_for_threads, self.units), 1)
        sums = self.count_sums()
        self.sums = [layout.take(sums, desc.compute.torch) for _ in range(self.slots)]
        self.scratch = [layout.take_rows(ROWS, _ROW_BYTES) for _ in range(self.slots)]
        self.set_workspace(layout)

    def count_units(self) -> int:
        raise NotImplementedError

    def count_sums(self) -> int:
        """Number of block sums that each thread stores."""
        return 0

    def measured(self, workspace: Workspace) -> tuple[int, int]:
        """Write the coordinates. Returns the address of the workspace and that of the coordinates."""
        base = first_address(workspace)
        _measure(self.sizes, self.divisors, base + self.along.offset)
        return base, base + self.along.offset

    def share(self, first: int, last: int) -> tuple[int, int]:
        """First and last unit of the threads ``first`` to ``last``."""
        return self.units * first // self.slots, self.units * last // self.slots


class AffineGrid(_MapKernel[plans.AffineGridDescriptor]):
    def count_units(self) -> int:
        return self.desc.batch * -(-self.desc.places // LANES)

    def compile(self) -> None:
        _compile(self.desc.compute)

    def prepare(self, args: plans.AffineGridArgs) -> Launch[plans.AffineGridArgs]:
        desc, compute = self.desc, self.desc.compute
        self.compile()
        like, walk = number(compute), loops(desc.output_size, args.grid.stride()[1:-1])
        table = table_of(walk.sizes, walk.strides[0])

        def launch(
            stream: Stream, workspace: Workspace, args: plans.AffineGridArgs, addresses: Sequence[int]
        ) -> None:
            base, along = self.measured(workspace)
            theta = (_operand(args.theta, 1, compute), args.theta.stride(2))
            grid, places = _operand(args.grid, -1, compute), walk_of(table)

            def work(first: int, last: int) -> None:
                own = base + self.scratch[first].offset
                _map(*self.share(first, last), self.sizes, desc.axes, theta, grid, places, along, own, like)

            parallel(work, self.slots, desc.batch * desc.places * desc.axes)

        return launch


class AffineGridBackward(_MapKernel[plans.AffineGridBackwardDescriptor]):
    def count_units(self) -> int:
        return self.desc.batch * self.desc.axes

    def count_sums(self) -> int:
        return (self.desc.axes + 1) * blocks_of(self.desc.places)

    def compile(self) -> None:
        _compile_backward(self.desc.compute)

    def prepare(self, args: plans.AffineGridBackwardArgs) -> Launch[plans.AffineGridBackwardArgs]:
        desc, compute = self.desc, self.desc.compute
        self.compile()
        like, walk = number(compute), loops(desc.output_size, args.dgrid.stride()[1:-1])
        table, accumulate = table_of(walk.sizes, walk.strides[0]), args.accumulate
        blocks = blocks_of(desc.places)

        def launch(
            stream: Stream, workspace: Workspace, args: plans.AffineGridBackwardArgs, addresses: Sequence[int]
        ) -> None:
            base, along = self.measured(workspace)
            dtheta = (_operand(args.dtheta, 1, compute), args.dtheta.stride(2))
            dgrid, places = _operand(args.dgrid, -1, compute), walk_of(table)

            def work(first: int, last: int) -> None:
                own_sums, own = base + self.sums[first].offset, base + self.scratch[first].offset
                _differentiate(
                    *self.share(first, last), self.sizes, desc.axes, dtheta, dgrid, places, blocks,
                    accumulate, along, own_sums, own, like,
                )  # fmt: skip

            parallel(work, self.slots, desc.batch * desc.places * desc.axes)

        return launch


_NO_OPERAND, _NO_WALK = (0, 8, 0, 0), (0, 1)


@cache
def _compile(compute: Float) -> None:
    like = number(compute)
    compile_kernel(_measure, (0, 0, 0), (like, like, like), 0)
    compile_kernel(_map, 0, 0, (1, 1, 1), 2, (_NO_OPERAND, 0), _NO_OPERAND, _NO_WALK, 0, 0, like)


@cache
def _compile_backward(compute: Float) -> None:
    like = number(compute)
    compile_kernel(_measure, (0, 0, 0), (like, like, like), 0)
    compile_kernel(
        _differentiate, 0, 0, (1, 1, 1), 2, (_NO_OPERAND, 0), _NO_OPERAND, _NO_WALK, 1, False, 0, 0, 0, like
    )
