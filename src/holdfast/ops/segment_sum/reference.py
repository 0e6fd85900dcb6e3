"""The ordered sum in NumPy, the definition."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.dtypes import Float
from holdfast.numerics.reference import Array, ReferenceKernel, store_gradient, widen
from holdfast.ops.segment_sum.indexed import CHUNK, BadIndex
from holdfast.ops.segment_sum.plan import SegmentSumArgs, SegmentSumDescriptor


def ordered_sum(terms: Array) -> Array:
    """Sum over the first axis: each chunk of 32 terms in order, then the chunk sums in the same way.

    Every sum starts from +0.0, so it is never -0.0. Without terms it is +0.0.
    """
    with np.errstate(all="ignore"):
        while True:
            sums = []
            for begin in range(0, max(len(terms), 1), CHUNK):
                total = np.zeros(terms.shape[1:], terms.dtype)
                for term in terms[begin : begin + CHUNK]:
                    total = total + term
                sums.append(total)
            if len(sums) == 1:
                return sums[0]
            terms = np.stack(sums)


def sources_of(destinations: Array, segments: int) -> dict[int, Array]:
    """The positions of each segment's terms, ascending, for the segments that have any, ascending."""
    kept = np.flatnonzero((destinations >= 0) & (destinations < segments))
    kept = kept[np.argsort(destinations[kept], kind="stable")]
    rows, begins = np.unique(destinations[kept], return_index=True)
    return dict(zip(rows.tolist(), np.split(kept, begins[1:]), strict=True)) if len(rows) else {}


def raise_outside(indices: torch.Tensor, rows: int) -> None:
    """Raise if an index is out of range."""
    flat = indices.numpy().reshape(-1)
    outside = np.flatnonzero((flat < 0) | (flat >= rows))
    if len(outside):
        raise BadIndex(rows).error(int(outside[0]), int(flat[outside[0]]))


def store_rows(out: torch.Tensor, sums: dict[int, Array], accumulate: bool, compute: Float) -> None:
    """Store or accumulate the rows in ``sums``. Without ``accumulate``, all other rows are zeroed."""
    if not accumulate:
        out.zero_()
    if sums:
        rows = torch.tensor(list(sums))
        made = out.detach()[rows]
        store_gradient(made, np.stack(list(sums.values())), accumulate, compute)
        out.detach()[rows] = made


class SegmentSum(ReferenceKernel[SegmentSumDescriptor]):
    """``ordered_sum`` of each segment."""

    def run(self, args: SegmentSumArgs) -> None:
        desc = self.desc
        terms = widen(args.terms, desc.compute).reshape(desc.count, desc.width)
        sources = sources_of(args.destinations.numpy().reshape(-1), desc.segments)
        sums = {row: ordered_sum(terms[places]) for row, places in sources.items()}
        store_rows(args.out, sums, args.accumulate, desc.compute)
