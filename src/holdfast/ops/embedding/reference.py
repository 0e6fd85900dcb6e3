"""embedding and its gradient in NumPy, the definition."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.numerics.reference import Array, ReferenceKernel, compute_type, widen
from holdfast.ops.embedding import plan as plans
from holdfast.ops.segment_sum.reference import ordered_sum, raise_outside, sources_of, store_rows


def kept_indices(indices: Array, padding: int) -> Array:
    """The indices, with -1 in place of the padding index."""
    return np.where(indices == padding, -1, indices)


class Embedding(ReferenceKernel[plans.EmbeddingDescriptor]):
    """Copy rows; zeros for an index out of range."""

    def run(self, args: plans.EmbeddingArgs) -> None:
        desc = self.desc
        if desc.bad_index == "raise":
            raise_outside(args.indices, desc.rows)
        known = (args.indices >= 0) & (args.indices < desc.rows)
        args.out.zero_()
        args.out[known] = args.weight.detach()[args.indices[known].to(torch.int64)]


class EmbeddingBackward(ReferenceKernel[plans.EmbeddingBackwardDescriptor]):
    """``ordered_sum`` of the gradients of each row."""

    def run(self, args: plans.EmbeddingBackwardArgs) -> None:
        desc = self.desc
        dout = widen(args.dout, desc.compute).reshape(desc.count, desc.embedding_dim)
        indices = kept_indices(args.indices.numpy().reshape(-1), desc.padding)
        sums = {}
        for row, places in sources_of(indices, desc.rows).items():
            sums[row] = ordered_sum(dout[places])
            if desc.scale_grad_by_freq:
                with np.errstate(all="ignore"):
                    sums[row] = sums[row] / compute_type(desc.compute)(len(places))
        store_rows(args.dweight, sums, args.accumulate, desc.compute)
