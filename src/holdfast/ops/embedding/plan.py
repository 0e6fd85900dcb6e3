"""Embedding: rows of a table selected by indices, and the gradient of the table.

The gradient of a row is the ordered sum of the gradients of all positions that read it. It loses no accuracy
for frequent tokens, and has the same bits on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.declaration import Implementation, Output, arguments
from holdfast.core.plan import Args, Plan
from holdfast.ops.segment_sum.indexed import (
    SummingArgs,
    TableDescriptor,
    count_roundings,
    summing_ulp,
    validate_bad_index,
    validate_padding,
)


@dataclass(frozen=True, kw_only=True)
class EmbeddingDescriptor(TableDescriptor):
    """``shape`` is the shape of the indices; each reads a row of a (num_embeddings, embedding_dim) table.

    An index out of range reads as zeros. With ``bad_index`` "raise" it also raises an error: on the CPU
    before anything is written; on CUDA at the next run of any plan, or at ``check_errors``. A run that writes
    nothing, for want of columns, checks no indices; ``hf.embedding`` checks them.
    """

    bad_index: str = "raise"

    @property
    def empty(self) -> bool:
        return self.count == 0 or self.embedding_dim == 0

    def validate(self) -> None:
        super().validate()
        validate_bad_index(self.bad_index)


@dataclass(frozen=True, kw_only=True)
class EmbeddingBackwardDescriptor(TableDescriptor):
    """Indices equal to ``padding_idx`` or out of range are skipped.

    With ``scale_grad_by_freq`` the sum of a row is divided by its number of terms.
    """

    padding_idx: int | None = None
    scale_grad_by_freq: bool = False

    @property
    def empty(self) -> bool:
        return self.num_embeddings == 0 or self.embedding_dim == 0

    @property
    def padding(self) -> int:
        return -1 if self.padding_idx is None else self.padding_idx

    @property
    def by_count(self) -> bool:
        return self.scale_grad_by_freq

    def validate(self) -> None:
        super().validate()
        validate_padding(self.padding_idx, self.num_embeddings)


@arguments
class EmbeddingArgs(Args):
    """``weight`` and ``indices`` are read, ``out`` is written."""

    weight: torch.Tensor
    indices: torch.Tensor
    out: Output


@arguments
class EmbeddingBackwardArgs(SummingArgs):
    """``dout`` and ``indices`` are read; ``dweight`` is written, or with ``accumulate`` added to.

    A row without terms is set to zeros, or with ``accumulate`` left unchanged.
    """

    dout: torch.Tensor
    indices: torch.Tensor
    dweight: Output
    accumulate: bool = False


class EmbeddingPlan(Plan[EmbeddingDescriptor, EmbeddingArgs]):
    """out[n] = weight[indices[n]]; zeros for an index out of range."""

    def mode(self) -> str:
        return self.descriptor.bad_index

    def ulp(self) -> dict[str, float]:
        return {"out": 0.0}

    def bytes_moved(self) -> int:
        desc = self.descriptor
        rows = 2 * desc.count * desc.embedding_dim * desc.dtype.itemsize
        return rows + desc.count * desc.index_dtype.itemsize


class EmbeddingBackwardPlan(Plan[EmbeddingBackwardDescriptor, EmbeddingBackwardArgs]):
    """dweight[i] = the ordered sum of dout[n] over all n with indices[n] == i."""

    kernels = (
        Implementation("cpu", "holdfast.ops.segment_sum.cpu:SegmentSum"),
        Implementation("gpu", "holdfast.ops.segment_sum.gpu_few_terms:segment_sum"),
        Implementation("reference", ".reference:EmbeddingBackward"),
    )

    def mode(self) -> str:
        return "by_frequency" if self.descriptor.scale_grad_by_freq else "ordered"

    def ulp(self) -> dict[str, float]:
        desc = self.descriptor
        divided = desc.by_count * count_roundings(desc.compute, desc.count)
        return {"dweight": summing_ulp(desc.real, desc.count, more=divided)}
