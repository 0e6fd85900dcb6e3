"""Triton: load the scales and zero points of a tile, and launch a kernel over tiles.

A scale or a zero point is loaded once per tile, row, column or element, as its granularity requires.
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
from holdfast.backends.gpu_tiles import VECTOR, columns_inside, tile_row_offsets
from holdfast.backends.steps import Steps, operand_names
from holdfast.backends.tuning import Tuned, warps_for
from holdfast.core.operands import Operand
from holdfast.core.plan import Args, Launch
from holdfast.core.strided import Space
from holdfast.numerics.gpu import ZERO_POINT_LIMIT, whole_zero_point, widen
from holdfast.ops.affine.plan import AffineKernel, ScaledDescriptor, affine_space, clamp_zero_point

D = TypeVar("D", bound=ScaledDescriptor)


@dataclass(frozen=True)
class Tuning:
    """Tile sizes and limits of the tiled kernels."""

    #: Elements per tile, and the most warps per tile.
    tile: int = 4096
    warps: int = 4
    #: Most columns of a tile if each column has a scale. Few, so that many rows reuse a column's scale.
    scaled_columns: int = 256
    #: Most tiles per program, one below the other, and the fewest programs that must remain.
    steps: int = 8
    programs: int = 1024
    #: Most programs along the second axis of a grid.
    grid_limit: int = 65535
    #: Minimum columns for a second launch, if there is one row and its last vector is not whole.
    least_split: int = 2**20


TUNING = Tuned(gpu=Tuning(), interpreter=Tuning(least_split=1000))
#: Cache hint of loads: keep inputs in the cache longer than outputs. It saves 1 to 2 percent of the time of
#: a large tensor on an H200, whether or not the next kernel reads the output.
EVICT_LAST = tl.constexpr("evict_last")


@triton.jit
def load_per_scale(
    pointer, row, start, rows, sizes, strides, OTHER: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load a scale or a zero point: one per tile, per row (BY_ROW), per column (BY_COLUMN) or per element."""
    step = strides[len(strides) - 1]
    offset = tl.zeros([1, 1], tl.int64)
    inside = tl.full([1, 1], True, tl.int1)
    if BY_ROW:
        offset += tile_row_offsets(row, sizes, strides)[:, None]
        inside = inside & (row < rows)[:, None]
    if BY_COLUMN:
        offset += (start * step + tl.arange(0, COLUMNS) * step)[None, :]
        inside = inside & columns_inside(start, sizes[len(sizes) - 1], COLUMNS)
    return tl.load(pointer + offset, mask=inside, other=OTHER, eviction_policy=EVICT_LAST)


