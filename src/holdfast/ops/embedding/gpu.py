"""embedding, in Triton: rows read at indices. The gradient is a segment sum."""

from __future__ import annotations

from holdfast.backends.steps import Steps
from holdfast.core.plan import Launch
from holdfast.ops.embedding.plan import EmbeddingArgs, EmbeddingDescriptor
from holdfast.ops.segment_sum.gpu_gather import Lookup, add_gather
from holdfast.ops.segment_sum.indexed import BadIndex, IndexedKernel, loops


class Embedding(IndexedKernel[EmbeddingDescriptor]):
    """``gather`` from a table."""

    def compile(self) -> None:
        self.prepare(EmbeddingArgs.described(self.desc))

    def prepare(self, args: EmbeddingArgs) -> Launch[EmbeddingArgs]:
        desc = self.desc
        walk = loops(desc.shape, args.indices.stride(), args.out.stride())
        row_stride, column_stride = args.weight.stride()
        lookup = Lookup(
            "weight", "indices", desc.count, desc.rows, desc.columns, desc.dtype.itemsize,
            row_stride, column_stride, sizes=(*walk.sizes, desc.columns),
            out_strides=(*walk.strides[1], args.out.stride(-1)), index_strides=(*walk.strides[0], 0),
        )  # fmt: skip
        steps = Steps(self.device, args)
        add_gather(steps, lookup, BadIndex(desc.rows) if desc.bad_index == "raise" else None)
        return steps.launch
