"""Embedding: rows of a table by their indices, and the gradient of the table.

The gradient of a row is the sum of the gradients of all places that read it: an ordered sum, so that a token
that comes often loses nothing, and the sum has the same bits on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.core.operands import Operand
from holdfast.core.plan import Args
from holdfast.ops.segment_sum.indexed import (
    IndexedDescriptor,
    IndexedPlan,
    SummingArgs,
    count_roundings,
    summing_ulp,
    validate_bad_index,
    validate_padding,
)


@dataclass(frozen=True, kw_only=True)
class EmbeddingDescriptor(IndexedDescriptor):
    """``shape`` is that of the indices; each reads one of ``num_embeddings`` rows of ``embedding_dim``.

    An index that names no row reads as zeros. With ``bad_index`` "raise" it is an error too: before anything
    is written on the CPU; on CUDA at the next run of any plan, or at ``check_errors``.
    """

    num_embeddings: int
    embedding_dim: int
    bad_index: str = "raise"

    sizes = ("num_embeddings", "embedding_dim")
    operands = ("out", "weight", "indices")

    @property
    def empty(self) -> bool:
        return self.count == 0 or self.embedding_dim == 0

    def expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name == "indices":
            return self.shape, self.index_dtype
        return (self.shape if name == "out" else (self.num_embeddings,)) + (self.embedding_dim,), self.dtype

    def validate(self) -> None:
        super().validate()
        validate_bad_index(self.bad_index)


@dataclass(frozen=True, kw_only=True)
class EmbeddingBackwardDescriptor(IndexedDescriptor):
    """Indices that are ``padding_idx``, or name no row, are skipped.

    With ``scale_grad_by_freq`` the sum of a row is divided by how often it was read.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None = None
    scale_grad_by_freq: bool = False

    sizes = ("num_embeddings", "embedding_dim")
    operands = ("dweight", "dout", "indices")

    @property
    def empty(self) -> bool:
        return self.num_embeddings == 0 or self.embedding_dim == 0

    @property
    def padding(self) -> int:
        return -1 if self.padding_idx is None else self.padding_idx

    @property
    def by_count(self) -> bool:
        return self.scale_grad_by_freq

    def expected(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name == "indices":
            return self.shape, self.index_dtype
        rows = (self.num_embeddings,) if name == "dweight" else self.shape
        return (*rows, self.embedding_dim), self.dtype

    def validate(self) -> None:
        super().validate()
        validate_padding(self.padding_idx, self.num_embeddings)


@dataclass(kw_only=True, slots=True, eq=False)
class EmbeddingArgs(Args):
    """``weight`` and ``indices`` are read, ``out`` is written."""

    weight: torch.Tensor
    indices: torch.Tensor
    out: torch.Tensor

    def operands(self) -> tuple[Operand, ...]:
        return self.out, self.weight, self.indices


@dataclass(kw_only=True, slots=True, eq=False)
class EmbeddingBackwardArgs(SummingArgs):
    """``dout`` and ``indices`` are read; ``dweight`` is written, or with ``accumulate`` added to.

    A row that no index names is zeros; with ``accumulate`` it is left as it is.
    """

    dout: torch.Tensor
    indices: torch.Tensor
    dweight: torch.Tensor
    accumulate: bool = False

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.dweight, self.dout, self.indices

    def options(self) -> tuple[bool]:
        return (self.accumulate,)


class EmbeddingPlan(IndexedPlan[EmbeddingDescriptor, EmbeddingArgs]):
    """out[n] = weight[indices[n]]; zeros where the index names no row."""

    op = "embedding"
    direction = "forward"
    outputs = ("out",)
    Descriptor = EmbeddingDescriptor
    Args = EmbeddingArgs
    kernels = {
        "cpu": "holdfast.ops.embedding.cpu:Embedding",
        "gpu": "holdfast.ops.embedding.gpu:Embedding",
        "reference": "holdfast.ops.embedding.reference:Embedding",
    }
    cases = "holdfast.ops.embedding.cases"

    def mode(self) -> str:
        return self.descriptor.bad_index

    def _ulp(self) -> dict[str, float]:
        return {"out": 0.0}

    def bytes_moved(self) -> int:
        desc = self.descriptor
        rows = 2 * desc.count * desc.embedding_dim * desc.dtype.itemsize
        return rows + desc.count * desc.index_dtype.itemsize


class EmbeddingBackwardPlan(IndexedPlan[EmbeddingBackwardDescriptor, EmbeddingBackwardArgs]):
    """dweight[i] = the ordered sum of dout[n] over all n with indices[n] == i."""

    op = "embedding"
    direction = "backward"
    outputs = ("dweight",)
    Descriptor = EmbeddingBackwardDescriptor
    Args = EmbeddingBackwardArgs
    kernels = {
        "cpu": "holdfast.ops.segment_sum.cpu:SegmentSum",
        "gpu": "holdfast.ops.segment_sum.gpu:SegmentSum",
        "reference": "holdfast.ops.embedding.reference:EmbeddingBackward",
    }
    cases = "holdfast.ops.embedding.cases"

    def mode(self) -> str:
        return "by_frequency" if self.descriptor.scale_grad_by_freq else "ordered"

    def _ulp(self) -> dict[str, float]:
        desc = self.descriptor
        divided = desc.by_count * count_roundings(desc.compute, desc.count)
        return {"dweight": summing_ulp(desc.real, desc.count, more=divided)}

    def bytes_moved(self) -> int:
        desc = self.descriptor
        rows = (desc.count + desc.num_embeddings) * desc.embedding_dim * desc.dtype.itemsize
        return rows + desc.count * desc.index_dtype.itemsize
