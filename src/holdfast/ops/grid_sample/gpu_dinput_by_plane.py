"""dinput and dgrid of small problems of every mode, in Triton: one launch.

For few samples, launches take longer than the kernels. A program has one plane: it finds the scale, clears
the accumulators, adds the terms of all samples with integer atomics, and stores the plane of dinput. Further
programs compute dgrid.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_cells import place_offset
from holdfast.ops.grid_sample.gpu_coordinates import sampling_constants
from holdfast.ops.grid_sample.gpu_dinput_by_sample import BLOCK, add_tile, operands_of
from holdfast.ops.grid_sample.gpu_integer_sums import BIAS, converted, exponent_field, plane_shift
from holdfast.ops.grid_sample.gpu_terms import SPECIAL
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor, Mode


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``differentiate_planes``."""

    #: Maximum number of planes, and of elements of all planes. An element is a pixel, or four corners.
    most_planes: int
    most_elements: int
    #: Maximum number of elements of a plane: with few channels, with many, and where the alternative is
    #: ``SampleSums``, which is slow with many channels.
    most_places: int
    most_places_of_many: int
    most_places_of_others: int
    #: Minimum number of channels that are many.
    many: int
    #: Maximum number of channels for dgrid in bilinear mode.
    most_channels: int
    #: Samples of a tile, elements of a plane that are loaded together, and warps.
    tile: int
    vector: int
    warps: int


TUNING = Tuned(
    gpu=Tuning(
        most_planes=4096, most_elements=2**20, most_places=2048, most_places_of_many=4096,
        most_places_of_others=2**14, many=5, most_channels=32, tile=256, vector=1024, warps=8,
    ),
    interpreter=Tuning(
        most_planes=8, most_elements=530, most_places=100, most_places_of_many=100,
        most_places_of_others=100, many=5, most_channels=4, tile=64, vector=64, warps=4,
    ),
)  # fmt: skip


