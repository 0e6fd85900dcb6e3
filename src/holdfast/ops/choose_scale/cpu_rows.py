"""Numba: rows that are segments, for kernels that compute scales and use them in one pass over memory."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numba import types

from holdfast.backends.cpu import emit, jit, pointer
from holdfast.core.plan import Args, Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space, contiguous_strides
from holdfast.numerics.cpu import FLOAT32, zero
from holdfast.numerics.cpu_walk import number
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import TILE, address
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
from holdfast.ops.choose_scale.plan import ChooseScaleArgs, FromDataDescriptor

# Operands of a kernel over rows that are not in its tiles, and its scalars after q_min and q_max.
_SCALE, _ZERO_POINT = 2, 3
_LOWEST, _HIGHEST, _FLOOR, _AFFINE = 2, 3, 4, 5


@emit
def _magnitude_bits(typingctx, like):
    """All bits of the compute type but the sign bit, as an integer."""
    integer = types.int32 if like == types.float32 else types.int64

    def build(context, builder, signature, args):
        return context.get_constant(integer, 2 ** (integer.bitwidth - 1) - 1)

    return integer(like), build


@jit
def row_rule(walk, scalars):
    """How ``row_scale`` computes scales: the addresses of the scales and the zero points, and the scalars."""
    scales, zero_points = address(walk[1], _SCALE), address(walk[1], _ZERO_POINT)
    return scales, zero_points, scalars[_LOWEST], scalars[_HIGHEST], scalars[_FLOOR], scalars[_AFFINE] != 0


@jit
def row_scale(x, columns, row, rule):
    """Compute and store the scale and the zero point of a row that is a segment. ``x`` is its address."""
    scales, zero_points, lowest, highest, floor, affine = rule
    both, mask = affine or lowest != -highest, _magnitude_bits(floor)
    above, below = fold(x, 1, columns, mask, both, zero_bits(mask), zero_bits(mask))
    low, high = range_of(above, below, FLOAT32)
    s = scale_of_range(low, high, lowest, highest, floor, not affine)
    z = zero(s)
    pointer(scales, s)[row] = s
    if affine:
        z = zero_point_of_range(low, s, lowest, highest)
        pointer(zero_points, np.int32)[row] = np.int32(z)
    return s, z


def rows_are_segments(desc: FromDataDescriptor, space: Space) -> bool:
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


D = TypeVar("D", bound=FromDataDescriptor)


class RowKernel(AffineKernel[D]):
    """Scales and results in one pass if every row is a segment, else choose_scale and the kernel ``second``.

    ``output`` names the output. ``second_args`` are the args of ``second``: output, x, scale, zero point.
    """

    output: str
    second: Any
    second_args: type[Args]
    streamed = False

    def __init__(self, desc: D, device: torch.device) -> None:
        super().__init__(desc, device)
        self.result = SYMMETRIC if desc.symmetric else AFFINE
        self.ends = desc.ends(*desc.code_range)
        self.observer = Observer(desc, self.result, self.ends)
        self.set_workspace(self.observer.layout)

    @property
    def entry(self) -> Any:
        """The kernel over rows, or None if there is none for these codes."""
        raise NotImplementedError

    def compile(self) -> None:
        if self.entry is not None:
            self.entry.compiled(number(self.desc.real.compute))

    def prepare(self, args: Any) -> Launch[Any]:
        desc, compute, written = self.desc, self.desc.real.compute, getattr(args, self.output)
        packed = 0 if desc.per_byte > 1 else None
        space = affine_space(desc, (written, args.x), (args.scale, args.zero_point), packed=packed)
        if self.entry is None or not rows_are_segments(desc, space):
            return self._in_two_passes(args)
        self.compile()
        _, *rule = kernel_constants(compute.bits // 8, *self.ends)
        walk = affine.Walk(
            self.entry,
            (written, args.x),
            (*desc.code_range, *rule, self.result == AFFINE),
            space=Space(space.sizes, space.strides[:2]),
            inputs=1,
            compute=compute,
            packed=0,
            per_byte=desc.per_byte,
            streamed=self.streamed,
        )

        over_rows = walk.over(4)

        def run(stream: int, workspace: int, out: int, scale: int, zero_point: int, x: int) -> None:
            over_rows(stream, workspace, out, x, scale, zero_point)

        def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
            run(0, 0, *addresses)

        launch.bound, launch.bound_uses_workspace = lambda args: run, False  # type: ignore[attr-defined]
        return launch

    def _in_two_passes(self, args: Any) -> Launch[Any]:
        choose = self.observer.prepare(args.scale, args.zero_point, args.x)
        second = None
        if prod(self.desc.shape):
            second = self.second(self.desc, self.device).prepare(self._second_args(args))

        def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
            out, scale, zero_point, x = addresses
            chosen = ChooseScaleArgs(x=args.x, scale=args.scale, zero_point=args.zero_point)
            choose(stream, workspace, chosen, (scale, zero_point, x))
            if second is not None:
                second(stream, workspace, self._second_args(args), (out, x, scale, zero_point))

        return launch

    def _second_args(self, args: Any) -> Any:
        operands = {name: getattr(args, name) for name in (self.output, "x", "scale", "zero_point")}
        return self.second_args(**operands)
