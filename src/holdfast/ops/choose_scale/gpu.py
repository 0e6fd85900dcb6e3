"""Triton: the range of the elements of each scale, and the scale for that range.

A segment is the elements of one scale. The bits of two floats of equal sign, read as integers, have the order
of the floats, with NaN above infinity. So the extremes of a segment are maxima of integers, which do not
depend on the order. A program loops over the tiles of some segments, or of a piece of each, and keeps a
maximum for each position of a tile. The maxima of pieces go to the workspace, and ``join`` combines them.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu_tiles import VECTOR, columns_inside, row_offsets
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned, constants_of, warps_for
from holdfast.core.plan import Launch
from holdfast.core.segments import Segments, segments_by_memory
from holdfast.core.strided import contiguous_strides
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import WHOLE_64
from holdfast.ops.affine.gpu import meta_tensor
from holdfast.ops.affine.plan import AffineKernel, ScaledDescriptor
from holdfast.ops.choose_scale import plan
from holdfast.ops.choose_scale import plan as plans

SCALE_FLOOR = tl.constexpr(plan.SCALE_FLOOR)
#: 1.5 * 2^23. Adding and subtracting it rounds a much smaller float32 to an integer, half to even.
MAGIC = tl.constexpr(12582912.0)

#: Pipeline stages of the loop over tiles.
STAGES = tl.constexpr(3)


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``Observer``."""

    #: Bytes per tile. A tile with two maxima per position has half of them.
    tile_bytes: int = 16384
    #: Most columns of a tile if each column is a segment.
    separate_columns: int = 512
    #: Programs that fill the device a few times. With fewer programs, segments are divided into pieces.
    programs: int = 2048
    #: Maximum number of warps of a program.
    warps: int = 4
    #: Most segments of a tile of ``join``, and most elements.
    joined_segments: int = 256
    joined: int = 2048


TUNING = Tuned(gpu=Tuning())


@triton.jit
def integers(values):
    """The bits of floats as sign-extended integers of at least 32 bits."""
    if values.dtype == tl.float64:
        return values.to(tl.int64, bitcast=True)
    elif values.dtype == tl.float32:
        return values.to(tl.int32, bitcast=True)
    else:
        return values.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def magnitudes(values):
    """The bits of |values| as integers."""
    SIZE: tl.constexpr = values.dtype.primitive_bitwidth
    return integers(values) & (2 ** (SIZE - 1) - 1)


@triton.jit
def negated_bits(bits, SIZE: tl.constexpr):
    """The bits of floats of SIZE bits with the opposite sign."""
    return bits ^ (-(2 ** (SIZE - 1)))


