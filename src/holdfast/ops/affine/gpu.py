"""Scales and zero points of a tile, in Triton, and how a launch over tiles is laid out.

What elements share (scale, zero point) is loaded once per row, once per column, or once per tile, as it
varies.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl

from holdfast.backends import interpreted
from holdfast.backends.gpu import prepare
from holdfast.backends.gpu_tiles import columns_inside, tile_row_offsets
from holdfast.core.operands import Operand
from holdfast.core.plan import Args, Launch
from holdfast.core.stream import Stream, Workspace
from holdfast.core.strided import Space
from holdfast.numerics.gpu import ZERO_POINT_LIMIT, whole_zero_point, widen
from holdfast.ops.affine.plan import AffineKernel, ScaledDescriptor, affine_space, clamp_zero_point

D = TypeVar("D", bound=ScaledDescriptor)

#: Elements of a tile, and the warps that share them.
TILE = 4096
WARPS = 4
#: Columns of a tile where each has a scale of its own: few, so that many rows share what is made of it.
SCALED_COLUMNS = 256
#: Tiles that a program takes at most, one below the other, and the fewest programs that it is done for.
STEPS = 8
PROGRAMS = 1024
#: Stands for the bits of a scale while a kernel is compiled: a number that needs 64 bits.
WIDE = 2**62
#: A hint to the cache: what is read may stay there longer than what is written. It saves one to two per cent
#: of the time of a large tensor on an H200, whether or not what is written is read next.
KEPT = tl.constexpr("evict_last")
#: How far the second axis of a grid goes.
GRID_LIMIT = 65535


@triton.jit
def load_shared(
    pointer, row, start, rows, sizes, strides, OTHER: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What elements share: one value for the tile, one per row, one per column, or one each."""
    step = strides[len(strides) - 1]
    offset = tl.zeros([1, 1], tl.int64)
    inside = tl.full([1, 1], True, tl.int1)
    if BY_ROW:
        offset += tile_row_offsets(row, sizes, strides)[:, None]
        inside = inside & (row < rows)[:, None]
    if BY_COLUMN:
        offset += (start * step + tl.arange(0, COLUMNS) * step)[None, :]
        inside = inside & columns_inside(start, sizes[len(sizes) - 1], COLUMNS)
    return tl.load(pointer + offset, mask=inside, other=OTHER, eviction_policy=KEPT)


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
    """The zero point, saturated: none, the host's (saturated there), or a tensor's, rounded if floating."""
    if ZERO == "none":
        return tl.zeros([1, 1], tl.int32)
    elif ZERO == "host":
        return tl.zeros([1, 1], tl.int32) + value
    else:
        z = load_shared(pointer, row, start, rows, sizes, strides, 0, BY_ROW, BY_COLUMN, COLUMNS)
        if z.dtype.is_floating():
            return whole_zero_point(z)
        else:
            return tl.minimum(tl.maximum(z, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)


def compile_contiguous(kernel: Any, args: type[Args]) -> None:
    """Prepare ``kernel`` for contiguous tensors, the scale and the zero point in tensors too.

    The tensors are without memory: only what they are like matters here.
    """
    desc: ScaledDescriptor = kernel.desc
    made: dict[str, torch.Tensor] = {}
    for field in fields(cast(Any, args)):
        if field.name in ("scale", "zero_point"):
            dtype = torch.float32 if field.name == "scale" else torch.int32
            made[field.name] = torch.empty(desc.view.scale_shape, dtype=dtype, device="meta")
        elif field.name != "accumulate":
            shape, dtype = desc.expected(field.name)
            made[field.name] = torch.empty(shape, dtype=dtype, device="meta")
    kernel.prepare(args(**made))


def alike_by_column(space: Space, tensors: int) -> bool:
    """Whether scales differ by column, and the tensors have their elements at the same offsets.

    A tile then has several rows, and it counts that the offsets of each are found once.
    """
    tensor_strides, scale_strides = space.strides[:tensors], space.strides[tensors:]
    return any(own[-1] for own in scale_strides) and all(own == tensor_strides[0] for own in tensor_strides)


class TiledKernel(AffineKernel[D]):
    """A kernel over tiles, for args whose operands are so many ``tensors``, then the scale and zero point.

    ``packed`` is the position of the codes, if these may share bytes.
    """

    kernel: Any
    args: type[Args]
    tensors = 2
    packed: int | None = None

    def compile(self) -> None:
        compile_contiguous(self, self.args)

    def prepare(self, args: Any) -> Launch[Any]:
        operands = args.operands()
        tensors, shared = operands[: self.tensors], operands[self.tensors :]
        packed = self.packed if self.desc.per_byte > 1 else None
        space = affine_space(self.desc, tensors, shared, packed=packed)
        return self.launch(args, space, tensors, shared, 1 if packed is None else self.desc.per_byte)

    def launch(
        self,
        args: Any,
        space: Space,
        tensors: Sequence[torch.Tensor],
        shared: Sequence[Operand],
        per_byte: int,
    ) -> Launch[Any]:
        """Lay the kernel out over ``space``."""
        return launch_over(
            self.kernel,
            in_bytes(space, None if per_byte == 1 else self.packed, per_byte),
            self.device,
            tensors,
            shared,
            per_byte=per_byte,
            **self.layout(args, space),
        )

    def layout(self, args: Any, space: Space) -> dict[str, Any]:
        """What else ``launch_over`` is to know."""
        raise NotImplementedError


def in_bytes(space: Space, packed: int | None, per_byte: int) -> Space:
    """The space with the rows of the packed operand counted in bytes instead of codes."""
    if packed is None:
        return space
    strides = list(space.strides)
    strides[packed] = (*(step // per_byte for step in strides[packed][:-1]), 1)
    return replace(space, strides=tuple(strides))


def in_pairs(space: Space) -> Space:
    """The space of packed codes, two to a byte, with two neighbours as one column.

    What elements share is that of the first of two; the other's is half a column further on.
    """
    codes, values, *shared = space.strides
    halved = [(*(step // 2 for step in own[:-1]), 1) for own in (codes, values)]
    doubled = [(*own[:-1], 2 * own[-1]) for own in shared]
    return Space((*space.sizes[:-1], space.columns // 2), (*halved, *doubled))


def launch_over(
    kernel: Any,
    space: Space,
    device: torch.device,
    tensors: Sequence[torch.Tensor],
    shared: Sequence[Operand],
    limits: tuple[int, ...] = (),
    per_byte: int = 1,
    per_column: int = 1,
    tile: int = TILE,
    scaled_tile: int = TILE,
    looped: bool = False,
    registers: int | None = None,
    **constants: Any,
) -> Launch[Any]:
    """Lay ``kernel`` out over ``space``.

    ``tensors`` and ``shared`` are its operands in the order of the space; ``limits`` are integers that follow
    the host's scale and zero point; ``per_byte`` codes share a byte of the codes; ``per_column`` elements are
    one column of the space; ``tile`` is how many elements a tile has, ``scaled_tile`` if each column has a
    scale of its own. A ``looped`` kernel takes several tiles then, and their number after the columns.
    ``registers`` is as in ``prepare``. A value of the host needs a pointer all the same, and gets the first
    one.
    """
    scales = space.strides[len(tensors) :]
    by_row, by_column = any(any(own[:-1]) for own in scales), any(own[-1] for own in scales)
    size, widest = (scaled_tile, SCALED_COLUMNS) if by_column else (tile, 0)
    rows, columns = _tile(space, len(tensors), size // per_column, widest // per_column)
    on_host = [position for position, operand in enumerate(shared) if not isinstance(operand, torch.Tensor)]
    zero_points = tuple(clamp_zero_point(o) if isinstance(o, int) else 0 for o in shared[1:])
    if len(shared) > 1:
        constants["ZERO"] = "tensor" if 1 not in on_host else "host" if any(zero_points) else "none"
    below, beside = -(-space.rows // rows), -(-space.columns // columns)
    steps = _steps(below * beside) if looped and by_column and not by_row else 1
    way, grid = _grid(-(-below // steps), beside)
    constants |= {
        "COMPUTE": tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32,
        "SCALE_ON_HOST": 0 in on_host,
        "PER_BYTE": per_byte,
        "BY_ROW": by_row,
        "BY_COLUMN": by_column,
        "ROWS": rows,
        "COLUMNS": columns,
        "GRID": way,
    }
    run = prepare(
        kernel,
        grid=grid,
        device=device,
        tensors=_pointers((*tensors, *shared)),
        scalars=(WIDE, *zero_points, *limits),
        settled=(
            space.rows,
            -(-space.columns // per_byte),
            *((steps,) if looped else ()),
            _loops(space),
            *_merged(space),
        ),
        constants=constants,
        num_warps=max(1, min(WARPS, rows * columns // 256)),
        registers=registers,
    )
    scale_on_host, interpreting = 0 in on_host, interpreted()
    fixed = (0, *zero_points, *limits)

    def launch(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
        pointers = _pointers(args.operands()) if interpreting else ()
        addresses = [address or addresses[0] for address in addresses]
        scalars = (_double_bits(args.scale), *fixed[1:]) if scale_on_host else fixed
        run(stream.handle, pointers, addresses, scalars)

    def launch_on_tensors(stream: Stream, workspace: Workspace, args: Any, addresses: Sequence[int]) -> None:
        run(stream.handle, (), addresses, fixed)

    return launch if on_host or interpreting else launch_on_tensors


def _pointers(operands: Sequence[Operand]) -> list[torch.Tensor]:
    output = operands[0]
    assert isinstance(output, torch.Tensor)
    return [operand if isinstance(operand, torch.Tensor) else output for operand in operands]


def _loops(space: Space) -> tuple[Any, ...]:
    """The loops of the rows, each with the numbers that divide by its size, then the columns.

    With l = ceil(log2 size), ceil(2^(31 + l) / size) is less than one above 2^(31 + l) / size. That makes its
    product with a row below 2^31, over 2^(31 + l), less than 1 / size too large: its whole part is right.
    The high half of the product is to be shifted by l - 1; what is passed is two more. A 1 would become a
    constant of the kernel, and Triton 3.6 loses its place in a tuple within a loop.
    """
    rows = [(size, max(1, (size - 1).bit_length())) for size in space.sizes[:-1]]
    return *((size, -(-(2 ** (31 + log)) // size), log + 1) for size, log in rows), space.columns


def _merged(space: Space) -> Iterator[tuple[int, ...]]:
    """The strides of each operand, those of its rows as one where they are one loop to it."""
    sizes = space.sizes
    for own in space.strides:
        one = all(own[d] == sizes[d + 1] * own[d + 1] for d in range(len(sizes) - 2))
        yield own[-2:] if one else own


def _double_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _steps(tiles: int) -> int:
    """How many tiles a program takes, so that enough programs are left: a power of two."""
    return min(STEPS, 2 ** max(0, (tiles // PROGRAMS).bit_length() - 1))


def _grid(below: int, beside: int) -> tuple[str, tuple[int, int]]:
    """How programs are numbered, for so many tiles below and beside each other, and the grid.

    Programs follow the memory: one that starts after another works beside it, or below if all columns are
    taken. That takes no division unless there are more tiles below each other than the second axis holds.
    """
    if beside == 1:
        return "rows", (below, 1)
    if below <= GRID_LIMIT:
        return "columns and rows", (beside, below)
    return "tiles", (beside * below, 1)


def _tile(space: Space, tensors: int, tile: int, most_columns: int) -> tuple[int, int]:
    """Rows and columns of a ``tile`` of so many elements; ``most_columns`` is 0 for any number.

    It is wide along the columns; square if one of the tensors runs across them.
    """
    columns = triton.next_power_of_2(space.columns)
    if any(own[-1] > 1 for own in space.strides[:tensors]):
        columns = min(columns, 64)
    elif most_columns:
        columns = min(columns, most_columns)
    columns = max(min(columns, tile), 4)
    return min(tile // columns, triton.next_power_of_2(space.rows)), columns
