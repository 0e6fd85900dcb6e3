"""interpolate on the CPU. Small planes are in ``cpu_planes``, images whose channels are last in
``cpu_channels``, and rows with many taps in ``cpu_rows``.

Here a unit of work is up to RUN elements of one output row.

Each input row that the unit reads is converted to the compute type in pieces, and summed over x for all
elements of the unit. These sums are then added over y, and those over z. The sums over x of the last rows are
kept, since the output rows below use them again.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from holdfast.backends.cpu import (
    clear,
    copy,
    fence,
    jit,
    next_range,
    numbers_of,
    outlined,
    pointer,
    scratch_of_next,
    team_kernel,
)
from holdfast.backends.scratch import Runs, Scratch, step_of
from holdfast.core.plan import DescribedKernel, Launch
from holdfast.numerics.cpu import ITEM_SIZE, kind
from holdfast.numerics.cpu_walk import RUN, load_run, number, size_of, store_run
from holdfast.ops.interpolate import cpu_channels, cpu_planes, cpu_rows
from holdfast.ops.interpolate import plan as plans
from holdfast.ops.interpolate.cpu_planes import sizes_of
from holdfast.ops.interpolate.cpu_rows import LANES, sum_rows, take_row
from holdfast.ops.interpolate.cpu_sums import add, add_all
from holdfast.ops.interpolate.cpu_task import (
    COUNT,
    EVEN,
    FIRST,
    SAME,
    SHARED,
    START,
    VARYING,
    Resampling,
    Units,
    table_at,
)
from holdfast.ops.interpolate.tables import Table, each, joined

_RUN_BYTES = 8 * RUN
#: Sums over x that are kept: of this many rows of a plane, and of this many planes; or of all of these rows
#: if there is one plane.
_ROWS, _PLANES = 16, cpu_rows.PLANES
_KEPT = _ROWS * _PLANES
_RUNS = 6 + _PLANES + _KEPT
_SCRATCH = Scratch("interpolate", Runs(_RUNS, _RUN_BYTES), Runs(2, LANES * _RUN_BYTES))
_STEP, _WIDE_STEP = step_of(_RUN_BYTES), step_of(LANES * _RUN_BYTES)
#: Minimum number of such elements that are summed together.
_VECTOR = 8


@jit
def _sum_same(count, taps, firsts, weights, row, values):
    """Sums of ``taps`` taps each. ``values`` start with the first tap of the first element."""
    origin = np.int64(firsts[0])
    if taps == 2:
        for i in range(count):
            at = firsts[i] - origin
            row[i] = weights[2 * i] * values[at] + weights[2 * i + 1] * values[at + 1]
        return
    for i in range(count):
        row[i] = weights[taps * i] * values[firsts[i] - origin]
    for tap in range(1, taps):
        for i in range(count):
            row[i] = row[i] + weights[taps * i + tap] * values[firsts[i] - origin + tap]


@jit
def _sum_even(count, taps, weights, row, values):
    """``_sum_same`` of 2 or 4 taps, where the first taps are 2 apart. Such loads vectorise best."""
    if taps == 2:
        for i in range(count):
            row[i] = weights[2 * i] * values[2 * i] + weights[2 * i + 1] * values[2 * i + 1]
    else:
        for i in range(count):
            total = weights[4 * i] * values[2 * i] + weights[4 * i + 1] * values[2 * i + 1]
            total = total + weights[4 * i + 2] * values[2 * i + 2]
            row[i] = total + weights[4 * i + 3] * values[2 * i + 3]


@jit
def _sum_varying(count, begin, spans, weights, row, values, origin):
    """Sums of 0 to 2 taps each, without branches. There is at least one value; missing taps read the first.

    The values start with column ``origin``.
    """
    for i in range(count):
        taps, start = spans[COUNT][begin + i], spans[START][begin + i]
        first = spans[FIRST][begin + i] - origin
        one, two = taps > 0, taps > 1
        total = weights[start if one else 0] * values[first if one else 0]
        total = total if one else row[i]
        term = weights[start + 1 if two else 0] * values[first + 1 if two else 0]
        row[i] = total + term if two else total


@jit
def _sum_any(begin, count, spans, weights, row, values, piece, columns):
    """Add the taps in the columns ``piece`` to ``piece + columns``, whose values these are, to sums."""
    for i in range(count):
        first = spans[FIRST][begin + i]
        start = spans[START][begin + i] - first
        total = row[i]
        for column in range(max(first, piece), min(first + spans[COUNT][begin + i], piece + columns)):
            product = weights[start + column] * values[column - piece]
            total = product if column == first else total + product
        row[i] = total


@jit
def _fitting(spans, begin, end, columns):
    """The end of the elements from ``begin`` on whose taps are within ``columns`` columns."""
    last, low, high = spans[FIRST][begin] + columns, begin, end
    while low < high:
        middle = (low + high) // 2
        if spans[FIRST][middle] + spans[COUNT][middle] <= last:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def _sum_part(values_at, origin, begin, end, spans, weights, tables_at, row_at, like):
    """Sums over x of elements ``begin`` to ``end``, which are zero before.

    There is at least one value. The values start with column ``origin``.
    """
    size, i = size_of(like), begin
    while i < end:
        same = min(spans[SAME][i], end - i)
        first = spans[FIRST][i]
        row = pointer(row_at + (i - begin) * size, like)
        values = pointer(values_at + (first - origin) * size, like)
        taps = np.int64(spans[COUNT][i])
        if taps == 0 and same >= _VECTOR:  # the sums are cleared
            i += same
            continue
        firsts = pointer(tables_at[0] + i * 4, np.int32)
        of_first = pointer(tables_at[1] + spans[START][i] * size, like)
        if same >= _VECTOR and (taps == 2 or taps == 4) and spans[EVEN][i] >= same:
            _sum_even(same, taps, of_first, row, values)
        elif same >= _VECTOR:
            _sum_same(same, taps, firsts, of_first, row, values)
        elif spans[VARYING][i] > same:
            same = min(spans[VARYING][i], end - i)
            _sum_varying(same, i, spans, weights, row, pointer(values_at, like), origin)
        else:
            columns = spans[FIRST][i + same - 1] + taps - first
            _sum_any(i, same, spans, weights, row, values, first, columns)
        i += same


@jit
def _sum_row(line, source, begin, count, spans, weights, tables_at, row_at, raw, wide, like):
    """Sums over x of elements ``begin`` to ``begin + count``, from the input row at ``line``.

    Columns that are not of the compute type, or not contiguous, are converted in pieces of up to RUN.
    """
    outlined()
    source_kind, step, size = source[1], source[6], size_of(like)
    item, end = source_kind & ITEM_SIZE, begin + count
    last = spans[FIRST][end - 1] + spans[COUNT][end - 1]
    in_place = source_kind == item and step == 1
    clear(row_at, count * size)
    i = begin
    while i < end:
        origin, part_at = spans[FIRST][i], row_at + (i - begin) * size
        stop = end if in_place or last - origin <= RUN else _fitting(spans, i, end, RUN)
        at = line + origin * step * item
        if stop > i:
            columns = spans[FIRST][stop - 1] + spans[COUNT][stop - 1] - origin
            if columns > 0:
                values_at = load_run(at, source_kind, step, columns, raw, wide, like)
                _sum_part(values_at, origin, i, stop, spans, weights, tables_at, part_at, like)
            i = stop
            continue
        # The taps of this element alone are more than a piece.
        window_end = origin + spans[COUNT][i]
        for piece in range(origin, window_end, RUN):
            columns = min(RUN, window_end - piece)
            at = line + piece * step * item
            values_at = load_run(at, source_kind, step, columns, raw, wide, like)
            _sum_any(i, 1, spans, weights, pointer(part_at, like), pointer(values_at, like), piece, columns)
        i += 1


@jit
def _pick(source, step, firsts_at, count, target, item):
    """Copy the only tap of each element; ``source`` is the address of the input row."""
    outlined()
    firsts = pointer(firsts_at, np.int32)
    if item == 2:
        for i in range(count):
            pointer(target, np.uint16)[i] = pointer(source, np.uint16)[firsts[i] * step]
    elif item == 4:
        for i in range(count):
            pointer(target, np.uint32)[i] = pointer(source, np.uint32)[firsts[i] * step]
    else:
        for i in range(count):
            pointer(target, np.uint64)[i] = pointer(source, np.uint64)[firsts[i] * step]


@jit
def _resample(
    first, last, sizes, spans, weights, tables_at, out, source, rows, copies, accumulate, scratch, like
):
    """Units ``first`` to ``last``. ``sizes`` are C, D, H, W of the output.

    ``rows`` is the number of rows of an input plane if ``cpu_rows.serves`` it, else 0.

    A tensor is (address, kind, strides of n, c, z, y, x). The table has the columns of x, then of y, then z.
    ``tables_at`` are the addresses of its rows and of the weights. ``copies``: all elements have one tap, of
    weight 1.
    """
    channels, depth, height, width = sizes
    source_item, out_kind, out_step = source[1] & ITEM_SIZE, out[1], out[6]
    out_item = out_kind & ITEM_SIZE
    raw, wide, old_at = scratch, scratch + _STEP, scratch + 2 * _STEP
    kept, total_at = pointer(scratch + 3 * _STEP, np.int64(0)), scratch + 4 * _STEP
    terms = pointer(scratch + 5 * _STEP, np.int64(0))
    planes_at, rows_at = scratch + 6 * _STEP, scratch + (6 + _PLANES) * _STEP
    columns_at, sums_at = scratch + _RUNS * _STEP, scratch + _RUNS * _STEP + _WIDE_STEP
    row_bytes = source[5] * source_item
    in_place = out_kind == out_item and out_step == 1 and not accumulate
    only_copies = copies and out_step == 1 and not accumulate
    chunks = (width + RUN - 1) // RUN
    # The input row and the first element of each kept sum.
    for slot in range(_KEPT if first < last else 0):
        kept[2 * slot] = 0
    before_at = before_target = np.int64(0)
    for unit in range(first, last):
        y, chunk = unit % height, unit // height % chunks
        begin, line = chunk * RUN, unit // height // chunks
        z, image = line % depth, line // depth
        n, c = image // channels, image % channels
        count = min(RUN, width - begin)
        of_y, of_z = width + y, width + height + z
        offset = n * out[2] + c * out[3] + z * out[4] + y * out[5] + begin * out_step
        target = out[0] + offset * out_item
        from_z, from_y = spans[FIRST][of_z], spans[FIRST][of_y]
        corner = n * source[2] + c * source[3] + from_z * source[4] + from_y * source[5]
        corner_at = source[0] + corner * source_item
        if only_copies:
            if corner_at == before_at and y > 0:
                copy(target, before_target, count * out_item)
            else:
                _pick(corner_at, source[6], tables_at[0] + begin * 4, count, target, out_item)
            before_at, before_target = corner_at, target
            continue
        taps_y = spans[COUNT][of_y]
        taps_z = spans[COUNT][of_z] if taps_y > 0 else 0
        start_y, start_z = spans[START][of_y], spans[START][of_z]
        one_plane = taps_z == 1 and weights[start_z] == 1
        few_rows, few_planes = 0 < taps_y <= 4, 0 < taps_z <= 4
        sum_at = target if in_place else total_at
        total = pointer(sum_at, like)
        if taps_z == 0:
            clear(sum_at, count * size_of(like))
        for in_z in range(taps_z):
            plane = total if one_plane else pointer(planes_at + (in_z % _PLANES) * _STEP, like)
            ring = _KEPT if one_plane else _ROWS
            first_slot = 0 if one_plane else (from_z + in_z) % _PLANES * _ROWS
            for in_y in range(taps_y):
                at = corner_at + in_z * source[4] * source_item + in_y * row_bytes
                y_in = from_y + in_y
                slot = first_slot + y_in % ring
                row_at = rows_at + slot * _STEP
                if kept[2 * slot] != at or kept[2 * slot + 1] != begin:
                    together = min(rows - y_in, LANES)
                    if together >= cpu_rows.FEWEST:
                        sum_rows(
                            at, row_bytes, together, source, begin, count, spans, tables_at[1], raw, wide,
                            columns_at, sums_at, like,
                        )  # fmt: skip
                    else:
                        together = 1
                        _sum_row(at, source, begin, count, spans, weights, tables_at, row_at, raw, wide, like)
                    for row in range(together):
                        place = first_slot + (y_in + row) % ring
                        kept[2 * place], kept[2 * place + 1] = at + row * row_bytes, begin
                        if together > 1:
                            take_row(sums_at, row, count, rows_at + place * _STEP, like)
                if few_rows:
                    terms[in_y] = row_at
                else:
                    add(plane, weights[start_y + in_y], pointer(row_at, like), count, in_y == 0)
            if few_rows:
                for empty in range(taps_y, 4):
                    terms[empty] = terms[0]
                add_all(plane, weights, start_y, terms, taps_y, count, like)
            if not few_planes:
                add(total, weights[start_z + in_z], plane, count, in_z == 0)
        if few_planes and not one_plane:
            for number in range(4):
                terms[number] = planes_at + (number if number < taps_z else 0) * _STEP
            add_all(total, weights, start_z, terms, taps_z, count, like)
        if accumulate:
            old = pointer(load_run(target, out_kind, out_step, count, raw, old_at, like), like)
            for i in range(count):
                total[i] = old[i] + total[i]
        if not in_place:
            store_run(total_at, count, target, out_kind, out_step, raw, like)


@team_kernel(SHARED + 16)
def resample_rows(task):
    """Take ranges of units, until none is left. The numbers of its own are sizes, strides, and two flags."""
    (
        _, _, threads, scratch, share, out, source, step, units, spans_at, weights_at, columns, kind,
        accumulate, channels, depth, height, width, out_n, out_c, out_z, out_y, out_x, source_n, source_c,
        source_z, source_y, source_x, rows, copies, like,
    ) = task[0]  # fmt: skip
    scratch = scratch_of_next(numbers_of(task), threads, scratch, step)
    if scratch == 0:
        return
    spans, weights = table_at(spans_at, columns, weights_at, like)
    while True:
        first, last = next_range(numbers_of(task), share, units)
        if first == last:
            break
        _resample(
            first, last, (channels, depth, height, width), spans, weights, (spans_at, weights_at),
            (out, kind, out_n, out_c, out_z, out_y, out_x),
            (source, kind, source_n, source_c, source_z, source_y, source_x), rows, copies != 0,
            accumulate != 0, scratch, like,
        )  # fmt: skip
    fence()


class _Resample(DescribedKernel[plans.D]):
    """Both directions: the tables and the operands differ."""

    def __init__(self, desc: plans.D, device: torch.device) -> None:
        super().__init__(desc, device)
        tables = self.tables()
        if desc.axes == 1:  # channels are rows; see ``_prepared``
            tables = (tables[0], each(desc.shape[1]), tables[2])
        spans, weights = joined(tables)
        first, count = spans[FIRST], spans[COUNT]
        same = _until(np.diff(count) != 0)
        varies = (same < _VECTOR) & (count <= 2)
        varying = np.where(varies, _until(np.diff(varies)), 0)
        self.spans = np.stack([*spans, same, _until(np.diff(first) != 2), varying])
        self.weights = weights.astype(type(number(desc.compute)))
        self.copies = bool((spans[COUNT] == 1).all() and (weights == 1).all())
        self.by_rows = cpu_rows.serves(*tables)

    def tables(self) -> tuple[Table, ...]:
        raise NotImplementedError

    def compile(self) -> None:
        like = number(self.desc.compute)
        resample_rows.compiled(like)
        cpu_planes.resample_planes.compiled(like)

    def _prepared(self, out: torch.Tensor, source: torch.Tensor, accumulate: bool) -> Launch[Any]:
        if out.dim() == 3:  # the channels of a signal are rows of an image
            out, source = out[:, None], source[:, None]
        table, code = (self.spans, self.weights), kind(self.desc.dtype, self.desc.compute.torch)
        most_taps, channels, sizes = int(self.spans[COUNT].max()), out.shape[1], sizes_of(out)
        if (accumulate or not self.copies) and cpu_planes.serves(out, source):
            products = max(out.numel(), source.numel()) * most_taps
            numbers = (channels, *sizes, *sizes_of(source), *out.stride()[:2], *source.stride()[:2])
            units = Units(out.shape[0] * channels, products)
            return Resampling(
                cpu_planes.resample_planes, cpu_planes.SCRATCH, table, units, code, accumulate, numbers
            ).launch
        lines, width, products = out.shape[0] * prod(sizes[:2]), sizes[2], out.numel() * most_taps
        if cpu_channels.serves(out, source):
            pixels = cpu_channels.ELEMENTS // channels
            strides = (*cpu_channels.strides_of(out), *cpu_channels.strides_of(source))
            return Resampling(
                cpu_channels.resample_channels, cpu_channels.SCRATCH, table,
                Units(lines * -(-width // pixels), products), code, accumulate,
                (channels, *sizes, pixels, *strides),
            ).launch  # fmt: skip
        rows = sizes_of(source)[1] if self.by_rows else 0
        return Resampling(
            resample_rows, _SCRATCH, table, Units(lines * channels * -(-width // RUN), products), code,
            accumulate, (channels, *sizes, *_strides(out), *_strides(source), rows, self.copies),
        ).launch  # fmt: skip


def _until(changes: Any) -> Any:
    """For each element: the number of elements from it on, up to a change between an element and the next."""
    ends = np.append(np.flatnonzero(changes) + 1, len(changes) + 1)
    index = np.arange(len(changes) + 1, dtype=np.int32)
    return ends[np.searchsorted(ends, index, "right")].astype(np.int32) - index


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of n, c, z, y and x; 0 for axes that the tensor does not have."""
    n, c, *steps = tensor.stride()
    return (n, c, *(0, 0, *steps)[-3:])


class Interpolate(_Resample[plans.InterpolateDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.tables()

    def prepare(self, args: plans.InterpolateArgs) -> Launch[plans.InterpolateArgs]:
        return self._prepared(args.out, args.input, False)


class InterpolateBackward(_Resample[plans.InterpolateBackwardDescriptor]):
    def tables(self) -> tuple[Table, ...]:
        return self.desc.transposed_tables()

    def prepare(self, args: plans.InterpolateBackwardArgs) -> Launch[plans.InterpolateBackwardArgs]:
        return self._prepared(args.dinput, args.dout, args.accumulate)
