"""Scatter and gather in NumPy, the definition."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.numerics.reference import Array, ReferenceKernel, compute_type, store, widen
from holdfast.ops.scatter.plan import (
    BadScatterIndex,
    GatherArgs,
    GatherDescriptor,
    LinesDescriptor,
    ScatterArgs,
    ScatterDescriptor,
)
from holdfast.ops.segment_sum.reference import ordered_sum, sources_of


def destinations(index: Array, desc: LinesDescriptor) -> Array:
    """The row of the table that each position of the index belongs to."""
    lines = np.tensordot(np.array(desc.line_strides), np.indices(desc.shape), axes=1)
    return (lines + index.astype(np.int64) * desc.step).reshape(-1)


def raise_outside(index: Array, extent: int) -> None:
    """Raise if an index is out of range."""
    outside = np.flatnonzero((index < 0) | (index >= extent))
    if len(outside):
        raise BadScatterIndex(extent).error(int(outside[0]), int(index.reshape(-1)[outside[0]]))


def result(total: Array, base: Array | None, terms: Array, desc: ScatterDescriptor) -> Array:
    """The results of rows with ``terms`` terms, from their sums; ``base`` has the rows of input, if added."""
    number = compute_type(desc.compute)
    with np.errstate(all="ignore"):
        if desc.alpha != 1.0:
            total = number(desc.alpha) * total
        if base is not None:
            total = base + total
        return total / (terms + (base is not None)).astype(number) if desc.by_count else total


class Scatter(ReferenceKernel[ScatterDescriptor]):
    """``ordered_sum`` of the terms of each row."""

    def run(self, args: ScatterArgs) -> None:
        desc, index = self.desc, args.index.numpy()
        raise_outside(index, desc.extent)
        terms = widen(args.src, desc.compute).reshape(desc.count, desc.columns)
        out = torch.zeros(desc.rows, desc.columns, dtype=desc.dtype)
        if args.input is not None:
            out.copy_(args.input.detach().reshape(out.shape))
        sources = sources_of(destinations(index, desc), desc.rows)
        if sources:
            rows = torch.tensor(list(sources))
            base = widen(out[rows], desc.compute) if desc.base == "added" else None
            total = np.stack([ordered_sum(terms[places]) for places in sources.values()])
            made, counts = out[rows], np.array([[len(places)] for places in sources.values()])
            store(made, result(total, base, counts, desc))
            out[rows] = made
        args.out.copy_(out.reshape(args.out.shape))


class Gather(ReferenceKernel[GatherDescriptor]):
    """Copy rows; zeros for an index out of range."""

    def run(self, args: GatherArgs) -> None:
        desc, index = self.desc, args.index.numpy()
        if desc.bad_index == "raise":
            raise_outside(index, desc.extent)
        known = torch.from_numpy(((index >= 0) & (index < desc.extent)).reshape(-1))
        rows = torch.from_numpy(destinations(index, desc))[known]
        out = torch.zeros(desc.count, desc.columns, dtype=desc.dtype)
        out[known] = args.input.detach().reshape(desc.rows, desc.columns)[rows]
        args.out.copy_(out.reshape(args.out.shape))
