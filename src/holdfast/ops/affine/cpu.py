"""Numba: the loop over tiles of quantize, dequantize and fake_quantize.

A tile is a few thousand elements: some columns of some consecutive rows. A kernel loads each operand of a
tile into a run, which is a contiguous array of the compute type, computes on runs, and stores the result.
An operand that is contiguous and of the compute type is used in place. An operand that is the same for all
tiles is loaded once. So the arithmetic of a kernel does not depend on strides, dtypes or the row length.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.backends.cpu import (
    BLOCK,
    STREAM_BLOCK,
    VECTOR,
    TeamKernel,
    address_of,
    copy,
    fence,
    jit,
    numbers_of,
    on_demand,
    outlined,
    pointer,
    prefetch,
    stream,
    stream_and_prefetch,
    stream_blocks,
    take,
)
from holdfast.backends.private import task_bytes, task_of
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.backends.threads import run_together, threads_together
from holdfast.core.dtypes import Float
from holdfast.core.plan import Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.numerics.cpu import (
    FLOAT8_E4M3FN,
    INT8,
    ITEM_SIZE,
    UINT8,
    ZERO_POINT,
    clamped_zero_point,
    kind,
    narrow,
    next_below,
    pack,
    rint,
    unpack,
    widen,
    zero,
    zero_point_kind,
)
from holdfast.numerics.cpu_walk import number, walk_of
from holdfast.ops.affine.plan import clamp_zero_point

#: Elements per tile. Its runs fit into the core's cache, and the cost of finding them is small per element.
TILE = 8192
#: Columns per tile if the columns of an operand are not contiguous. A square tile touches few cache lines.
_SQUARE_COLUMNS = 64
#: Bytes of a scratch run (a tile of the widest type), and the distance from one run to the next.
_RUN_BYTES = TILE * 8
_RUN = step_of(_RUN_BYTES)
#: Bytes that ``unpack`` may write past the end of a run.
_UNPACK_OVERRUN = 3

#: Least columns of a row that is a tile of its own.
_LONG_ROW = 2048

# Layout of an operand within a tile.
_IN_PLACE = 0  # contiguous
_FIXED = 1  # the same elements for every tile
_STRIDED = 2  # rows, or the elements of a row, are not contiguous
_STREAMED = 3  # contiguous output, written by stores that bypass the caches
# Layouts of a scale or zero point with one element per row; its run has one element per row too.
_BY_ROW = 4  # the elements are not contiguous
_BY_ROW_IN_PLACE = 5  # contiguous

#: Least bytes of the output and the inputs for a streamed output. A smaller one may stay in a cache for its
#: next reader.
_STREAM_MIN_BYTES = 2**26

#: Columns of a row that a kernel computes together if scales are by row; minimum columns of such a row.
ROW_BLOCK = 32
#: Minimum columns of a row for which bounds are computed from its scale.
_BOUNDED = 128

# Kinds of operands that a kernel converts itself: codes as signed bytes, and bfloat16.
_RAW_BYTES, _RAW_BFLOAT16 = 0x01, 0x02

#: Prefetch distance of a kernel that streams, in bytes.
_PREFETCH_DISTANCE = 1024

# Numbers of a task. The first differ between calls: the next tile, the number of threads that have started,
# how many tiles a thread takes at once, the number of slots, the address of their scratch, and the addresses
# of the operands. Then come the bytes of a slot, the number of tiles, whether each has one scale, the address
# of the scalars, the shape, the rows and columns of the table, and whether the kernel adds to its output. The
# table follows a value of the compute type.
_NEXT, _THREAD, _SHARE, _SLOTS, _SCRATCH, _ADDRESSES = range(6)
#: Maximum number of operands.
_OPERANDS = 5
_VARIABLES = _ADDRESSES + _OPERANDS
_SCRATCH_STEP, _TILES, _SHARED, _SCALARS, _SHAPE = range(_VARIABLES, _VARIABLES + 5)
_ROWS, _COLUMNS, _ACCUMULATE, NUMBERS = range(_SHAPE + 4, _SHAPE + 8)
_TABLE = NUMBERS + 1
#: Ranges of tiles per thread.
_RANGES = 8

# Columns of the table of a walk. _PACK_SHIFT is log2 of the codes per byte, _SIGNED tells if they have signs.
_KIND, _LAYOUT, _PACK_SHIFT, _SIGNED, _STRIDES = 0, 1, 2, 3, 4


class Tiling(NamedTuple):
    """The tiles of a space. ``shape`` is (rows, columns, rows of a tile, columns of a tile).

    ``table`` has a row for each operand. Its last row has the loop sizes in place of strides. ``shared``:
    each tile has one scale and one zero point. ``by_row``: each row of a tile has one of each, and at least
    ``ROW_BLOCK`` columns.
    """

    tiles: int
    shared: bool
    by_row: bool
    shape: tuple[int, int, int, int]
    table: np.ndarray[Any, Any]


@lru_cache(maxsize=1024)
def _tiling(space: Space, inputs: int) -> Tiling:
    rows, columns = space.rows, space.columns
    most = _SQUARE_COLUMNS if rows > 1 and any(strides[-1] > 1 for strides in space.strides) else TILE
    parts = -(-columns // most)
    tile_columns = columns if parts == 1 else -(-columns // (parts * 16)) * 16  # whole bytes of packed codes
    parts = -(-columns // tile_columns)
    by_row = all(strides[-1] == 0 for strides in space.strides[1 + inputs :])
    # A long row with one scale is a tile of its own: then no scale is copied for every element.
    tile_rows = 1 if by_row and columns >= _LONG_ROW else min(rows, TILE // tile_columns)
    table = np.zeros((len(space.strides) + 1, _STRIDES + len(space.sizes)), np.int64)
    table[:-1, _LAYOUT] = [_layout(space.sizes, strides, parts, tile_rows) for strides in space.strides]
    table[:-1, _STRIDES:] = space.strides
    table[-1, _STRIDES:] = space.sizes
    shared = all(s[-1] == 0 and (tile_rows == 1 or not any(s)) for s in space.strides[1 + inputs :])
    in_blocks = by_row and parts == 1 and columns >= ROW_BLOCK and not shared
    shape = (rows, columns, tile_rows, tile_columns)
    return Tiling(-(-rows // tile_rows) * parts, shared, in_blocks, shape, table)


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each loop continues where the next inner loop ends."""
    return all(strides[d] == strides[d + 1] * sizes[d + 1] for d in range(len(sizes) - 1))


