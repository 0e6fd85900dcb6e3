"""dinput and dgrid of many small 2-D problems, in Triton: one program processes one image at a time.

The accumulators are those of the smallest box around all pixels that the samples of an image touch, or of
some rows of the box if it is large. A program clears them, adds the terms with integer atomics, and stores
the sums. All other pixels of the image are zero.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import math
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

    #: Accumulators of a program, programs, and warps. There are more programs if an image has many pixels.
    band: int
    programs: int
    warps: int
    #: Minimum number of images, and maximum number of samples of an image.
    least_images: int
    most_samples: int


TUNING = Tuned(
    gpu=Tuning(band=512, programs=2112, warps=4, least_images=64, most_samples=1024),
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


@triton.jit
def box_of(pixels, masks, sizes):
    """First and last x, first and last y of the pixels with a mask; one pixel if there is none."""
    x0, x1 = tl.zeros_like(pixels[0]) + sizes[0], tl.zeros_like(pixels[0])
    y0, y1 = tl.zeros_like(pixels[0]) + sizes[1], tl.zeros_like(pixels[0])
    for k in tl.static_range(4):
        x, y = pixels[k] % sizes[0], pixels[k] // sizes[0]
        x0, x1 = tl.where(masks[k], tl.minimum(x0, x), x0), tl.where(masks[k], tl.maximum(x1, x), x1)
        y0, y1 = tl.where(masks[k], tl.minimum(y0, y), y0), tl.where(masks[k], tl.maximum(y1, y), y1)
    right, bottom = tl.max(x1, 0), tl.max(y1, 0)
    return tl.minimum(tl.min(x0, 0), right), right, tl.minimum(tl.min(y0, 0), bottom), bottom


@triton.jit
def place_in_rows(pixel, mask, x0, width, y, below, sizes):
    """The accumulator of a pixel in the rows from y to ``below`` of a box, and whether it is there."""
    row = pixel // sizes[0]
    return (row - y) * width + (pixel % sizes[0] - x0), mask & (row >= y) & (row < below)


@triton.jit
def places_in_rows(pixels, masks, x0, width, y, below, sizes):
    """``place_in_rows`` of four corners."""
    p0, m0 = place_in_rows(pixels[0], masks[0], x0, width, y, below, sizes)
    p1, m1 = place_in_rows(pixels[1], masks[1], x0, width, y, below, sizes)
    p2, m2 = place_in_rows(pixels[2], masks[2], x0, width, y, below, sizes)
    p3, m3 = place_in_rows(pixels[3], masks[3], x0, width, y, below, sizes)
    return (p0, p1, p2, p3), (m0, m1, m2, m3)


@triton.jit
def sums_in_rows(
    held, pixel, x0, width, y, below, sizes, begin, shift, fraction_bits,
    BAND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The sums of BAND pixels from ``begin``, +0 outside the box."""
    value = tl.zeros([BAND], COMPUTE)
    if (begin < below * sizes[0]) & (begin + BAND > y * sizes[0]):
        column = pixel % sizes[0] - x0
        place, known = place_in_rows(pixel, (column >= 0) & (column < width), x0, width, y, below, sizes)
        # Atomics bypass the first-level cache, so loads of their results must do so too.
        total = tl.load(held + place, mask=known, other=BIAS, cache_modifier=".cg")
        value = tl.where(known, converted(total, total, shift, fraction_bits, COMPUTE), 0.0)
    return value


