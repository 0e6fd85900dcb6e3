"""The range of each scale's elements, and the scale that follows from it, in Triton.

The bits of two floats of one sign compare as integers like the floats themselves, and NaN above infinity.
So the extremes of a segment are maxima of integers: exact in any order, with NaN as the largest of all. A
program walks down a segment, or a piece of one, and keeps a maximum for each element of its tile; pieces
leave theirs in the workspace, for a second kernel to join.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import columns_inside, row_offsets
from holdfast.backends.steps import Steps
from holdfast.core.plan import Launch
from holdfast.core.segments import Segments, segments_by_memory
from holdfast.core.strided import contiguous_strides
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import WHOLE_64
from holdfast.ops.affine.plan import AffineKernel, ScaledDescriptor
from holdfast.ops.choose_scale import plan
from holdfast.ops.choose_scale.plan import (
    ChooseScaleArgs,
    ChooseScaleDescriptor,
    ObserveRangeArgs,
    ObserveRangeDescriptor,
)

SCALE_FLOOR = tl.constexpr(plan.SCALE_FLOOR)
#: 1.5 * 2^23: adding and subtracting it rounds a float32 that is far smaller to an integer, half to even.
MAGIC = tl.constexpr(12582912.0)

#: Bytes of a tile, halved where two maxima are kept for each element, and the warps that share it.
TILE_BYTES = 16384
WARPS = 4
#: Tiles of a program that are on their way at a time.
STAGES = tl.constexpr(3)
#: Columns of a tile where each belongs to another segment.
SEPARATE_COLUMNS = 512
#: As many programs as fill the device a few times over; segments are cut into pieces until there are so many.
PROGRAMS = 2048


@triton.jit
def integers(values):
    """The bits of floats as integers of at least 32 bits, which keep their sign."""
    if values.dtype == tl.float64:
        return values.to(tl.int64, bitcast=True)
    elif values.dtype == tl.float32:
        return values.to(tl.int32, bitcast=True)
    else:
        return values.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def magnitudes(values):
    """The bits of |values|, as integers."""
    SIZE: tl.constexpr = values.dtype.primitive_bitwidth
    return integers(values) & (2 ** (SIZE - 1) - 1)


@triton.jit
def opposites(bits, SIZE: tl.constexpr):
    """The bits of the floats with the other sign, SIZE bits long."""
    return bits ^ (-(2 ** (SIZE - 1)))


@triton.jit
def real(bits, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """The floats of type DTYPE that have these bits, in the compute type."""
    if DTYPE == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(COMPUTE)
    else:
        return bits.to(COMPUTE, bitcast=True)


@triton.jit
def divided(x, y):
    """x / y, correctly rounded; y may be a scalar."""
    y = tl.zeros(x.shape, x.dtype) + y.to(x.dtype)
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def ends_of_range(below, above, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """low and high, from the largest bits of negative and of positive elements; both NaN if one is."""
    low = 0.0 - real(below, DTYPE, COMPUTE)
    high = real(above, DTYPE, COMPUTE)
    return tl.where(high == high, low, high), tl.where(low == low, high, low)


@triton.jit
def floored(scale):
    """A scale that is not too small; NaN stays."""
    floor = tl.full(scale.shape, SCALE_FLOOR, scale.dtype)
    return tl.where(scale < floor, floor, scale)


@triton.jit
def scale_of_range(low, high, lowest, highest, SYMMETRIC: tl.constexpr):
    """The scale that spreads low to high over the codes lowest to highest."""
    if SYMMETRIC:
        up = divided(high, highest)
        down = divided(low, lowest)
        scale = tl.where(down > up, down, up)
    else:
        scale = divided(high * 0.5 - low * 0.5, highest - lowest) * 2.0
    return floored(scale)


@triton.jit
def scale_of_magnitude(magnitude, highest):
    """The symmetric scale that spreads -magnitude to magnitude over as many codes on either side of 0."""
    return floored(divided(magnitude, highest))


@triton.jit
def zero_point_of_range(low, scale, lowest, highest):
    """lowest - rint(low / scale), the quotient taken for 0 where it is NaN."""
    t = divided(low, scale)
    t = tl.where(t == t, t, 0.0)
    whole = WHOLE_64 if t.dtype == tl.float64 else MAGIC
    r = (t - whole) + whole
    return tl.minimum(tl.maximum(lowest - r.to(tl.int32), lowest), highest)


@triton.jit
def joined(bits, COLUMNS_WITHIN: tl.constexpr):
    """The maximum of each segment in a tile of [rows within, segments, columns]; the axes stay."""
    bits = tl.max(bits, axis=0, keep_dims=True)
    if COLUMNS_WITHIN:
        bits = tl.max(bits, axis=2, keep_dims=True)
    return bits


@triton.jit
def put_results(
    first, second, below, above, lowest, highest, at_first, at_second, inside,
    RESULT: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store what is asked for: a range, a scale, or a scale and a zero point."""
    if RESULT == "magnitude":
        tl.store(first + at_first, scale_of_magnitude(real(above, DTYPE, COMPUTE), highest), mask=inside)
    else:
        low, high = ends_of_range(below, above, DTYPE, COMPUTE)
        if RESULT == "range":
            tl.store(first + at_first, low, mask=inside)
            tl.store(second + at_second, high, mask=inside)
        else:
            scale = scale_of_range(low, high, lowest, highest, RESULT == "symmetric")
            tl.store(first + at_first, scale, mask=inside)
            if RESULT == "affine":
                z = zero_point_of_range(low, scale, lowest, highest)
                tl.store(second + at_second, z, mask=inside)


