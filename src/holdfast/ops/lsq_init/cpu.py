"""lsq_init in Numba: the tree sum of magnitudes."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from holdfast.backends.cpu import fence, jit, numbers_of, outlined, pointer, prefetch, team_kernel
from holdfast.core.plan import Launch
from holdfast.core.segments import segment_length, segments_in_order
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import BOUND_BYTES, first_address
from holdfast.numerics.cpu import kind
from holdfast.numerics.cpu_walk import number
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.lsq_init.plan import LsqInitArgs, LsqInitDescriptor
from holdfast.ops.tree_sum import cpu as trees
from holdfast.ops.tree_sum.blocks import LANES


class Operands(NamedTuple):
    """The operands, in the order of the table of the walk."""

    x: Any
    scale: Any


#: The position of each operand in the table.
AT = Operands(*range(2))


@jit
def _one_by_one(walk, place, sums, like):
    """A job of contiguous segments, one after another."""
    outlined()
    segment, taken, begin, count = place
    width = trees.lane_count(count)
    lanes = trees.zeroed(trees.scratch_run(walk, 0), width * taken, like)
    x = pointer(trees.load(walk, AT.x, segment, taken, begin, count, like), like)
    for k in range(taken):
        for row in range(0, count, LANES):
            here = k * count + row
            prefetch(x, here)
            for i in range(min(LANES, count - row)):
                lanes[k * width + i] += abs(x[here + i])
    trees.store_block_sums(walk, 0, width, segment, taken, begin, sums, like)


@jit
def _side_by_side(walk, place, sums, like):
    """A job of interleaved segments: one lane of all segments at a time."""
    outlined()
    segment, taken, begin, count = place
    for lane in range(min(count, LANES)):
        lanes = trees.new_lane(walk, 0, taken, like)
        for i in range(begin + lane, begin + count, LANES):
            x = pointer(trees.load_row(walk, AT.x, segment, taken, i, like), like)
            for c in range(taken):
                lanes[c] += abs(x[c])
        trees.add_lane(walk, 0, lane, taken, like)
    trees.store_lane_sums(walk, 0, min(count, LANES), segment, taken, begin, sums, like)


@team_kernel(trees.NUMBERS)
def _magnitudes(task):
    """Take ranges of jobs, until none is left."""
    numbers, like = numbers_of(task), task[0][-1]
    scratch, sums = trees.thread_scratch(numbers), numbers[trees.SUMS]
    if scratch == 0:
        return
    walk = trees.walk_in(numbers, scratch)
    while True:
        first, last = trees.next_units(numbers)
        if first == last:
            break
        for job in range(first, last):
            if walk[0][4]:
                _side_by_side(walk, trees.job_range(walk, job), sums, like)
            else:
                _one_by_one(walk, trees.job_range(walk, job), sums, like)
    fence()


class LsqInit(AffineKernel[LsqInitDescriptor]):
    """``_magnitudes`` and the kernels that add its sums."""

    def __init__(self, desc: LsqInitDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        count, length = desc.view.scale_count, segment_length(desc.view)
        self.sums, layout = trees.workspace_sums(count, length, desc.real.compute, 1)
        self.set_workspace(layout)

    def compile(self) -> None:
        like = number(self.desc.real.compute)
        _magnitudes.compiled(like)
        trees.add_block_sums.compiled(like)

    def prepare(self, args: LsqInitArgs) -> Launch[LsqInitArgs]:
        desc, compute = self.desc, self.desc.real.compute
        total = trees.TreeSum(
            _magnitudes, segments_in_order(desc.view, (args.x,), (args.scale,)),
            [kind(operand.dtype, compute.torch) for operand in (args.x, args.scale)], (AT.scale,), self.sums,
            compute, factor=desc.factor, floor=desc.floor,
        )  # fmt: skip

        def run(stream: int, workspace: int, scale: int, x: int) -> None:
            total.run(workspace, (x, scale))

        def launch(stream: Stream, workspace: Workspace, args: LsqInitArgs, addresses: Sequence[int]) -> None:
            run(0, first_address(workspace), *addresses)

        if self.workspace_size <= BOUND_BYTES:
            launch.bound = lambda args: run  # type: ignore[attr-defined]
        return launch