@triton.jit
def store_pixels(
    dinput, held, first, end, n, channel, x0, width, y, below, sizes, shift, fraction_bits, strides, step,
    FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, BAND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the pixels ``first`` to ``end`` of a channel: sums in the rows y to ``below``, else +0."""
    for begin in range(first, end, BAND):
        pixel = begin + tl.arange(0, BAND)
        value = sums_in_rows(
            held, pixel, x0, width, y, below, sizes, begin, shift, fraction_bits, BAND, COMPUTE
        )
        store_band(
            dinput, value, n, channel, pixel, pixel < end, sizes, strides, step, FLAT, ACCUMULATE, COMPUTE
        )


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
        x0, x1, y0, y1 = box_of(whole[0], whole[2], sizes)
        width = x1 - x0 + 1
        rows = BAND // width
        s0, s1, s2, s3 = zeros, zeros, zeros, zeros
        for channel in range(channels):
            base = dout + tl.full([1], channel, tl.int64) * dout_step
            d = widen(tl.load(base + at, mask=inside, other=0.0), COMPUTE)
            field = exponent_field(d)
            shift = plane_shift(tl.max(tl.where(field < 255, field, 0), 0), fraction_bits, COMPUTE)
            special = tl.max(field, 0) == 255
            change = scaled(finite_or_zero(d), shift, COMPUTE)
            for row in range(y0, y1 + 1, rows):
                # Accumulators of the rows from ``row``.
                below = tl.minimum(row + rows, y1 + 1)
                tl.store(held + lane, tl.full([BAND], BIAS, tl.int64), mask=lane < (below - row) * width)
                tl.debug_barrier()
                places, masks = places_in_rows(whole[0], whole[2], x0, width, row, below, sizes)
                for k in tl.static_range(4):
                    add_term(held, places[k], masks[k], weights[k] * change, BAND, fraction_bits, 1)
                if special:
                    mark_specials(held, places, masks, weights, d, 4)
                tl.debug_barrier()
                if y1 - y0 < rows:  # all pixels in one pass: with this constant begin, stores are wide
                    store_pixels(
                        dinput, held, 0, pixels, n, channel, x0, width, row, below, sizes, shift,
                        fraction_bits, dinput_strides, dinput_step, DINPUT_FLAT, ACCUMULATE, BAND, COMPUTE,
                    )  # fmt: skip
                else:
                    # Not a variable that each pass sets for the next: Triton 3.6 drops it, since the
                    # other branch does not set it.
                    begin = tl.where(row > y0, row * sizes[0], 0)
                    end = tl.where(below > y1, pixels, below * sizes[0])
                    store_pixels(
                        dinput, held, begin, end, n, channel, x0, width, row, below, sizes, shift,
                        fraction_bits, dinput_strides, dinput_step, DINPUT_FLAT, ACCUMULATE, BAND, COMPUTE,
                    )  # fmt: skip
                tl.debug_barrier()
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
        # Programs that need no more memory than half of dinput may all have one image.
        many = math.prod(desc.shape) * desc.input_dtype.itemsize // (16 * self.tuning.band)
        self.programs = min(desc.batch, max(self.tuning.programs, many))
        self.sums = layout.take(self.programs * self.tuning.band, torch.int64)

    @staticmethod
    def serves(desc: GridSampleBackwardDescriptor, device: torch.device) -> bool:
        """Whether there are many images with few samples each, and one chunk of channels."""
        tuning = TUNING.on(device)
        kind = desc.mode == Mode.BILINEAR and desc.axes == 2 and desc.compute.bits == 32 and desc.needs_dinput
        few = 0 < desc.samples <= tuning.most_samples and 0 < desc.channels <= indexed.CHUNK
        return kind and few and desc.batch >= tuning.least_images and desc.shape[-1] <= tuning.band

    def add_steps(self, steps: Steps, args: GridSampleBackwardArgs) -> None:
        """Add the launch."""
        tile = max(triton.next_power_of_2(self.desc.samples), 32)
        steps.add(
            differentiate_images, self.programs, operands_of(self.desc, args, 0, self.desc.batch),
            constants_of(self.tuning), sampling_constants(self.desc),
            sums=self.sums, programs=self.programs, images=self.desc.batch, TILE=tile,
            DGRID=args.dgrid is not None, num_warps=self.tuning.warps,
        )  # fmt: skip
