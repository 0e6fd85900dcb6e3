"""Terms of bilinear samples in columns, in Triton, for ``gpu_dinput_by_sample``.

A lane processes a column of samples along y, one after another. The far corners of a sample, those below it,
are often the near corners of the next sample. So their terms are carried: they are added to the terms of the
next sample if its cell is the one below, and to the accumulators if it is not.

Along x, there are two methods. If most lanes are one pixel apart, a lane adds its west term together with the
east term of the lane before. Otherwise two lanes exchange terms, so that one instruction adds the west and
the east terms of half of the lanes. The two pixels of a sample are neighbours, mostly in one sector of
memory, and atomics are faster if they touch fewer sectors.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.backends.gpu import follow
from holdfast.ops.grid_sample.gpu_cells import cell_of, place_offset
from holdfast.ops.grid_sample.gpu_coordinates import load_coordinate, located
from holdfast.ops.grid_sample.gpu_integer_sums import finite_or_zero, scaled
from holdfast.ops.grid_sample.gpu_terms import (
    add_products,
    add_slopes,
    four_corners,
    inside_axis,
    load_changes,
    load_plane,
    mark_specials,
    store_changes,
)

#: The cell of samples without pixels: it is above no other cell.
NOWHERE = tl.constexpr(-(2**30))


@triton.jit
def in_band(pixel, span, BANDS: tl.constexpr):
    """Whether a pixel of the image is in the band."""
    if BANDS:
        return (pixel >= 0) & (pixel < span)
    else:
        return pixel == pixel


@triton.jit
def add_word(sums, pixel, word, span, BANDS: tl.constexpr):
    """Add words to the accumulators of pixels. The word of a corner outside the image is 0."""
    tl.atomic_add(sums + pixel, word, mask=(word != 0) & in_band(pixel, span, BANDS), sem="relaxed")


@triton.jit
def paired(pixel, lane, TILE: tl.constexpr):
    """The pixels of a lane in ``add_paired``: for the first half of the samples, and for the second half."""
    other = tl.gather(pixel, lane ^ (TILE // 2), 0)
    second = lane >= TILE // 2
    return tl.where(second, other + 1, pixel), tl.where(second, pixel + 1, other)


@triton.jit
def add_paired(sums, pixels, offset, west, east, lane, span, BANDS: tl.constexpr, TILE: tl.constexpr):
    """Add the west and east words of the first half of the lanes, then those of the second half.

    ``pixels`` are those of ``paired``; the words belong to the pixels that are ``offset`` further.
    """
    second = lane >= TILE // 2
    got = tl.gather(tl.where(second, west, east), lane ^ (TILE // 2), 0)
    add_word(sums, pixels[0] + offset, tl.where(second, got, west), span, BANDS)
    add_word(sums, pixels[1] + offset, tl.where(second, east, got), span, BANDS)


@triton.jit
def add_merged(sums, pixel, west, east, taken, given, lane, span, BANDS: tl.constexpr):
    """Add the west word of each sample together with the east word of the sample before, if it is ``taken``.

    ``given``: the next sample takes the east word of this one.
    """
    before = tl.gather(east, tl.maximum(lane - 1, 0), 0)
    add_word(sums, pixel, west + tl.where(taken, before, 0), span, BANDS)
    add_word(sums, pixel + 1, tl.where(given, 0, east), span, BANDS)


@triton.jit
def release(
    sums, carried, before, joined, lane, span, row, layer,
    AXES: tl.constexpr, BANDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the carried words that do not join those of the next sample to the pixels below ``before``."""
    west, east = tl.where(joined, 0, carried[0]), tl.where(joined, 0, carried[1])
    add_paired(sums, before, row, west, east, lane, span, BANDS, TILE)
    if AXES == 3:
        west, east = tl.where(joined, 0, carried[2]), tl.where(joined, 0, carried[3])
        add_paired(sums, before, row + layer, west, east, lane, span, BANDS, TILE)


@triton.jit
def term_words(weights, change):
    """The terms of four corners as integers."""
    return (
        (weights[0] * change).to(tl.int64),
        (weights[1] * change).to(tl.int64),
        (weights[2] * change).to(tl.int64),
        (weights[3] * change).to(tl.int64),
    )


