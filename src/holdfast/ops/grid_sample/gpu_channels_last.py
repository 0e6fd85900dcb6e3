"""A copy of dout with channels last, in Triton: one row of channels per sample."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import StepOperand, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import Region
from holdfast.ops.grid_sample.gpu_coordinates import (
    grid_strides_of,
    locate,
    offset_of,
    sampling_constants,
    sizes_of,
    strides_of,
    unravel,
)
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor

#: Rows of fewer bytes are not copied.
LEAST_BYTES = 32


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``copy_rows``: elements of a tile, its maximum channels, and the warps."""

    tile: int
    channels: int = 64
    warps: int = 4


TUNING = Tuned(gpu=Tuning(tile=4096), interpreter=Tuning(tile=2**20))


@triton.jit
def store_fractions(fractions, target, t, inside):
    """Store the fractions of samples along x and y."""
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
    """Copy SAMPLES samples in CHANNELS channels. RANKED: in sorted order, with their fractions."""
    follow()
    tile = tl.program_id(0) % tiles
    number = tl.program_id(0) // tiles * SAMPLES + tl.arange(0, SAMPLES)
    inside = number < count
    n = number // samples
    x, y, z = unravel(number - n * samples, out_sizes, AXES)
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
            store_fractions(fractions, target, t, inside)
    else:
        target = number
    tl.store(rows + (target.to(tl.int64) * channels)[:, None] + channel, value, mask=mask)


def worth_copying(desc: GridSampleBackwardDescriptor) -> bool:
    """Whether rows have at least LEAST_BYTES."""
    return desc.channels * desc.input_dtype.itemsize >= LEAST_BYTES


def add_copy(
    steps: Steps,
    device: torch.device,
    desc: GridSampleBackwardDescriptor,
    args: GridSampleBackwardArgs,
    images: int,
    rows: Region,
    dout: StepOperand,
    ranked: tuple[Region, Region, StepOperand] | None = None,
) -> None:
    """Add the launch that copies dout; ``ranked`` are the fractions to write, the ranks, and the grid."""
    tuning = TUNING.on(device)
    channels = min(triton.next_power_of_2(desc.channels), tuning.channels)
    samples, tiles = tuning.tile // channels, -(-desc.channels // channels)
    fractions, ranks, grid = ranked or (rows, rows, rows)
    steps.add(
        copy_rows,
        -(-images * desc.samples // samples) * tiles,
        rows=rows,
        fractions=fractions,
        dout=dout,
        ranks=ranks,
        grid=grid,
        count=images * desc.samples,
        samples=desc.samples,
        channels=desc.channels,
        tiles=tiles,
        sizes=sizes_of(desc.image_size),
        out_sizes=sizes_of(desc.output_size),
        dout_strides=strides_of(args.dout),
        dout_step=args.dout.stride(1),
        grid_strides=grid_strides_of(args.grid),
        grid_step=args.grid.stride(-1),
        **sampling_constants(desc),
        RANKED=ranked is not None,
        SAMPLES=samples,
        CHANNELS=channels,
        num_warps=tuning.warps,
    )
