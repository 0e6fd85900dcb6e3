"""dinput and dgrid of every mode, in Triton: each sample adds its terms to the accumulators of its pixels.

Three launches: ``prepare`` finds the scale of each plane and clears the accumulators, ``add_samples`` adds
the terms with integer atomics and computes dgrid, ``convert`` stores dinput. In bilinear mode
``add_columns`` (``gpu_sample_columns``) adds the terms instead, for a few channels at a time. If memory is
short, they run for a few images at a time, for a few channels of an image, or for one band of pixels of a
channel.

For ``gpu_dinput_by_plane``: the east corners of a bilinear sample are often the west corners of the next
sample. Then the next sample adds both terms with one atomic (MERGE).
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.backends.steps import Part, Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import ALIGNMENT, Region, WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_cells import is_flat, place_offset
from holdfast.ops.grid_sample.gpu_coordinates import (
    NEAREST,
    grid_strides_of,
    locate,
    offset_of,
    offset_type,
    sampling_constants,
    sizes_of,
    strides_of,
    unravel,
)
from holdfast.ops.grid_sample.gpu_dgrid import GridGradient
from holdfast.ops.grid_sample.gpu_integer_sums import (
    BIAS,
    converted,
    exponent_field,
    finite_or_zero,
    scaled,
)
from holdfast.ops.grid_sample.gpu_sample_columns import add_columns
from holdfast.ops.grid_sample.gpu_terms import (
    SPECIAL,
    add_products,
    add_slopes,
    add_term,
    load_plane,
    mark_specials,
    quad_of,
    quad_weights,
    store_changes,
)
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor, Mode
from holdfast.ops.segment_sum import indexed

CHUNK, BLOCK = tl.constexpr(indexed.CHUNK), tl.constexpr(indexed.CHUNK**2)
#: Maximum number of bands of an image, and of parts of a plane.
MOST_BANDS, MOST_PARTS = 64, 1024


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``SampleSums``."""

    #: Samples per program of ``add_samples``, one per thread, and warps; in 2-D and in 3-D.
    tile: int
    warps: int
    tile_3d: int
    warps_3d: int
    #: Elements of a plane that a program of ``prepare`` processes, elements loaded together, and pixels per
    #: program of ``convert``.
    prepared: int
    vector: int
    converted: int
    #: Maximum number of parts of ``vector`` elements.
    most_small: int = 64
    #: Maximum number of channels of a group: the loop over its channels is unrolled.
    group: int = 4
    #: Maximum number of programs behind a gate, since it takes time to start them. Those of ``add_columns``
    #: have one warp.
    gated_programs: int = 1056
    gated_columns: int = 2112
    #: Columns per program of ``add_columns``: one warp, so that lanes exchange values without shared memory.
    lanes: int = 32
    #: Samples of a column, at most; fewer if there would be fewer programs than ``least_programs``.
    steps: int = 8
    least_programs: int = 2048
    #: Maximum registers per thread of ``add_columns``.
    registers: int | None = None


TUNING = Tuned(
    gpu=Tuning(
        tile=256, warps=8, tile_3d=128, warps_3d=4, prepared=8192, vector=2048, converted=2048,
    ),
    interpreter=Tuning(
        tile=8192, warps=4, tile_3d=8192, warps_3d=4, prepared=2**20, vector=16384, converted=16384,
        lanes=16, steps=3, least_programs=1,
    ),
)  # fmt: skip


