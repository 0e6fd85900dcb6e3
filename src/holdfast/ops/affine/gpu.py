"""Tiles of the index space, in Triton, and how a launch is laid out.

A program works on one tile of ROWS x COLUMNS. Columns run along the memory that is written; a row number is
taken apart into the remaining loops once per row, so a contiguous tensor pays for no division at all. What
elements share (scale, zero point) is loaded once per row, once per column, or once per tile, as it varies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
import triton
import triton.language as tl

from holdfast.backends import interpreted
from holdfast.backends.gpu import prepare
from holdfast.core.plan import Args, Launch, Operand
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.numerics.gpu import ZERO_POINT_LIMIT, widen
from holdfast.ops.affine.plan import AffineDescriptor, clamp_zero_point

#: Elements of a tile over all its tensors, and the warps that share them.
TILE = 8192
WARPS = 4
#: Columns of a tile where each has a scale of its own, which stays in registers.
SCALED_COLUMNS = 1024
#: How many tiles a program walks down at most, and how many programs are left to fill the device.
MOST_STEPS = 16
ENOUGH_PROGRAMS = 8192
#: Stands for the bits of a scale while a kernel is compiled: a number that needs 64 bits.
WIDE = 2**62
#: How far the second axis of a grid goes.
GRID_LIMIT = 65535


@triton.jit
def tile_rows(rows, ROWS: tl.constexpr, STEPS: tl.constexpr, ROW_AXIS: tl.constexpr):
    """The numbers of the rows of this program's first tile."""
    return tl.program_id(ROW_AXIS).to(rows.dtype) * (ROWS * STEPS) + tl.arange(0, ROWS)


@triton.jit
def tile_start(COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr):
    """The first column of this program's tiles."""
    return tl.program_id(1 - ROW_AXIS).to(tl.int64) * COLUMNS


@triton.jit
def columns_inside(start, columns, COLUMNS: tl.constexpr):
    """Which of the columns from ``start`` on exist, as a row of the tile."""
    left = tl.minimum(columns - start, COLUMNS).to(tl.int32)
    return (tl.arange(0, COLUMNS) < left)[None, :]


@triton.jit
def row_offsets(row, sizes, strides):
    """Where each row begins, in elements: its number taken apart into the loops, innermost first."""
    offset = tl.zeros(row.shape, tl.int64)
    loops: tl.constexpr = len(sizes) - 1
    for d in tl.static_range(loops - 1, -1, -1):
        if d == 0:
            offset += row.to(tl.int64) * strides[d]
        else:
            offset += (row % sizes[d]).to(tl.int64) * strides[d]
            row = row // sizes[d]
    return offset


@triton.jit
def tile_offsets(row, start, sizes, strides, COLUMNS: tl.constexpr):
    """The offset of each element of the tile."""
    step = strides[len(sizes) - 1]
    column = tl.arange(0, COLUMNS)
    return (start * step + row_offsets(row, sizes, strides))[:, None] + (column * step)[None, :]


