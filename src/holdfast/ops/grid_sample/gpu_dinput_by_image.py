"""dinput and dgrid of many small 2-D problems, in Triton: one program processes one image at a time.

The accumulators are those of the smallest box around all pixels that the samples of an image touch, or of
some rows of the box if it is large. A program clears them, adds the terms with integer atomics, and stores
the sums. All other pixels of the image are zero.

The samples of an image often form a window: they are one pixel apart. Then every pixel of the box sums the
terms of at most four samples, which neighbouring lanes hold, and no accumulators are needed.
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
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_cells import cell_of, place_offset
from holdfast.ops.grid_sample.gpu_coordinates import (
    load_coordinate,
    located,
    offset_of,
    sampling_constants,
)
from holdfast.ops.grid_sample.gpu_dinput_by_sample import operands_of
from holdfast.ops.grid_sample.gpu_integer_sums import (
    BIAS,
    converted,
    exponent_field,
    finite_or_zero,
    plane_shift,
    scaled,
)
from holdfast.ops.grid_sample.gpu_terms import (
    add_slopes,
    add_term,
    load_pixels,
    mark_specials,
    quad_of,
    quad_weights,
    store_changes,
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
    #: Pixels that are cleared together.
    cleared: int
    #: Minimum number of images, and maximum number of samples of an image.
    least_images: int
    most_samples: int
    #: Maximum number of lanes for pixels of windows.
    most_lanes: int = 512


TUNING = Tuned(
    gpu=Tuning(band=512, programs=2112, warps=4, cleared=2048, least_images=64, most_samples=1024),
    interpreter=Tuning(band=64, programs=2, warps=4, cleared=256, least_images=5, most_samples=256),
)
#: Added to the first pixels of windows, which makes them positive.
WINDOW_BIAS = tl.constexpr(2**14)


@triton.jit
def add_zeros(
    dinput, n, channels, pixels, sizes, strides, step, x0, x1, y0, y1,
    FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, CLEARED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Clear an image of dinput; if ACCUMULATE, add +0 to the pixels outside the box x0 to x1, y0 to y1."""
    for channel in range(channels):
        plane = dinput + n * strides[0] + tl.full([1], channel, tl.int64) * step
        for begin in range(0, pixels, CLEARED):
            pixel = begin + tl.arange(0, CLEARED)
            at = plane + place_offset(pixel, sizes, strides, 2, FLAT)
            inside = pixel < pixels
            value = tl.zeros([CLEARED], COMPUTE)
            if ACCUMULATE:
                x, y = pixel % sizes[0], pixel // sizes[0]
                inside = inside & ((x < x0) | (x > x1) | (y < y0) | (y > y1))
                value = widen(tl.load(at, mask=inside, other=0.0), COMPUTE) + value
            tl.store(at, narrow(value, dinput.dtype.element_ty), mask=inside)