@triton.jit(do_not_specialize=["limit", "tasks", "programs", "parts", "first_channel", "span"])
def prepare(
    sums, words, dout, gate,
    limit, tasks, programs, parts, first_channel, channels, samples, span, out_sizes, dout_strides, dout_step,
    GATED: tl.constexpr, AXES: tl.constexpr, COMPUTE: tl.constexpr, FLAT: tl.constexpr, WORDS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Prepare a part of a plane. GATED: a program has several parts, if the gate is open."""
    follow()
    dout += first_channel.to(tl.int64) * dout_step
    if GATED:
        if tl.load(gate) > limit:
            for task in range(tl.program_id(0), tasks, programs):
                prepare_part(
                    sums, words, dout, task, parts, channels, samples, span, out_sizes, dout_strides,
                    dout_step, AXES, COMPUTE, FLAT, WORDS, VECTOR,
                )  # fmt: skip
    else:
        prepare_part(
            sums, words, dout, tl.program_id(0), parts, channels, samples, span, out_sizes, dout_strides,
            dout_step, AXES, COMPUTE, FLAT, WORDS, VECTOR,
        )  # fmt: skip


@triton.jit
def prepare_part(
    sums, words, dout, task, parts, channels, samples, span, out_sizes, dout_strides, dout_step,
    AXES: tl.constexpr, COMPUTE: tl.constexpr, FLAT: tl.constexpr, WORDS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One part of a plane: the largest exponent field of dout, and cleared accumulators."""
    plane = task // parts
    part = task - plane * parts
    n, channel = plane // channels, plane % channels
    base = dout + n.to(tl.int64) * dout_strides[0] + channel.to(tl.int64) * dout_step
    share = tl.cdiv(samples, parts)
    most, not_finite = tl.zeros([VECTOR], tl.int32), tl.zeros([VECTOR], tl.int32)
    end = tl.minimum(part * share + share, samples)
    FIELD: tl.constexpr = 2047 if COMPUTE == tl.float64 else 255
    for begin in range(part * share, end, VECTOR):
        sample = begin + tl.arange(0, VECTOR)
        at = base + place_offset(sample, out_sizes, dout_strides, AXES, FLAT)
        field = exponent_field(widen(tl.load(at, mask=sample < end, other=0.0), COMPUTE))
        most = tl.maximum(most, tl.where(field < FIELD, field, 0))
        not_finite = tl.maximum(not_finite, (field == FIELD).to(tl.int32))
    tl.store(words + task, tl.max(most, 0) + tl.max(not_finite, 0) * SPECIAL)
    cleared = tl.cdiv(span * WORDS, parts)
    last = tl.minimum(part * cleared + cleared, span * WORDS)
    target = sums + plane.to(tl.int64) * (span * WORDS)
    for begin in range(part * cleared, last, VECTOR):
        number = begin + tl.arange(0, VECTOR)
        tl.store(target + number, tl.full([VECTOR], BIAS, tl.int64), mask=number < last)


@triton.jit(
    do_not_specialize=[
        "limit", "tasks", "programs", "first_channel", "first_pixel", "conversions", "span", "fraction_bits",
    ]
)  # fmt: skip
def convert(
    dinput, sums, words, gate,
    limit, tasks, programs, first_channel, first_pixel, conversions, channels, pixels, span, fraction_bits,
    sizes, dinput_strides, dinput_step,
    GATED: tl.constexpr, AXES: tl.constexpr, DINPUT_FLAT: tl.constexpr, ACCUMULATE: tl.constexpr,
    COMPUTE: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr, CONVERTED: tl.constexpr,
):  # fmt: skip
    """Store CONVERTED pixels of a plane. GATED: a program has several tasks, if the gate is open."""
    follow()
    dinput += first_channel.to(tl.int64) * dinput_step
    if GATED:
        if tl.load(gate) > limit:
            for task in range(tl.program_id(0), tasks, programs):
                convert_pixels(
                    dinput, sums, words, task, first_pixel, conversions, channels, pixels, span,
                    fraction_bits, sizes, dinput_strides, dinput_step, AXES, DINPUT_FLAT, ACCUMULATE, COMPUTE,
                    WORDS, PARTS, CONVERTED,
                )  # fmt: skip
    else:
        convert_pixels(
            dinput, sums, words, tl.program_id(0), first_pixel, conversions, channels, pixels, span,
            fraction_bits, sizes, dinput_strides, dinput_step, AXES, DINPUT_FLAT, ACCUMULATE, COMPUTE, WORDS,
            PARTS, CONVERTED,
        )  # fmt: skip


@triton.jit
def convert_pixels(
    dinput, sums, words, task,
    first_pixel, conversions, channels, pixels, span, fraction_bits, sizes, dinput_strides, dinput_step,
    AXES: tl.constexpr, DINPUT_FLAT: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
    WORDS: tl.constexpr, PARTS: tl.constexpr, CONVERTED: tl.constexpr,
):  # fmt: skip
    """Store CONVERTED pixels of a plane."""
    plane = task // conversions
    shift, _special = load_plane(words, plane, fraction_bits, COMPUTE, PARTS)
    number = (task - plane * conversions) * CONVERTED + tl.arange(0, CONVERTED)
    inside = (number < span) & (first_pixel + number < pixels)
    source = sums + plane.to(tl.int64) * (span * WORDS) + number
    total = tl.load(source, mask=inside, other=BIAS)
    fraction = total
    if WORDS == 2:
        fraction = tl.load(source + span, mask=inside, other=BIAS)
    value = converted(total, fraction, shift, fraction_bits, COMPUTE)
    n, channel = plane // channels, plane % channels
    at = dinput + n.to(tl.int64) * dinput_strides[0] + channel.to(tl.int64) * dinput_step
    at += place_offset(first_pixel + number, sizes, dinput_strides, AXES, DINPUT_FLAT)
    if ACCUMULATE:
        value = widen(tl.load(at, mask=inside, other=0.0), COMPUTE) + value
    tl.store(at, narrow(value, dinput.dtype.element_ty), mask=inside)


@triton.jit
def is_next(first, after, AXES: tl.constexpr):
    """Whether the first taps of ``after`` are one pixel east of those of ``first``."""
    same = (after[0] == first[0] + 1) & (after[1] == first[1])
    return same & (after[2] == first[2]) if AXES == 3 else same


@triton.jit
def add_merged(sums, pixels, masks, weights, others, change, previous, given):
    """Add the terms of four corners, together with the east terms of the sample before."""
    for k in tl.static_range(0, 4, 2):
        word = (weights[k] * change).to(tl.int64) + (others[k + 1] * previous).to(tl.int64)
        tl.atomic_add(sums + pixels[k], word, mask=masks[k], sem="relaxed")
        east = (weights[k + 1] * change).to(tl.int64)
        tl.atomic_add(sums + pixels[k + 1], east, mask=masks[k + 1] & (given == 0), sem="relaxed")


@triton.jit
def visit_channel(
    sums, words, dout, image, channel, n, at, quad, inside, weights, neighbours, s0, s1, s2, s3,
    channels, span, fraction_bits, dout_step, image_step,
    CORNERS: tl.constexpr, DINPUT: tl.constexpr, PRODUCTS: tl.constexpr, MERGE: tl.constexpr,
    COMPUTE: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One channel of four corners: add the terms of dinput, and the products for dgrid.

    ``neighbours``: for the sample before, its offset in dout and the weights of its corners; whether this
    sample adds its east terms (``taken``); and whether the next sample adds those of this one (``given``).
    """
    pixels, offsets, masks, _there = quad
    base = dout + tl.full([1], channel, tl.int64) * dout_step
    d = widen(tl.load(base + at, mask=inside, other=0.0), COMPUTE)
    if DINPUT:
        plane = n * channels + channel
        target = sums + plane.to(tl.int64) * (span * WORDS)
        shift, special = load_plane(words, plane, fraction_bits, COMPUTE, PARTS)
        change = scaled(finite_or_zero(d), shift, COMPUTE)
        COUNT: tl.constexpr = 1 if CORNERS == 1 else 4
        if MERGE:
            at_before, others, taken, given = neighbours
            before = widen(tl.load(base + at_before, mask=taken, other=0.0), COMPUTE)
            previous = scaled(finite_or_zero(before), shift, COMPUTE)
            add_merged(target, pixels, masks, weights, others, change, previous, given)
        else:
            for k in tl.static_range(COUNT):
                add_term(target, pixels[k], masks[k], weights[k] * change, span, fraction_bits, WORDS)
        if special:
            mark_specials(target, pixels, masks, weights, d, COUNT)
    if PRODUCTS:
        s0, s1, s2, s3 = add_products(s0, s1, s2, s3, d, image, channel, image_step, offsets, COMPUTE)
    return s0, s1, s2, s3


@triton.jit(do_not_specialize=["first_channel", "first_pixel", "tiles", "span", "fraction_bits"])
def add_samples(
    dgrid, sums, words, dout, image, grid,
    first_channel, first_pixel, tiles, span, fraction_bits, channels, samples, sizes, out_sizes,
    dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DINPUT: tl.constexpr, DGRID: tl.constexpr, BANDS: tl.constexpr,
    UNROLLED: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr, MANY_CHANNELS: tl.constexpr,
    OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The terms and dgrid of TILE samples."""
    follow()
    add_tile(
        dgrid, sums, words, dout + first_channel.to(tl.int64) * dout_step, image, grid, tl.program_id(0),
        first_pixel, tiles, span, fraction_bits, channels, samples, sizes, out_sizes, dgrid_strides,
        dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step, AXES, MODE,
        PADDING, ALIGNED, COMPUTE, TAPS, DINPUT, DGRID, BANDS, False, UNROLLED, WORDS, PARTS, MANY_CHANNELS,
        OFFSET, ACCUMULATE, TILE,
    )  # fmt: skip


@triton.jit
def add_tile(
    dgrid, sums, words, dout, image, grid, task,
    first_pixel, tiles, span, fraction_bits, channels, samples, sizes, out_sizes, dgrid_strides, dout_strides,
    image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DINPUT: tl.constexpr, DGRID: tl.constexpr, BANDS: tl.constexpr,
    MERGE: tl.constexpr, UNROLLED: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    MANY_CHANNELS: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The terms of dinput and the dgrid of TILE samples, one per thread.

    UNROLLED: the number of channels, if it is small; otherwise 0.
    """
    n = task // tiles
    number = (task - n * tiles) * TILE + tl.arange(0, TILE)
    inside = number < samples
    # Past the end, the last sample is located, so that loads of pixels need no mask.
    sample = tl.minimum(number, samples - 1)
    x, y, z = unravel(sample, out_sizes, AXES)
    zeros = tl.zeros([TILE], COMPUTE)
    first, t, scale = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    at = offset_of(n, x, y, z, dout_strides).to(OFFSET)
    target = offset_of(n, x, y, z, dgrid_strides)
    at_before, t_before, taken, given = at, t, inside, inside
    if MERGE:
        x, y, z = unravel(tl.maximum(sample - 1, 0), out_sizes, AXES)
        west, t_before, _ = locate(
            grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
            AXES, MODE, PADDING, ALIGNED, COMPUTE,
        )  # fmt: skip
        at_before = offset_of(n, x, y, z, dout_strides).to(OFFSET)
        x, y, z = unravel(tl.minimum(sample + 1, samples - 1), out_sizes, AXES)
        east, _, _ = locate(
            grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
            AXES, MODE, PADDING, ALIGNED, COMPUTE,
        )  # fmt: skip
        taken = inside & (number > 0) & is_next(west, first, AXES)
        given = (number < samples - 1) & is_next(first, east, AXES)
    CORNERS: tl.constexpr = (TAPS * TAPS * TAPS) if AXES == 3 else (TAPS * TAPS)
    PRODUCTS: tl.constexpr = DGRID and MODE != NEAREST
    changes = (zeros, zeros, zeros)
    for corner in tl.static_range(0, CORNERS, 4):
        quad = quad_of(
            first, n, inside, first_pixel, span, sizes, image_strides,
            corner, AXES, TAPS, MODE, PADDING, ALIGNED, BANDS, OFFSET,
        )  # fmt: skip
        weights = quad_weights(t, corner, AXES, TAPS, MODE)
        neighbours = (at_before, quad_weights(t_before, corner, AXES, TAPS, MODE), taken, given)
        whole_0, whole_1, whole_2, whole_3 = zeros, zeros, zeros, zeros
        total_0, total_1, total_2, total_3 = zeros, zeros, zeros, zeros
        block_0, block_1, block_2, block_3 = zeros, zeros, zeros, zeros
        if UNROLLED > 0:
            for channel in tl.static_range(UNROLLED):
                block_0, block_1, block_2, block_3 = visit_channel(
                    sums, words, dout, image, channel, n, at, quad, inside, weights, neighbours, block_0,
                    block_1, block_2, block_3, channels, span, fraction_bits, dout_step, image_step,
                    CORNERS, DINPUT, PRODUCTS, MERGE, COMPUTE, WORDS, PARTS,
                )  # fmt: skip
        else:
            for chunk in range(0, channels, CHUNK):
                sum_0, sum_1, sum_2, sum_3 = zeros, zeros, zeros, zeros
                for channel in range(chunk, tl.minimum(chunk + CHUNK, channels)):
                    sum_0, sum_1, sum_2, sum_3 = visit_channel(
                        sums, words, dout, image, channel, n, at, quad, inside, weights, neighbours, sum_0,
                        sum_1, sum_2, sum_3, channels, span, fraction_bits, dout_step, image_step,
                        CORNERS, DINPUT, PRODUCTS, MERGE, COMPUTE, WORDS, PARTS,
                    )  # fmt: skip
                if PRODUCTS:
                    block_0, block_1 = block_0 + sum_0, block_1 + sum_1
                    block_2, block_3 = block_2 + sum_2, block_3 + sum_3
                    if MANY_CHANNELS and (chunk + CHUNK) % BLOCK == 0:
                        total_0, total_1 = total_0 + block_0, total_1 + block_1
                        total_2, total_3 = total_2 + block_2, total_3 + block_3
                        block_0, block_1, block_2, block_3 = zeros, zeros, zeros, zeros
                        if (chunk + CHUNK) % (BLOCK * CHUNK) == 0:
                            whole_0, whole_1 = whole_0 + total_0, whole_1 + total_1
                            whole_2, whole_3 = whole_2 + total_2, whole_3 + total_3
                            total_0, total_1, total_2, total_3 = zeros, zeros, zeros, zeros
        if PRODUCTS:
            # A sum is never -0.0, so the +0.0 of an empty level changes no bit.
            if MANY_CHANNELS:
                block_0, block_1 = whole_0 + (total_0 + block_0), whole_1 + (total_1 + block_1)
                block_2, block_3 = whole_2 + (total_2 + block_2), whole_3 + (total_3 + block_3)
            changes = add_slopes(
                changes, (block_0, block_1, block_2, block_3), quad[3], t, corner, AXES, TAPS, MODE
            )
    if DGRID:
        store_changes(dgrid, target, changes, scale, inside, dgrid_step, AXES, MODE, ACCUMULATE, COMPUTE)


def operands_of(
    desc: GridSampleBackwardDescriptor, args: GridSampleBackwardArgs, first: int, images: int
) -> dict[str, Any]:
    """Parameters of the kernels that the args and the descriptor give, for ``images`` images from ``first``.

    dout stands for operands that are None.
    """
    dout, grid = args.dout, args.grid
    image, dinput = (dout if tensor is None else tensor for tensor in (args.input, args.dinput))
    dgrid = grid if args.dgrid is None else args.dgrid
    named = {
        name: Part(operand if getattr(args, operand) is not None else "dout", first, images)
        for name, operand in (
            ("dinput", "dinput"), ("dgrid", "dgrid"), ("dout", "dout"), ("image", "input"), ("grid", "grid"),
        )
    }  # fmt: skip
    wide = tl.int64 in [offset_type(tensor) for tensor in (dinput, dgrid, dout, image, grid)]
    return named | {
        "channels": desc.channels, "samples": desc.samples, "pixels": desc.pixels,
        "fraction_bits": desc.fraction_bits,
        "sizes": sizes_of(desc.image_size), "out_sizes": sizes_of(desc.output_size),
        "dinput_strides": strides_of(dinput), "dgrid_strides": grid_strides_of(dgrid),
        "dout_strides": strides_of(dout), "image_strides": strides_of(image),
        "grid_strides": grid_strides_of(grid),
        "dinput_step": dinput.stride(1), "dgrid_step": dgrid.stride(-1), "dout_step": dout.stride(1),
        "image_step": image.stride(1), "grid_step": grid.stride(-1),
        "OFFSET": tl.int64 if wide else tl.int32, "ACCUMULATE": args.accumulate,
        "FLAT": is_flat(desc.output_size, dout.stride()[2:]),
        "DINPUT_FLAT": is_flat(desc.image_size, dinput.stride()[2:]),
    }  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """The kernels return at once unless ``gate[0] > limit``."""

    gate: Region
    limit: int


class SampleSums:
    """Workspace regions and launches for dinput and dgrid, each if needed, in ``budget`` bytes if possible.

    Images are processed ``images`` at a time. If memory is short, an image is processed ``channels`` channels
    at a time, or in ``bands`` bands of ``span`` pixels.
    """

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor, budget: int
    ) -> None:
        self.desc, self.device, self.tuning = desc, device, TUNING.on(device)
        tuning = self.tuning
        self.tile, self.warps = tuning.tile, tuning.warps
        if desc.axes == 3:
            self.tile, self.warps = tuning.tile_3d, tuning.warps_3d
        self.words = 2 if desc.compute.bits == 64 else 1
        #: Whether terms are added in columns, and by several groups of channels.
        self.in_columns = desc.mode == Mode.BILINEAR and self.words == 1
        self.in_groups = self.in_columns and desc.channels > tuning.group
        self.images, self.channels, self.bands = desc.batch, max(desc.channels, 1), 1
        parts = self._parts(max(desc.samples, desc.pixels * self.words))
        plane_bytes = 8 * desc.pixels * self.words + 4 * parts
        image_bytes, room = self.channels * plane_bytes, max(budget - 4 * ALIGNMENT, 0)
        if desc.needs_dinput:
            portions = -(-desc.batch // max(room // image_bytes, 1))
            self.images = -(-desc.batch // max(portions, 1))
        if desc.needs_dinput and image_bytes > room:
            groups = min(-(-self.channels // max(room // plane_bytes, 1)), MOST_BANDS)
            self.channels = -(-self.channels // groups)
            bands = -(-self.channels * plane_bytes // max(room, 1))
            self.bands = min(bands, max(MOST_BANDS // groups, 1), desc.pixels)
        self.span = -(-desc.pixels // self.bands)
        self.parts = self._parts(max(desc.samples, self.span * self.words))
        planes = self.images * self.channels if desc.needs_dinput else 0
        self.plane_words = layout.take(planes * self.parts, torch.int32)
        self.sums = layout.take(planes * self.span * self.words, torch.int64)

    def _parts(self, elements: int) -> int:
        """Number of parts of a plane. Small planes have smaller parts, for more programs."""
        tuning = self.tuning
        many, few = (max(-(-elements // size), 1) for size in (tuning.vector, tuning.prepared))
        most = min(max(triton.next_power_of_2(few), tuning.most_small), MOST_PARTS)
        return min(triton.next_power_of_2(many), most)

    def add_steps(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        gate: Gate | None = None,
        begin: int = 0,
        images: int | None = None,
    ) -> None:
        """Add the launches for ``images`` images from ``begin``; behind a gate, for dinput alone."""
        desc = self.desc
        end = begin + (desc.batch if images is None else images)
        needs_dinput = args.dinput is not None and desc.channels > 0
        needs_dgrid = args.dgrid is not None and gate is None
        # dgrid is a sum over all channels, which ``add_columns`` computes if they are one group.
        together = needs_dinput and self.channels >= desc.channels and not self.in_groups
        alone = needs_dgrid and not together
        for first in range(begin, end, self.images):
            images = min(self.images, end - first)
            sources = operands_of(desc, args, first, images) | sampling_constants(desc)
            if alone and desc.samples:
                self._add_dgrid(steps, args, first, images, sources)
            if not needs_dinput:
                continue
            for channel in range(0, desc.channels, self.channels):
                for band in range(self.bands):
                    more = {
                        "channels": min(self.channels, desc.channels - channel), "first_channel": channel,
                        "first_pixel": band * self.span, "DGRID": needs_dgrid and not alone and band == 0,
                    }  # fmt: skip
                    self._add_band(steps, args, images, sources | more, gate)

    def _add_dgrid(
        self, steps: Steps, args: GridSampleBackwardArgs, first: int, images: int, sources: dict[str, Any]
    ) -> None:
        """Add the launch for dgrid alone."""
        if self.in_groups:
            GridGradient(self.device, self.desc).add_steps(steps, args, first, images)
            return
        without_dinput = {
            "sums": "dout", "words": "dout", "first_channel": 0, "first_pixel": 0, "span": 0, "DINPUT": False,
            "DGRID": True, "BANDS": False, "WORDS": self.words, "PARTS": 1,
        }  # fmt: skip
        self._add_terms(steps, args, images, sources | without_dinput)

    def _add_band(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        images: int,
        sources: dict[str, Any],
        gate: Gate | None,
    ) -> None:
        """Add the launches for one band of some channels."""
        desc, tuning = self.desc, self.tuning
        sources |= {
            "sums": self.sums, "words": self.plane_words, "span": self.span, "parts": self.parts,
            "DINPUT": True, "BANDS": self.bands > 1, "gate": gate.gate if gate else "dout",
            "limit": gate.limit if gate else 0, "GATED": gate is not None, "WORDS": self.words,
            "PARTS": self.parts, "VECTOR": tuning.vector, "CONVERTED": tuning.converted,
        }  # fmt: skip
        planes = images * sources["channels"]
        tasks = planes * self.parts
        programs = min(tasks, tuning.gated_programs) if gate else tasks
        steps.add(prepare, programs, sources, tasks=tasks, programs=programs, num_warps=self.warps)
        if desc.samples:
            self._add_terms(steps, args, images, sources, gate)
        conversions = -(-self.span // tuning.converted)
        count = planes * conversions
        programs = min(count, tuning.gated_programs) if gate else count
        steps.add(
            convert, programs, sources, conversions=conversions, tasks=count, programs=programs,
            num_warps=self.warps,
        )  # fmt: skip

    def _add_terms(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        images: int,
        sources: dict[str, Any],
        gate: Gate | None = None,
    ) -> None:
        """Add the launches of ``add_columns``, or of ``add_samples``."""
        desc, tuning, channels = self.desc, self.tuning, sources["channels"]
        if self.in_columns and sources["DINPUT"]:
            groups, rest = divmod(channels, tuning.group)
            self._add_columns(steps, args, images, sources, gate, 0, groups, tuning.group)
            self._add_columns(steps, args, images, sources, gate, channels - rest, 1, rest)
            return
        assert gate is None
        tiles = -(-desc.samples // self.tile)
        steps.add(
            add_samples, images * tiles, sources, tiles=tiles,
            UNROLLED=channels if self.in_columns and channels <= tuning.group else 0,
            MANY_CHANNELS=channels > BLOCK.value, TILE=self.tile, num_warps=self.warps,
        )  # fmt: skip

    def _add_columns(
        self,
        steps: Steps,
        args: GridSampleBackwardArgs,
        images: int,
        sources: dict[str, Any],
        gate: Gate | None,
        first_plane: int,
        groups: int,
        channels: int,
    ) -> None:
        """Add the launch of ``add_columns`` for ``groups`` groups of ``channels`` channels."""
        if not groups * channels:
            return
        desc, tuning, length = self.desc, self.tuning, self.tuning.steps
        while length > 1 and images * desc.samples < tuning.least_programs * tuning.lanes * length:
            length //= 2
        wide = desc.output_size[-1]
        columns = wide * -(-desc.samples // (wide * length))
        tiles = -(-columns // tuning.lanes)
        count = images * tiles * groups
        programs = min(count, tuning.gated_columns) if gate else count
        grid, dgrid = args.grid, args.grid if args.dgrid is None else args.dgrid
        steps.add(
            add_columns, programs, sources, tasks=count, programs=programs, tiles=tiles, columns=columns,
            first_plane=first_plane, groups=groups,
            GRID_FLAT=is_flat(desc.output_size, grid.stride()[1:-1]),
            DGRID_FLAT=is_flat(desc.output_size, dgrid.stride()[1:-1]), CHANNELS=channels,
            TILE=tuning.lanes, STEPS=length, registers=tuning.registers, num_warps=1,
        )  # fmt: skip