@triton.jit
def real(bits, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """The floats of type DTYPE with these bits, in the compute type."""
    if DTYPE == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(COMPUTE)
    else:
        return bits.to(COMPUTE, bitcast=True)


@triton.jit
def divided(x, y):
    """x / y, correctly rounded. y may be a scalar."""
    y = tl.zeros(x.shape, x.dtype) + y.to(x.dtype)
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def ends_of_range(below, above, DTYPE: tl.constexpr, COMPUTE: tl.constexpr):
    """low and high from the largest bits of negative and of positive elements. Both are NaN if one is."""
    low = 0.0 - real(below, DTYPE, COMPUTE)
    high = real(above, DTYPE, COMPUTE)
    return tl.where(high == high, low, high), tl.where(low == low, high, low)


@triton.jit
def floored(scale):
    """max(scale, SCALE_FLOOR). NaN stays NaN."""
    floor = tl.full(scale.shape, SCALE_FLOOR, scale.dtype)
    return tl.where(scale < floor, floor, scale)


@triton.jit
def scale_of_range(low, high, lowest, highest, SYMMETRIC: tl.constexpr):
    """The scale that maps low to high onto the codes lowest to highest."""
    if SYMMETRIC:
        up = divided(high, highest)
        down = divided(low, lowest)
        scale = tl.where(down > up, down, up)
    else:
        scale = divided(high * 0.5 - low * 0.5, highest - lowest) * 2.0
    return floored(scale)


@triton.jit
def scale_of_magnitude(magnitude, highest):
    """The symmetric scale that maps -magnitude to magnitude onto the codes -highest to highest."""
    return floored(divided(magnitude, highest))


@triton.jit
def zero_point_of_range(low, scale, lowest, highest):
    """lowest - rint(low / scale). A NaN quotient counts as 0."""
    t = divided(low, scale)
    t = tl.where(t == t, t, 0.0)
    whole = WHOLE_64 if t.dtype == tl.float64 else MAGIC
    r = (t - whole) + whole
    return tl.minimum(tl.maximum(lowest - r.to(tl.int32), lowest), highest)


@triton.jit
def maxima(bits, COLUMNS_WITHIN: tl.constexpr):
    """The maximum of each segment in a tile of [rows within, segments, columns]. Reduced axes have size 1."""
    bits = tl.max(bits, axis=0, keep_dims=True)
    if COLUMNS_WITHIN:
        bits = tl.max(bits, axis=2, keep_dims=True)
    return bits


@triton.jit
def put_results(
    first, second, below, above, lowest, highest, at_first, at_second, inside,
    RESULT: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the RESULT: a range, a scale, or a scale and a zero point."""
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
    RAGGED: tl.constexpr, ONE_STEP: tl.constexpr,
    ROWS: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The results of SEGMENTS segments, or with IN_PIECES the extremes of one piece of each.

    The columns are ``column_tiles`` tiles. With COLUMNS_WITHIN the columns of a row belong to one segment.
    Otherwise each column is a segment, and ``segments`` counts rows of such segments.
    RAGGED: there is one contiguous row, and its last vector is not whole. Every program loads that one
    separately: the compiler loads vectors only if it knows that all are whole.
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
    end = columns // VECTOR * VECTOR if RAGGED else columns
    above = tl.zeros([ROWS, SEGMENTS, COLUMNS], BITS)
    below = tl.zeros([ROWS, SEGMENTS, COLUMNS] if RESULT != "magnitude" else [1, 1, 1], BITS)
    for k in tl.range(1 if ONE_STEP else steps, num_stages=STAGES):
        at = piece * steps + k
        if COLUMNS_WITHIN:
            start = (at % column_tiles).to(tl.int64) * COLUMNS
            at = at // column_tiles
        row = at.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        offset = base + row_offsets(row, within_sizes, x_within)[:, None, None]
        inside = known & (row < rows)[:, None, None] & columns_inside(start, end, COLUMNS)[None, :, :]
        values = tl.load(x + (offset + start * step) + column * step, mask=inside, other=0.0)
        if RESULT == "magnitude":
            above = tl.maximum(above, magnitudes(values))
        else:
            bits = integers(values)
            above = tl.maximum(above, bits)
            below = tl.maximum(below, negated_bits(bits, SIZE))
    above = maxima(above, COLUMNS_WITHIN)
    if RESULT != "magnitude":
        below = maxima(below, COLUMNS_WITHIN)
    if RAGGED:
        last = end + tl.arange(0, VECTOR)[None, None, :].to(tl.int64)
        values = tl.load(x + last, mask=last < columns, other=0.0)
        if RESULT == "magnitude":
            above = tl.maximum(above, maxima(magnitudes(values), True))
        else:
            bits = integers(values)
            above = tl.maximum(above, maxima(bits, True))
            below = tl.maximum(below, maxima(negated_bits(bits, SIZE), True))
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


@triton.jit(do_not_specialize=["lowest", "highest", "count", "piece_count"])
def join(
    first, second, pieces,
    lowest, highest,
    count, piece_count, sizes, first_strides, second_strides,
    RESULT: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The results of ``count`` segments from the extremes of their pieces, ``piece_count`` per segment."""
    segment = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    BITS: tl.constexpr = pieces.dtype.element_ty
    above = tl.zeros([ROWS, COLUMNS], BITS)
    below = tl.zeros([ROWS, COLUMNS], BITS)
    for begin in range(0, piece_count, ROWS):
        piece = begin + tl.arange(0, ROWS)
        inside = (piece < piece_count)[:, None] & (segment < count)[None, :]
        place = piece.to(tl.int64)[:, None] * count + segment[None, :]
        above = tl.maximum(above, tl.load(pieces + place, mask=inside, other=0))
        if RESULT != "magnitude":
            place += piece_count.to(tl.int64) * count
            below = tl.maximum(below, tl.load(pieces + place, mask=inside, other=0))
    put_results(
        first, second, tl.max(below, axis=0), tl.max(above, axis=0), lowest, highest,
        row_offsets(segment, sizes, first_strides), row_offsets(segment, sizes, second_strides),
        segment < count, RESULT, DTYPE, COMPUTE,
    )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """A tile of [rows within a segment, segments, columns]."""

    rows: int
    segments: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.segments * self.columns


def tile_of(walk: Segments, most: int, tuning: Tuning) -> Tile:
    """A tile of up to ``most`` elements: as many columns as possible, then the dimension next in memory."""
    width = most if walk.columns_within else min(most, tuning.separate_columns)
    columns = min(width, power_of_2(walk.columns))
    rows, count = power_of_2(walk.within.rows), power_of_2(walk.over.rows)
    if walk.columns_within:
        count = min(count, most // columns)
        rows = min(rows, most // (columns * count))
    else:
        rows = min(rows, most // columns)
        count = min(count, most // (columns * rows))
    return Tile(rows, count, columns)


def power_of_2(size: int) -> int:
    return int(triton.next_power_of_2(max(size, 1)))


def _grid(walk: Segments, tile: Tile) -> tuple[int, int]:
    """Programs if segments are not divided, and tiles per segment."""
    across = -(-walk.columns // tile.columns)
    programs, steps = -(-walk.over.rows // tile.segments), -(-walk.within.rows // tile.rows)
    return (programs, steps * across) if walk.columns_within else (programs * across, steps)


def walk_parameters(walk: Segments, tile: Tile) -> dict[str, Any]:
    """The parameters of a kernel that follow from its walk, with the strides of x first, and its tile."""
    return constants_of(tile) | {
        "segments": walk.over.rows, "rows": walk.within.rows, "columns": walk.columns,
        "column_tiles": -(-walk.columns // tile.columns), "over_sizes": walk.over.sizes,
        "within_sizes": walk.within.sizes, "x_over": walk.over.strides[0], "x_within": walk.within.strides[0],
        "COLUMNS_WITHIN": walk.columns_within,
    }  # fmt: skip


def _pieces_per_segment(walk: Segments, tile: Tile, tuning: Tuning) -> int:
    programs, steps = _grid(walk, tile)
    return max(1, min(-(-tuning.programs // programs), steps // 2))


#: Words of workspace per piece of a segment, by result.
WORDS = {"magnitude": 1, "symmetric": 2, "affine": 2, "range": 2}


class Observer:
    """The launches that compute extremes: one kernel, or two if segments are divided into pieces.

    ``result`` is "range"; "magnitude", a scale for equally many codes above and below zero; "symmetric", a
    scale; or "affine", a scale and a zero point. Without ``in_pieces`` no workspace is needed, and long
    segments are slower.
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
        self.tuning = TUNING.on(device)
        self.tile = self.tuning.tile_bytes // desc.input_dtype.itemsize // WORDS[result]
        self.most_pieces = 1
        if in_pieces and not desc.empty:
            walk = segments_by_memory(desc.view, [contiguous_strides(desc.shape)], ())
            tile = tile_of(walk, self.tile, self.tuning)
            self.most_pieces = _pieces_per_segment(walk, tile, self.tuning)
        words = self.most_pieces * desc.view.scale_count * WORDS[result] if self.most_pieces > 1 else 0
        self.layout = WorkspaceLayout()
        self.maxima = self.layout.take(words, self.word)

    def add_steps(self, steps: Steps, args: Any, first: str, second: str) -> None:
        """Add the launches. They write to the operands ``first`` and ``second`` of ``args``."""
        x: torch.Tensor = args.x
        walk = segments_by_memory(self.desc.view, [x.stride()], (getattr(args, first), getattr(args, second)))
        tuning = self.tuning
        tile = tile_of(walk, self.tile, tuning)
        programs, depth = _grid(walk, tile)
        piece_count = min(self.most_pieces, _pieces_per_segment(walk, tile, tuning))
        depth = -(-depth // piece_count)
        over = walk.over.strides
        step = over[0][-1] + walk.within.strides[0][-1]
        single = walk.columns_within and walk.over.rows == walk.within.rows == step == 1
        compute = tl.float64 if x.dtype == torch.float64 else tl.float32
        common = {"first": first, "second": second, "lowest": self.ends[0], "highest": self.ends[1]}
        steps.add(
            observe, (programs, piece_count), common, walk_parameters(walk, tile),
            pieces=self.maxima if piece_count > 1 else first, steps=depth,
            column_steps=(over[1][-1], over[2][-1], step),
            first_strides=over[1], second_strides=over[2],
            RESULT=self.result, COMPUTE=compute, IN_PIECES=piece_count > 1, ONE_STEP=depth == 1,
            RAGGED=single and walk.columns % VECTOR.value > 0,
            num_warps=warps_for(tile.size, tuning.warps),
        )  # fmt: skip
        if piece_count == 1:
            return
        columns = min(power_of_2(walk.count), tuning.joined_segments)
        rows = min(power_of_2(piece_count), tuning.joined // columns)
        steps.add(
            join, -(-walk.count // columns), common,
            pieces=self.maxima, count=walk.count, piece_count=piece_count, sizes=(*walk.over.sizes, 1),
            first_strides=(*over[1], 0), second_strides=(*over[2], 0),
            RESULT=self.result, DTYPE=_TYPES[x.dtype], COMPUTE=compute, ROWS=rows, COLUMNS=columns,
            num_warps=warps_for(rows * columns, tuning.warps),
        )  # fmt: skip

    def launch(self, args: Any, first: str, second: str) -> Launch[Any]:
        """A launch of these steps only."""
        steps = Steps(self.device, args)
        self.add_steps(steps, args, first, second)
        return steps.launch


_TYPES = {
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
    torch.float64: tl.float64,
}  # fmt: skip


def result_of(symmetric: bool, ends: tuple[int, int]) -> str:
    """The kernels' RESULT. "magnitude" is enough if lowest is -highest."""
    if not symmetric:
        return "affine"
    return "magnitude" if ends[0] == -ends[1] else "symmetric"


class ObserveRange(AffineKernel[plans.ObserveRangeDescriptor]):
    """``observe`` with RESULT "range"."""

    def __init__(self, desc: plans.ObserveRangeDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        self.observer = Observer(desc, device, "range", (0, 0))
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        made = {name: meta_tensor(*self.desc.expected(name)) for name in ("x", "low", "high")}
        self.prepare(plans.ObserveRangeArgs(**made))

    def prepare(self, args: plans.ObserveRangeArgs) -> Launch[plans.ObserveRangeArgs]:
        return self.observer.launch(args, "low", "high")


class ChooseScale(AffineKernel[plans.ChooseScaleDescriptor]):
    """``observe`` for a scale, with or without a zero point."""

    def __init__(self, desc: plans.ChooseScaleDescriptor, device: torch.device) -> None:
        super().__init__(desc, device)
        ends = desc.ends(*desc.code_range)
        self.observer = Observer(desc, device, result_of(desc.symmetric, ends), ends)
        self.set_workspace(self.observer.layout)

    def compile(self) -> None:
        names = ("x", "scale") if self.desc.symmetric else ("x", "scale", "zero_point")
        self.prepare(
            plans.ChooseScaleArgs(**{name: meta_tensor(*self.desc.expected(name)) for name in names})
        )

    def prepare(self, args: plans.ChooseScaleArgs) -> Launch[plans.ChooseScaleArgs]:
        return self.observer.launch(args, "scale", "zero_point")
