"""Bundles: several channels of an image, interleaved, so that one vector holds all channels of a pixel.

A bundle has one row per pixel and one lane per channel. ``lanes`` is a tuple of that length, which the
compiler knows; its elements are not used. Lanes beyond the last channel hold +0.0. Row -1, before the first,
is for pixels outside the image.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from llvmlite import ir
from numba import types

from holdfast.backends.cpu import copy, emit, jit, outlined, pointer
from holdfast.numerics.cpu import ITEM_SIZE, widen, zero
from holdfast.numerics.cpu_walk import RUN, load_run, load_span, size_of, store_run, store_span


def _load(builder, address, row):
    loaded = builder.load(builder.inttoptr(address, row.as_pointer()))
    loaded.align = 4
    return loaded


def _store(builder, values, address):
    builder.store(values, builder.inttoptr(address, values.type.as_pointer())).align = 4


def _broadcast(builder, value, row):
    nothing = ir.Constant(row, ir.Undefined)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), row.count), [0] * row.count)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, everywhere)


def _add_terms(context, builder, signature, args, total):
    """Add weight times row to ``total``, for each source in turn, and store the result."""
    target, sources, weights, _ = args
    for k in range(signature.args[1].count):
        weight = _broadcast(builder, builder.extract_value(weights, k), total.type)
        row = _load(builder, builder.extract_value(sources, k), total.type)
        total = builder.fadd(total, builder.fmul(weight, row))
    _store(builder, total, target)
    return context.get_dummy_value()


def _row_type(context, signature):
    return ir.VectorType(context.get_value_type(signature.args[2].dtype), signature.args[3].count)


@emit
def set_weighted_rows(typingctx, target, sources, weights, lanes):
    """Row at ``target`` = +0.0 + weight * row + weight * row + ..., in the order of the tuples."""

    def build(context, builder, signature, args):
        row = _row_type(context, signature)
        return _add_terms(context, builder, signature, args, ir.Constant(row, [0.0] * row.count))

    return types.none(target, sources, weights, lanes), build


@emit
def add_weighted_rows(typingctx, target, sources, weights, lanes):
    """Row at ``target`` += weight * row, for each element of the tuples in turn."""

    def build(context, builder, signature, args):
        total = _load(builder, args[0], _row_type(context, signature))
        return _add_terms(context, builder, signature, args, total)

    return types.none(target, sources, weights, lanes), build


@emit
def add_row(typingctx, target, source, like, lanes):
    """Row at ``target`` += row at ``source``."""

    def build(context, builder, signature, args):
        row = ir.VectorType(args[2].type, signature.args[3].count)
        _store(builder, builder.fadd(_load(builder, args[0], row), _load(builder, args[1], row)), args[0])
        return context.get_dummy_value()

    return types.none(target, source, like, lanes), build


@emit
def copy_row(typingctx, target, source, like, lanes):
    """Row at ``target`` = row at ``source``."""

    def build(context, builder, signature, args):
        _store(
            builder, _load(builder, args[1], ir.VectorType(args[2].type, signature.args[3].count)), args[0]
        )
        return context.get_dummy_value()

    return types.none(target, source, like, lanes), build


@emit
def clear_row(typingctx, target, like, lanes):
    """Row at ``target`` = +0.0."""

    def build(context, builder, signature, args):
        row = ir.VectorType(args[1].type, signature.args[2].count)
        _store(builder, ir.Constant(row, [0.0] * row.count), args[0])
        return context.get_dummy_value()

    return types.none(target, like, lanes), build


@jit
def _transpose_in(lines_at, step, count, rows_at, like, lanes):
    """Transpose lines, one per lane and ``step`` elements apart, to rows."""
    lines, rows = pointer(lines_at, like), pointer(rows_at, like)
    for i in range(count):
        for lane in range(len(lanes)):
            rows[i * len(lanes) + lane] = lines[lane * step + i]


@jit
def _transpose_out(rows_at, count, lines_at, step, like, lanes):
    """Transpose rows to lines, eight rows at a time, so that vectors write the lines."""
    rows, lines = pointer(rows_at, like), pointer(lines_at, like)
    whole = count // 8 * 8
    for begin in range(0, whole, 8):
        for lane in range(len(lanes)):
            for i in range(begin, begin + 8):
                lines[lane * step + i] = rows[i * len(lanes) + lane]
    for i in range(whole, count):
        for lane in range(len(lanes)):
            lines[lane * step + i] = rows[i * len(lanes) + lane]


@jit
def _contiguous(table):
    """Whether the loops are a single contiguous one."""
    return table.shape[1] == 1 and table[1, 0] == 1


@jit
def load_bundle(address, kind, channel_step, table, width, count, rows_at, scratch, like, lanes):
    """Load ``width`` channels from ``address`` to ``count`` rows; ``table`` holds the loops over pixels.

    ``scratch`` holds one line of RUN elements per lane, and two more.
    """
    outlined()
    item, row, line = kind & ITEM_SIZE, len(lanes) * size_of(like), RUN * size_of(like)
    whole = kind == item and width == len(lanes)
    if whole and _contiguous(table):
        _transpose_in(address, channel_step, count, rows_at, like, lanes)
        return
    if channel_step == 1 and table.shape[1] == 1:
        step = table[1, 0] * item
        for i in range(count):
            target, source = rows_at + i * row, address + i * step
            if whole:
                copy_row(target, source, like, lanes)
            else:
                clear_row(target, like, lanes)
                widen_row(source, kind, width, target, like)
        return
    raw = scratch + len(lanes) * line
    for lane in range(width, len(lanes)):
        blank = pointer(scratch + lane * line, like)
        for i in range(RUN):
            blank[i] = zero(like)
    for begin in range(0, count, RUN):
        end = min(begin + RUN, count)
        for lane in range(width):
            source = address + lane * channel_step * item
            load_span(source, kind, table, begin, end, raw, scratch + lane * line, like)
        _transpose_in(scratch, RUN, end - begin, rows_at + begin * row, like, lanes)


@jit
def widen_row(source, kind, width, target, like):
    if kind == kind & ITEM_SIZE:
        copy(target, source, width * kind)
    else:
        widen(source, kind, 0, width, target, like)


@jit
def store_bundle(rows_at, address, kind, channel_step, table, width, count, accumulate, scratch, like, lanes):
    """Store ``count`` rows to ``width`` channels, or add them; the rows may be overwritten."""
    outlined()
    item, row, line = kind & ITEM_SIZE, len(lanes) * size_of(like), RUN * size_of(like)
    raw, old = scratch + len(lanes) * line, scratch + (len(lanes) + 1) * line
    whole = kind == item and width == len(lanes)
    if whole and not accumulate and _contiguous(table):
        _transpose_out(rows_at, count, address, channel_step, like, lanes)
        return
    if channel_step == 1 and table.shape[1] == 1:
        step = table[1, 0] * item
        for i in range(count):
            source, target = rows_at + i * row, address + i * step
            if accumulate:
                before = pointer(load_run(target, kind, 1, width, raw, old, like), like)
                now = pointer(source, like)
                for lane in range(width):
                    now[lane] = before[lane] + now[lane]
            if whole:
                copy_row(target, source, like, lanes)
            else:
                store_run(source, width, target, kind, 1, raw, like)
        return
    for begin in range(0, count, RUN):
        end = min(begin + RUN, count)
        _transpose_out(rows_at + begin * row, end - begin, scratch, RUN, like, lanes)
        for lane in range(width):
            target, values = address + lane * channel_step * item, scratch + lane * line
            store_span(values, target, kind, table, begin, end, accumulate, raw, old, like)
