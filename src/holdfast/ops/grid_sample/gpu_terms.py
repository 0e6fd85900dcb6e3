"""Terms of dinput and products for dgrid, in Triton: what the kernels of ``gpu_dinput_by_*`` share."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: allow-any-generics, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.numerics.gpu import widen
from holdfast.ops.grid_sample.gpu_coordinates import (
    NEAREST,
    corner_pixel,
    corner_slope,
    corner_weight,
    offset_of,
)
from holdfast.ops.grid_sample.gpu_dgrid import store_dgrid
from holdfast.ops.grid_sample.gpu_integer_sums import (
    finite_or_zero,
    fraction_word,
    plane_shift,
    special_bits,
)

#: A part's word is its largest finite exponent field, plus this if it has a number that is not finite.
SPECIAL = tl.constexpr(2**16)


@triton.jit
def load_plane(words, plane, fraction_bits, COMPUTE: tl.constexpr, PARTS: tl.constexpr):
    """The shift of a plane, and whether it has numbers that are not finite."""
    word = tl.load(words + plane * PARTS + tl.arange(0, PARTS))
    special = word >= SPECIAL
    field = tl.max(tl.where(special, word - SPECIAL, word), 0)
    return plane_shift(field, fraction_bits, COMPUTE), tl.max(special.to(tl.int32), 0) > 0


@triton.jit
def load_changes(dout, step, inside, CHANNELS: tl.constexpr, COMPUTE: tl.constexpr):
    """dout of samples in up to four channels; those of the first for missing channels."""
    step = tl.full([], 1, tl.int64) * step
    d0 = widen(tl.load(dout, mask=inside, other=0.0), COMPUTE)
    d1, d2, d3 = d0, d0, d0
    if CHANNELS > 1:
        d1 = widen(tl.load(dout + step, mask=inside, other=0.0), COMPUTE)
    if CHANNELS > 2:
        d2 = widen(tl.load(dout + 2 * step, mask=inside, other=0.0), COMPUTE)
    if CHANNELS > 3:
        d3 = widen(tl.load(dout + 3 * step, mask=inside, other=0.0), COMPUTE)
    return d0, d1, d2, d3


@triton.jit
def add_term(sums, pixel, mask, term, span, fraction_bits, WORDS: tl.constexpr):
    """Add a term to the accumulator of ``pixel``."""
    tl.atomic_add(sums + pixel, term.to(tl.int64), mask=mask, sem="relaxed")
    if WORDS == 2:
        tl.atomic_add(sums + span + pixel, fraction_word(term, fraction_bits), mask=mask, sem="relaxed")


@triton.jit
def mark_specials(sums, pixels, masks, weights, d, COUNT: tl.constexpr):
    """Mark the pixels of samples whose dout is not finite."""
    for k in tl.static_range(COUNT):
        marks = tl.where(finite_or_zero(d) == d, 0, special_bits(weights[k] * d))
        tl.atomic_or(sums + pixels[k], marks, mask=masks[k] & (marks != 0), sem="relaxed")


@triton.jit
def pixel_offset(n, x, y, z, strides, OFFSET: tl.constexpr):
    """Offset of a pixel in the image; outside, of a pixel inside, which is safe to load."""
    return offset_of(n, tl.maximum(x, 0), tl.maximum(y, 0), tl.maximum(z, 0), strides).to(OFFSET)


@triton.jit
def quad_of(
    first, n, inside, first_pixel, span, sizes, image_strides,
    CORNER: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr,
    ALIGNED: tl.constexpr, BANDS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Four corners from CORNER: pixels in the band, offsets in the image, masks of both."""
    x0, y0, z0, in_0 = corner_pixel(first, CORNER, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
    x1, y1, z1, in_1 = corner_pixel(first, CORNER + 1, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
    x2, y2, z2, in_2 = corner_pixel(first, CORNER + 2, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
    x3, y3, z3, in_3 = corner_pixel(first, CORNER + 3, sizes, AXES, TAPS, MODE, PADDING, ALIGNED)
    p0 = (z0 * sizes[1] + y0) * sizes[0] + x0 - first_pixel
    p1 = (z1 * sizes[1] + y1) * sizes[0] + x1 - first_pixel
    p2 = (z2 * sizes[1] + y2) * sizes[0] + x2 - first_pixel
    p3 = (z3 * sizes[1] + y3) * sizes[0] + x3 - first_pixel
    offsets = (
        pixel_offset(n, x0, y0, z0, image_strides, OFFSET),
        pixel_offset(n, x1, y1, z1, image_strides, OFFSET),
        pixel_offset(n, x2, y2, z2, image_strides, OFFSET),
        pixel_offset(n, x3, y3, z3, image_strides, OFFSET),
    )
    m0, m1, m2, m3 = in_0 & inside, in_1 & inside, in_2 & inside, in_3 & inside
    if BANDS:
        m0, m1 = m0 & (p0 >= 0) & (p0 < span), m1 & (p1 >= 0) & (p1 < span)
        m2, m3 = m2 & (p2 >= 0) & (p2 < span), m3 & (p3 >= 0) & (p3 < span)
    return (p0, p1, p2, p3), offsets, (m0, m1, m2, m3), (in_0, in_1, in_2, in_3)


@triton.jit
def quad_weights(t, CORNER: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr, MODE: tl.constexpr):
    """Weights of four corners from CORNER."""
    return (
        corner_weight(t, CORNER, AXES, TAPS, MODE),
        corner_weight(t, CORNER + 1, AXES, TAPS, MODE),
        corner_weight(t, CORNER + 2, AXES, TAPS, MODE),
        corner_weight(t, CORNER + 3, AXES, TAPS, MODE),
    )


@triton.jit
def inside_axis(index, size):
    """Whether 0 <= index < size."""
    return index.to(tl.uint32) < (size + tl.zeros([1], tl.int32)).to(tl.uint32)


@triton.jit
def clipped_tap(first, TAP: tl.constexpr, size):
    """A tap's pixel, the nearest one of the image if it is outside, and whether it is inside."""
    index = first + TAP
    return tl.minimum(tl.maximum(index, 0), size - 1), inside_axis(index, size)


@triton.jit
def four_corners(first, sizes, strides, LAYER: tl.constexpr, AXES: tl.constexpr, OFFSET: tl.constexpr):
    """Offsets in the image of the four corners of a layer, and whether they are inside."""
    west, in_west = clipped_tap(first[0], 0, sizes[0])
    east, in_east = clipped_tap(first[0], 1, sizes[0])
    north, in_north = clipped_tap(first[1], 0, sizes[1])
    south, in_south = clipped_tap(first[1], 1, sizes[1])
    west, east = west.to(OFFSET) * strides[1], east.to(OFFSET) * strides[1]
    north, south = north.to(OFFSET) * strides[2], south.to(OFFSET) * strides[2]
    if AXES == 3:
        layer, in_layer = clipped_tap(first[2], LAYER, sizes[2])
        layer = layer.to(OFFSET) * strides[3]
        north, south = north + layer, south + layer
        in_north, in_south = in_north & in_layer, in_south & in_layer
    offsets = (north + west, north + east, south + west, south + east)
    return offsets, (in_north & in_west, in_north & in_east, in_south & in_west, in_south & in_east)


@triton.jit
def load_pixels(image, channel, step, offsets, COMPUTE: tl.constexpr):
    """The pixels of four corners in one channel."""
    pixels = image + tl.full([1], channel, tl.int64) * step
    return (
        widen(tl.load(pixels + offsets[0]), COMPUTE),
        widen(tl.load(pixels + offsets[1]), COMPUTE),
        widen(tl.load(pixels + offsets[2]), COMPUTE),
        widen(tl.load(pixels + offsets[3]), COMPUTE),
    )


@triton.jit
def add_products(s0, s1, s2, s3, d, image, channel, step, offsets, COMPUTE: tl.constexpr):
    """Add dout times pixel of one channel to the sums of four corners."""
    p0, p1, p2, p3 = load_pixels(image, channel, step, offsets, COMPUTE)
    return s0 + d * p0, s1 + d * p1, s2 + d * p2, s3 + d * p3


@triton.jit
def add_slopes(
    changes, totals, insides, t, CORNER: tl.constexpr, AXES: tl.constexpr, TAPS: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Add slope times total of four corners to the derivatives along x, y and z."""
    x, y, z = changes
    for i in tl.static_range(4):
        # A sum is never -0.0, so adding a zero to it changes no bit.
        total = tl.where(insides[i], totals[i], 0.0)
        x += corner_slope(t, CORNER + i, 0, AXES, TAPS, MODE) * total
        y += corner_slope(t, CORNER + i, 1, AXES, TAPS, MODE) * total
        if AXES == 3:
            z += corner_slope(t, CORNER + i, 2, AXES, TAPS, MODE) * total
    return x, y, z


@triton.jit
def store_changes(
    dgrid, at, changes, scale, inside, step,
    AXES: tl.constexpr, MODE: tl.constexpr, ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the derivatives along all axes; zeros in mode nearest."""
    if MODE == NEAREST:
        scale = changes
    store_dgrid(dgrid, at, changes[0], scale[0], inside, ACCUMULATE, COMPUTE)
    store_dgrid(dgrid, at + step, changes[1], scale[1], inside, ACCUMULATE, COMPUTE)
    if AXES == 3:
        store_dgrid(dgrid, at + 2 * step, changes[2], scale[2], inside, ACCUMULATE, COMPUTE)
