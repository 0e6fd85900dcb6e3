"""dinput and dgrid of every mode, in Triton: each sample adds its terms to the accumulators of its pixels.

The batch is processed in groups: a few images, or one band of pixels of an image if memory is short. A group
takes three stages. ``prepare`` finds the scale of each plane and clears the accumulators, ``add_terms`` adds
the terms with integer atomics and computes dgrid, ``convert`` stores dinput. One launch runs all stages of
all groups. Its programs are ordered such that the accumulators of a group stay in the L2 cache, and that a
program waits only for programs of lower numbers, which the hardware has started before.

In bilinear mode, the east corners of a sample are often the west corners of the next sample. Then the next
sample adds both terms at once (MERGE).
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
from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.workspace_layout import WorkspaceLayout
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.grid_sample.gpu_coordinates import (
    NEAREST,
    corner_pixel,
    corner_slope,
    corner_weight,
    grid_strides_of,
    locate,
    offset_of,
    offset_type,
    sampling_constants,
    sizes_of,
    strides_of,
    unravel,
)
from holdfast.ops.grid_sample.gpu_integer_sums import (
    BIAS,
    converted,
    exponent_field,
    finite_or_zero,
    fraction_word,
    plane_shift,
    scaled,
    special_bits,
)
from holdfast.ops.grid_sample.plan import GridSampleBackwardArgs, GridSampleBackwardDescriptor, Mode
from holdfast.ops.segment_sum import indexed

CHUNK, BLOCK = tl.constexpr(indexed.CHUNK), tl.constexpr(indexed.CHUNK**2)
#: Maximum number of bands of an image.
MOST_BANDS = 64


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``differentiate``."""

    #: Samples per program, one per thread, and warps.
    tile: int
    warps: int
    #: Elements of a plane that a program prepares and converts, and elements loaded together.
    prepared: int
    converted: int
    vector: int
    #: Desired bytes of accumulators of a group, and number of groups in memory at a time.
    group_bytes: int = 2**23
    groups: int = 3
    #: With more channels than this, the loop over channels is not unrolled.
    unrolled: int = 4
    #: Elements cleared per program.
    cleared: int = 4096


TUNING = Tuned(
    gpu=Tuning(tile=256, warps=8, prepared=8192, converted=2048, vector=2048),
    interpreter=Tuning(tile=8192, warps=4, prepared=2**20, converted=16384, vector=16384, unrolled=0),
)


@triton.jit(do_not_specialize=["count"])
def clear_words(words, count, TILE: tl.constexpr):
    """Zero ``count`` words."""
    follow()
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(words + number, tl.zeros([TILE], tl.int32), mask=number < count)