def _layout(sizes: Sequence[int], strides: Sequence[int], parts: int, tile_rows: int) -> int:
    if strides[-1] == 1 and (tile_rows == 1 or (parts == 1 and _is_dense(sizes, strides))):
        return _IN_PLACE
    if not any(strides[:-1]) and (parts == 1 or strides[-1] == 0):
        return _FIXED
    return _STRIDED


@lru_cache(maxsize=1024)
def _host_value(value: float, dtype: torch.dtype) -> torch.Tensor:
    """A Python number as a tensor. Cached, since calls repeat the same values."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def scale_tensor(scale: torch.Tensor | float, compute: Float) -> torch.Tensor:
    """The scale as a tensor. A Python float is rounded to the compute type."""
    return scale if isinstance(scale, torch.Tensor) else _host_value(float(scale), compute.torch)


def zero_point_tensor(zero_point: torch.Tensor | int) -> torch.Tensor:
    """The zero point as a tensor."""
    if isinstance(zero_point, torch.Tensor):
        return zero_point
    return _host_value(clamp_zero_point(zero_point), torch.int32)


def shared_tensors(args: Any, compute: Float) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the zero point as tensors."""
    return scale_tensor(args.scale, compute), zero_point_tensor(args.zero_point)


class Walk:
    """The loop of a kernel over the tiles of ``operands``: the output, ``inputs`` inputs, scale, zero point.

    ``entry`` is a ``team_kernel(NUMBERS)`` that calls a function made by ``over_tiles``, which gets
    ``scalars`` of the compute type. Operand ``packed`` has ``per_byte`` codes in each byte, with sign bits if
    ``signed``. With ``streamed`` a large output is written by streaming stores; the kernel must then call
    ``streamed_item``, ``flush`` and ``finish``, and must not read the output. ``by_row``: the kernel calls
    ``is_by_row``. ``raw``: the kernel converts operands of these numbers and dtypes itself if the scale is by
    tile or by row.
    """

    def __init__(
        self,
        entry: TeamKernel,
        operands: Sequence[torch.Tensor],
        scalars: Sequence[float],
        *,
        space: Space,
        inputs: int,
        compute: Float,
        packed: int = 0,
        per_byte: int = 1,
        signed: bool = False,
        streamed: bool = False,
        accumulate: bool = False,
        by_row: bool = False,
        raw: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        tiling = _tiling(space, inputs)
        table = tiling.table.copy()
        table[:-1, _KIND] = [kind(operand.dtype, compute.torch) for operand in operands]
        if len(operands) > inputs + 2:
            table[-2, _KIND] = zero_point_kind(operands[-1].dtype)
        if per_byte > 1:
            table[packed, _KIND] = INT8 if signed else UINT8
            table[packed, _PACK_SHIFT], table[packed, _SIGNED] = per_byte >> 1, signed
        if by_row and tiling.by_row:
            for operand in range(1 + inputs, len(operands)):
                if table[operand, _LAYOUT] == _STRIDED:
                    strides = space.strides[operand][:-1]
                    dense = strides[-1] == 1 and _is_dense(space.sizes[:-1], strides)
                    table[operand, _LAYOUT] = _BY_ROW_IN_PLACE if dense else _BY_ROW
        if tiling.shared or tiling.by_row:
            for operand, dtype in (raw or {}).items():
                if operands[operand].dtype == dtype:
                    table[operand, _KIND] = dtype.itemsize
        large = _bytes_of(operands[: 1 + inputs]) >= _STREAM_MIN_BYTES
        if streamed and not accumulate and table[0, _LAYOUT] == _IN_PLACE and large:
            table[0, _LAYOUT] = _STREAMED
        self.inputs, self.operands = inputs, len(operands)
        self._tiles, self._elements = tiling.tiles, space.rows * space.columns
        self._scratch, like = _scratch_for(len(operands)), number(compute)
        self._function = entry.compiled(like)
        self._scalars = np.array(scalars, type(like))[None]  # its address is in use
        self._bytes = task_bytes(
            *[0] * _VARIABLES, self._scratch.size, tiling.tiles, tiling.shared, walk_of(self._scalars)[0],
            *tiling.shape, *table.shape, accumulate, 0, *table.flatten().tolist(),
        )  # fmt: skip
        self._task = task_of(len(self._bytes) // 8)

    def over(self, count: int, known: Mapping[int, int] | None = None) -> Callable[..., None]:
        """A function that runs the kernel over operands at ``count`` addresses; ``known`` has some already.

        The kernel may take more operands than a tile has. Like a bound launch, the function takes a stream
        and a workspace before the addresses. It ignores addresses that are known or too many.
        """
        known = known or {}
        given = min(known, default=count)
        others = [position for position in range(given, count) if position not in known]
        first = self._task.from_buffer_copy(self._bytes)
        for position, address in known.items():
            first[_ADDRESSES + position] = address
        start, end = bytes(first), _ADDRESSES + given

        def run(stream: int, workspace: int, *addresses: int) -> None:
            threads = threads_together(self._elements)
            share = max(self._tiles // (_RANGES * threads), 1) if threads > 1 else self._tiles
            task = self._task.from_buffer_copy(start)
            task[_SHARE:end] = (share, threads, self._scratch.of_team(threads), *addresses[:given])
            for position in others:
                task[_ADDRESSES + position] = addresses[position]
            run_together(self._function, task, self._elements)

        return run


def launch_of(walk: Walk, compute: Float) -> Launch[Any]:
    """The launch of a walk over the first operands of the args. A scale or a zero point may be a number."""

    def tensors_of_numbers(args: Any) -> dict[int, torch.Tensor]:
        """The scale and the zero point as tensors if they are numbers, by their position."""
        found = {}
        for position, name in enumerate(("scale", "zero_point")[: walk.operands - walk.inputs - 1]):
            given = getattr(args, name)
            if not isinstance(given, torch.Tensor):
                as_tensor = scale_tensor(given, compute) if name == "scale" else zero_point_tensor(given)
                found[walk.inputs + 1 + position] = as_tensor
        return found

    def bound(args: Any) -> Callable[..., None]:
        numbers = tensors_of_numbers(args)
        known = {position: tensor.data_ptr() for position, tensor in numbers.items()}
        run = walk.over(walk.operands, known)
        run.numbers = numbers  # type: ignore[attr-defined]  # kept: their addresses are in use
        return run

    run = walk.over(walk.operands)

    def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
        numbers = tensors_of_numbers(args)
        at = [*addresses]
        for position, tensor in numbers.items():
            at[position] = tensor.data_ptr()
        run(0, 0, *at)

    launch.bound = bound  # type: ignore[attr-defined]
    return launch


def _bytes_of(operands: Sequence[torch.Tensor]) -> int:
    return sum(operand.nbytes for operand in operands)


@cache
def _scratch_for(operands: int) -> Scratch:
    """Scratch memory of a walk over ``operands`` operands."""
    return Scratch("affine", Runs(2 * operands + 2, _RUN_BYTES, _UNPACK_OVERRUN))


def compute_scalars(compute: Float, *values: int) -> tuple[np.floating[Any], ...]:
    """Integers as scalars of the compute type."""
    return tuple(type(number(compute))(value) for value in values)


# A kernel's ``walk`` is (shape, table, address of the scratch). A table is (address, its rows, its columns):
# a row for each operand, then one with the loop sizes. Operand 0 is the output. The scratch has two runs for
# each operand: its elements in the stored dtype, and in the compute type. Then follow a run for row offsets
# and a run for the addresses that ``load`` returns. ``like`` is a scalar of the compute type.


@jit
def cell(table, row, column):
    """A number of a table."""
    return pointer(table[0], np.int64)[row * table[2] + column]


@jit
def address(table, operand):
    """The address of an operand, which precedes the table in the task."""
    return pointer(table[0] - 8 * (_TABLE - _ADDRESSES), np.int64)[operand]


def over_tiles(function: Callable[..., Any], name: str = "") -> Any:
    """Declare a function that kernels call with their task, from a function over a range of tiles.

    ``function`` takes the first and the last tile, the walk, whether each tile has one scale, the scalars,
    and whether to add to the output. The threads of a task take ranges of tiles until none is left. ``name``
    is that of ``jit``.
    """
    tiles = jit(function, name)

    def share(task):
        numbers, like = numbers_of(task), task[0][-1]
        slot = take(numbers, _THREAD, 1)
        if slot >= numbers[_SLOTS]:
            return
        shape = (numbers[_SHAPE], numbers[_SHAPE + 1], numbers[_SHAPE + 2], numbers[_SHAPE + 3])
        table = (address_of(numbers) + 8 * _TABLE, numbers[_ROWS], numbers[_COLUMNS])
        walk = shape, table, numbers[_SCRATCH] + slot * numbers[_SCRATCH_STEP]
        shared, accumulate = numbers[_SHARED] != 0, numbers[_ACCUMULATE] != 0
        scalars = pointer(numbers[_SCALARS], like)
        while True:
            first = take(numbers, _NEXT, numbers[_SHARE])
            last = min(first + numbers[_SHARE], numbers[_TILES])
            if first >= last:
                break
            tiles(first, last, walk, shared, scalars, accumulate)

    share.__module__ = function.__module__
    return jit(share, name=f"{function.__qualname__}_of_task")


@jit
def window(shape, tile):
    """First row, first column, number of rows and number of columns of a tile."""
    rows, columns, tile_rows, tile_columns = shape
    parts = (columns + tile_columns - 1) // tile_columns
    block = tile // parts
    row, column = block * tile_rows, (tile - block * parts) * tile_columns
    return row, column, min(tile_rows, rows - row), min(tile_columns, columns - column)


@jit
def _row_offsets(walk, operand, row, rows):
    """Offsets, in elements, of ``rows`` rows of an operand, beginning with ``row``."""
    outlined()
    _, table, scratch = walk
    sizes, inner = table[1] - 1, table[2] - 2
    offsets = pointer(scratch + 2 * sizes * _RUN, np.int64)
    offsets[0] = 0
    if inner < _STRIDES:
        return offsets
    size, step = cell(table, sizes, inner), cell(table, operand, inner)
    done = 0
    while done < rows:
        rest = (row + done) // size
        index = row + done - rest * size
        offset = index * step
        for d in range(inner - 1, _STRIDES - 1, -1):
            outer = rest // cell(table, sizes, d)
            offset += (rest - outer * cell(table, sizes, d)) * cell(table, operand, d)
            rest = outer
        run = min(rows - done, size - index)
        for r in range(run):
            offsets[done + r] = offset + r * step
        done += run
    return offsets


@on_demand
def _broadcast_rows(memory, item, offsets, rows, columns, run):
    """Fill each row of a run with the one element of that row."""
    offsets = pointer(offsets, np.int64)
    for r in range(rows):
        source, target = memory + offsets[r] * item, run + r * columns * item
        if item == 1:
            for c in range(columns):
                pointer(target, np.uint8)[c] = pointer(source, np.uint8)[0]
        elif item == 2:
            value2 = pointer(source, np.uint16)[0]
            for c in range(columns):
                pointer(target, np.uint16)[c] = value2
        elif item == 4:
            value4 = pointer(source, np.uint32)[0]
            for c in range(columns):
                pointer(target, np.uint32)[c] = value4
        else:
            value8 = pointer(source, np.uint64)[0]
            for c in range(columns):
                pointer(target, np.uint64)[c] = value8


@on_demand
def _copy_strided(memory, item, offsets, step, rows, columns, run, gather):
    """Copy rows whose elements are not contiguous into a run (``gather``), or from a run to memory."""
    offsets = pointer(offsets, np.int64)
    transposed = rows > 1 and offsets[1] - offsets[0] < step  # then the inner loop follows the memory
    inner = rows if transposed else columns
    for i in range(columns if transposed else rows):
        for j in range(inner):
            r, c = (j, i) if transposed else (i, j)
            far, near = memory + (offsets[r] + c * step) * item, run + (r * columns + c) * item
            target, source = (near, far) if gather else (far, near)
            if item == 1:
                pointer(target, np.uint8)[0] = pointer(source, np.uint8)[0]
            elif item == 2:
                pointer(target, np.uint16)[0] = pointer(source, np.uint16)[0]
            elif item == 4:
                pointer(target, np.uint32)[0] = pointer(source, np.uint32)[0]
            else:
                pointer(target, np.uint64)[0] = pointer(source, np.uint64)[0]


@jit
def _load(walk, operand, row, column, rows, columns, like):
    """The address of a run with an operand's elements in a window of rows and columns."""
    _, table, scratch = walk
    kind, layout = cell(table, operand, _KIND), cell(table, operand, _LAYOUT)
    pack_shift = cell(table, operand, _PACK_SHIFT)
    item, step = kind & ITEM_SIZE, cell(table, operand, table[2] - 1)
    count = rows * columns
    in_place = layout == _IN_PLACE or layout == _BY_ROW_IN_PLACE
    if in_place:
        rows, columns = 1, count
    offsets = _row_offsets(walk, operand, row, rows)
    memory = address(table, operand) + ((column * step * item) >> pack_shift)
    raw = scratch + 2 * operand * _RUN
    if pack_shift > 0:
        for r in range(rows):
            signed = cell(table, operand, _SIGNED)
            unpack(memory + (offsets[r] >> pack_shift), pack_shift, signed, columns, raw + r * columns)
    elif in_place or (count == 1 and operand > 0):  # a single element is contiguous
        raw = memory + offsets[0] * item
    elif step == 0:
        _broadcast_rows(memory, item, offsets, rows, columns, raw)
    elif step == 1:
        for r in range(rows):
            copy(raw + r * columns * item, memory + offsets[r] * item, columns * item)
    else:
        _copy_strided(memory, item, offsets, step, rows, columns, raw, True)
    if kind == item:
        return raw
    wide = scratch + (2 * operand + 1) * _RUN
    if kind == ZERO_POINT and count == 1:  # the common case, without compiling ``widen``
        pointer(wide, like)[0] = clamped_zero_point(pointer(raw, np.int32)[0])
        return wide
    for begin in range(0, count, BLOCK):
        for b in range(item):
            prefetch(pointer(raw, np.uint8), begin * item + b * BLOCK)
        widen(raw, kind, begin, min(begin + BLOCK, count), wide, like)
    return wide


@jit
def _computed_as_stored(kind):
    """Whether a kernel writes results in the stored dtype: the compute type, or 8-bit integer codes.

    ``store`` converts results to any other dtype.
    """
    return kind == INT8 or kind == UINT8 or kind <= ITEM_SIZE


@jit
def load(walk, tile, is_first, shared, inputs, accumulate, like):
    """The number of elements of a tile, and the addresses of its operands as runs of the compute type.

    The kernel writes its results to run 0; with ``accumulate`` that run holds the old output. With ``shared``
    the scale and the zero point, which follow the ``inputs``, have one element. ``is_first``: this is the
    first tile of the walk, so operands that are the same for all tiles are loaded.
    """
    outlined()
    shape, table, scratch = walk
    here = window(shape, tile)
    runs = pointer(scratch + (2 * table[1] - 1) * _RUN, np.int64)
    for operand in range(table[1] - 1):
        kind, layout = cell(table, operand, _KIND), cell(table, operand, _LAYOUT)
        row, column, rows, columns = here
        if operand == 0 and not accumulate:
            runs[0] = scratch if _computed_as_stored(kind) else scratch + _RUN
            in_place = layout == _IN_PLACE or layout == _STREAMED
            if _computed_as_stored(kind) and in_place and cell(table, 0, _PACK_SHIFT) == 0:
                offset = _row_offsets(walk, operand, row, min(rows, 1))[0] + column
                runs[0] = address(table, 0) + offset * (kind & ITEM_SIZE)
            continue
        if layout == _FIXED and not is_first:
            continue
        if shared and operand > inputs:
            rows, columns = 1, 1
        elif layout == _FIXED:
            row, column, rows, columns = 0, 0, shape[2], shape[3]
        elif layout >= _BY_ROW:
            columns = 1
        runs[operand] = _load(walk, operand, row, column, rows, columns, like)
    return here[2] * here[3], runs


@jit
def elements_of(walk):
    """The number of elements of all tiles."""
    rows, columns, _, _ = walk[0]
    return rows * columns


@jit
def streamed_item(walk):
    """Bytes per element if the kernel streams its results, else 0.

    If it does, it writes each block of results to the start of the scratch, ``walk[2]``, and calls ``flush``
    in place of ``prefetch``. Results that ``store`` converts or packs are streamed by ``store``.
    """
    table = walk[1]
    kind, layout, pack_shift = cell(table, 0, _KIND), cell(table, 0, _LAYOUT), cell(table, 0, _PACK_SHIFT)
    return kind & ITEM_SIZE if layout == _STREAMED and _computed_as_stored(kind) and pack_shift == 0 else 0


@jit
def is_by_row(walk, inputs):
    """Whether the scale or the zero point has one element per row in its run.

    The other one has then at least as many elements. There are at least ``ROW_BLOCK`` columns.
    """
    table = walk[1]
    return cell(table, inputs + 1, _LAYOUT) >= _BY_ROW or cell(table, inputs + 2, _LAYOUT) >= _BY_ROW


@jit
def row_columns(walk, inputs, count):
    """Elements with the same scale: the columns of a row, or all elements of a tile."""
    return walk[0][3] if is_by_row(walk, inputs) else count


@jit
def reads_bytes(walk):
    """Whether run 1 has codes as signed bytes, not as numbers of the compute type."""
    return cell(walk[1], 1, _KIND) == _RAW_BYTES


@jit
def reads_bfloat16(walk):
    """Whether run 1 has bits of bfloat16, not numbers of the compute type."""
    return cell(walk[1], 1, _KIND) == _RAW_BFLOAT16


@jit
def stores_bfloat16(walk):
    """Whether the kernel writes bits of bfloat16."""
    return cell(walk[1], 0, _KIND) == _RAW_BFLOAT16


@jit
def flush(walk, runs, reads, begin, end):
    """Copy a block of results from the scratch to run 0 by streaming stores, if the output is streamed.

    ``reads`` has the addresses of the kernel's input runs; their next blocks are prefetched.
    """
    item = streamed_item(walk)
    if item > 0:
        done = begin * item
        stream_and_prefetch(runs[0] + done, walk[2], (end - begin) * item, reads, done + _PREFETCH_DISTANCE)


@jit
def _stream_run(target, source, size):
    outlined()
    stream(target, source, size)


@jit
def flush_alone(walk, runs, begin, end):
    """``flush`` without prefetches, for a kernel whose reads the hardware follows."""
    item = streamed_item(walk)
    if item > 0:
        target, size = runs[0] + begin * item, (end - begin) * item
        if target % VECTOR == 0 and size % STREAM_BLOCK == 0:
            stream_blocks(target, walk[2], size // STREAM_BLOCK)
        else:
            _stream_run(target, walk[2], size)


@jit
def store(walk, tile, like):
    """Copy a tile's results from run 0 to the output, unless they are there already."""
    outlined()
    shape, table, scratch = walk
    kind, layout, pack_shift = cell(table, 0, _KIND), cell(table, 0, _LAYOUT), cell(table, 0, _PACK_SHIFT)
    item, step = kind & ITEM_SIZE, cell(table, 0, table[2] - 1)
    in_place, as_stored = layout == _IN_PLACE or layout == _STREAMED, _computed_as_stored(kind)
    if in_place and as_stored and pack_shift == 0:
        return
    row, column, rows, columns = window(shape, tile)
    count = rows * columns
    if in_place:
        rows, columns = 1, count
    offsets = _row_offsets(walk, np.int64(0), row, rows)
    memory = address(table, 0) + ((column * step * item) >> pack_shift)
    raw = scratch
    if layout == _IN_PLACE and pack_shift == 0:
        raw = memory + offsets[0] * item
    if not as_stored:
        narrow(scratch + _RUN, count, kind, raw, like)
    if layout == _STREAMED:
        if pack_shift > 0:
            raw = scratch + _RUN
            pack(scratch, pack_shift, count, raw)
        size = (count * item + (1 << pack_shift) - 1) >> pack_shift
        _stream_run(memory + ((offsets[0] * item) >> pack_shift), raw, size)
    elif pack_shift > 0:
        for r in range(rows):
            pack(raw + r * columns, pack_shift, columns, memory + (offsets[r] >> pack_shift))
    elif layout != _IN_PLACE and step == 1:
        for r in range(rows):
            copy(memory + offsets[r] * item, raw + r * columns * item, columns * item)
    elif layout != _IN_PLACE:
        _copy_strided(memory, item, offsets, step, rows, columns, raw, False)


@jit
def finish(walk):
    """Make streamed results visible to other threads, after the last tile."""
    if cell(walk[1], 0, _LAYOUT) == _STREAMED:
        fence()


@jit
def stores_bytes(walk):
    """Whether the kernel writes results as bytes: integer codes of 8 bits or fewer."""
    kind = cell(walk[1], 0, _KIND)
    return kind == INT8 or kind == UINT8


@jit
def stores_floating_codes(walk):
    """Whether the kernel writes quotients, which ``store`` rounds to a float format."""
    return cell(walk[1], 0, _KIND) == FLOAT8_E4M3FN


@jit
def _least_with_code(code, s):
    """The least x with rint(x / s) >= ``code``, for a positive finite scale.

    Division and rounding are monotonic, so every larger x satisfies it too. The first guess is off by a few
    roundings at most.
    """
    x = (code - np.float32(0.5)) * s
    while rint(x / s) >= code:
        x = next_below(x)
    while not rint(x / s) >= code:
        x = -next_below(-x)
    return x


@jit
def in_range_bounds(s, z, q_min, q_max):
    """The least and the greatest x with q_min - z <= rint(x / s) <= q_max - z.

    If there is no such x, the least exceeds the greatest. For many x with one scale, two comparisons per x
    replace a division.
    """
    lo, hi = q_min - z, q_max - z
    infinite = zero(s) + np.float32(np.inf)
    if s < zero(s):
        s, lo, hi = -s, -hi, -lo
    if s == infinite and lo <= zero(s) and hi >= zero(s):  # x / s is 0 for a finite x, NaN for an infinite x
        return -next_below(infinite), next_below(infinite)
    if not (s > zero(s) and s < infinite):
        return infinite, -infinite
    return _least_with_code(lo, s), -_least_with_code(-hi, s)


@jit
def code_bounds(s, z, q_min, q_max):
    """q_min and q_max, for an estimator that needs no other bounds."""
    return q_min, q_max


def straight_through(name: str, estimate: Any, estimate_shared: Any, bounds_of: Any = code_bounds) -> Any:
    """``over_tiles`` of a straight-through gradient, as the function ``name``.

    ``estimate`` gives dx of one element. For many elements with one scale, ``bounds_of`` computes two bounds
    from the scale, and ``estimate_shared`` takes them in place of q_min and q_max.
    """

    def tiles(first, last, walk, shared, scalars, accumulate):
        q_min, q_max, item = scalars[0], scalars[1], streamed_item(walk)
        by_row = shared or is_by_row(walk, 2)
        for tile in range(first, last):
            count, runs = load(walk, tile, tile == first, shared, 2, accumulate, q_min)
            dy, x = pointer(runs[1], q_min), pointer(runs[2], q_min)
            scale, zero_point = pointer(runs[3], q_min), pointer(runs[4], q_min)
            columns = row_columns(walk, 2, count)
            bounded = by_row and columns >= _BOUNDED
            row, row_end = np.int64(-1), np.int64(0)
            s, z, least, greatest = q_min, q_min, q_min, q_max
            for begin in range(0, count, BLOCK):
                end = min(begin + BLOCK, count)
                dx = pointer(walk[2] - begin * item if item > 0 else runs[0], q_min)
                if item == 0:
                    prefetch(x, begin)
                    prefetch(dy, begin)
                part = begin if by_row else end
                while part < end:
                    if part == row_end:
                        row, row_end = row + 1, row_end + columns
                        s, z = scale[row], zero_point[row]
                        if bounded:
                            least, greatest = bounds_of(s, z, q_min, q_max)
                    stop = min(end, row_end)
                    if bounded and accumulate:
                        for i in range(part, stop):
                            dx[i] += estimate_shared(dy[i], x[i], s, z, least, greatest)
                    elif bounded:
                        for i in range(part, stop):
                            dx[i] = estimate_shared(dy[i], x[i], s, z, least, greatest)
                    elif accumulate:
                        for i in range(part, stop):
                            dx[i] += estimate(dy[i], x[i], s, z, q_min, q_max)
                    else:
                        for i in range(part, stop):
                            dx[i] = estimate(dy[i], x[i], s, z, q_min, q_max)
                    part = stop
                if not by_row and accumulate:
                    for i in range(begin, end):
                        dx[i] += estimate(dy[i], x[i], scale[i], zero_point[i], q_min, q_max)
                elif not by_row:
                    for i in range(begin, end):
                        dx[i] = estimate(dy[i], x[i], scale[i], zero_point[i], q_min, q_max)
                flush(walk, runs, (runs[1], runs[2]), begin, end)
            store(walk, tile, q_min)
        finish(walk)

    return over_tiles(tiles, name)
