"""Walks over strided elements on the CPU: gathered into runs of the compute type, and scattered back.

A walk is a table: the sizes of its loops, then the strides. A run is some elements side by side.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from holdfast.backends.cpu import copy, emit, jit, on_demand, outlined, pointer
from holdfast.core.dtypes import Float
from holdfast.numerics.cpu import ITEM_SIZE, narrow, widen

#: Elements that are converted or transposed at a time.
RUN = 256


def table_of(sizes: Sequence[int], strides: Sequence[int]) -> np.ndarray[Any, Any]:
    """The loops over rows as kernels take them."""
    return np.array([sizes, strides], np.int64)


def number(compute: Float) -> np.floating[Any]:
    """Any number of the compute type."""
    return np.float64(0) if compute.name == "float64" else np.float32(0)


@jit
def offset_of(number, table):
    """Where element ``number`` of a walk lies. ``table`` has the sizes of the loops, then the strides."""
    inner = table.shape[1] - 1
    if inner == 0:
        return number * table[1, 0]
    offset = 0
    for d in range(inner, 0, -1):
        outer = number // table[0, d]
        offset += (number - outer * table[0, d]) * table[1, d]
        number = outer
    return offset + number * table[1, 0]


@emit
def size_of(typingctx, like):
    """The bytes of a value like this."""

    def build(context, builder, signature, args):
        return context.get_constant(types.int64, context.get_abi_sizeof(args[0].type))

    return types.int64(like), build


@on_demand
def move(source, step, count, target, target_step, item):
    """Carry elements that are ``step`` apart to where they are ``target_step`` apart."""
    if item == 2:
        for i in range(count):
            pointer(target, np.uint16)[i * target_step] = pointer(source, np.uint16)[i * step]
    elif item == 4:
        for i in range(count):
            pointer(target, np.uint32)[i * target_step] = pointer(source, np.uint32)[i * step]
    else:
        for i in range(count):
            pointer(target, np.uint64)[i * target_step] = pointer(source, np.uint64)[i * step]


@jit
def load_run(address, kind, step, count, raw, wide, like):
    """The address of ``count`` elements in the compute type, side by side: in place, or in a scratch run."""
    outlined()
    item = kind & ITEM_SIZE
    if step != 1:
        move(address, step, count, raw, 1, item)
        address = raw
    if kind != item:
        widen(address, kind, 0, count, wide, like)
        address = wide
    elif step != 1:
        copy(wide, raw, count * item)
        address = wide
    return address


@jit
def store_run(values, count, address, kind, step, raw, like):
    """Write ``count`` values of the compute type to where they belong, narrowed."""
    outlined()
    item = kind & ITEM_SIZE
    if kind != item:
        target = address if step == 1 else raw
        narrow(values, count, kind, target, like)
        values = target
    if step != 1:
        move(values, 1, count, address, step, item)
    elif values != address:
        copy(address, values, count * item)


@jit
def load_span(address, kind, table, begin, end, raw, wide, like):
    """Elements ``begin`` to ``end`` of a walk, in the compute type, side by side at ``wide``."""
    outlined()
    inner = table.shape[1] - 1
    columns, step, item, size = table[0, inner], table[1, inner], kind & ITEM_SIZE, size_of(like)
    at = begin
    while at < end:
        count = min(min(columns - at % columns, end - at), RUN)
        target = wide + (at - begin) * size
        run = load_run(address + offset_of(at, table) * item, kind, step, count, raw, target, like)
        if run != target:
            copy(target, run, count * item)
        at += count


@jit
def store_span(values, address, kind, table, begin, end, accumulate, raw, old, like):
    """Write values of the compute type to elements ``begin`` to ``end`` of a walk, or add them there."""
    outlined()
    inner = table.shape[1] - 1
    columns, step, item, size = table[0, inner], table[1, inner], kind & ITEM_SIZE, size_of(like)
    at = begin
    while at < end:
        count = min(min(columns - at % columns, end - at), RUN)
        target, source = address + offset_of(at, table) * item, values + (at - begin) * size
        if accumulate:
            before = pointer(load_run(target, kind, step, count, raw, old, like), like)
            now = pointer(source, like)
            for i in range(count):
                now[i] = before[i] + now[i]
        store_run(source, count, target, kind, step, raw, like)
        at += count