@triton.jit
def store_plane(
    dinput, sums, shift, n, channel, fraction_bits, pixels, sizes, strides, step,
    AXES: tl.constexpr, FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
    WORDS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store the pixels of a plane."""
    base = dinput + n.to(tl.int64) * strides[0] + channel.to(tl.int64) * step
    for begin in range(0, pixels, VECTOR):
        number = begin + tl.arange(0, VECTOR)
        inside = number < pixels
        # Atomics bypass the first-level cache, so loads of their results must do so too.
        total = tl.load(sums + number, mask=inside, other=BIAS, cache_modifier=".cg")
        fraction = total
        if WORDS == 2:
            fraction = tl.load(sums + pixels + number, mask=inside, other=BIAS, cache_modifier=".cg")
        value = converted(total, fraction, shift, fraction_bits, COMPUTE)
        at = base + place_offset(number, sizes, strides, AXES, FLAT)
        if ACCUMULATE:
            value = widen(tl.load(at, mask=inside, other=0.0), COMPUTE) + value
        tl.store(at, narrow(value, dinput.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["planes", "tiles", "fraction_bits"])
def differentiate_planes(
    dinput, dgrid, sums, words, dout, image, grid,
    planes, tiles, fraction_bits, channels, samples, pixels, sizes, out_sizes,
    dinput_strides, dgrid_strides, dout_strides, image_strides, grid_strides,
    dinput_step, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DGRID: tl.constexpr, MERGE: tl.constexpr,
    WORDS: tl.constexpr, MANY_CHANNELS: tl.constexpr, OFFSET: tl.constexpr, FLAT: tl.constexpr,
    DINPUT_FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A plane of dinput, or the dgrid of TILE samples."""
    follow()
    program = tl.program_id(0)
    if program < planes:
        n = program // channels
        channel = program - n * channels
        own_dout = dout + channel.to(tl.int64) * dout_step
        base = own_dout + n.to(tl.int64) * dout_strides[0]
        FIELD: tl.constexpr = 2047 if COMPUTE == tl.float64 else 255
        most, not_finite = tl.zeros([VECTOR], tl.int32), tl.zeros([VECTOR], tl.int32)
        for begin in range(0, samples, VECTOR):
            sample = begin + tl.arange(0, VECTOR)
            at = base + place_offset(sample, out_sizes, dout_strides, AXES, FLAT)
            field = exponent_field(widen(tl.load(at, mask=sample < samples, other=0.0), COMPUTE))
            most = tl.maximum(most, tl.where(field < FIELD, field, 0))
            not_finite = tl.maximum(not_finite, (field == FIELD).to(tl.int32))
        largest = tl.max(most, 0)
        tl.store(words + program, largest + tl.max(not_finite, 0) * SPECIAL)
        own_sums = sums + program.to(tl.int64) * (pixels * WORDS)
        for begin in range(0, pixels * WORDS, VECTOR):
            number = begin + tl.arange(0, VECTOR)
            tl.store(own_sums + number, tl.full([VECTOR], BIAS, tl.int64), mask=number < pixels * WORDS)
        tl.debug_barrier()
        # The image of one channel: its plane has the number n.
        for tile in range(tiles):
            add_tile(
                dgrid, own_sums - n.to(tl.int64) * (pixels * WORDS), words + (program - n), own_dout, image,
                grid, n * tiles + tile, 0, tiles, pixels, fraction_bits, 1, samples, sizes, out_sizes,
                dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step,
                grid_step, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, True, False, False, MERGE, 1, WORDS,
                1, False, OFFSET, ACCUMULATE, TILE,
            )  # fmt: skip
        tl.debug_barrier()
        store_plane(
            dinput, own_sums, plane_shift(largest, fraction_bits, COMPUTE), n, channel, fraction_bits, pixels,
            sizes, dinput_strides, dinput_step, AXES, DINPUT_FLAT, ACCUMULATE, COMPUTE, WORDS, VECTOR,
        )  # fmt: skip
    elif DGRID:
        add_tile(
            dgrid, sums, words, dout, image, grid, program - planes, 0, tiles, pixels, fraction_bits,
            channels, samples, sizes, out_sizes, dgrid_strides, dout_strides, image_strides, grid_strides,
            dgrid_step, dout_step, image_step, grid_step, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, False,
            True, False, False, 0, WORDS, 1, MANY_CHANNELS, OFFSET, ACCUMULATE, TILE,
        )  # fmt: skip


class PlaneSums:
    """Workspace regions and launch of ``differentiate_planes``."""

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor, budget: int
    ) -> None:
        self.desc, self.tuning = desc, TUNING.on(device)
        self.planes, self.WORDS = desc.batch * desc.channels, 2 if desc.compute.bits == 64 else 1
        self.words = layout.take(self.planes, torch.int32)
        self.sums = layout.take(self.planes * desc.pixels * self.WORDS, torch.int64)
        self.fits = layout.size <= budget

    @staticmethod
    def serves(desc: GridSampleBackwardDescriptor, device: torch.device) -> bool:
        """Whether dinput is needed, and small."""
        tuning, planes = TUNING.on(device), desc.batch * desc.channels
        if not desc.needs_dinput or not planes or not desc.samples or planes > tuning.most_planes:
            return False
        places = max(desc.samples * desc.corners // 4, desc.pixels)
        most = tuning.most_places
        if desc.channels >= tuning.many:
            others = desc.mode != Mode.BILINEAR or desc.compute.bits == 64
            most = tuning.most_places_of_others if others else tuning.most_places_of_many
        return places <= most and planes * places <= tuning.most_elements

    @property
    def computes_dgrid(self) -> bool:
        """Whether dgrid is computed too. With many channels, ``grid_gradient`` is faster in bilinear mode."""
        desc = self.desc
        own = desc.mode != Mode.BILINEAR or desc.channels <= self.tuning.most_channels
        return desc.needs_dgrid and own

    def add_steps(self, steps: Steps, args: GridSampleBackwardArgs) -> None:
        """Add the launch."""
        desc, tuning = self.desc, self.tuning
        tiles, needs_dgrid = -(-desc.samples // tuning.tile), self.computes_dgrid
        steps.add(
            differentiate_planes, self.planes + desc.batch * tiles * needs_dgrid,
            operands_of(desc, args, 0, desc.batch), sampling_constants(desc),
            sums=self.sums, words=self.words, planes=self.planes, tiles=tiles, DGRID=needs_dgrid,
            MERGE=desc.mode == Mode.BILINEAR and self.WORDS == 1, WORDS=self.WORDS,
            MANY_CHANNELS=desc.channels > BLOCK.value, TILE=tuning.tile, VECTOR=tuning.vector,
            num_warps=tuning.warps,
        )  # fmt: skip
