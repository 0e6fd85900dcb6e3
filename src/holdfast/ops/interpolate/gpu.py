"""interpolate in Triton. A program computes a strip of rows, one after the other, in one or several planes.

A plane is one channel of one image; with channels last, it is one image, and its pixels have channels. The
lanes of a program are elements of a row, so all lanes have the same taps along y and z. The rows of a strip
are neighbours along y, or along z in a volume.

Output rows of a strip read the same sources: the sum over x of a source row, or the sum over y and x of a
source slab. A program keeps the sums of the sources of the current output row, its window, and adds only
those that the next output row reads besides. Windows of many sums would not fit into registers, so there
every sum is computed again; so are those of the few rows at the edges that have more taps than the others.

The tables are tensors that the kernel keeps. A sum starts with -0.0, and taps that do not exist add -0.0:
these additions change no bit, so that no tap needs a comparison.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from holdfast.backends.steps import Steps
from holdfast.backends.tuning import Tuned
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.numerics.gpu import narrow, widen
from holdfast.ops.interpolate import plan as plans
from holdfast.ops.interpolate.tables import Table, joined


@dataclass(frozen=True)
class Tuning:
    """Tuning of ``resample``."""

    #: Threads of a program. A lane is an element of a row; planes side by side have lanes of their own.
    threads: int = 128
    #: Fewest lanes of a row, if the row has as many elements.
    least: int = 16
    #: Maximum rows of a strip; fewer if there would be fewer programs than these.
    rows: int = 32
    programs: int = 2112
    programs_of_volume: int = 4224
    #: Maximum sums of a window.
    window: int = 16
    #: Maximum taps of loops that are unrolled: along x, and along x and y in a volume.
    unrolled: int = 24
    #: Lanes per thread, which are neighbours: ``most``, ``some`` or 1.
    most: int = 4
    some: int = 2
    #: Source elements per output element along x for less than ``most`` lanes, and for one lane.
    far: float = 1.5
    farther: float = 3.0
    #: Maximum taps along x for more than one lane, if the source is far.
    few_taps: int = 4

    def per_thread(self, distance: float, taps: int) -> int:
        """Lanes per thread. Loads of a warp are close together if neighbours belong to different threads.

        ``distance`` is the number of source elements between those of neighbouring lanes.
        """
        if distance < self.far:
            return self.most
        return self.some if distance < self.farther and taps <= self.few_taps else 1

    def block_of(self, elements: int, lanes: int) -> int:
        """Lanes of a row: a power of two that pads the row by little."""
        sizes = [1 << bit for bit in range(lanes.bit_length())]
        sizes = [size for size in sizes if size >= min(self.least, elements)]
        padded = {size: -(-elements // size) * size for size in sizes}
        return max(size for size in sizes if padded[size] * 8 <= min(padded.values()) * 9)


TUNING = Tuned(
    gpu=Tuning(), interpreter=Tuning(threads=4096, rows=64, programs=1, programs_of_volume=1, window=6)
)


@triton.jit
def negative_zeros(LANES: tl.constexpr, COMPUTE: tl.constexpr):
    """Elements -0.0. A zero among Triton's constants loses its sign."""
    return tl.zeros([LANES], COMPUTE) * -1.0


