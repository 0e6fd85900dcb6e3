"""embedding and its gradient in NumPy, the definition."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.plan import Launch
from holdfast.numerics.reference import Array, compute_type, widen
from holdfast.ops.embedding.plan import (
    EmbeddingArgs,
    EmbeddingBackwardArgs,
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
)
from holdfast.ops.segment_sum.indexed import IndexedKernel
from holdfast.ops.segment_sum.reference import ordered_sum, raise_outside, sources_of, store_rows


def kept_indices(indices: Array, padding: int) -> Array:
    """The indices, with -1 in place of the padding index."""
    return np.where(indices == padding, -1, indices)


class Embedding(IndexedKernel[EmbeddingDescriptor]):
    """Copy rows; zeros for an index out of range."""

    def prepare(self, args: EmbeddingArgs) -> Launch[EmbeddingArgs]:
        desc = self.desc

        def launch(stream: object, workspace: object, args: EmbeddingArgs, addresses: object) -> None:
            if desc.bad_index == "raise":
                raise_outside(args.indices, desc.rows)
            known = (args.indices >= 0) & (args.indices < desc.rows)
            args.out.zero_()
            args.out[known] = args.weight.detach()[args.indices[known].to(torch.int64)]

        return launch


class EmbeddingBackward(IndexedKernel[EmbeddingBackwardDescriptor]):
    """``ordered_sum`` of the gradients of each row."""

    def prepare(self, args: EmbeddingBackwardArgs) -> Launch[EmbeddingBackwardArgs]:
        desc = self.desc

        def launch(stream: object, workspace: object, args: EmbeddingBackwardArgs, addresses: object) -> None:
            dout = widen(args.dout, desc.compute).reshape(desc.count, desc.embedding_dim)
            indices = kept_indices(args.indices.numpy().reshape(-1), desc.padding)
            sums = {}
            for row, places in sources_of(indices, desc.rows).items():
                sums[row] = ordered_sum(dout[places])
                if desc.scale_grad_by_freq:
                    with np.errstate(all="ignore"):
                        sums[row] = sums[row] / compute_type(desc.compute)(len(places))
            store_rows(args.dweight, sums, args.accumulate, desc.compute)

        return launch