@triton.jit
def add_channel(
    sums, carried, change, weights, place, before, lane, span, row, layer,
    AXES: tl.constexpr, BANDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the terms of a channel. Returns those of the far corners, which are carried to the next sample."""
    pixel, pixels, joined, taken, given, apart = place
    release(sums, carried, before, joined, lane, span, row, layer, AXES, BANDS, TILE)
    west, east, far_0, far_1 = term_words(weights[0], change)
    west += tl.where(joined, carried[0], 0)
    east += tl.where(joined, carried[1], 0)
    # In 3-D, the corners of the second layer.
    west_behind, east_behind, far_2, far_3 = west, east, far_0, far_1
    if AXES == 3:
        west_behind, east_behind, far_2, far_3 = term_words(weights[1], change)
        west_behind += tl.where(joined, carried[2], 0)
        east_behind += tl.where(joined, carried[3], 0)
    if apart:
        add_paired(sums, pixels, 0, west, east, lane, span, BANDS, TILE)
        if AXES == 3:
            add_paired(sums, pixels, layer, west_behind, east_behind, lane, span, BANDS, TILE)
    else:
        add_merged(sums, pixel, west, east, taken, given, lane, span, BANDS)
        if AXES == 3:
            add_merged(sums, pixel + layer, west_behind, east_behind, taken, given, lane, span, BANDS)
    return far_0, far_1, far_2, far_3


@triton.jit
def layer_weights(first, t, sizes, AXES: tl.constexpr):
    """The weights of the four corners of each layer; in 2-D the layers are the same."""
    x0, x1 = kept_weights(first[0], t[0], sizes[0])
    y0, y1 = kept_weights(first[1], t[1], sizes[1])
    w0, w1, w2, w3 = x0 * y0, x1 * y0, x0 * y1, x1 * y1
    if AXES == 3:
        z0, z1 = kept_weights(first[2], t[2], sizes[2])
        return (w0 * z0, w1 * z0, w2 * z0, w3 * z0), (w0 * z1, w1 * z1, w2 * z1, w3 * z1)
    else:
        return (w0, w1, w2, w3), (w0, w1, w2, w3)


@triton.jit
def kept_weights(first, t, size):
    """The weights of the two taps along an axis; 0 for a tap outside the image."""
    return tl.where(inside_axis(first, size), 1.0 - t, 0.0), tl.where(inside_axis(first + 1, size), t, 0.0)


@triton.jit
def load_sample(
    grid, dout, number, inside, out_sizes, grid_strides, dout_strides, grid_step, dout_step,
    AXES: tl.constexpr, CHANNELS: tl.constexpr, GRID_FLAT: tl.constexpr, FLAT: tl.constexpr,
    OFFSET: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The coordinates of samples, and their dout in all channels."""
    at = place_offset(number, out_sizes, grid_strides, AXES, GRID_FLAT).to(OFFSET)
    gx = load_coordinate(grid, at, inside, 0, AXES, grid_step, COMPUTE)
    gy = load_coordinate(grid, at, inside, 1, AXES, grid_step, COMPUTE)
    gz = load_coordinate(grid, at, inside, 2, AXES, grid_step, COMPUTE)
    base = dout + place_offset(number, out_sizes, dout_strides, AXES, FLAT).to(OFFSET)
    return (gx, gy, gz), load_changes(base, dout_step, inside, CHANNELS, COMPUTE)


@triton.jit
def mark_sample(
    sums, d, weights, exist, behind, pixel, span, row, layer, AXES: tl.constexpr, BANDS: tl.constexpr
):  # fmt: skip
    """Mark the pixels of samples whose dout is not finite."""
    for k in tl.static_range(AXES - 1):
        start = pixel + k * layer
        pixels = (start, start + 1, start + row, start + (row + 1))
        there = exist if k == 0 else behind
        m0, m1 = there[0] & in_band(pixels[0], span, BANDS), there[1] & in_band(pixels[1], span, BANDS)
        m2, m3 = there[2] & in_band(pixels[2], span, BANDS), there[3] & in_band(pixels[3], span, BANDS)
        mark_specials(sums, pixels, (m0, m1, m2, m3), weights[k], d, 4)


@triton.jit
def add_gradient(
    dgrid, target, image, d, t, scale, inside, offsets, exist, behind_offsets, behind, image_step, dgrid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store dgrid of samples."""
    zeros = tl.zeros(d[0].shape, COMPUTE)
    s0, s1, s2, s3 = zeros, zeros, zeros, zeros
    for channel in tl.static_range(CHANNELS):
        s0, s1, s2, s3 = add_products(
            s0, s1, s2, s3, d[channel], image, channel, image_step, offsets, COMPUTE
        )
    changes = add_slopes((zeros, zeros, zeros), (s0, s1, s2, s3), exist, t, 0, AXES, TAPS, MODE)
    if AXES == 3:
        s0, s1, s2, s3 = zeros, zeros, zeros, zeros
        for channel in tl.static_range(CHANNELS):
            s0, s1, s2, s3 = add_products(
                s0, s1, s2, s3, d[channel], image, channel, image_step, behind_offsets, COMPUTE
            )
        changes = add_slopes(changes, (s0, s1, s2, s3), behind, t, 4, AXES, TAPS, MODE)
    store_changes(dgrid, target, changes, scale, inside, dgrid_step, AXES, MODE, ACCUMULATE, COMPUTE)


@triton.jit(
    do_not_specialize=[
        "limit", "tasks", "programs", "first_channel", "first_plane", "groups", "first_pixel", "tiles",
        "columns", "span", "fraction_bits",
    ]
)  # fmt: skip
def add_columns(
    dgrid, sums, words, dout, image, grid, gate, limit, tasks, programs,
    first_channel, first_plane, groups, first_pixel, tiles, columns, span, fraction_bits, channels, samples,
    sizes, out_sizes, dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step,
    image_step, grid_step,
    GATED: tl.constexpr, AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DGRID: tl.constexpr, BANDS: tl.constexpr,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, GRID_FLAT: tl.constexpr, FLAT: tl.constexpr,
    DGRID_FLAT: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The terms and dgrid of TILE columns. GATED: a program has several tasks, if the gate is open."""
    follow()
    if GATED:
        if tl.load(gate) > limit:
            for task in range(tl.program_id(0), tasks, programs):
                add_column_tile(
                    dgrid, sums, words, dout, image, grid, task, first_channel, first_plane, groups,
                    first_pixel, tiles, columns, span, fraction_bits, channels, samples, sizes, out_sizes,
                    dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step,
                    image_step, grid_step, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, DGRID, BANDS,
                    CHANNELS, PARTS, GRID_FLAT, FLAT, DGRID_FLAT, OFFSET, ACCUMULATE, TILE, STEPS,
                )  # fmt: skip
    else:
        add_column_tile(
            dgrid, sums, words, dout, image, grid, tl.program_id(0), first_channel, first_plane, groups,
            first_pixel, tiles, columns, span, fraction_bits, channels, samples, sizes, out_sizes,
            dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step, image_step,
            grid_step, AXES, MODE, PADDING, ALIGNED, COMPUTE, TAPS, DGRID, BANDS, CHANNELS, PARTS, GRID_FLAT,
            FLAT, DGRID_FLAT, OFFSET, ACCUMULATE, TILE, STEPS,
        )  # fmt: skip


@triton.jit
def add_column_tile(
    dgrid, sums, words, dout, image, grid, task,
    first_channel, first_plane, groups, first_pixel, tiles, columns, span, fraction_bits, channels, samples,
    sizes, out_sizes, dgrid_strides, dout_strides, image_strides, grid_strides, dgrid_step, dout_step,
    image_step, grid_step,
    AXES: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr, TAPS: tl.constexpr, DGRID: tl.constexpr, BANDS: tl.constexpr,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, GRID_FLAT: tl.constexpr, FLAT: tl.constexpr,
    DGRID_FLAT: tl.constexpr, OFFSET: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The terms of TILE columns of STEPS samples, in CHANNELS channels, and their dgrid.

    ``channels`` planes of an image have accumulators. This launch has ``groups`` groups of CHANNELS of them,
    from ``first_plane``.
    """
    row, layer = sizes[0], sizes[0] * sizes[1]
    tile, group = task // groups, task % groups
    n = tile // tiles
    lane = tl.arange(0, TILE)
    column = (tile - n * tiles) * TILE + lane
    own_plane = first_plane + group * CHANNELS
    own_grid = grid + n.to(tl.int64) * grid_strides[0]
    own_dout = dout + n.to(tl.int64) * dout_strides[0] + (first_channel + own_plane).to(tl.int64) * dout_step
    own_image = image + n.to(tl.int64) * image_strides[0]
    own_dgrid = dgrid + n.to(tl.int64) * dgrid_strides[0]
    plane, size = n * channels + own_plane, tl.full([], 1, tl.int64) * span
    sums_0 = sums + plane * size
    sums_1, sums_2, sums_3 = sums_0 + size, sums_0 + 2 * size, sums_0 + 3 * size
    shift_0, special = load_plane(words, plane, fraction_bits, COMPUTE, PARTS)
    shift_1, shift_2, shift_3 = shift_0, shift_0, shift_0
    if CHANNELS > 1:
        shift_1, found = load_plane(words, plane + 1, fraction_bits, COMPUTE, PARTS)
        special = special | found
    if CHANNELS > 2:
        shift_2, found = load_plane(words, plane + 2, fraction_bits, COMPUTE, PARTS)
        special = special | found
    if CHANNELS > 3:
        shift_3, found = load_plane(words, plane + 3, fraction_bits, COMPUTE, PARTS)
        special = special | found
    none = tl.zeros([TILE], tl.int64)
    carried_0 = (none, none, none, none)
    carried_1, carried_2, carried_3 = carried_0, carried_0, carried_0
    last_cell = tl.full([TILE], NOWHERE, tl.int32)
    last_0, last_1 = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    number = column // out_sizes[0] * (STEPS - 1) * out_sizes[0] + column
    inside = (column < columns) & (number < samples)
    at, d = load_sample(
        own_grid, own_dout, number, inside, out_sizes, grid_strides, dout_strides, grid_step, dout_step,
        AXES, CHANNELS, GRID_FLAT, FLAT, OFFSET, COMPUTE,
    )  # fmt: skip
    for step in range(STEPS):
        number_after = number + out_sizes[0]
        inside_after = (column < columns) & (number_after < samples) & (step + 1 < STEPS)
        at_after, d_after = load_sample(
            own_grid, own_dout, number_after, inside_after, out_sizes, grid_strides, dout_strides,
            grid_step, dout_step, AXES, CHANNELS, GRID_FLAT, FLAT, OFFSET, COMPUTE,
        )  # fmt: skip
        first, t, scale = located(at[0], at[1], at[2], sizes, MODE, PADDING, ALIGNED)
        offsets, exist = four_corners(first, sizes, image_strides, 0, AXES, OFFSET)
        behind_offsets, behind = four_corners(first, sizes, image_strides, AXES - 2, AXES, OFFSET)
        pixel = first[1] * row + first[0] - first_pixel
        if AXES == 3:
            pixel += first[2] * layer
        if DGRID:
            target = place_offset(number, out_sizes, dgrid_strides, AXES, DGRID_FLAT).to(OFFSET)
            add_gradient(
                own_dgrid, target, own_image, d, t, scale, inside, offsets, exist, behind_offsets, behind,
                image_step, dgrid_step, AXES, MODE, TAPS, CHANNELS, ACCUMULATE, COMPUTE,
            )  # fmt: skip
        weights = layer_weights(first, t, sizes, AXES)
        if special:
            for channel in tl.static_range(CHANNELS):
                mark_sample(
                    sums_0 + channel * size, d[channel], weights, exist, behind, pixel, span, row, layer,
                    AXES, BANDS,
                )  # fmt: skip
        cell, there = cell_of(first, sizes, AXES)
        cell = tl.where(there & inside, cell, NOWHERE)
        joined = cell == last_cell + (row + 1)
        taken = (lane > 0) & (cell == tl.gather(cell, tl.maximum(lane - 1, 0), 0) + 1)
        given = (lane < TILE - 1) & (tl.gather(cell, tl.minimum(lane + 1, TILE - 1), 0) == cell + 1)
        apart = tl.sum(given.to(tl.int32), 0) < TILE // 2
        pixels = paired(pixel, lane, TILE)
        place, before = (pixel, pixels, joined, taken, given, apart), (last_0, last_1)
        carried_0 = add_channel(
            sums_0, carried_0, scaled(finite_or_zero(d[0]), shift_0, COMPUTE), weights, place, before,
            lane, span, row, layer, AXES, BANDS, TILE,
        )  # fmt: skip
        if CHANNELS > 1:
            carried_1 = add_channel(
                sums_1, carried_1, scaled(finite_or_zero(d[1]), shift_1, COMPUTE), weights, place, before,
                lane, span, row, layer, AXES, BANDS, TILE,
            )  # fmt: skip
        if CHANNELS > 2:
            carried_2 = add_channel(
                sums_2, carried_2, scaled(finite_or_zero(d[2]), shift_2, COMPUTE), weights, place, before,
                lane, span, row, layer, AXES, BANDS, TILE,
            )  # fmt: skip
        if CHANNELS > 3:
            carried_3 = add_channel(
                sums_3, carried_3, scaled(finite_or_zero(d[3]), shift_3, COMPUTE), weights, place, before,
                lane, span, row, layer, AXES, BANDS, TILE,
            )  # fmt: skip
        last_cell, last_0, last_1 = cell, pixels[0], pixels[1]
        number, inside, at, d = number_after, inside_after, at_after, d_after
    before, joined = (last_0, last_1), lane < 0
    release(sums_0, carried_0, before, joined, lane, span, row, layer, AXES, BANDS, TILE)
    if CHANNELS > 1:
        release(sums_1, carried_1, before, joined, lane, span, row, layer, AXES, BANDS, TILE)
    if CHANNELS > 2:
        release(sums_2, carried_2, before, joined, lane, span, row, layer, AXES, BANDS, TILE)
    if CHANNELS > 3:
        release(sums_3, carried_3, before, joined, lane, span, row, layer, AXES, BANDS, TILE)
