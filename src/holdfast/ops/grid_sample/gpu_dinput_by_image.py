"""dinput and dgrid of many small 2-D problems, in Triton: one program processes one image at a time.

A program has few accumulators, for one band of pixels. It stores zeros in the bands that no sample touches.
For the other bands it clears the accumulators, adds the terms with integer atomics, and stores the sums.
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
from holdfast.backends.tuning import Tuned, constants_of
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_cells import place_offset
from holdfast.ops.grid_sample.gpu_coordinates import locate, offset_of, sampling_constants, unravel
from holdfast.ops.grid_sample.gpu_dinput_by_sample import (
    add_products,
    add_slopes,
    add_term,
    mark_specials,
    operands_of,
    quad_of,
    quad_weights,
    store_changes,
)
from holdfast.ops.grid_sample.gpu_integer_sums import (
    BIAS,
    converted,
    exponent_field,
    finite_or_zero,
    plane_shift,
    scaled,
)
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor, Mode
from holdfast.ops.segment_sum import indexed


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``differentiate_images``."""

    #: Pixels of a band, programs, and warps.
    band: int
    programs: int
    warps: int
    #: Minimum number of images, and maximum number of samples of an image.
    least_images: int
    most_samples: int


TUNING = Tuned(
    gpu=Tuning(band=1024, programs=2112, warps=4, least_images=64, most_samples=1024),
    interpreter=Tuning(band=64, programs=2, warps=4, least_images=5, most_samples=256),
)


