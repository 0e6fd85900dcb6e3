"""Scales and zero points of a tile, in Triton, and how a launch over tiles is laid out.

What elements share (scale, zero point) is loaded once per row, once per column, or once per tile, as it
varies.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import EachRun, Wide, double_bits, parameters_of
from holdfast.backends.gpu_tiles import columns_inside, tile_row_offsets
from holdfast.backends.steps import Steps, operand_names
from holdfast.backends.tuning import Tuned
from holdfast.core.operands import Operand
from holdfast.core.plan import Args, Launch
from holdfast.core.strided import Space
from holdfast.numerics.gpu import ZERO_POINT_LIMIT, whole_zero_point, widen
from holdfast.ops.affine.plan import AffineKernel, ScaledDescriptor, affine_space, clamp_zero_point

D = TypeVar("D", bound=ScaledDescriptor)


@dataclass(frozen=True)
class Tuning:
    """The tuning of kernels over tiles."""

    #: Elements of a tile, and the warps that share them.
    tile: int = 4096
    warps: int = 4
    #: Columns of a tile where each has a scale of its own: few, so that many rows share what is made of it.
    scaled_columns: int = 256
    #: The most tiles that a program takes, one below the other, and the fewest programs to be left by that.
    steps: int = 8
    programs: int = 1024
    #: The most programs along the second axis of a grid.
    grid_limit: int = 65535


TUNING = Tuned(gpu=Tuning())
#: A hint to the cache: what is read may stay there longer than what is written. It saves one to two per cent
#: of the time of a large tensor on an H200, whether or not what is written is read next.
KEPT = tl.constexpr("evict_last")


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

    def __init__(self, desc: D, device: torch.device) -> None:
        super().__init__(desc, device)
        self.tuning = TUNING.on(device)

    def compile(self) -> None:
        compile_contiguous(self, self.args)

    def prepare(self, args: Any) -> Launch[Any]:
        steps = Steps(self.device, args)
        self.add_steps(steps, args)
        return steps.launch

    def add_steps(self, steps: Steps, args: Any) -> None:
        """Add the kernel to the steps of ``args``, which have the operands of this kernel by name."""
        names = operand_names(self.args)
        operands = [getattr(args, name) for name in names]
        tensors, shared = operands[: self.tensors], operands[self.tensors :]
        packed = self.packed if self.desc.per_byte > 1 else None
        space = affine_space(self.desc, tensors, shared, packed=packed)
        layout = Layout(space, names, tensors, shared, self.tuning)
        self.add_step(steps, args, layout, 1 if packed is None else self.desc.per_byte)

    def add_step(self, steps: Steps, args: Any, layout: Layout, per_byte: int) -> None:
        """Lay the kernel out."""
        space = in_bytes(layout.space, None if per_byte == 1 else self.packed, per_byte)
        parameters = self.parameters(args, layout.space)
        add_tiles(steps, self.kernel, replace(layout, space=space), per_byte=per_byte, **parameters)

    def parameters(self, args: Any, space: Space) -> dict[str, Any]:
        """The parameters that ``add_tiles`` does not offer, and the options of ``add_tiles``."""
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


@dataclass(frozen=True)
class Layout:
    """The loops over the operands called ``names``: ``tensors``, then what is ``shared``, a scale first."""

    space: Space
    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    shared: Sequence[Operand]
    tuning: Tuning


def add_tiles(
    steps: Steps,
    kernel: Any,
    layout: Layout,
    *,
    per_byte: int = 1,
    per_column: int = 1,
    tile: int | None = None,
    scaled_tile: int | None = None,
    registers: int | None = None,
    **parameters: Any,
) -> None:
    """Add ``kernel`` over the tiles of a layout.

    ``per_byte`` codes share a byte of the codes; ``per_column`` elements are one column of the space. A tile
    has ``tile`` elements, or ``scaled_tile`` if each column has a scale of its own; a kernel with a parameter
    ``steps`` then takes several tiles. The kernel is given those of the parameters below that it has, and all
    of ``parameters``.
    """
    space, tensors, shared, tuning = layout.space, layout.tensors, layout.shared, layout.tuning
    taken = parameters_of(kernel.fn)
    scales = space.strides[len(tensors) :]
    by_row, by_column = any(any(own[:-1]) for own in scales), any(own[-1] for own in scales)
    size, widest = (scaled_tile, tuning.scaled_columns) if by_column else (tile, 0)
    size = size or tuning.tile
    rows, columns = _tile(space, len(tensors), size // per_column, widest // per_column)
    zero_point = shared[1] if len(shared) > 1 else None
    zero_value = clamp_zero_point(zero_point) if isinstance(zero_point, int) else 0
    below, beside = -(-space.rows // rows), -(-space.columns // columns)
    number = _steps(below * beside, tuning) if "steps" in taken and by_column and not by_row else 1
    way, grid = _grid(-(-below // number), beside, tuning.grid_limit)
    bytes_across = -(-space.columns // per_byte)
    offered = {
        **{name: name for name in layout.names},
        **{
            f"{_SHORT.get(name, name)}_strides": own
            for name, own in zip(layout.names, _merged(space), strict=True)
        },
        "scale_bits": scale_bits(shared[0]),
        "zero_value": zero_value,
        "rows": space.rows,
        "columns": bytes_across,
        "byte_columns": bytes_across,
        "steps": number,
        "sizes": _loops(space),
        "COMPUTE": tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32,
        "SCALE_ON_HOST": not isinstance(shared[0], torch.Tensor),
        "ZERO": "tensor" if isinstance(zero_point, torch.Tensor) else "host" if zero_value else "none",
        "PER_BYTE": per_byte,
        "BY_ROW": by_row,
        "BY_COLUMN": by_column,
        "ROWS": rows,
        "COLUMNS": columns,
        "GRID": way,
    }
    steps.add(
        kernel,
        grid,
        **{name: value for name, value in offered.items() if name in taken},
        **parameters,
        num_warps=max(1, min(tuning.warps, rows * columns // 256)),
        registers=registers,
    )


#: How a kernel's parameters call an operand, where its own name is long.
_SHORT = {"zero_point": "zero"}


def limits(code_range: tuple[int, int]) -> dict[str, Any]:
    """The least and the greatest code, as parameters of a kernel."""
    return {"q_min": code_range[0], "q_max": code_range[1]}


def scale_bits(scale: Operand) -> EachRun | Wide:
    """The bits of a scale of the host, which may change from run to run; 0 if the scale is in a tensor."""
    return Wide(0) if isinstance(scale, torch.Tensor) else EachRun(lambda args: double_bits(args.scale))


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


def _steps(tiles: int, tuning: Tuning) -> int:
    """How many tiles a program takes, so that enough programs are left: a power of two."""
    return min(tuning.steps, 2 ** max(0, (tiles // tuning.programs).bit_length() - 1))


def _grid(below: int, beside: int, limit: int) -> tuple[str, tuple[int, int]]:
    """How programs are numbered, for so many tiles below and beside each other, and the grid.

    Programs follow the memory: one that starts after another works beside it, or below if all columns are
    taken. That takes no division unless there are more tiles below each other than the second axis's limit.
    """
    if beside == 1:
        return "rows", (below, 1)
    if below <= limit:
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
