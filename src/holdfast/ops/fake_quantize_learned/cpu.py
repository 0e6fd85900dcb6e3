"""Numba: the gradients of fake quantization with respect to x, scale and zero point, in one pass."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.backends.cpu import fence, jit, numbers_of, outlined, pointer, prefetch, team_kernel
from holdfast.core.plan import Launch
from holdfast.core.segments import segment_length, segments_in_order
from holdfast.core.stream import Stream, Workspace
from holdfast.core.workspace_layout import BOUND_BYTES, first_address
from holdfast.numerics.cpu import kind, rint, zero, zero_point_kind
from holdfast.numerics.cpu_walk import number
from holdfast.ops.affine.cpu import shared_tensors
from holdfast.ops.affine.plan import AffineKernel
from holdfast.ops.fake_quantize import cpu as estimators
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardDescriptor,
)
from holdfast.ops.tree_sum import cpu as trees
from holdfast.ops.tree_sum.blocks import LANES


class Operands(NamedTuple):
    """The operands, in the order of the table of the walk."""

    dx: Any
    dy: Any
    x: Any
    dscale: Any
    dzero_point: Any
    scale: Any
    zero_point: Any


#: The position of each operand in the table.
AT = Operands(*range(7))


@jit
def scale_term(dy, x, s, lo, hi):
    """dy * (r - t) where r = rint(t) is in range, dy * lo below, dy * hi above; 0 where t = x / s is NaN."""
    t = x / s
    r = rint(t)
    step = lo if r < lo else (hi if r > hi else r - t)
    return zero(dy) if np.isnan(t) else dy * step


@jit
def zero_point_term(dy, x, s, lo, hi):
    """-(dy * s) where rint(x / s) is out of range, else 0."""
    r = rint(x / s)
    return -(dy * s) if (r < lo) | (r > hi) else zero(dy)


@jit
def _row(estimate, dx, dy, x, begin, count, s, z, limits, lanes, zero_lanes, lane, learns_zero):
    """One row of lanes of one segment."""
    outlined()
    q_min, q_max = limits
    lo, hi = q_min - z, q_max - z
    if learns_zero:
        for i in range(count):
            u, v = dy[begin + i], x[begin + i]
            lanes[lane + i] += scale_term(u, v, s, lo, hi)
            zero_lanes[lane + i] += zero_point_term(u, v, s, lo, hi)
            dx[begin + i] = estimate(u, v, s, z, q_min, q_max)
    else:
        for i in range(count):
            u, v = dy[begin + i], x[begin + i]
            lanes[lane + i] += scale_term(u, v, s, lo, hi)
            dx[begin + i] = estimate(u, v, s, z, q_min, q_max)


@jit
def _per_lane(estimate, dx, dy, x, count, scale, zero_point, limits, lanes, zero_lanes, learns_zero):
    """Elements that each have their own scale, zero point and lane."""
    outlined()
    q_min, q_max = limits
    if learns_zero:
        for c in range(count):
            u, v, s, z = dy[c], x[c], scale[c], zero_point[c]
            lanes[c] += scale_term(u, v, s, q_min - z, q_max - z)
            zero_lanes[c] += zero_point_term(u, v, s, q_min - z, q_max - z)
            dx[c] = estimate(u, v, s, z, q_min, q_max)
    else:
        for c in range(count):
            u, v, s, z = dy[c], x[c], scale[c], zero_point[c]
            lanes[c] += scale_term(u, v, s, q_min - z, q_max - z)
            dx[c] = estimate(u, v, s, z, q_min, q_max)


@jit
def _one_by_one(estimate, walk, place, scale, zero_point, sums, learns_zero, limits, accumulate):
    """A job of contiguous segments, one after another."""
    outlined()
    like = limits[0]
    segment, taken, begin, count = place
    width = trees.lane_count(count)
    lanes = trees.zeroed(trees.scratch_run(walk, 0), width * taken, like)
    second = trees.scratch_run(walk, trees.RUNS_PER_TREE)
    zero_lanes = trees.zeroed(second, width * taken if learns_zero else 0, like)
    dy = pointer(trees.load(walk, AT.dy, segment, taken, begin, count, like), like)
    x = pointer(trees.load(walk, AT.x, segment, taken, begin, count, like), like)
    run = trees.result_address(walk, AT.dx, segment, taken, begin, count, accumulate)
    dx = pointer(run, like)
    if taken > 1 and count == width:
        s = trees.repeat_values(walk, 0, scale, taken, count, like)
        z = trees.repeat_values(walk, 1, zero_point, taken, count, like)
        _per_lane(estimate, dx, dy, x, taken * count, s, z, limits, lanes, zero_lanes, learns_zero)
    else:
        for k in range(taken):
            for row in range(0, count, LANES):
                here, there = k * count + row, min(LANES, count - row)
                prefetch(x, here)
                prefetch(dy, here)
                _row(
                    estimate, dx, dy, x, here, there, scale[k], zero_point[k], limits, lanes, zero_lanes,
                    k * width, learns_zero,
                )  # fmt: skip
    trees.store(walk, AT.dx, segment, taken, begin, count, run, accumulate, like)
    trees.store_block_sums(walk, 0, width, segment, taken, begin, sums[0], like)
    if learns_zero:
        trees.store_block_sums(walk, 1, width, segment, taken, begin, sums[1], like)


@jit
def _side_by_side(estimate, walk, place, scale, zero_point, sums, learns_zero, limits, accumulate):
    """A job of interleaved segments: one lane of all segments at a time."""
    outlined()
    like = limits[0]
    segment, taken, begin, count = place
    for lane in range(min(count, LANES)):
        lanes = trees.new_lane(walk, 0, taken, like)
        zero_lanes = trees.new_lane(walk, 1, taken if learns_zero else 0, like)
        for i in range(begin + lane, begin + count, LANES):
            dy = pointer(trees.load_row(walk, AT.dy, segment, taken, i, like), like)
            x = pointer(trees.load_row(walk, AT.x, segment, taken, i, like), like)
            run = trees.row_result_address(walk, AT.dx, segment, i, accumulate)
            dx = pointer(run, like)
            _per_lane(estimate, dx, dy, x, taken, scale, zero_point, limits, lanes, zero_lanes, learns_zero)
            trees.store_row(walk, AT.dx, segment, taken, i, run, accumulate, like)
        trees.add_lane(walk, 0, lane, taken, like)
        if learns_zero:
            trees.add_lane(walk, 1, lane, taken, like)
    trees.store_lane_sums(walk, 0, min(count, LANES), segment, taken, begin, sums[0], like)
    if learns_zero:
        trees.store_lane_sums(walk, 1, min(count, LANES), segment, taken, begin, sums[1], like)


@jit
def _backward_jobs(estimate, task):
    """Take ranges of jobs, until none is left. The flag: the zero point is learned."""
    numbers, like = numbers_of(task), task[0][-1]
    scratch, reals = trees.thread_scratch(numbers), trees.reals_in(numbers, like)
    if scratch == 0:
        return
    walk, limits = trees.walk_in(numbers, scratch), (reals[trees.SCALARS], reals[trees.SCALARS + 1])
    sums, learns_zero = (numbers[trees.SUMS], numbers[trees.SUMS + 1]), numbers[trees.FLAG] != 0
    accumulate = numbers[trees.ACCUMULATE] != 0
    while True:
        first, last = trees.next_units(numbers)
        if first == last:
            break
        for job in range(first, last):
            place = trees.job_range(walk, job)
            scale = pointer(trees.load_per_segment(walk, AT.scale, place[0], place[1], like), like)
            zero_point = pointer(trees.load_per_segment(walk, AT.zero_point, place[0], place[1], like), like)
            if walk[0][4]:
                _side_by_side(estimate, walk, place, scale, zero_point, sums, learns_zero, limits, accumulate)
            else:
                _one_by_one(estimate, walk, place, scale, zero_point, sums, learns_zero, limits, accumulate)
    fence()


@team_kernel(trees.NUMBERS)
def _identity(task):
    _backward_jobs(estimators.identity, task)


@team_kernel(trees.NUMBERS)
def _clipped_identity(task):
    _backward_jobs(estimators.clipped_identity, task)


@team_kernel(trees.NUMBERS)
def _tanh(task):
    _backward_jobs(estimators.tanh, task)


@team_kernel(trees.NUMBERS)
def _hard_tanh(task):
    _backward_jobs(estimators.hard_tanh, task)


@team_kernel(trees.NUMBERS)
def _in_range(task):
    _backward_jobs(estimators.in_range, task)


_BACKWARD: dict[SteKind, Any] = {
    SteKind.IDENTITY: _identity, SteKind.CLIPPED_IDENTITY: _clipped_identity, SteKind.TANH: _tanh,
    SteKind.HARD_TANH: _hard_tanh, SteKind.IN_RANGE: _in_range,
}  # fmt: skip


class FakeQuantizeLearnedBackward(AffineKernel[FakeQuantizeLearnedBackwardDescriptor]):
    """The gradients by the descriptor's estimator, as a kernel."""

    def __init__(self, desc: FakeQuantizeLearnedBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        count, length = desc.view.scale_count, segment_length(desc.view)
        learned = 1 if desc.zero_point_dtype is None else 2
        self.sums, layout = trees.workspace_sums(count, length, desc.real.compute, learned)
        self.set_workspace(layout)

    def compile(self) -> None:
        like = number(self.desc.real.compute)
        _BACKWARD[self.desc.ste].compiled(like)
        trees.add_block_sums.compiled(like)

    def prepare(self, args: FakeQuantizeLearnedBackwardArgs) -> Launch[FakeQuantizeLearnedBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        learns_zero = desc.zero_point_dtype is not None
        shared = (args.dscale, args.dzero_point, args.scale, args.zero_point)
        kinds = [kind(operand.dtype, compute.torch) for operand in self.operands(args)[:-1]]
        total = trees.TreeSum(
            _BACKWARD[desc.ste], segments_in_order(desc.view, (args.dx, args.dy, args.x), shared),
            [*kinds, zero_point_kind(self.operands(args).zero_point.dtype)],
            (AT.dscale, AT.dzero_point) if learns_zero else (AT.dscale,), self.sums, compute,
            factor=desc.grad_factor, scalars=desc.code_range, flag=learns_zero, accumulate=args.accumulate,
        )  # fmt: skip

        def bound(args: Any) -> Callable[..., None]:
            """A run for args with the host values of these."""
            scale, zero_point = shared_tensors(args, compute)
            on_host = isinstance(args.scale, float), not isinstance(args.zero_point, torch.Tensor)

            def run(
                stream: int, workspace: int, dx: int, dscale: int, dzero_point: int, dy: int, x: int,
                scale_at: int, zero_at: int,
            ) -> None:  # fmt: skip
                total.run(workspace, (
                    dx, dy, x, dscale, dzero_point or dscale, scale.data_ptr() if on_host[0] else scale_at,
                    zero_point.data_ptr() if on_host[1] else zero_at,
                ))  # fmt: skip

            return run

        def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
            bound(args)(0, first_address(workspace), *addresses)

        if self.workspace_size <= BOUND_BYTES:
            launch.bound = bound  # type: ignore[attr-defined]
        return launch

    def operands(self, args: FakeQuantizeLearnedBackwardArgs) -> Operands:
        """The operands as tensors; without a gradient of the zero point, that of the scale stands in."""
        scale, zero_point = shared_tensors(args, self.desc.real.compute)
        dzero_point = args.dscale if args.dzero_point is None else args.dzero_point
        return Operands(args.dx, args.dy, args.x, args.dscale, dzero_point, scale, zero_point)