@triton.jit(do_not_specialize=["lowest", "highest", "segments", "rows", "steps"])
def observe(
    first, second, x, pieces,
    lowest, highest,
    segments, rows, columns, column_tiles, steps,
    column_steps, over_sizes, first_strides, second_strides, x_over, within_sizes, x_within,
    RESULT: tl.constexpr, COMPUTE: tl.constexpr, IN_PIECES: tl.constexpr, COLUMNS_WITHIN: tl.constexpr,
    AT_ONCE: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What follows from the extremes of SEGMENTS segments, or those of a piece of each.

    The columns are ``column_tiles`` tiles wide. They run within the segments, or each is a segment of its
    own: then ``segments`` counts the rows of these.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth
    BITS: tl.constexpr = tl.int64 if SIZE == 64 else tl.int32
    program = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    if COLUMNS_WITHIN:
        tile = program
        start = tl.zeros([], tl.int64)
    else:
        tile = program // column_tiles
        start = (program % column_tiles) * COLUMNS
    segment = tile * SEGMENTS + tl.arange(0, SEGMENTS)
    known = (segment < segments)[None, :, None]
    base = row_offsets(segment, over_sizes, x_over)[None, :, None]
    step = column_steps[2]
    column = tl.arange(0, COLUMNS)[None, None, :].to(tl.int64)
    above = tl.zeros([ROWS, SEGMENTS, COLUMNS], BITS)
    below = tl.zeros([ROWS, SEGMENTS, COLUMNS] if RESULT != "magnitude" else [1, 1, 1], BITS)
    for k in tl.range(1 if AT_ONCE else steps, num_stages=STAGES):
        at = piece * steps + k
        if COLUMNS_WITHIN:
            start = (at % column_tiles).to(tl.int64) * COLUMNS
            at = at // column_tiles
        row = at.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        offset = base + row_offsets(row, within_sizes, x_within)[:, None, None]
        inside = known & (row < rows)[:, None, None] & columns_inside(start, columns, COLUMNS)[None, :, :]
        values = tl.load(x + (offset + start * step) + column * step, mask=inside, other=0.0)
        if RESULT == "magnitude":
            above = tl.maximum(above, magnitudes(values))
        else:
            bits = integers(values)
            above = tl.maximum(above, bits)
            below = tl.maximum(below, opposites(bits, SIZE))
    above = joined(above, COLUMNS_WITHIN)
    if RESULT != "magnitude":
        below = joined(below, COLUMNS_WITHIN)
    if COLUMNS_WITHIN:
        start = tl.zeros([], tl.int64)
        column = tl.zeros([1, 1, 1], tl.int64)
        width = 1
        exists = known
    else:
        width = columns
        exists = known & columns_inside(start, columns, COLUMNS)[None, :, :]
    if IN_PIECES:
        count = segments * width
        place = piece.to(tl.int64) * count + segment[None, :, None] * width + start + column
        tl.store(pieces + place, above, mask=exists)
        if RESULT != "magnitude":
            tl.store(pieces + tl.num_programs(1).to(tl.int64) * count + place, below, mask=exists)
    else:
        at_first = row_offsets(segment, over_sizes, first_strides)[None, :, None]
        at_second = row_offsets(segment, over_sizes, second_strides)[None, :, None]
        put_results(
            first, second, below, above, lowest, highest,
            at_first + (start + column) * column_steps[0], at_second + (start + column) * column_steps[1],
            exists, RESULT, DTYPE, COMPUTE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lowest", "highest", "count", "number"])
def join(
    first, second, pieces,
    lowest, highest,
    count, number, sizes, first_strides, second_strides,
    RESULT: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What follows from the extremes of ``count`` segments, of which each has ``number`` pieces."""
    segment = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    BITS: tl.constexpr = pieces.dtype.element_ty
    above = tl.zeros([ROWS, COLUMNS], BITS)
    below = tl.zeros([ROWS, COLUMNS], BITS)
    for begin in range(0, number, ROWS):
        piece = begin + tl.arange(0, ROWS)
        inside = (piece < number)[:, None] & (segment < count)[None, :]
        place = piece.to(tl.int64)[:, None] * count + segment[None, :]
        above = tl.maximum(above, tl.load(pieces + place, mask=inside, other=0))
        if RESULT != "magnitude":
            place += number.to(tl.int64) * count
            below = tl.maximum(below, tl.load(pieces + place, mask=inside, other=0))
    put_results(
        first, second, tl.max(below, axis=0), tl.max(above, axis=0), lowest, highest,
        row_offsets(segment, sizes, first_strides), row_offsets(segment, sizes, second_strides),
        segment < count, RESULT, DTYPE, COMPUTE,
    )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """Rows within a segment, segments, and columns of a tile."""

    rows: int
    segments: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.segments * self.columns


def tile_of(walk: Segments, most: int) -> Tile:
    """A tile of up to ``most`` elements: wide along the columns, then over what lies beside them."""
    width = min(most, SEPARATE_COLUMNS if not walk.columns_within else most)
    columns = min(width, power(walk.columns))
    rows, count = power(walk.within.rows), power(walk.over.rows)
    if walk.columns_within:
        count = min(count, most // columns)
        rows = min(rows, most // (columns * count))
    else:
        rows = min(rows, most // columns)
        count = min(count, most // (columns * rows))
    return Tile(rows, count, columns)


def power(size: int) -> int:
    return int(triton.next_power_of_2(max(size, 1)))


def _grid(walk: Segments, tile: Tile) -> tuple[int, int, int]:
    """Programs without pieces, the tiles across the columns, and the tiles down a segment."""
    across = -(-walk.columns // tile.columns)
    programs, steps = -(-walk.over.rows // tile.segments), -(-walk.within.rows // tile.rows)
    return (programs, across, steps * across) if walk.columns_within else (programs * across, across, steps)


def _pieces(walk: Segments, tile: Tile) -> int:
    """Into how many pieces each segment is cut."""
    programs, _, steps = _grid(walk, tile)
    return max(1, min(-(-PROGRAMS // programs), steps // 2))


#: How many words of the workspace each piece of a segment takes.
WORDS = {"magnitude": 1, "symmetric": 2, "affine": 2, "range": 2}


class Observer:
    """The launches that find extremes: in one go, or in pieces that are joined.

    ``result`` says what is wanted of them: "range"; "magnitude", a scale for as many codes above as below
    zero; "symmetric", a scale; "affine", a scale and a zero point. Without ``in_pieces`` there is no need
    of a workspace, and long segments take long.
    """

    def __init__(
        self,
        desc: ScaledDescriptor,
        device: torch.device,
        result: str,
        ends: tuple[int, int],
        in_pieces: bool = True,
    ) -> None:
        self.desc, self.device, self.result, self.ends = desc, device, result, ends
        self.word = torch.int64 if desc.input_dtype.itemsize == 8 else torch.int32
        self.tile = TILE_BYTES // desc.input_dtype.itemsize // WORDS[result]
        self.most_pieces = 1
        if in_pieces and not desc.empty:
            walk = segments_by_memory(desc.view, [contiguous_strides(desc.shape)], ())
            self.most_pieces = _pieces(walk, tile_of(walk, self.tile))
        words = self.most_pieces * desc.view.scale_count * WORDS[result] if self.most_pieces > 1 else 0
        self.layout = WorkspaceLayout()
        self.maxima = self.layout.take(words, self.word)

    def add_steps(self, steps: Steps, args: Any, first: str, second: str) -> None:
        """Add the launches. The results go to the operands ``first`` and ``second`` of ``args``."""
        x: torch.Tensor = args.x
        walk = segments_by_memory(self.desc.view, [x.stride()], (getattr(args, first), getattr(args, second)))
        tile = tile_of(walk, self.tile)
        programs, across, depth = _grid(walk, tile)
        number = min(self.most_pieces, _pieces(walk, tile))
        depth = -(-depth // number)
        over, within = walk.over, walk.within
        compute = tl.float64 if x.dtype == torch.float64 else tl.float32
        lowest, highest = self.ends
        steps.add(
            observe,
            (programs, number),
            first=first,
            second=second,
            x="x",
            pieces=self.maxima if number > 1 else first,
            lowest=lowest,
            highest=highest,
            segments=over.rows,
            rows=within.rows,
            columns=walk.columns,
            column_tiles=across,
            steps=depth,
            column_steps=(
                over.strides[1][-1],
                over.strides[2][-1],
                over.strides[0][-1] + within.strides[0][-1],
            ),
            over_sizes=over.sizes,
            first_strides=over.strides[1],
            second_strides=over.strides[2],
            x_over=over.strides[0],
            within_sizes=within.sizes,
            x_within=within.strides[0],
            RESULT=self.result,
            COMPUTE=compute,
            IN_PIECES=number > 1,
            COLUMNS_WITHIN=walk.columns_within,
            AT_ONCE=depth == 1,
            ROWS=tile.rows,
            SEGMENTS=tile.segments,
            COLUMNS=tile.columns,
            num_warps=max(1, min(WARPS, tile.size // 256)),
        )
        if number == 1:
            return
        columns = min(power(walk.count), 256)
        rows = min(power(number), 2048 // columns)
        steps.add(
            join,
            -(-walk.count // columns),
            first=first,
            second=second,
            pieces=self.maxima,
            lowest=lowest,
            highest=highest,
            count=walk.count,
            number=number,
            sizes=(*over.sizes, 1),
            first_strides=(*over.strides[1], 0),
            second_strides=(*over.strides[2], 0),
            RESULT=self.result,
            DTYPE=_TYPES[x.dtype],
            COMPUTE=compute,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=max(1, min(WARPS, rows * columns // 256)),
        )

    def launch(self, args: Any, first: str, second: str) -> Launch[Any]:
        """A launch of these steps alone."""
        steps = Steps(self.device, args)
        self.add_steps(steps, args, first, second)
        return steps.launch


_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def result_of(symmetric: bool, ends: tuple[int, int]) -> str:
    """What the kernels are asked for: magnitudes do where there are as many codes on either side of 0."""
    if not symmetric:
        return "affine"
    return "magnitude" if ends[0] == -ends[1] else "symmetric"


class ObserveRange(AffineKernel[ObserveRangeDescriptor]):
    """``observe`` for a range."""

    def __init__(self, desc: ObserveRangeDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.observer = Observer(desc, device, "range", (0, 0))
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        made = {name: meta_tensor(*self.desc.expected(name)) for name in ("x", "low", "high")}
        self.prepare(ObserveRangeArgs(**made))

    def prepare(self, args: ObserveRangeArgs) -> Launch[ObserveRangeArgs]:
        return self.observer.launch(args, "low", "high")


class ChooseScale(AffineKernel[ChooseScaleDescriptor]):
    """``observe`` for scales, with or without a zero point."""

    def __init__(self, desc: ChooseScaleDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        ends = desc.ends(*desc.code_range)
        self.observer = Observer(desc, device, result_of(desc.symmetric, ends), ends)
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        names = ("x", "scale") if self.desc.symmetric else ("x", "scale", "zero_point")
        self.prepare(ChooseScaleArgs(**{name: meta_tensor(*self.desc.expected(name)) for name in names}))

    def prepare(self, args: ChooseScaleArgs) -> Launch[ChooseScaleArgs]:
        return self.observer.launch(args, "scale", "zero_point")


def meta_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory: only what it is like matters."""
    return torch.empty(shape, dtype=dtype, device="meta")