@triton.jit
def byte_offsets(row, start, sizes, strides, WIDTH: tl.constexpr):
    """The offset of each byte of packed codes in the tile; ``strides`` and ``start`` count bytes."""
    return (start + row_offsets(row, sizes, strides))[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_shared(
    pointer, row, start, rows, sizes, strides, OTHER: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What elements share: one value for the tile, one per row, one per column, or one each."""
    step = strides[len(sizes) - 1]
    offset = tl.zeros([1, 1], tl.int64)
    inside = tl.full([1, 1], True, tl.int1)
    if BY_ROW:
        offset += row_offsets(row, sizes, strides)[:, None]
        inside = inside & (row < rows)[:, None]
    if BY_COLUMN:
        offset += (start * step + tl.arange(0, COLUMNS) * step)[None, :]
        inside = inside & columns_inside(start, sizes[len(sizes) - 1], COLUMNS)
    return tl.load(pointer + offset, mask=inside, other=OTHER)


@triton.jit
def load_scale(
    pointer, bits, row, start, rows, sizes, strides, COMPUTE: tl.constexpr, ON_HOST: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scale in the compute type; the host's comes as the bits of a float64 and is rounded once."""
    if ON_HOST:
        scale = (tl.zeros([1, 1], tl.int64) + bits).to(tl.float64, bitcast=True)
    else:
        scale = load_shared(pointer, row, start, rows, sizes, strides, 1.0, BY_ROW, BY_COLUMN, COLUMNS)
    return widen(scale, COMPUTE)


@triton.jit
def load_zero_point(
    pointer, value, row, start, rows, sizes, strides, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The zero point, saturated: none, the host's (saturated there), or a tensor's."""
    if ZERO == "none":
        return tl.zeros([1, 1], tl.int32)
    elif ZERO == "host":
        return tl.zeros([1, 1], tl.int32) + value
    else:
        z = load_shared(pointer, row, start, rows, sizes, strides, 0, BY_ROW, BY_COLUMN, COLUMNS)
        return tl.minimum(tl.maximum(z, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)


def compile_contiguous(kernel: Any, args: type[Args]) -> None:
    """Prepare ``kernel`` for contiguous tensors, the scale and the zero point in tensors too.

    The tensors are without memory: only what they are like matters here.
    """
    desc: AffineDescriptor = kernel.desc
    made: dict[str, torch.Tensor] = {}
    for field in fields(cast(Any, args)):
        if field.name in ("scale", "zero_point"):
            dtype = torch.float32 if field.name == "scale" else torch.int32
            made[field.name] = torch.empty(desc.view.scale_shape, dtype=dtype, device="meta")
        elif field.name != "accumulate":
            shape, dtype = desc.expected(field.name)
            made[field.name] = torch.empty(shape, dtype=dtype, device="meta")
    kernel.prepare(args(**made))


def in_bytes(space: Space, packed: int | None, per_byte: int) -> Space:
    """The space with the rows of the packed operand counted in bytes instead of codes."""
    if packed is None:
        return space
    strides = list(space.strides)
    strides[packed] = (*(step // per_byte for step in strides[packed][:-1]), 1)
    return replace(space, strides=tuple(strides))


def launch_over(
    kernel: Any,
    space: Space,
    device: torch.device,
    tensors: Sequence[torch.Tensor],
    shared: Sequence[Operand],
    limits: tuple[int, ...] = (),
    per_byte: int = 1,
    **constants: Any,
) -> Launch[Any]:
    """Lay ``kernel`` out over ``space``.

    ``tensors`` and ``shared`` are its operands in the order of the space; ``limits`` are integers that follow
    the host's scale and zero point; ``per_byte`` codes share a byte of the codes. A value of the host needs a
    pointer all the same, and gets the first one.
    """
    scales = space.strides[len(tensors) :]
    by_row, by_column = any(any(own[:-1]) for own in scales), any(own[-1] for own in scales)
    rows, columns, steps = _tile(space, len(tensors), by_row, by_column)
    on_host = [position for position, operand in enumerate(shared) if not isinstance(operand, torch.Tensor)]
    zero_points = tuple(clamp_zero_point(o) if isinstance(o, int) else 0 for o in shared[1:])
    if len(shared) > 1:
        constants["ZERO"] = "tensor" if 1 not in on_host else "host" if any(zero_points) else "none"
    row_tiles, column_tiles = -(-space.rows // (rows * steps)), -(-space.columns // columns)
    row_axis = 0 if row_tiles > GRID_LIMIT else 1  # else programs follow the memory
    constants |= {
        "COMPUTE": tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32,
        "SCALE_ON_HOST": 0 in on_host,
        "PER_BYTE": per_byte,
        "BY_ROW": by_row,
        "BY_COLUMN": by_column,
        "ROWS": rows,
        "COLUMNS": columns,
        "STEPS": steps,
        "ROW_AXIS": row_axis,
    }
    run = prepare(
        kernel,
        grid=(row_tiles, column_tiles) if row_axis == 0 else (column_tiles, row_tiles),
        device=device,
        tensors=_pointers((*tensors, *shared)),
        scalars=(WIDE, *zero_points, *limits),
        settled=(space.rows, -(-space.columns // per_byte), space.sizes, *space.strides),
        constants=constants,
        num_warps=max(1, min(WARPS, rows * columns // 256)),
    )
    scale_on_host, interpreting = 0 in on_host, interpreted()
    tail = (*zero_points, *limits)

    def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
        pointers = _pointers(args.operands()) if interpreting else ()
        if on_host:
            addresses = [address or addresses[0] for address in addresses]
        bits = _double_bits(args.scale) if scale_on_host else 0
        run(stream.handle, pointers, addresses, (bits, *tail))

    return launch


def _pointers(operands: Sequence[Operand]) -> list[torch.Tensor]:
    output = operands[0]
    assert isinstance(output, torch.Tensor)
    return [operand if isinstance(operand, torch.Tensor) else output for operand in operands]


def _double_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _tile(space: Space, tensors: int, by_row: bool, by_column: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and how many tiles a program walks down.

    Wide along the columns; square if an operand runs across them. Where each column has a scale of its own, a
    program keeps it for many rows, as long as there are programs enough to fill the device.
    """
    tile = 2 ** ((TILE // tensors).bit_length() - 1)
    columns = triton.next_power_of_2(space.columns)
    if any(own[-1] > 1 for own in space.strides[:tensors]):
        columns = min(columns, 64)
    elif by_column:
        tile = SCALED_COLUMNS
    columns = max(min(columns, tile), 4)
    rows = min(tile // columns, triton.next_power_of_2(space.rows))
    if not by_column or by_row:
        return rows, columns, 1
    tiles = -(-space.rows // rows) * -(-space.columns // columns)
    return rows, columns, min(MOST_STEPS, triton.next_power_of_2(max(1, tiles // ENOUGH_PROGRAMS)))
