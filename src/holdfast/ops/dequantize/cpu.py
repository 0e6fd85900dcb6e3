"""dequantize in Numba. An integer code minus a zero point is exact, so only the product rounds."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
import torch
from numba import types

from holdfast.backends.cpu import (
    BLOCK,
    counted_loop,
    emit,
    jit,
    load_lanes,
    outlined,
    pointer,
    splat,
    team_kernel,
)
from holdfast.core.plan import Launch
from holdfast.numerics.cpu import store_real, store_real_lanes
from holdfast.numerics.cpu_walk import number
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import (
    NUMBERS,
    ROW_BLOCK,
    finish,
    flush_alone,
    load,
    over_tiles,
    reads_bytes,
    row_columns,
    store,
    stores_bfloat16,
    streamed_item,
)
from holdfast.ops.affine.plan import AffineKernel, affine_space
from holdfast.ops.dequantize.plan import (
    DequantizeArgs,
    DequantizeBackwardArgs,
    DequantizeBackwardDescriptor,
    DequantizeDescriptor,
)


@emit
def _value_blocks(typingctx, codes, y, begin, end, s, z):
    """Values ``begin`` to ``end`` of codes in bytes, in blocks of ``ROW_BLOCK``; ``y`` may be bfloat16."""

    def build(context, builder, signature, args):
        codes, y, begin, end, *scalars = args
        s, z = (splat(builder, value, ROW_BLOCK) for value in scalars)
        number = begin.type
        with counted_loop(builder, builder.sdiv(builder.sub(end, begin), number(ROW_BLOCK))) as block:
            index = builder.add(begin, builder.mul(block, number(ROW_BLOCK)))
            codes_of_block = builder.sitofp(load_lanes(builder, codes, index, ROW_BLOCK), s.type)
            store_real_lanes(builder, builder.fmul(builder.fsub(codes_of_block, z), s), y, index)
        return context.get_dummy_value()

    return types.none(codes, y, begin, end, s, z), build


@jit
def _dequantize_rows(walk, runs, like, stored, count):
    """The values of a tile of codes in bytes, if the tile, or each of its rows, has one scale.

    ``stored`` is a value of the type of the results: the compute type, or bits of bfloat16.
    """
    outlined()
    codes, scale, zero_point = pointer(runs[1], np.int8), pointer(runs[2], like), pointer(runs[3], like)
    item, columns = streamed_item(walk), row_columns(walk, 1, count)
    row, row_end, size = 0, columns, BLOCK if item > 0 else count
    for begin in range(0, count, size):
        end = min(begin + size, count)
        y = pointer(walk[2] - begin * item if item > 0 else runs[0], stored)
        part = begin
        while part < end:
            if part == row_end:
                row, row_end = row + 1, row_end + columns
            stop, s, z = min(end, row_end), scale[row], zero_point[row]
            blocks = stop - (stop - part) % ROW_BLOCK
            _value_blocks(codes, y, part, blocks, s, z)
            if part < blocks < stop:  # the last block again, with equal results
                _value_blocks(codes, y, stop - ROW_BLOCK, stop, s, z)
            elif blocks < stop:
                for i in range(part, stop):
                    store_real(y, i, (np.float32(codes[i]) - z) * s)  # Numba: int32 - float32 is float64
            part = stop
        flush_alone(walk, runs, begin, end)


@over_tiles
def _dequantize_tiles(first, last, walk, shared, scalars, accumulate):
    like = scalars[0]
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, False, like)
        y, q = pointer(runs[0], like), pointer(runs[1], like)
        scale, zero_point = pointer(runs[2], like), pointer(runs[3], like)
        s, z = scale[0], zero_point[0]
        if stores_bfloat16(walk):
            _dequantize_rows(walk, runs, like, np.uint16(0), count)
        elif reads_bytes(walk):
            _dequantize_rows(walk, runs, like, like, count)
        elif shared:
            for i in range(count):
                y[i] = (q[i] - z) * s
        else:
            for i in range(count):
                y[i] = (q[i] - zero_point[i]) * scale[i]
        store(walk, tile, like)
    finish(walk)


@team_kernel(NUMBERS)
def _dequantize(task):
    _dequantize_tiles(task)


@over_tiles
def _gradient_tiles(first, last, walk, shared, scalars, accumulate):
    like = scalars[0]
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, accumulate, like)
        dq, dy, scale = pointer(runs[0], like), pointer(runs[1], like), pointer(runs[2], like)
        s = scale[0]
        if accumulate:
            if shared:
                for i in range(count):
                    dq[i] += dy[i] * s
            else:
                for i in range(count):
                    dq[i] += dy[i] * scale[i]
        elif shared:
            for i in range(count):
                dq[i] = dy[i] * s
        else:
            for i in range(count):
                dq[i] = dy[i] * scale[i]
        store(walk, tile, like)


@team_kernel(NUMBERS)
def _dequantize_backward(task):
    _gradient_tiles(task)


class Dequantize(AffineKernel[DequantizeDescriptor]):
    """``_dequantize`` as a kernel."""

    def compile(self) -> None:
        _dequantize.compiled(number(self.desc.real.compute))

    def prepare(self, args: DequantizeArgs) -> Launch[DequantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        packed = 1 if desc.per_byte > 1 else None
        space = affine_space(desc, (args.y, args.q), (args.scale, args.zero_point), packed=packed)
        in_bytes = desc.per_byte > 1 or args.q.dtype == torch.int8  # unsigned packed codes are less than 128
        walk = affine.Walk(
            _dequantize,
            (args.y, args.q, *affine.shared_tensors(args, compute)),
            (0,),
            space=space,
            inputs=1,
            compute=compute,
            packed=1,
            per_byte=desc.per_byte,
            signed=desc.codes.signed,
            streamed=True,
            by_row=in_bytes,
            raw={0: torch.bfloat16, 1: args.q.dtype} if in_bytes else {},
        )
        return affine.launch_of(walk, compute)


class DequantizeBackward(AffineKernel[DequantizeBackwardDescriptor]):
    """``_dequantize_backward`` as a kernel."""

    def compile(self) -> None:
        _dequantize_backward.compiled(number(self.desc.real.compute))

    def prepare(self, args: DequantizeBackwardArgs) -> Launch[DequantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        space = affine_space(desc, (args.dq, args.dy), (args.scale,))
        operands = (args.dq, args.dy, affine.scale_tensor(args.scale, compute))
        walk = affine.Walk(
            _dequantize_backward,
            operands,
            (0,),
            space=space,
            inputs=1,
            compute=compute,
            accumulate=args.accumulate,
        )
        return affine.launch_of(walk, compute)
