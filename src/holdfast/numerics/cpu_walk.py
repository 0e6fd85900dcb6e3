"""Strided loads and stores on the CPU, with conversion to and from the compute type.

A walk is an iteration over strided elements, described by a table: row 0 has the sizes of its loops, row 1
the strides. Kernels take the table as an array, or as (its address, number of loops). A run is a contiguous
range of elements.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import types

from holdfast.backends.cpu import copy, emit, jit, on_demand, outlined, pointer
from holdfast.core.dtypes import Float
from holdfast.numerics.cpu import ITEM_SIZE, narrow, widen

#: Maximum number of elements per run.
RUN = 256


def table_of(sizes: Sequence[int], strides: Sequence[int]) -> np.ndarray[Any, Any]:
    """The table of a walk."""
    return np.array([sizes, strides], np.int64)


def walk_of(table: np.ndarray[Any, Any]) -> tuple[int, int]:
    """(address, number of loops) of a table, which must be kept as long as they are used."""
    return torch.from_numpy(table).data_ptr(), table.shape[1]


def number(compute: Float) -> np.floating[Any]:
    """A zero of the compute type: it gives kernels their type."""
    return np.float64(0) if compute.name == "float64" else np.float32(0)


@jit
def offset_of(number, table, strides=1):
    """The offset of element ``number`` of a walk, in elements. ``strides`` is the row of the table to use."""
    inner = table.shape[1] - 1
    if inner == 0:
        return number * table[strides, 0]
    offset = 0
    for d in range(inner, 0, -1):
        outer = number // table[0, d]
        offset += (number - outer * table[0, d]) * table[strides, d]
        number = outer
    return offset + number * table[strides, 0]


@jit
def offset_at(number, walk):
    """``offset_of`` for a walk given as (address of the table, number of loops)."""
    address, loops = walk
    table, offset = pointer(address, np.int64), np.int64(0)
    for d in range(loops - 1, 0, -1):
        outer = number // table[d]
        offset += (number - outer * table[d]) * table[loops + d]
        number = outer
    return offset + number * table[loops]


@emit
def size_of(typingctx, like):
    """The size of a value of this type, bytes."""

    def build(context, builder, signature, args):
        return context.get_constant(types.int64, context.get_abi_sizeof(args[0].type))

    return types.int64(like), build


@on_demand
def move(source, step, count, target, target_step, item):
    """Copy ``count`` elements of ``item`` bytes from stride ``step`` to stride ``target_step``."""
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
    """The address of ``count`` contiguous elements in the compute type: in place, or in a scratch run."""
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
    """Narrow ``count`` values of the compute type to ``kind`` and store them with stride ``step``."""
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
def _innermost(walk):
    """Size and stride of the innermost loop."""
    table, loops = pointer(walk[0], np.int64), walk[1]
    return table[loops - 1], table[2 * loops - 1]


@jit
def load_span(address, kind, walk, begin, end, raw, wide, like):
    """Load elements ``begin`` to ``end`` of a walk to ``wide``, contiguous and in the compute type."""
    outlined()
    (columns, step), item, size = _innermost(walk), kind & ITEM_SIZE, size_of(like)
    at = begin
    while at < end:
        count = min(min(columns - at % columns, end - at), RUN)
        target = wide + (at - begin) * size
        run = load_run(address + offset_at(at, walk) * item, kind, step, count, raw, target, like)
        if run != target:
            copy(target, run, count * item)
        at += count


@jit
def in_one_run(walk):
    """Whether the elements of a walk are contiguous."""
    return walk[1] == 1 and offset_at(1, walk) == 1


@jit
def span_of(address, kind, walk, begin, end, raw, wide, like):
    """The address of elements ``begin`` to ``end`` as in ``load_span``: in place, or loaded to ``wide``."""
    if kind == size_of(like) and in_one_run(walk):
        return address + begin * kind
    load_span(address, kind, walk, begin, end, raw, wide, like)
    return wide


@jit
def store_span(values, address, kind, walk, begin, end, accumulate, raw, old, like):
    """Store values of the compute type to elements ``begin`` to ``end`` of a walk, or add them."""
    outlined()
    (columns, step), item, size = _innermost(walk), kind & ITEM_SIZE, size_of(like)
    at = begin
    while at < end:
        count = min(min(columns - at % columns, end - at), RUN)
        target, source = address + offset_at(at, walk) * item, values + (at - begin) * size
        if accumulate:
            before = pointer(load_run(target, kind, step, count, raw, old, like), like)
            now = pointer(source, like)
            for i in range(count):
                now[i] = before[i] + now[i]
        store_run(source, count, target, kind, step, raw, like)
        at += count