@triton.jit
def wait_for(counter, amount):
    """Wait until ``amount`` programs have called ``announce``."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < amount:
        seen = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def announce(counter):
    """Count this program, after the stores and atomics of all its threads."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def prepare(
    sums, largest, special, dout, plane, part, held,
    parts, channels, samples, span, out_sizes, dout_strides, dout_step,
    AXES: tl.constexpr, COMPUTE: tl.constexpr, WORDS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One part of a plane: the largest exponent field of dout, and cleared accumulators."""
    n, channel = plane // channels, plane % channels
    base = dout + channel.to(tl.int64) * dout_step
    share = tl.cdiv(samples, parts)
    most, not_finite = tl.zeros([VECTOR], tl.int32), tl.zeros([VECTOR], tl.int32)
    end = tl.minimum(part * share + share, samples)
    FIELD: tl.constexpr = 2047 if COMPUTE == tl.float64 else 255
    for begin in range(part * share, end, VECTOR):
        sample = begin + tl.arange(0, VECTOR)
        x, y, z = unravel(sample, out_sizes, AXES)
        at = base + offset_of(n, x, y, z, dout_strides)
        field = exponent_field(widen(tl.load(at, mask=sample < end, other=0.0), COMPUTE))
        most = tl.maximum(most, tl.where(field < FIELD, field, 0))
        not_finite = tl.maximum(not_finite, (field == FIELD).to(tl.int32))
    tl.atomic_max(largest + plane, tl.max(most, 0), sem="relaxed")
    if tl.max(not_finite, 0) > 0:
        tl.atomic_max(special + plane, 1, sem="relaxed")
    cleared = tl.cdiv(span * WORDS, parts)
    last = tl.minimum(part * cleared + cleared, span * WORDS)
    target = sums + held.to(tl.int64) * (span * WORDS)
    for begin in range(part * cleared, last, VECTOR):
        number = begin + tl.arange(0, VECTOR)
        tl.store(target + number, tl.full([VECTOR], BIAS, tl.int64), mask=number < last)


@triton.jit
def convert(
    dinput, sums, largest, plane, part, held, first_pixel,
    channels, pixels, span, fraction_bits, sizes, dinput_strides, dinput_step,
    AXES: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
    WORDS: tl.constexpr, CONVERTED: tl.constexpr,
):  # fmt: skip
    """Store CONVERTED pixels of a plane."""
    shift = plane_shift(tl.load(largest + plane), fraction_bits, COMPUTE)
    number = part * CONVERTED + tl.arange(0, CONVERTED)
    inside = (number < span) & (first_pixel + number < pixels)
    source = sums + held.to(tl.int64) * (span * WORDS) + number
    total = tl.load(source, mask=inside, other=BIAS, cache_modifier=".cg")
    fraction = total
    if WORDS == 2:
        fraction = tl.load(source + span, mask=inside, other=BIAS, cache_modifier=".cg")
    value = converted(total, fraction, shift, fraction_bits, COMPUTE)
    n, channel = plane // channels, plane % channels
    x, y, z = unravel(first_pixel + number, sizes, AXES)
    at = dinput + channel.to(tl.int64) * dinput_step + offset_of(n, x, y, z, dinput_strides)
    if ACCUMULATE:
        value = widen(tl.load(at, mask=inside, other=0.0), COMPUTE) + value
    tl.store(at, narrow(value, dinput.dtype.element_ty), mask=inside)


@triton.jit
def add_to_pixel(
    sums, pixel, mask, term, other, span, fraction_bits, MERGE: tl.constexpr, WORDS: tl.constexpr
):
    """Add a term, and with MERGE another one, to the accumulator of ``pixel``."""
    word = term.to(tl.int64)
    if MERGE:
        word += other.to(tl.int64)
    tl.atomic_add(sums + pixel, word, mask=mask, sem="relaxed")
    if WORDS == 2:
        word = fraction_word(term, fraction_bits)
        if MERGE:
            word += fraction_word(other, fraction_bits)
        tl.atomic_add(sums + span + pixel, word, mask=mask, sem="relaxed")


@triton.jit
def add_channel(
    sums, largest, special, plane, d, before, terms, span, fraction_bits,
    CORNER: tl.constexpr, CORNERS: tl.constexpr, MERGE: tl.constexpr,
    COMPUTE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Add the terms of up to four corners of each sample in one channel.

    ``d`` and ``before`` are dout of the sample and of the sample before it. ``terms`` are pixels, masks,
    weights, weights of the sample before, ``taken`` and ``given``: whether this sample adds the east terms of
    the sample before, and whether the next sample adds those of this one.
    """
    pixels, masks, weights, others, taken, given = terms
    shift = plane_shift(tl.load(largest + plane), fraction_bits, COMPUTE)
    change = scaled(finite_or_zero(d), shift, COMPUTE)
    if MERGE:
        previous = scaled(finite_or_zero(before), shift, COMPUTE)
    for k in tl.static_range(4):
        if CORNER + k < CORNERS:
            term = weights[k] * change
            if MERGE and k % 2 == 0:
                other = tl.where(taken, others[k + 1] * previous, 0.0)
                add_to_pixel(sums, pixels[k], masks[k], term, other, span, fraction_bits, True, WORDS)
            elif MERGE:
                kept = masks[k] & (given == 0)
                add_to_pixel(sums, pixels[k], kept, term, term, span, fraction_bits, False, WORDS)
            else:
                add_to_pixel(sums, pixels[k], masks[k], term, term, span, fraction_bits, False, WORDS)
    if tl.load(special + plane) > 0:
        d = tl.where(finite_or_zero(d) == d, 0.0, d)
        for k in tl.static_range(4):
            if CORNER + k < CORNERS:
                marks = tl.where(d == 0.0, 0, special_bits(weights[k] * d))
                tl.atomic_or(sums + pixels[k], marks, mask=masks[k] & (marks != 0), sem="relaxed")