@triton.jit
def store_band(
    dinput, value, n, channel, number, inside, sizes, strides, step,
    FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the pixels ``number`` of a channel, or add to them if ACCUMULATE."""
    at = dinput + n * strides[0] + tl.full([1], channel, tl.int64) * step
    at += place_offset(number, sizes, strides, 2, FLAT)
    if ACCUMULATE:
        value = widen(tl.load(at, mask=inside, other=0.0), COMPUTE) + value
    tl.store(at, narrow(value, dinput.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["programs", "images", "fraction_bits"])
def differentiate_images(
    dinput, dgrid, sums, dout, image, grid,
    programs, images, fraction_bits, channels, samples, pixels, sizes, out_sizes,
    dinput_strides, dgrid_strides, dout_strides, image_strides, grid_strides,
    dinput_step, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DGRID: tl.constexpr, OFFSET: tl.constexpr,
    DINPUT_FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, BAND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th image, with all its samples in one tile."""
    follow()
    held = sums + tl.program_id(0).to(tl.int64) * BAND
    lane, sample = tl.arange(0, BAND), tl.arange(0, TILE)
    inside = sample < samples
    x, y, z = unravel(tl.minimum(sample, samples - 1), out_sizes, AXES)
    zeros = tl.zeros([TILE], COMPUTE)
    for number in range(tl.program_id(0), images, programs):
        n = tl.full([1], number, tl.int64)
        first, t, scale = locate(
            grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
            AXES, MODE, PADDING, ALIGNED, COMPUTE,
        )  # fmt: skip
        at = offset_of(n, x, y, z, dout_strides)
        weights = quad_weights(t, 0, AXES, TAPS, MODE)
        whole = quad_of(
            first, n, inside, 0, pixels, sizes, image_strides,
            0, AXES, TAPS, MODE, PADDING, ALIGNED, False, OFFSET,
        )  # fmt: skip
        # The band of each corner's pixel lies between those of the first and the last touched pixel.
        low, high = tl.full([TILE], pixels, tl.int32), tl.full([TILE], -1, tl.int32)
        for k in tl.static_range(4):
            low = tl.where(whole[2][k], tl.minimum(low, whole[0][k]), low)
            high = tl.where(whole[2][k], tl.maximum(high, whole[0][k]), high)
        lowest, highest = tl.min(low, 0), tl.max(high, 0)
        s0, s1, s2, s3 = zeros, zeros, zeros, zeros
        for channel in range(channels):
            base = dout + tl.full([1], channel, tl.int64) * dout_step
            d = widen(tl.load(base + at, mask=inside, other=0.0), COMPUTE)
            field = exponent_field(d)
            shift = plane_shift(tl.max(tl.where(field < 255, field, 0), 0), fraction_bits, COMPUTE)
            special = tl.max(field, 0) == 255
            change = scaled(finite_or_zero(d), shift, COMPUTE)
            for begin in range(0, pixels, BAND):
                pixel = begin + lane
                if (highest >= begin) & (lowest < begin + BAND):
                    tl.store(held + lane, tl.full([BAND], BIAS, tl.int64))
                    tl.debug_barrier()
                    quad = quad_of(
                        first, n, inside, begin, BAND, sizes, image_strides,
                        0, AXES, TAPS, MODE, PADDING, ALIGNED, True, OFFSET,
                    )  # fmt: skip
                    for k in tl.static_range(4):
                        add_term(held, quad[0][k], quad[2][k], weights[k] * change, BAND, fraction_bits, 1)
                    if special:
                        mark_specials(held, quad[0], quad[2], weights, d, 4)
                    tl.debug_barrier()
                    # Atomics bypass the first-level cache, so loads of their results must do so too.
                    total = tl.load(held + lane, cache_modifier=".cg")
                    tl.debug_barrier()
                    value = converted(total, total, shift, fraction_bits, COMPUTE)
                    store_band(
                        dinput, value, n, channel, pixel, pixel < pixels, sizes, dinput_strides, dinput_step,
                        DINPUT_FLAT, ACCUMULATE, COMPUTE,
                    )  # fmt: skip
                else:
                    store_band(
                        dinput, tl.zeros([BAND], COMPUTE), n, channel, pixel, pixel < pixels, sizes,
                        dinput_strides, dinput_step, DINPUT_FLAT, ACCUMULATE, COMPUTE,
                    )  # fmt: skip
            if DGRID:
                s0, s1, s2, s3 = add_products(
                    s0, s1, s2, s3, d, image, channel, image_step, whole[1], COMPUTE
                )
        if DGRID:
            changes = add_slopes((zeros, zeros, zeros), (s0, s1, s2, s3), whole[3], t, 0, AXES, TAPS, MODE)
            target = offset_of(n, x, y, z, dgrid_strides)
            store_changes(dgrid, target, changes, scale, inside, dgrid_step, AXES, MODE, ACCUMULATE, COMPUTE)


class ImageSums:
    """Workspace region and launch of ``differentiate_images``."""

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor
    ) -> None:
        self.desc, self.tuning = desc, TUNING.on(device)
        self.programs = min(desc.batch, self.tuning.programs)
        self.sums = layout.take(self.programs * self.tuning.band, torch.int64)

    @staticmethod
    def serves(desc: GridSampleBackwardDescriptor, device: torch.device) -> bool:
        """Whether there are many images with few samples each, and one chunk of channels."""
        tuning = TUNING.on(device)
        kind = desc.mode == Mode.BILINEAR and desc.axes == 2 and desc.compute.bits == 32 and desc.needs_dinput
        few = 0 < desc.samples <= tuning.most_samples and 0 < desc.channels <= indexed.CHUNK
        return kind and few and desc.batch >= tuning.least_images

    def add_steps(self, steps: Steps, args: GridSampleBackwardArgs) -> None:
        """Add the launch."""
        tile = max(triton.next_power_of_2(self.desc.samples), 32)
        steps.add(
            differentiate_images, self.programs, operands_of(self.desc, args, 0, self.desc.batch),
            constants_of(self.tuning), sampling_constants(self.desc),
            sums=self.sums, programs=self.programs, images=self.desc.batch, TILE=tile,
            DGRID=args.dgrid is not None, num_warps=self.tuning.warps,
        )  # fmt: skip
