"""Triton: the gradients of fake quantization with respect to x, scale and zero point, in one pass."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import double_bits, loop_offsets
from holdfast.backends.steps import StepOperand, Steps
from holdfast.core.plan import Launch
from holdfast.core.segments import segments_in_order
from holdfast.numerics.gpu import (
    MAGIC,
    WHOLE_64,
    ZERO_POINT_LIMIT,
    exact_quotient,
    least_rounding_up_to,
    narrow,
    reciprocal,
    whole_zero_point,
    widen,
)
from holdfast.ops.affine.gpu import code_limits, meta_tensor, scale_bits
from holdfast.ops.affine.plan import AffineKernel, clamp_zero_point
from holdfast.ops.fake_quantize.gpu import estimated_gradient
from holdfast.ops.fake_quantize_learned.plan import (
    FakeQuantizeLearnedBackwardArgs,
    FakeQuantizeLearnedBackwardDescriptor,
)
from holdfast.ops.tree_sum.gpu import (
    BLOCK,
    LANES,
    STAGES,
    TUNING,
    add_further_levels,
    filled_rows,
    first_level,
    from_double_bits,
    further_levels,
    max_sums,
    splits_of,
    store_sums,
    tile_coordinates,
    tile_of,
)


@triton.jit
def rounding_center(lo, z, DTYPE: tl.constexpr):
    """A constant c: (t + c) - c rounds a quotient t in range to an integer, half to even.

    In float32 c is 1.5 * 2^23. If the zero point is large, an even number near lo is subtracted from c, so
    that t + c stays in the binade where a unit is 1. An even number changes no tie.
    """
    base = tl.where(tl.abs(z) > 2**21, lo & -2, 0)
    if DTYPE == tl.float64:
        return tl.full(base.shape, 1.5 * WHOLE_64, tl.float64)
    else:
        return (tl.full(base.shape, MAGIC, tl.int32) - base).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "scale_bits", "zero_value", "q_min", "q_max", "factor_bits", "segments", "blocks", "tiles"
    ]
)  # fmt: skip
def fake_quantize_learned_backward(
    dx, dscale, dzero_point, dy, x, scale, zero_point,
    scale_bits, zero_value, q_min, q_max, factor_bits,
    segments, blocks, tiles, extent, over, within,
    dx_over, dy_over, x_over, dscale_over, dzero_over, scale_over, zero_over,
    dx_within, dy_within, x_within,
    COMPUTE: tl.constexpr, STE: tl.constexpr, SCALE_ON_HOST: tl.constexpr, ZERO: tl.constexpr,
    LEARNS_ZERO: tl.constexpr, ACCUMULATE: tl.constexpr, FINAL: tl.constexpr, SAME_STRIDES: tl.constexpr,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, SEGMENTS: tl.constexpr, BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """dx, and the sums of the terms of dscale and dzero_point, for the blocks of one program."""
    COUNT: tl.constexpr = SEGMENTS * BLOCKS
    segment, block, split = tile_coordinates(tiles, SEGMENTS, BLOCKS, SPLITS, INDEX)
    exists = segment < segments
    if SCALE_ON_HOST:
        s = from_double_bits(scale_bits, COMPUTE)
    else:
        s = widen(tl.load(scale + loop_offsets(segment, over, scale_over), mask=exists, other=1.0), COMPUTE)
    if ZERO == "none":
        z = tl.zeros([1], tl.int32)
    elif ZERO == "host":
        z = tl.zeros([1], tl.int32) + zero_value
    else:
        z = tl.load(zero_point + loop_offsets(segment, over, zero_over), mask=exists, other=0)
        if z.dtype.is_floating():
            z = whole_zero_point(z)
        else:
            z = tl.minimum(tl.maximum(z, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)
    most, rest = reciprocal(s)
    s, most, rest, z = s[:, None], most[:, None], rest[:, None], z[:, None]
    lo, hi = q_min - z, q_max - z
    low, high = least_rounding_up_to(lo, COMPUTE), -least_rounding_up_to(-hi, COMPUTE)
    center = rounding_center(lo, z, COMPUTE)
    lo, hi = lo.to(COMPUTE), hi.to(COMPUTE)

    start = (block * BLOCK + split * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    dx_start = loop_offsets(segment, over, dx_over)[:, None]
    dy_start = dx_start if SAME_STRIDES else loop_offsets(segment, over, dy_over)[:, None]
    x_start = dx_start if SAME_STRIDES else loop_offsets(segment, over, x_over)[:, None]
    sums = tl.zeros([COUNT, WIDTH], COMPUTE)
    zero_sums = tl.zeros([COUNT, WIDTH], COMPUTE)
    for row in tl.range(ROWS if EVEN else filled_rows(block, extent[0], ROWS), num_stages=STAGES):
        element = start + row * LANES
        to_dx = dx_start + loop_offsets(element, within, dx_within)
        to_dy = to_dx if SAME_STRIDES else dy_start + loop_offsets(element, within, dy_within)
        to_x = to_dx if SAME_STRIDES else x_start + loop_offsets(element, within, x_within)
        inside = tl.full([1, 1], True, tl.int1) if EVEN else exists[:, None] & (element < extent[0])
        upstream = widen(tl.load(dy + to_dy, mask=inside, other=0.0), COMPUTE)
        value = widen(tl.load(x + to_x, mask=inside, other=float("nan")), COMPUTE)
        t = exact_quotient(value, s, most, rest)
        kept = (low <= t) & (t <= high)
        step = tl.where(kept, ((t + center) - center) - t, tl.minimum(tl.maximum(t, lo), hi))
        term = tl.where(t == t, upstream * step, 0.0)
        sums = term if ROWS == 1 else sums + term
        if LEARNS_ZERO:
            term = tl.where(kept | (t != t), 0.0, -(upstream * s))
            zero_sums = term if ROWS == 1 else zero_sums + term
        if STE == "identity":
            gradient = upstream
        elif STE == "in_range":
            gradient = tl.where(kept, upstream, 0.0)
        else:
            gradient = estimated_gradient(upstream, value, s, q_min, q_max, z, STE, False)
        if ACCUMULATE:
            gradient = widen(tl.load(dx + to_dx, mask=inside), COMPUTE) + gradient
        tl.store(dx + to_dx, narrow(gradient, dx.dtype.element_ty), mask=inside)

    store_sums(
        dscale, sums, segment, block, split, segments, blocks, factor_bits, factor_bits, over, dscale_over,
        FINAL, ACCUMULATE, False, COUNT, WIDTH, SPLITS,
    )  # fmt: skip
    if LEARNS_ZERO:
        store_sums(
            dzero_point, zero_sums, segment, block, split, segments, blocks, factor_bits, factor_bits, over,
            dzero_over, FINAL, ACCUMULATE, False, COUNT, WIDTH, SPLITS,
        )  # fmt: skip


class FakeQuantizeLearnedBackward(AffineKernel[FakeQuantizeLearnedBackwardDescriptor]):
    """``fake_quantize_learned_backward`` and the kernels that add its sums."""

    def __init__(self, desc: FakeQuantizeLearnedBackwardDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.trees = 1 if desc.zero_point_dtype is None else 2
        self.tuning = TUNING.on(device)
        self.splits = splits_of(desc.view, desc.shape, desc.input_dtype.itemsize, self.tuning)
        self.sums, layout = max_sums(desc.view, self.splits, desc.real.compute, self.trees)
        self.set_workspace(layout)

    def compile(self) -> None:
        names = ["dy", "x", "scale", "dx", "dscale"]
        if self.desc.zero_point_dtype is not None:
            names += ["zero_point", "dzero_point"]
        # The scale and the zero point have the shape and dtype of their gradients.
        like = {"scale": "dscale", "zero_point": "dzero_point"}
        made: dict[str, Any] = {
            name: meta_tensor(*self.desc.expected(like.get(name, name))) for name in names
        }
        self.prepare(FakeQuantizeLearnedBackwardArgs(**made))

    def prepare(self, args: FakeQuantizeLearnedBackwardArgs) -> Launch[FakeQuantizeLearnedBackwardArgs]:
        desc, compute, z = self.desc, self.desc.real.compute, args.zero_point
        tensors, shared = (args.dx, args.dy, args.x), (args.dscale, args.dzero_point, args.scale, z)
        found = segments_in_order(desc.view, tensors, shared)
        tile = tile_of(found, desc.input_dtype.itemsize, self.splits, self.tuning)
        further = further_levels(found.length, tile.splits)
        sums: Sequence[StepOperand] = self.sums[0] if further else ("dscale", "dzero_point")
        zero_value = 0 if isinstance(z, torch.Tensor) else clamp_zero_point(z)
        over, within = found.over.strides, found.within.strides
        names = ("dx", "dy", "x", "dscale", "dzero", "scale", "zero")
        strides = {f"{name}_over": own for name, own in zip(names, over, strict=True)}
        strides |= {f"{name}_within": own for name, own in zip(names, within, strict=False)}
        steps = Steps(self.device, args)
        steps.add(
            fake_quantize_learned_backward, tile.programs,
            first_level(found, tile), code_limits(desc.code_range), strides,
            dscale=sums[0], dzero_point=sums[-1],
            scale_bits=scale_bits(args.scale), zero_value=zero_value,
            factor_bits=double_bits(desc.grad_factor),
            COMPUTE=tl.float64 if compute.bits == 64 else tl.float32, STE=desc.ste.value,
            SCALE_ON_HOST=not isinstance(args.scale, torch.Tensor),
            ZERO="tensor" if isinstance(z, torch.Tensor) else "host" if zero_value else "none",
            LEARNS_ZERO=self.trees > 1, ACCUMULATE=args.accumulate, FINAL=not further,
            SAME_STRIDES=len(set(over[:3])) == len(set(within)) == 1, num_warps=tile.warps,
        )  # fmt: skip
        add_further_levels(
            steps, found, further, self.sums, ("dscale", "dzero_point")[: self.trees],
            over[3:5], self.tuning, factor=desc.grad_factor, accumulate=args.accumulate,
        )  # fmt: skip
        return steps.launch
