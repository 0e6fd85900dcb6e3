"""dequantize in Numba. An integer code minus a zero point is exact, so only the product rounds."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import ir
from numba import types

from holdfast.backends.cpu import BLOCK, emit, jit, kernel, load_lanes, pointer, splat
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.numerics.cpu import store_real, store_real_lanes
from holdfast.ops.affine import cpu as affine
from holdfast.ops.affine.cpu import (
    ROW_BLOCK,
    flush,
    load,
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
def _value_block(typingctx, codes, y, index, s, z):
    """``ROW_BLOCK`` values of codes in bytes, from ``index`` on. ``y`` may hold bits of bfloat16."""

    def build(context, builder, signature, args):
        codes, y, index, s, z = args
        vector = ir.VectorType(s.type, ROW_BLOCK)
        numbers = builder.sitofp(load_lanes(builder, codes, index, ROW_BLOCK), vector)
        exact = builder.fsub(numbers, splat(builder, z, ROW_BLOCK))
        store_real_lanes(builder, builder.fmul(exact, splat(builder, s, ROW_BLOCK)), y, index)
        return context.get_dummy_value()

    return types.none(codes, y, index, s, z), build


@jit
def _values_of_bytes(codes, y, begin, end, scale, zero_point, row, columns):
    """Values ``begin`` to ``end``; ``columns`` per row, or 0 for a single row. Returns the last row."""
    s, z, row_end = scale[row], zero_point[row], (row + 1) * columns if columns > 0 else -1
    whole = end - (end - begin) % ROW_BLOCK
    for part in range(begin, whole, ROW_BLOCK):
        if part == row_end:
            row, row_end = row + 1, row_end + columns
            s, z = scale[row], zero_point[row]
        _value_block(codes, y, part, s, z)
    for i in range(whole, end):
        store_real(y, i, (np.int32(codes[i]) - z) * s)
    return row


@kernel
def _dequantize(first, last, walk, shared, like):
    item = streamed_item(walk)
    for tile in range(first, last):
        count, runs = load(walk, tile, tile == first, shared, 1, False, like)
        q, codes = pointer(runs[1], like), pointer(runs[1], np.int8)
        scale, zero_point = pointer(runs[2], like), pointer(runs[3], like)
        s, z = scale[0], zero_point[0]
        columns, row = row_columns(walk, 1), 0
        for begin in range(0, count, BLOCK):
            end = min(begin + BLOCK, count)
            target = walk[2] - begin * item if item > 0 else runs[0]
            y = pointer(target, like)
            if stores_bfloat16(walk):
                bits = pointer(target, np.uint16)
                row = _values_of_bytes(codes, bits, begin, end, scale, zero_point, row, columns)
            elif reads_bytes(walk):
                row = _values_of_bytes(codes, y, begin, end, scale, zero_point, row, columns)
            elif shared:
                for i in range(begin, end):
                    y[i] = (q[i] - z) * s
            else:
                for i in range(begin, end):
                    y[i] = (q[i] - zero_point[i]) * scale[i]
            flush(walk, runs, (runs[1],), begin, end)
        store(walk, tile, like)


@kernel
def _dequantize_backward(first, last, walk, shared, like, accumulate):
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


class Dequantize(AffineKernel[DequantizeDescriptor]):
    """``_dequantize`` as a kernel."""

    def compile(self) -> None:
        affine.compile_for(_dequantize, self.desc.real.compute)

    def prepare(self, args: DequantizeArgs) -> Launch[DequantizeArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        packed = 1 if desc.per_byte > 1 else None
        space = affine_space(desc, (args.y, args.q), (args.scale, args.zero_point), packed=packed)
        like = affine.compute_scalars(compute, 0)
        in_bytes = desc.per_byte > 1 or args.q.dtype == torch.int8  # unsigned packed codes are less than 128
        raw = {0: torch.bfloat16, 1: args.q.dtype} if in_bytes else {}

        def launch(
            stream: Stream, workspace: Workspace, args: DequantizeArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                _dequantize,
                (args.y, args.q, *affine.shared_tensors(args, compute)),
                *like,
                space=space,
                inputs=1,
                compute=compute,
                packed=1,
                per_byte=desc.per_byte,
                signed=desc.codes.signed,
                streamed=True,
                by_row=in_bytes,
                raw=raw,
            )

        return launch


class DequantizeBackward(AffineKernel[DequantizeBackwardDescriptor]):
    """``_dequantize_backward`` as a kernel."""

    def compile(self) -> None:
        affine.compile_for(_dequantize_backward, self.desc.real.compute, False)

    def prepare(self, args: DequantizeBackwardArgs) -> Launch[DequantizeBackwardArgs]:
        desc, compute = self.desc, self.desc.real.compute
        self.compile()
        space = affine_space(desc, (args.dq, args.dy), (args.scale,))
        like = affine.compute_scalars(compute, 0)

        def launch(
            stream: Stream, workspace: Workspace, args: DequantizeBackwardArgs, addresses: Sequence[int]
        ) -> None:
            affine.launch(
                _dequantize_backward,
                (args.dq, args.dy, affine.scale_tensor(args.scale, compute)),
                *like,
                args.accumulate,
                space=space,
                inputs=1,
                compute=compute,
            )

        return launch