@triton.jit
def loaded_weights(weights, count, none, TAPS: tl.constexpr):
    """The weights of TAPS taps. From ``count`` on they are ``none``; the first is 0.0 if there are none."""
    found = (tl.load(weights, mask=0 < count, other=0.0),)
    for number in tl.static_range(1, TAPS):
        found = found + (tl.load(weights + number, mask=number < count, other=none),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def row_sum(line, of_x, weights, stride, taps, count, none, COMPUTE: tl.constexpr, TAPS: tl.constexpr):
    """The sum over the taps of x. TAPS is their largest count, or 0 if only ``taps`` has it."""
    row = none
    if TAPS > 0:
        for number in tl.static_range(TAPS):
            step = tl.full([], number, tl.int64) * stride
            value = tl.load(line + step, mask=number < count, other=0.0)
            row += of_x[number] * widen(value, COMPUTE)
    else:
        for number in range(taps):
            step = tl.cast(number, tl.int64) * stride
            value = tl.load(line + step, mask=number < count, other=0.0)
            other = tl.where(number > 0, none, 0.0)
            weight = tl.load(weights + number, mask=number < count, other=other)
            row += weight * widen(value, COMPUTE)
    return row


@triton.jit
def inner_sum(
    line, of_x, weight_x, taps, count_x, weight_y, count_y, strides, none,
    COMPUTE: tl.constexpr, TAPS_X: tl.constexpr, TAPS_Y: tl.constexpr, VOLUME: tl.constexpr,
):  # fmt: skip
    """The sum over the taps of x, and in a VOLUME of y. TAPS_Y is the largest count of y, or 0."""
    if not VOLUME:
        slab = row_sum(line, of_x, weight_x, strides[0], taps, count_x, none, COMPUTE, TAPS_X)
    else:
        slab = none
        if TAPS_Y > 0:
            for number in tl.static_range(TAPS_Y):
                # For a tap that does not exist, the last row is read again, and not added.
                step = tl.minimum(number, tl.maximum(count_y - 1, 0)).to(tl.int64) * strides[1]
                row = row_sum(line + step, of_x, weight_x, strides[0], taps, count_x, none, COMPUTE, TAPS_X)
                weight = tl.load(weight_y + number, mask=number < count_y, other=0.0)
                slab = tl.where(number < count_y, slab + weight * row, slab)
        else:
            for number in range(count_y):
                step = tl.cast(number, tl.int64) * strides[1]
                row = row_sum(line + step, of_x, weight_x, strides[0], taps, count_x, none, COMPUTE, TAPS_X)
                slab += tl.load(weight_y + number) * row
        slab = tl.where(count_y > 0, slab, 0.0)
    return slab


@triton.jit(do_not_specialize=["blocks", "strips", "planes", "strip"])
def resample(
    out, source, spans, weights, elements, blocks, strips, strip, planes, channels, columns,
    sizes, source_sizes, taps, out_strides, source_strides,
    ACCUMULATE: tl.constexpr, COMPUTE: tl.constexpr, INDEX: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    TAPS_X: tl.constexpr, TAPS_Y: tl.constexpr, WINDOW: tl.constexpr, LONGER: tl.constexpr,
    VOLUME: tl.constexpr, BLOCK: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of ``strip`` rows of ABREAST planes: rows along z in a VOLUME, else along y.

    ``elements`` are those of a row. ``sizes`` and ``source_sizes`` are of x, y, z; strides are of x, y, z, c,
    n. ``spans`` has rows of ``columns`` numbers: the first tap, the count and the first weight. TAPS_X and
    TAPS_Y are the largest counts of x, and of y in a VOLUME, or 0 if the loop is not unrolled. Rows with up
    to WINDOW taps along the strip use a window. LONGER: some have more taps.
    """
    ALONG: tl.constexpr = 2 if VOLUME else 1
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    y, rest = rest % sizes[3 - ALONG], rest // sizes[3 - ALONG]
    begin, group = rest % strips * strip, rest // strips
    LANES: tl.constexpr = BLOCK * ABREAST
    lane = tl.arange(0, LANES)
    element = block.to(INDEX) * BLOCK + lane % BLOCK
    inside = element < elements
    plane = group * ABREAST
    if ABREAST > 1:
        plane += lane // BLOCK
        inside = inside & (plane < planes)
        plane = tl.where(inside, plane, 0)
    if CHANNELS_LAST:
        x, channel, image = element // channels, (element % channels).to(tl.int64), tl.cast(plane, tl.int64)
    else:
        x, channel, image = element, tl.cast(plane % channels, tl.int64), tl.cast(plane // channels, tl.int64)
    at_x, at_y = spans + x, spans + sizes[0] + y
    count_x = tl.load(at_x + columns, mask=inside, other=0)
    weight_x = weights + tl.load(at_x + 2 * columns, mask=inside, other=0)
    none = negative_zeros(LANES, COMPUTE)
    of_x = loaded_weights(weight_x, count_x, none, TAPS_X)
    column = tl.load(at_x, mask=inside, other=0).to(tl.int64)
    corner = source + (image * source_strides[4] + channel * source_strides[3]) + column * source_strides[0]
    target = out + (image * out_strides[4] + channel * out_strides[3]) + x.to(tl.int64) * out_strides[0]
    count_y, weight_y, at = 1, weights, spans + sizes[0]
    if VOLUME:
        corner += tl.minimum(tl.load(at_y), source_sizes[1] - 1).to(tl.int64) * source_strides[1]
        target += y.to(tl.int64) * out_strides[1]
        count_y, weight_y, at = tl.load(at_y + columns), weights + tl.load(at_y + 2 * columns), at + sizes[1]

    window = (tl.full([LANES], 0.0, COMPUTE),)
    for _ in tl.static_range(1, WINDOW):
        window = window + (tl.full([LANES], 0.0, COMPUTE),)  # type: ignore[assignment]  # noqa: RUF005
    known = tl.load(at + begin) - WINDOW
    for row in range(begin, tl.minimum(begin + strip, sizes[ALONG])):
        first, count = tl.load(at + row), tl.load(at + columns + row)
        weight = weights + tl.load(at + 2 * columns + row)
        total = none
        if count <= WINDOW:
            # Move the window to the taps of this row. Rows past its taps are read, but not added.
            known = tl.maximum(known, first - WINDOW)
            while known < first:
                step = tl.minimum(known + WINDOW, source_sizes[ALONG] - 1).to(tl.int64)
                found = inner_sum(
                    corner + step * source_strides[ALONG], of_x, weight_x, taps, count_x, weight_y, count_y,
                    source_strides, none, COMPUTE, TAPS_X, TAPS_Y, VOLUME,
                )  # fmt: skip
                window = window[1:] + (found,)  # noqa: RUF005
                known += 1
            if count == WINDOW:
                for number in tl.static_range(WINDOW):
                    total += tl.load(weight + number) * window[number]
            else:
                for number in tl.static_range(WINDOW):
                    one = tl.load(weight + number, mask=number < count, other=0.0)
                    total = tl.where(number < count, total + one * window[number], total)
        if LONGER and count > WINDOW:
            for number in range(count):
                step = (first + number).to(tl.int64)
                found = inner_sum(
                    corner + step * source_strides[ALONG], of_x, weight_x, taps, count_x, weight_y, count_y,
                    source_strides, none, COMPUTE, TAPS_X, TAPS_Y, VOLUME,
                )  # fmt: skip
                total += tl.load(weight + number) * found
        total = tl.where(count > 0, total, 0.0)
        written = target + tl.cast(row, tl.int64) * out_strides[ALONG]
        if ACCUMULATE:
            total = widen(tl.load(written, mask=inside), COMPUTE) + total
        tl.store(written, narrow(total, out.dtype.element_ty), mask=inside)


class _Resample(DescribedKernel[plans.D]):
    """Both directions: the tables and the operands differ."""

    def __init__(self, desc: plans.D, device: torch.device) -> None:
        super().__init__(desc, device)
        tables = self.tables()
        self.most = tuple(table.most for table in tables)
        self.usual = tuple(table.usual for table in tables)
        spans, weights = joined(tables)
        self.spans = torch.from_numpy(spans).to(device)
        self.weights = torch.from_numpy(weights).to(desc.compute.torch).to(device)

    def tables(self) -> tuple[Table, ...]:
        raise NotImplementedError

    def _prepared(self, args: Any, out: str, source: str, accumulate: bool) -> Launch[Any]:
        tuning = TUNING.on(self.device)
        written, read = getattr(args, out), getattr(args, source)
        images, channels = written.shape[:2]
        sizes, source_sizes = _along(written.shape[2:], 1), _along(read.shape[2:], 1)
        channels_last = channels > 1 and written.stride(1) == 1
        elements = sizes[0] * (channels if channels_last else 1)
        planes = images * (1 if channels_last else channels)
        volume = written.ndim == 5
        along, across = (2, 1) if volume else (1, 2)
        taps_x, taps_y = self.most[:2]
        window = self.usual[along] if self.usual[along] <= tuning.window else 0
        distance = 1.0 if channels_last else source_sizes[0] / sizes[0]
        per_thread = tuning.per_thread(distance, taps_x)
        lanes = tuning.threads * per_thread
        block = tuning.block_of(elements, lanes)
        abreast = min(lanes // block, triton.next_power_of_2(max(planes, 1)))
        blocks, groups = -(-elements // block), -(-planes // abreast)
        programs = tuning.programs_of_volume if volume else tuning.programs
        strip = min(-(-blocks * groups * sizes[1] * sizes[2] // programs), tuning.rows, sizes[along])
        strip = max(strip, 1)
        strips = -(-sizes[along] // strip)
        steps = Steps(self.device, args)
        steps.add(
            resample, blocks * strips * sizes[across] * groups,
            out=out, source=source, spans=self.spans, weights=self.weights, elements=elements, blocks=blocks,
            strips=strips, strip=strip, planes=planes, channels=channels, columns=self.spans.shape[1],
            sizes=sizes, source_sizes=source_sizes, taps=taps_x,
            out_strides=_strides(written), source_strides=_strides(read), ACCUMULATE=accumulate,
            COMPUTE=tl.float64 if self.desc.compute.bits == 64 else tl.float32,
            INDEX=tl.int32 if blocks * block < 2**31 else tl.int64, CHANNELS_LAST=channels_last,
            TAPS_X=taps_x if taps_x <= tuning.unrolled else 0,
            TAPS_Y=taps_y if volume and taps_x * taps_y <= tuning.unrolled else 0,
            WINDOW=window, LONGER=self.most[along] > window, VOLUME=volume,
            BLOCK=block, ABREAST=abreast,
            num_warps=max(block * abreast // (32 * per_thread), 1),
        )  # fmt: skip
        return steps.launch


def _along(numbers: Any, missing: int) -> tuple[int, ...]:
    """Numbers of x, y and z from those of the last axes."""
    return (*reversed(numbers), missing, missing)[:3]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    n, c, *steps = tensor.stride()
    return (*_along(steps, 0), c, n)


class Interpolate(_Resample[plans.InterpolateDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.tables()

    def compile(self) -> None:
        self.prepare(plans.InterpolateArgs.described(self.desc))

    def prepare(self, args: plans.InterpolateArgs) -> Launch[plans.InterpolateArgs]:
        return self._prepared(args, "out", "input", False)


class InterpolateBackward(_Resample[plans.InterpolateBackwardDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.transposed_tables()

    def compile(self) -> None:
        self.prepare(plans.InterpolateBackwardArgs.described(self.desc))

    def prepare(self, args: plans.InterpolateBackwardArgs) -> Launch[plans.InterpolateBackwardArgs]:
        return self._prepared(args, "dinput", "dout", args.accumulate)
