"""dynamic_quantize in Numba.

If every row is a segment, one kernel computes the scale and the codes of each row and reads it from memory
once. Other layouts, and float formats, take two passes: the kernels of choose_scale and of quantize.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np
import torch

from holdfast.backends.cpu import jit, kernel, outlined, pointer
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space, contiguous_strides
from holdfast.numerics.cpu import FLOAT32, zero
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import TILE, load, store, stores_bytes, window
from holdfast.ops.affine.plan import AffineKernel, affine_space
from holdfast.ops.choose_scale.cpu import (
    AFFINE,
    SYMMETRIC,
    Observer,
    fold,
    kernel_constants,
    range_of,
    scale_of_range,
    zero_bits,
    zero_point_of_range,
)
from holdfast.ops.choose_scale.plan import ChooseScaleArgs
from holdfast.ops.dynamic_quantize.plan import DynamicQuantizeArgs, DynamicQuantizeDescriptor
from holdfast.ops.quantize.cpu import Quantize, code
from holdfast.ops.quantize.plan import QuantizeArgs


@jit
def code_row(x, q, columns, bytewise, s, z, q_min, q_max):
    """The codes of a row, as bytes or in the compute type."""
    outlined()
    values = pointer(x, q_min)
    if bytewise:
        codes = pointer(q, np.int8)
        for i in range(columns):
            codes[i] = np.int32(code(values[i], s, z, q_min, q_max))
    else:
        wide = pointer(q, q_min)
        for i in range(columns):
            wide[i] = code(values[i], s, z, q_min, q_max)


@kernel
def _dynamic_quantize(first, last, walk, shared, q_min, q_max, results, mask, lowest, highest, floor):
    """Scales and codes of rows that are segments. A tile has whole rows.

    ``results`` is the addresses of the scales and the zero points, SYMMETRIC or AFFINE, and the bytes of the
    compute type.
    """
    scales, zero_points, result, item = results
    scale, zero_point = pointer(scales, q_min), pointer(zero_points, np.int32)
    both = result == AFFINE or lowest != -highest
    bytewise = stores_bytes(walk)
    size = 1 if bytewise else item
    for tile in range(first, last):
        _, runs = load(walk, tile, tile == first, shared, 1, False, q_min)
        row, _, rows, columns = window(walk[0], tile)
        for r in range(rows):
            x, q = runs[1] + r * columns * item, runs[0] + r * columns * size
            above, below = fold(x, 1, columns, mask, both, zero_bits(mask), zero_bits(mask))
            low, high = range_of(above, below, FLOAT32)
            s = scale_of_range(low, high, lowest, highest, floor, result == SYMMETRIC)
            z = zero(s)
            scale[row + r] = s
            if result == AFFINE:
                z = zero_point_of_range(low, s, lowest, highest)
                zero_point[row + r] = np.int32(z)
            code_row(x, q, columns, bytewise, s, z, q_min, q_max)
        store(walk, tile, q_min)


def _rows_are_segments(desc: DynamicQuantizeDescriptor, space: Space) -> bool:
    """Whether each row is a segment that fits in a tile, and the scales are in the order of the rows."""
    rows = space.sizes[:-1]
    adjacent = all(strides[-1] <= 1 for strides in space.strides[:2]) or space.rows == 1
    in_order = (*contiguous_strides(rows), 0)
    return (
        adjacent
        and 0 < space.columns <= TILE
        and space.rows == desc.view.scale_count
        and all(not any(strides) or strides == in_order for strides in space.strides[2:])
        and (space.rows == 1 or space.strides[2] == in_order)
    )


class DynamicQuantize(AffineKernel[DynamicQuantizeDescriptor]):
    """``_dynamic_quantize``, or the kernels of choose_scale and quantize in sequence."""

    def __init__(self, desc: DynamicQuantizeDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.result = SYMMETRIC if desc.symmetric else AFFINE
        self.ends = desc.ends(*desc.code_range)
        self.observer = Observer(desc, self.result, self.ends)
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        _compile(self.desc.real.compute)

    def prepare(self, args: DynamicQuantizeArgs) -> Launch[DynamicQuantizeArgs]:
        desc = self.desc
        packed = 0 if desc.per_byte > 1 else None
        space = affine_space(desc, (args.q, args.x), (args.scale, args.zero_point), packed=packed)
        if desc.codes.is_float or not _rows_are_segments(desc, space):
            return self._in_two_passes(args)
        self.compile()
        compute = desc.real.compute
        item = compute.bits // 8
        bounds, rule = affine.compute_scalars(compute, *desc.code_range), kernel_constants(item, *self.ends)
        of_tensors, result = Space(space.sizes, space.strides[:2]), self.result

        def launch(
            stream: Stream, workspace: Workspace, args: DynamicQuantizeArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                _dynamic_quantize,
                (args.q, args.x),
                *bounds,
                (addresses[1], addresses[2], result, item),
                *rule,
                space=of_tensors,
                inputs=1,
                compute=compute,
                packed=0,
                per_byte=desc.per_byte,
            )

        return launch

    def _in_two_passes(self, args: DynamicQuantizeArgs) -> Launch[DynamicQuantizeArgs]:
        choose = self.observer.prepare(args.scale, args.zero_point, args.x)
        quantize = None
        if prod(self.desc.shape):
            quantize = Quantize(self.desc, self.device).prepare(_quantize_args(args))

        def launch(
            stream: Stream, workspace: Workspace, args: DynamicQuantizeArgs, addresses: Sequence[int]
        ) -> None:
            q, scale, zero_point, x = addresses
            chosen = ChooseScaleArgs(x=args.x, scale=args.scale, zero_point=args.zero_point)
            choose(stream, workspace, chosen, (scale, zero_point, x))
            if quantize is not None:
                quantize(stream, workspace, _quantize_args(args), (q, x, scale, zero_point))

        return launch


@cache
def _compile(compute: Float) -> None:
    item = compute.bits // 8
    affine.compile_for(_dynamic_quantize, compute, (0, 0, SYMMETRIC, item), *kernel_constants(item, -1, 1))


def _quantize_args(args: DynamicQuantizeArgs) -> QuantizeArgs:
    return QuantizeArgs(x=args.x, q=args.q, scale=args.scale, zero_point=args.zero_point)