@triton.jit
def add_slopes(
    changes, totals, insides, t, CORNER: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Add slope times total of four corners to the derivatives along x, y and z."""
    x, y, z = changes
    for i in tl.static_range(4):
        x = tl.where(insides[i], x + corner_slope(t, CORNER + i, 0, AXES, TAPS, MODE) * totals[i], x)
        y = tl.where(insides[i], y + corner_slope(t, CORNER + i, 1, AXES, TAPS, MODE) * totals[i], y)
        if AXES == 3:
            z = tl.where(insides[i], z + corner_slope(t, CORNER + i, 2, AXES, TAPS, MODE) * totals[i], z)
    return x, y, z


@triton.jit
def store_dgrid(dgrid, at, change, scale, inside, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr):
    value = tl.where(scale != 0, change * scale, 0.0)
    if ACCUMULATE:
        value = widen(tl.load(dgrid + at, mask=inside, other=0.0), COMPUTE) + value
    tl.store(dgrid + at, narrow(value, dgrid.dtype.element_ty), mask=inside)


@triton.jit
def pixel_offset(n, x, y, z, strides, OFFSET: tl.constexpr):
    """Offset of a pixel in the image; outside, of a pixel inside, which is safe to load."""
    return offset_of(n, tl.maximum(x, 0), tl.maximum(y, 0), tl.maximum(z, 0), strides).to(OFFSET)


@triton.jit
def is_next(first, after, AXES: tl.constexpr):
    """Whether the first taps of ``after`` are one pixel east of those of ``first``."""
    same = (after[0] == first[0] + 1) & (after[1] == first[1])
    return same & (after[2] == first[2]) if AXES == 3 else same


@triton.jit
def visit_channel(
    sums, largest, special, dout, image, channel, n, held, at, at_before, offsets, inside, terms,
    s0, s1, s2, s3, channels, span, fraction_bits, dout_step, image_step,
    CORNER: tl.constexpr, CORNERS: tl.constexpr, DINPUT: tl.constexpr, PRODUCTS: tl.constexpr,
    MERGE: tl.constexpr, COMPUTE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One channel of a tile of samples: add its terms of dinput, and its products for dgrid."""
    base = dout + tl.full([1], channel, tl.int64) * dout_step
    d = widen(tl.load(base + at, mask=inside, other=0.0), COMPUTE)
    if DINPUT:
        before = d
        if MERGE:
            before = widen(tl.load(base + at_before, mask=terms[4], other=0.0), COMPUTE)
        target = sums + (held * channels + channel).to(tl.int64) * (span * WORDS)
        add_channel(
            target, largest, special, n * channels + channel, d, before, terms, span, fraction_bits,
            CORNER, CORNERS, MERGE, COMPUTE, WORDS,
        )  # fmt: skip
    if PRODUCTS:
        pixels = image + tl.full([1], channel, tl.int64) * image_step
        s0 += d * widen(tl.load(pixels + offsets[0]), COMPUTE)
        s1 += d * widen(tl.load(pixels + offsets[1]), COMPUTE)
        s2 += d * widen(tl.load(pixels + offsets[2]), COMPUTE)
        s3 += d * widen(tl.load(pixels + offsets[3]), COMPUTE)
    return s0, s1, s2, s3


@triton.jit
def add_samples(
    dgrid, sums, largest, special, dout, image, grid, n, held, tile, first_pixel,
    channels, samples, span, fraction_bits, sizes, out_sizes, dgrid_strides, dout_strides, image_strides,
    grid_strides, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DINPUT: tl.constexpr, DGRID: tl.constexpr, BANDS: tl.constexpr,
    MERGE: tl.constexpr, WORDS: tl.constexpr, UNROLLED: tl.constexpr,
    MANY_CHANNELS: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The terms of dinput and the dgrid of TILE samples of image ``n``."""
    number = tile * TILE + tl.arange(0, TILE)
    inside = number < samples
    # Past the end, the last sample is loaded, so that loads of pixels need no mask.
    sample = tl.minimum(number, samples - 1)
    x, y, z = unravel(sample, out_sizes, AXES)
    target = offset_of(n, x, y, z, dgrid_strides)
    zeros = tl.zeros([TILE], COMPUTE)
    first, t, scale = locate(
        grid, offset_of(n, x, y, z, grid_strides), inside, grid_step, sizes,
        AXES, MODE, PADDING, ALIGNED, COMPUTE,
    )  # fmt: skip
    at = offset_of(n, x, y, z, dout_strides).to(OFFSET)
    at_before, taken, given, t_before = at, inside, inside, t
    if MERGE and DINPUT:
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
        x0, y0, z0, in_0 = corner_pixel(first, corner, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
        x1, y1, z1, in_1 = corner_pixel(first, corner + 1, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
        x2, y2, z2, in_2 = corner_pixel(first, corner + 2, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
        x3, y3, z3, in_3 = corner_pixel(first, corner + 3, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
        p0, p1 = (z0 * sizes[1] + y0) * sizes[0] + x0, (z1 * sizes[1] + y1) * sizes[0] + x1
        p2, p3 = (z2 * sizes[1] + y2) * sizes[0] + x2, (z3 * sizes[1] + y3) * sizes[0] + x3
        weights = (
            corner_weight(t, corner, AXES, TAPS, MODE), corner_weight(t, corner + 1, AXES, TAPS, MODE),
            corner_weight(t, corner + 2, AXES, TAPS, MODE), corner_weight(t, corner + 3, AXES, TAPS, MODE),
        )  # fmt: skip
        others = weights
        if MERGE and DINPUT:
            others = (
                weights[0], corner_weight(t_before, corner + 1, AXES, TAPS, MODE),
                weights[2], corner_weight(t_before, corner + 3, AXES, TAPS, MODE),
            )  # fmt: skip
        offsets = (
            pixel_offset(n, x0, y0, z0, image_strides, OFFSET),
            pixel_offset(n, x1, y1, z1, image_strides, OFFSET),
            pixel_offset(n, x2, y2, z2, image_strides, OFFSET),
            pixel_offset(n, x3, y3, z3, image_strides, OFFSET),
        )
        masks = (in_0 & inside, in_1 & inside, in_2 & inside, in_3 & inside)
        if BANDS > 1:
            p0, p1, p2, p3 = p0 - first_pixel, p1 - first_pixel, p2 - first_pixel, p3 - first_pixel
            masks = (
                masks[0] & (p0 >= 0) & (p0 < span), masks[1] & (p1 >= 0) & (p1 < span),
                masks[2] & (p2 >= 0) & (p2 < span), masks[3] & (p3 >= 0) & (p3 < span),
            )  # fmt: skip
        terms = ((p0, p1, p2, p3), masks, weights, others, taken, given)
        s0, s1, s2, s3 = zeros, zeros, zeros, zeros
        if UNROLLED > 0:
            for channel in tl.static_range(UNROLLED):
                s0, s1, s2, s3 = visit_channel(
                    sums, largest, special, dout, image, channel, n, held, at, at_before, offsets, inside,
                    terms, s0, s1, s2, s3, channels, span, fraction_bits, dout_step, image_step,
                    corner, CORNERS, DINPUT, PRODUCTS, MERGE, COMPUTE, WORDS,
                )  # fmt: skip
        else:
            whole_0, whole_1, whole_2, whole_3 = zeros, zeros, zeros, zeros
            total_0, total_1, total_2, total_3 = zeros, zeros, zeros, zeros
            block_0, block_1, block_2, block_3 = zeros, zeros, zeros, zeros
            for chunk in range(0, channels, CHUNK):
                sum_0, sum_1, sum_2, sum_3 = zeros, zeros, zeros, zeros
                for channel in range(chunk, tl.minimum(chunk + CHUNK, channels)):
                    sum_0, sum_1, sum_2, sum_3 = visit_channel(
                        sums, largest, special, dout, image, channel, n, held, at, at_before, offsets, inside,
                        terms, sum_0, sum_1, sum_2, sum_3, channels, span, fraction_bits, dout_step,
                        image_step, corner, CORNERS, DINPUT, PRODUCTS, MERGE, COMPUTE, WORDS,
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
            # A sum is never -0.0, so the +0.0 of an empty level changes no bit.
            s0, s1, s2, s3 = block_0, block_1, block_2, block_3
            if MANY_CHANNELS:
                s0, s1 = whole_0 + (total_0 + s0), whole_1 + (total_1 + s1)
                s2, s3 = whole_2 + (total_2 + s2), whole_3 + (total_3 + s3)
        if PRODUCTS:
            changes = add_slopes(
                changes, (s0, s1, s2, s3), (in_0, in_1, in_2, in_3), t, corner, AXES, TAPS, MODE
            )
    if DGRID and (BANDS == 1 or first_pixel == 0):
        if MODE == NEAREST:
            scale = (zeros, zeros, zeros)
        store_dgrid(dgrid, target, changes[0], scale[0], inside, ACCUMULATE, COMPUTE)
        store_dgrid(dgrid, target + dgrid_step, changes[1], scale[1], inside, ACCUMULATE, COMPUTE)
        if AXES == 3:
            store_dgrid(dgrid, target + 2 * dgrid_step, changes[2], scale[2], inside, ACCUMULATE, COMPUTE)


@triton.jit
def stage_of(program, groups, prepare_tasks, add_tasks, convert_tasks):
    """The stage (0, 1 or 2), group and task of a program; a group outside 0 to ``groups`` has no task.

    First the preparation of group 0. Then for each group: its terms, the conversion of the group before, and
    the preparation of the group after. Last the conversion of the last group.
    """
    step_tasks = prepare_tasks + add_tasks + convert_tasks
    rest = program - prepare_tasks
    group = rest // step_tasks
    task = rest - group * step_tasks
    stage = tl.where(task < add_tasks, 1, tl.where(task < add_tasks + convert_tasks, 2, 0))
    task = task - tl.where(stage == 1, 0, tl.where(stage == 2, add_tasks, add_tasks + convert_tasks))
    at_end = group >= groups
    task = tl.where(at_end, rest - groups * step_tasks, task)
    stage = tl.where(at_end, 2, stage)
    group = group + tl.where(stage == 1, 0, tl.where(stage == 2, -1, 1))
    is_first = rest < 0
    return tl.where(is_first, 0, stage), tl.where(is_first, 0, group), tl.where(is_first, program, task)


@triton.jit(do_not_specialize=["groups", "in_memory", "images", "parts", "tiles", "conversions", "fraction_bits"])
def differentiate(
    dinput, dgrid, sums, words, dout, image, grid,
    batch, groups, in_memory, images, parts, tiles, conversions, channels, samples, pixels, span,
    fraction_bits, sizes, out_sizes, dinput_strides, dgrid_strides, dout_strides, image_strides, grid_strides,
    dinput_step, dgrid_step, dout_step, image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DINPUT: tl.constexpr, DGRID: tl.constexpr, BANDS: tl.constexpr,
    MERGE: tl.constexpr, WORDS: tl.constexpr, UNROLLED: tl.constexpr,
    MANY_CHANNELS: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
    VECTOR: tl.constexpr, CONVERTED: tl.constexpr,
):  # fmt: skip
    """One task of one stage of one group, as numbered by ``stage_of``; without DINPUT only the terms.

    ``words`` are the largest exponent field of each plane of the batch, whether it has numbers that are not
    finite, and the number of finished tasks of each stage and group. ``sums`` holds the accumulators of
    ``in_memory`` groups. A group is ``images`` images, or one of BANDS bands of ``span`` pixels of an image.
    """
    follow()
    program = tl.program_id(0)
    largest, special = words, words + batch * channels
    done = special + batch * channels
    if not DINPUT:
        n = program // tiles
        add_samples(
            dgrid, sums, largest, special, dout, image, grid, n, n, program - n * tiles, 0,
            channels, samples, span, fraction_bits, sizes, out_sizes, dgrid_strides, dout_strides, image_strides,
            grid_strides, dgrid_step, dout_step, image_step, grid_step, AXES, MODE, PADDING, ALIGNED, COMPUTE,
            TAPS, False, DGRID, 1, MERGE, WORDS, UNROLLED, MANY_CHANNELS, OFFSET, ACCUMULATE, TILE,
        )  # fmt: skip
    else:
        planes = images * channels
        stage, group, task = stage_of(program, groups, planes * parts, images * tiles, planes * conversions)
        exists = (group >= 0) & (group < groups)
        group = tl.where(exists, group, 0)
        slot = group % in_memory
        first_image = group // BANDS * images
        first_pixel = group % BANDS * span
        counter = done + stage * groups + group
        if not exists:
            pass
        elif stage == 0:
            if group >= in_memory:
                wait_for(done + 2 * groups + group - in_memory, planes * conversions)
            own = task // parts
            if first_image + own // channels < batch:
                prepare(
                    sums, largest, special, dout, first_image * channels + own, task - own * parts,
                    slot * planes + own, parts, channels, samples, span, out_sizes, dout_strides, dout_step,
                    AXES, COMPUTE, WORDS, VECTOR,
                )  # fmt: skip
        elif stage == 1:
            wait_for(done + group, planes * parts)
            own = task // tiles
            if first_image + own < batch:
                add_samples(
                    dgrid, sums, largest, special, dout, image, grid, first_image + own, slot * images + own,
                    task - own * tiles, first_pixel, channels, samples, span, fraction_bits, sizes, out_sizes, dgrid_strides,
                    dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step, grid_step,
                    AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, True, DGRID, BANDS, MERGE, WORDS,
                    UNROLLED, MANY_CHANNELS, OFFSET, ACCUMULATE, TILE,
                )  # fmt: skip
        else:
            wait_for(done + groups + group, images * tiles)
            own = task // conversions
            if first_image + own // channels < batch:
                convert(
                    dinput, sums, largest, first_image * channels + own, task - own * conversions,
                    slot * planes + own, first_pixel, channels, pixels, span, fraction_bits, sizes, dinput_strides,
                    dinput_step, AXES, ACCUMULATE, COMPUTE, WORDS, CONVERTED,
                )  # fmt: skip
        if exists:
            announce(counter)


class SampleSums:
    """Workspace regions and launches of ``differentiate``, for ``budget`` bytes of accumulators.

    With ``needs_dinput`` False it needs no workspace.
    """

    def __init__(
        self, layout: WorkspaceLayout, device: torch.device, desc: GridSampleBackwardDescriptor, budget: int
    ) -> None:
        self.desc, self.device, self.tuning = desc, device, TUNING.on(device)
        tuning, channels, samples = self.tuning, desc.channels, max(desc.samples, 1)
        self.words = 2 if desc.compute.bits == 64 else 1
        self.bands, self.images, self.in_memory = 1, 1, 1
        image_bytes = max(channels * desc.pixels * 8 * self.words, 1)
        if 2 * image_bytes > budget and desc.batch * image_bytes > budget:
            self.bands = min(-(-2 * image_bytes // max(budget, 1)), MOST_BANDS, desc.pixels)
        else:
            self.images = max(min(tuning.group_bytes // image_bytes, desc.batch), 1)
        self.span = -(-desc.pixels // self.bands)
        self.groups = -(-desc.batch // self.images) * self.bands
        group_bytes = self.images * image_bytes // self.bands
        self.in_memory = min(self.groups, max(2, min(tuning.groups, budget // max(group_bytes, 1))))
        planes = self.images * channels
        self.parts = -(-max(samples, self.span * self.words) // tuning.prepared)
        self.tiles = -(-samples // tuning.tile)
        self.conversions = -(-self.span // tuning.converted)
        self.programs = planes * self.parts + self.groups * (
            planes * (self.parts + self.conversions) + self.images * self.tiles
        ) + planes * self.conversions  # fmt: skip
        if not desc.needs_dinput:
            self.programs = desc.batch * self.tiles
        all_planes = desc.batch * channels
        counted = 2 * all_planes + 3 * self.groups if desc.needs_dinput else 0
        self.word_region = layout.take(counted, torch.int32)
        self.sums = layout.take(
            self.in_memory * planes * self.span * self.words if desc.needs_dinput else 0, torch.int64
        )

    def add_steps(self, steps: Steps, args: GridSampleBackwardArgs) -> None:
        desc, tuning = self.desc, self.tuning
        count = self.word_region.count
        operands: dict[str, Any] = {"sums": "dout", "words": "dout"}
        if count:
            operands = {"sums": self.sums, "words": self.word_region}
            steps.add(
                clear_words, -(-count // tuning.cleared), operands, count=count, TILE=tuning.cleared,
                num_warps=tuning.warps,
            )  # fmt: skip
        like = args.dout
        dinput, dgrid, image = args.dinput, args.dgrid, args.input
        wide = [offset_type(tensor) for tensor in (like, image) if tensor is not None]
        bilinear = desc.mode == Mode.BILINEAR
        steps.add(
            differentiate, self.programs, operands, sampling_constants(desc),
            dinput="dinput" if dinput is not None else "dout", dgrid="dgrid" if dgrid is not None else "dout",
            image="input" if image is not None else "dout",
            batch=desc.batch, groups=self.groups, in_memory=self.in_memory, images=self.images,
            parts=self.parts, tiles=self.tiles, conversions=self.conversions, span=self.span,
            channels=desc.channels, samples=desc.samples, pixels=desc.pixels,
            fraction_bits=desc.fraction_bits,
            sizes=sizes_of(desc.image_size), out_sizes=sizes_of(desc.output_size),
            dinput_strides=strides_of(like if dinput is None else dinput), dout_strides=strides_of(like),
            dgrid_strides=grid_strides_of(args.grid if dgrid is None else dgrid),
            image_strides=strides_of(like if image is None else image),
            grid_strides=grid_strides_of(args.grid),
            dinput_step=0 if dinput is None else dinput.stride(1), dout_step=like.stride(1),
            dgrid_step=0 if dgrid is None else dgrid.stride(-1),
            image_step=0 if image is None else image.stride(1), grid_step=args.grid.stride(-1),
            DINPUT=dinput is not None, DGRID=dgrid is not None, BANDS=self.bands,
            MERGE=bilinear and dinput is not None, WORDS=self.words,
            UNROLLED=desc.channels if desc.channels <= tuning.unrolled else 0,
            MANY_CHANNELS=desc.channels > BLOCK.value,
            OFFSET=tl.int64 if tl.int64 in wide else tl.int32, ACCUMULATE=args.accumulate,
            TILE=tuning.tile, VECTOR=tuning.vector, CONVERTED=tuning.converted, num_warps=tuning.warps,
        )  # fmt: skip