@triton.jit
def store_sums(
    dinput, value, n, channel, x, y, inside, strides, step, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Store the pixels at x and y of a channel, or add to them if ACCUMULATE."""
    at = dinput + offset_of(n, x, y, tl.zeros_like(x), strides) + tl.full([1], channel, tl.int64) * step
    if ACCUMULATE:
        value = widen(tl.load(at, mask=inside, other=0.0), COMPUTE) + value
    tl.store(at, narrow(value, dinput.dtype.element_ty), mask=inside)


@triton.jit
def window_of(first, x, y, inside, sizes):
    """Whether the samples form a window, and the first pixel of the window.

    They do if their first taps are as far apart as the samples themselves. Samples without a pixel in the
    image may be anywhere.
    """
    _cell, there = cell_of(first, sizes, 2)
    place = ((first[1] - y + WINDOW_BIAS) << 16) + (first[0] - x + WINDOW_BIAS)
    highest = tl.max(tl.where(inside & there, place, 0), 0)
    lowest = tl.min(tl.where(inside & there, place, 2**31 - 1), 0)
    return highest <= lowest, (highest & (2**16 - 1)) - WINDOW_BIAS, (highest >> 16) - WINDOW_BIAS


@triton.jit
def earlier(words, lane):
    """The words of these lanes, 0 for a negative lane."""
    return tl.where(lane >= 0, tl.gather(words, tl.maximum(lane, 0), 0), 0)


@triton.jit
def window_sums(weights, masks, change, lane, wide):
    """The sums of the pixels of a window. A row of samples has ``wide`` lanes; the last one has no sample."""
    zero = tl.zeros(lane.shape, tl.int64)
    north = tl.where(masks[0], (weights[0] * change).to(tl.int64), zero)
    north += earlier(tl.where(masks[1], (weights[1] * change).to(tl.int64), zero), lane - 1)
    south = tl.where(masks[2], (weights[2] * change).to(tl.int64), zero)
    south += earlier(tl.where(masks[3], (weights[3] * change).to(tl.int64), zero), lane - 1)
    return north + earlier(south, lane - wide)


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


@triton.jit(do_not_specialize=["programs", "images", "fraction_bits", "wide"])
def differentiate_images(
    dinput, dgrid, sums, dout, image, grid,
    programs, images, fraction_bits, wide, channels, pixels, sizes, out_sizes,
    dinput_strides, dgrid_strides, dout_strides, image_strides, grid_strides,
    dinput_step, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DGRID: tl.constexpr, OFFSET: tl.constexpr,
    DINPUT_FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, WINDOWS: tl.constexpr,
    BAND: tl.constexpr, CLEARED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th image, with all its samples in one tile. A row of samples has ``wide`` lanes.

    WINDOWS: there are lanes for all pixels of a window, so that the sums of a window need no accumulators.
    """
    follow()
    held = sums + tl.program_id(0).to(tl.int64) * BAND
    band, lane = tl.arange(0, BAND), tl.arange(0, TILE)
    y = lane // wide
    x = lane - y * wide
    z = tl.zeros_like(x)
    inside = (x < out_sizes[0]) & (y < out_sizes[1])
    zeros = tl.zeros([TILE], COMPUTE)
    for number in range(tl.program_id(0), images, programs):
        n = tl.full([1], number, tl.int64)
        at = offset_of(n, x, y, z, dout_strides)
        grid_at = offset_of(n, x, y, z, grid_strides)
        gx = load_coordinate(grid, grid_at, inside, 0, AXES, grid_step, COMPUTE)
        gy = load_coordinate(grid, grid_at, inside, 1, AXES, grid_step, COMPUTE)
        following = tl.load(dout + at, mask=inside, other=0.0)
        if not ACCUMULATE:  # while the loads are in flight
            add_zeros(
                dinput, n, channels, pixels, sizes, dinput_strides, dinput_step, 0, 0, 0, 0,
                DINPUT_FLAT, False, CLEARED, COMPUTE,
            )  # fmt: skip
        first, t, scale = located(gx, gy, zeros, sizes, MODE, PADDING, ALIGNED)
        weights = quad_weights(t, 0, AXES, TAPS, MODE)
        whole = quad_of(
            first, n, inside, 0, pixels, sizes, image_strides,
            0, AXES, TAPS, MODE, PADDING, ALIGNED, False, OFFSET,
        )  # fmt: skip
        in_window, left, top = False, 0, 0
        if WINDOWS:
            in_window, left, top = window_of(first, x, y, inside, sizes)
        x0, x1, y0, y1 = 0, 0, 0, 0
        if not in_window:
            x0, x1, y0, y1 = box_of(whole[0], whole[2], sizes)
        else:
            x0, x1 = tl.maximum(left, 0), tl.minimum(left + out_sizes[0], sizes[0] - 1)
            y0, y1 = tl.maximum(top, 0), tl.minimum(top + out_sizes[1], sizes[1] - 1)
        width = x1 - x0 + 1
        rows = BAND // tl.maximum(width, 1)
        if ACCUMULATE:
            add_zeros(
                dinput, n, channels, pixels, sizes, dinput_strides, dinput_step, x0, x1, y0, y1,
                DINPUT_FLAT, True, CLEARED, COMPUTE,
            )  # fmt: skip
        # The pixels of the box are stored after the zeros.
        tl.debug_barrier()
        s0, s1, s2, s3 = zeros, zeros, zeros, zeros
        for channel in range(channels):
            d = widen(following, COMPUTE)
            later = tl.full([1], channel + 1, tl.int64)
            following = tl.load(dout + (at + later * dout_step), mask=inside & (later < channels), other=0.0)
            if DGRID:
                p0, p1, p2, p3 = load_pixels(image, channel, image_step, whole[1], COMPUTE)
            field = exponent_field(d)
            most = tl.max(field, 0)
            special = most == 255
            if special:
                most = tl.max(tl.where(field < 255, field, 0), 0)
            shift = plane_shift(most, fraction_bits, COMPUTE)
            change = scaled(finite_or_zero(d), shift, COMPUTE)
            if in_window & (special == 0):
                if WINDOWS:
                    total = window_sums(weights, whole[2], change, lane, wide)
                    value = scaled(total.to(COMPUTE), -shift, COMPUTE)
                    px, py = left + x, top + y
                    exists = (px >= 0) & (px < sizes[0]) & (py >= 0) & (py < sizes[1]) & (y <= out_sizes[1])
                    store_sums(
                        dinput, value, n, channel, px, py, exists, dinput_strides, dinput_step, False, COMPUTE
                    )
            else:
                for row in range(y0, y1 + 1, rows):
                    # Accumulators of the rows from ``row``.
                    below = tl.minimum(row + rows, y1 + 1)
                    used = band < (below - row) * width
                    tl.store(held + band, tl.full([BAND], BIAS, tl.int64), mask=used)
                    tl.debug_barrier()
                    places, masks = places_in_rows(whole[0], whole[2], x0, width, row, below, sizes)
                    for k in tl.static_range(4):
                        add_term(held, places[k], masks[k], weights[k] * change, BAND, fraction_bits, 1)
                    if special:
                        mark_specials(held, places, masks, weights, d, 4)
                    tl.debug_barrier()
                    # Atomics bypass the first-level cache, so loads of their results must do so too.
                    total = tl.load(held + band, mask=used, other=BIAS, cache_modifier=".cg")
                    value = converted(total, total, shift, fraction_bits, COMPUTE)
                    down = band // width
                    store_sums(
                        dinput, value, n, channel, x0 + (band - down * width), row + down, used,
                        dinput_strides, dinput_step, ACCUMULATE, COMPUTE,
                    )  # fmt: skip
                    tl.debug_barrier()
            if DGRID:
                s0, s1, s2, s3 = s0 + d * p0, s1 + d * p1, s2 + d * p2, s3 + d * p3
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
        desc, tuning = self.desc, self.tuning
        rows, columns = desc.output_size
        lanes = triton.next_power_of_2((rows + 1) * (columns + 1))
        fits = max(*desc.output_size, *desc.image_size) < WINDOW_BIAS.value
        windows = not args.accumulate and lanes <= tuning.most_lanes and fits
        tile = lanes if windows else triton.next_power_of_2(desc.samples)
        steps.add(
            differentiate_images, self.programs, operands_of(desc, args, 0, desc.batch),
            sampling_constants(desc),
            sums=self.sums, programs=self.programs, images=desc.batch, TILE=max(tile, 32),
            wide=columns + 1 if windows else columns, WINDOWS=windows, DGRID=args.dgrid is not None,
            BAND=tuning.band, CLEARED=tuning.cleared, num_warps=tuning.warps,
        )  # fmt: skip
