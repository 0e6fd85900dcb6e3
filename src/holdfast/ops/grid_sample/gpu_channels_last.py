"""Rows of channels, in Triton: dout copied so that the channels of a sample lie side by side."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.backends import interpreted
from holdfast.backends.gpu import StepOperand, Steps, follow
from holdfast.core.pieces import Piece
from holdfast.ops.grid_sample.gpu_coordinates import (
    grid_strides_of,
    kind_of,
    locate,
    offset_of,
    sizes_of,
    split,
    strides_of,
)
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor

#: Shorter rows are read faster where they are.
LEAST_BYTES = 32
#: Elements of a tile, and the most channels of one.
TILE, CHANNELS = (2**20, 64) if interpreted() else (4096, 64)
WARPS = 4


@triton.jit
def put_fractions(fractions, target, t, inside):
    """How far samples are from their corners nw, along x and y."""
    tl.store(fractions + 2 * target.to(tl.int64), t[0], mask=inside)
    tl.store(fractions + 2 * target.to(tl.int64) + 1, t[1], mask=inside)


@triton.jit(do_not_specialize=["count", "samples", "tiles"])
def copy_rows(
    rows, fractions, dout, ranks, grid,
    count, samples, channels, tiles, sizes, out_sizes, dout_strides, dout_step, grid_strides, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, RANKED: tl.constexpr, SAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some samples, in some channels. RANKED ones go where they belong, and so do their fractions."""
    follow()
    tile = tl.program_id(0) % tiles
    number = tl.program_id(0) // tiles * SAMPLES + tl.arange(0, SAMPLES)
    inside = number < count
    n = number // samples
    x, y, z = split(number - n * samples, out_sizes, AXES)
    channel = (tile * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    mask = inside[:, None] & (channel < channels)
    source = dout + offset_of(n, x, y, z, dout_strides)[:, None] + channel.to(tl.int64) * dout_step
    value = tl.load(source, mask=mask, other=0.0)
    if RANKED:
        target = tl.load(ranks + number, mask=inside, other=0)
        if tile == 0:
            _first, t, _scale = locate(
                grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
                AXES, MODE, PADDING, ALIGNED, COMPUTE,
            )  # fmt: skip
            put_fractions(fractions, target, t, inside)
    else:
        target = number
    tl.store(rows + (target.to(tl.int64) * channels)[:, None] + channel, value, mask=mask)


def worth_copying(desc: GridSampleBackwardDescriptor) -> bool:
    """Whether rows are long enough."""
    return desc.channels * desc.input_dtype.itemsize >= LEAST_BYTES


def add_copy(
    steps: Steps,
    desc: GridSampleBackwardDescriptor,
    args: GridSampleBackwardArgs,
    images: int,
    rows: Piece,
    dout: StepOperand,
    ranked: tuple[Piece, Piece, StepOperand] | None = None,
) -> None:
    """Copy dout; ``ranked`` are the fractions to be written, the ranks, and the grid."""
    channels = min(triton.next_power_of_2(desc.channels), CHANNELS)
    samples, tiles = TILE // channels, -(-desc.channels // channels)
    fractions, ranks, grid = ranked or (rows, rows, rows)
    steps.add(
        copy_rows,
        -(-images * desc.samples // samples) * tiles,
        (rows, fractions, dout, ranks, grid),
        (
            images * desc.samples, desc.samples, desc.channels, tiles,
            sizes_of(desc.image_size), sizes_of(desc.output_size),
            strides_of(args.dout), args.dout.stride(1), grid_strides_of(args.grid), args.grid.stride(-1),
        ),
        {**kind_of(desc), "RANKED": ranked is not None, "SAMPLES": samples, "CHANNELS": channels},
        WARPS,
    )  # fmt: skip