@triton.jit
def load_scale(
    pointer, bits, row, start, rows, sizes, strides, COMPUTE: tl.constexpr, ON_HOST: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scale in the compute type. ON_HOST: ``bits`` is a float64, which is rounded once."""
    if ON_HOST:
        scale = (tl.zeros([1, 1], tl.int64) + bits).to(tl.float64, bitcast=True)
    else:
        scale = load_per_scale(pointer, row, start, rows, sizes, strides, 1.0, BY_ROW, BY_COLUMN, COLUMNS)
    return widen(scale, COMPUTE)


@triton.jit
def load_zero_point(
    pointer, value, row, start, rows, sizes, strides, ZERO: tl.constexpr,
    BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The saturated zero point. ZERO: "none", "host" (``value`` is saturated already) or "tensor".

    A floating zero point is rounded.
    """
    if ZERO == "none":
        return tl.zeros([1, 1], tl.int32)
    elif ZERO == "host":
        return tl.zeros([1, 1], tl.int32) + value
    else:
        z = load_per_scale(pointer, row, start, rows, sizes, strides, 0, BY_ROW, BY_COLUMN, COLUMNS)
        if z.dtype.is_floating():
            return whole_zero_point(z)
        else:
            return tl.minimum(tl.maximum(z, -ZERO_POINT_LIMIT), ZERO_POINT_LIMIT)


def compile_contiguous(kernel: Any, args: type[Args]) -> None:
    """Compile ``kernel`` for contiguous tensors, with the scale and the zero point in tensors.

    The tensors are on the meta device: compiling needs only their shapes, strides and dtypes.
    """
    desc: ScaledDescriptor = kernel.desc
    tensors: dict[str, torch.Tensor] = {}
    for field in fields(cast(Any, args)):
        if field.name in ("scale", "zero_point"):
            dtype = torch.float32 if field.name == "scale" else torch.int32
            tensors[field.name] = meta_tensor(desc.view.scale_shape, dtype)
        elif field.name != "accumulate":
            tensors[field.name] = meta_tensor(*desc.expected(field.name))
    kernel.prepare(args(**tensors))


def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor without memory, for compiling."""
    return torch.empty(shape, dtype=dtype, device="meta")


def same_strides_by_column(space: Space, tensors: int) -> bool:
    """Whether scales differ by column and the first ``tensors`` operands have equal strides.

    A tile then has several rows, and computing each row's offset once for all tensors saves time.
    """
    tensor_strides, scale_strides = space.strides[:tensors], space.strides[tensors:]
    return any(own[-1] for own in scale_strides) and all(own == tensor_strides[0] for own in tensor_strides)


class TiledKernel(AffineKernel[D]):
    """A kernel over tiles.

    The operands of ``args`` are ``tensors`` tensors, then the scale and the zero point. ``packed`` is the
    position of the operand that may hold packed codes.
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
        """Add a launch of the kernel to ``steps``. ``args`` has the kernel's operands by name."""
        names = operand_names(self.args)
        operands = [getattr(args, name) for name in names]
        tensors, shared = operands[: self.tensors], operands[self.tensors :]
        packed = self.packed if self.desc.per_byte > 1 else None
        space = affine_space(self.desc, tensors, shared, packed=packed)
        layout = Layout(space, names, tensors, shared, self.tuning)
        self.add_step(steps, args, layout, 1 if packed is None else self.desc.per_byte)

    def add_step(self, steps: Steps, args: Any, layout: Layout, per_byte: int) -> None:
        """Add the launch over the tiles of ``layout``."""
        space = in_bytes(layout.space, None if per_byte == 1 else self.packed, per_byte)
        parameters = self.parameters(args, layout.space)
        add_tiles(steps, self.kernel, replace(layout, space=space), per_byte=per_byte, **parameters)

    def parameters(self, args: Any, space: Space) -> dict[str, Any]:
        """Kernel parameters that ``add_tiles`` does not compute, and options of ``add_tiles``."""
        raise NotImplementedError


def in_bytes(space: Space, packed: int | None, per_byte: int) -> Space:
    """The space with the row strides of operand ``packed`` in bytes instead of codes."""
    if packed is None:
        return space
    strides = list(space.strides)
    strides[packed] = (*(step // per_byte for step in strides[packed][:-1]), 1)
    return replace(space, strides=tuple(strides))


def in_pairs(space: Space) -> Space:
    """The space of packed 4-bit codes with two neighbours as one column.

    The scale's column stride is that of two elements: the scale of the second one is half a stride further.
    """
    codes, values, *per_scale = space.strides
    halved = [(*(step // 2 for step in own[:-1]), 1) for own in (codes, values)]
    doubled = [(*own[:-1], 2 * own[-1]) for own in per_scale]
    return Space((*space.sizes[:-1], space.columns // 2), (*halved, *doubled))


@dataclass(frozen=True)
class Layout:
    """The operands ``names`` of a launch: ``tensors``, then ``shared``, which is a scale and a zero point."""

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
    """Add a launch of ``kernel`` over the tiles of a layout.

    ``per_byte`` codes are packed in a byte, and ``per_column`` elements are one column of the space. A tile
    has ``tile`` elements, or ``scaled_tile`` if each column has a scale; a program of a kernel with the
    parameter ``steps`` then processes several tiles. The kernel receives all of ``parameters``, and each
    entry of ``offered`` that it has as a parameter.

    The compiler loads and stores vectors only if it knows that a row has a whole number of them. So a long
    row is split: a second launch processes its last columns.
    """
    options = {
        "per_byte": per_byte, "per_column": per_column, "tile": tile, "scaled_tile": scaled_tile,
        "registers": registers, **parameters,
    }  # fmt: skip
    space = layout.space
    whole = space.columns // VECTOR.value * VECTOR.value
    if space.rows > 1 or whole == space.columns or whole < layout.tuning.least_split:
        _add_launch(steps, kernel, layout, **options)
        return
    vectors = replace(space, sizes=(*space.sizes[:-1], whole))
    _add_launch(steps, kernel, replace(layout, space=vectors), **options)
    _add_launch(steps, kernel, layout, last_columns=True, **options)


def _add_launch(
    steps: Steps,
    kernel: Any,
    layout: Layout,
    *,
    per_byte: int,
    per_column: int,
    tile: int | None,
    scaled_tile: int | None,
    registers: int | None,
    last_columns: bool = False,
    **parameters: Any,
) -> None:
    """Add a launch over all columns of a layout, or over the last ones, which are no whole vector."""
    space, tensors, shared, tuning = layout.space, layout.tensors, layout.shared, layout.tuning
    taken = parameters_of(kernel.fn)
    scales = space.strides[len(tensors) :]
    by_row, by_column = any(any(own[:-1]) for own in scales), any(own[-1] for own in scales)
    size, widest = (scaled_tile, tuning.scaled_columns) if by_column else (tile, 0)
    size = size or tuning.tile
    rows, columns = _tile_shape(space, len(tensors), size // per_column, widest // per_column)
    if last_columns:
        columns = VECTOR.value
    zero_point = shared[1] if len(shared) > 1 else None
    zero_value = clamp_zero_point(zero_point) if isinstance(zero_point, int) else 0
    tiles_down, tiles_across = -(-space.rows // rows), -(-space.columns // columns)
    several = "steps" in taken and by_column and not by_row
    steps_each = _tiles_per_program(tiles_down * tiles_across, tuning) if several and not last_columns else 1
    order, grid = _grid(-(-tiles_down // steps_each), tiles_across, tuning.grid_limit)
    if last_columns:
        order, grid = "last columns", (1, 1)
    bytes_across = -(-space.columns // per_byte)
    strides = zip(layout.names, _collapsed_strides(space), strict=True)
    offered = {f"{_PARAMETER_NAMES.get(name, name)}_strides": own for name, own in strides} | {
        "scale_bits": scale_bits(shared[0]), "zero_value": zero_value, "sizes": _row_divisors(space),
        "rows": space.rows, "columns": bytes_across, "byte_columns": bytes_across, "steps": steps_each,
        "COMPUTE": tl.float64 if any(t.dtype == torch.float64 for t in tensors) else tl.float32,
        "SCALE_ON_HOST": not isinstance(shared[0], torch.Tensor),
        "ZERO": "tensor" if isinstance(zero_point, torch.Tensor) else "host" if zero_value else "none",
        "PER_BYTE": per_byte, "BY_ROW": by_row, "BY_COLUMN": by_column, "ROWS": rows, "COLUMNS": columns,
        "GRID": order,
    }  # fmt: skip
    warps = warps_for(rows * columns, tuning.warps)
    steps.add(kernel, grid, offered, num_warps=warps, registers=registers, **parameters)


#: Prefix of an operand's kernel parameters, where it differs from the operand's name.
_PARAMETER_NAMES = {"zero_point": "zero"}


def code_limits(code_range: tuple[int, int]) -> dict[str, Any]:
    """The least and the greatest code as kernel parameters."""
    return {"q_min": code_range[0], "q_max": code_range[1]}


def scale_bits(scale: Operand) -> EachRun | Wide:
    """The float64 bits of a Python scale, read from the args of each run; 0 for a tensor scale."""
    return Wide(0) if isinstance(scale, torch.Tensor) else EachRun(lambda args: double_bits(args.scale))


def _row_divisors(space: Space) -> tuple[Any, ...]:
    """(size, multiplier, shift + 2) for each loop over rows, then the number of columns.

    A kernel divides a row index r < 2^31 by a loop's size with a multiplication and a shift. Let
    l = ceil(log2 size) and multiplier m = ceil(2^(31 + l) / size). Then m exceeds 2^(31 + l) / size by less
    than 1, so r * m / 2^(31 + l) exceeds r / size by less than 2^-l <= 1 / size: its integer part is exact.
    The high 32 bits of r * m are shifted by l - 1. The tuple has l + 1 instead: Triton turns an argument of
    1 into a constant, and Triton 3.6 then loses its position in a tuple that is read in a loop.
    """
    rows = [(size, max(1, (size - 1).bit_length())) for size in space.sizes[:-1]]
    return *((size, -(-(2 ** (31 + log)) // size), log + 1) for size, log in rows), space.columns


def _collapsed_strides(space: Space) -> Iterator[tuple[int, ...]]:
    """The strides of each operand. If its rows are evenly spaced: one row stride and the column stride."""
    sizes = space.sizes
    for own in space.strides:
        evenly = all(own[d] == sizes[d + 1] * own[d + 1] for d in range(len(sizes) - 2))
        yield own[-2:] if evenly else own


def _tiles_per_program(tiles: int, tuning: Tuning) -> int:
    """Tiles per program, a power of two that leaves enough programs."""
    return min(tuning.steps, 2 ** max(0, (tiles // tuning.programs).bit_length() - 1))


def _grid(tiles_down: int, tiles_across: int, limit: int) -> tuple[str, tuple[int, int]]:
    """The kernel's GRID constant, and the grid, of ``tiles_down`` by ``tiles_across`` tiles.

    Consecutive programs process tiles of consecutive columns, then the next rows, as in memory. A kernel
    finds its tile without a division, unless ``tiles_down`` exceeds the limit of the grid's second axis.
    """
    if tiles_across == 1:
        return "rows", (tiles_down, 1)
    if tiles_down <= limit:
        return "columns and rows", (tiles_across, tiles_down)
    return "tiles", (tiles_across * tiles_down, 1)


def _tile_shape(space: Space, tensors: int, tile: int, most_columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of ``tile`` elements, with ``most_columns`` columns at most (0: no limit).

    A tile is as wide as possible. If a tensor's columns are not contiguous, it is about square.
    """
    columns = triton.next_power_of_2(space.columns)
    if any(own[-1] > 1 for own in space.strides[:tensors]):
        columns = min(columns, 64)
    elif most_columns:
        columns = min(columns, most_columns)
    columns = max(min(columns, tile), 4)
    return min(tile // columns, triton.next_power_of_2(space.rows)), columns
