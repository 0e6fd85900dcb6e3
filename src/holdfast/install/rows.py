"""Rows added into a table in place: only the rows that an index names are read and written."""
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from math import prod

import torch

from holdfast.core.repeated import Work
from holdfast.install.serving import plan_of
from holdfast.ops.embedding.plan import EmbeddingBackwardArgs, EmbeddingBackwardPlan
from holdfast.ops.scatter.plan import GatherArgs, GatherPlan


def add_rows(
    self: torch.Tensor, first: int, dims: int, index: torch.Tensor, terms: torch.Tensor
) -> torch.Tensor:
    """Add ``terms`` to ``self`` at ``index``, which counts the positions of ``dims`` dims from dim ``first``.

    The terms of a row are summed in the order of the index, in float32 for 16 bits; then the row is added and
    rounded once. ``refuse_bad_indices`` was called.
    """
    if not terms.numel():
        return self
    if not self.is_contiguous():
        return self.copy_(add_rows(self.contiguous(), first, dims, index, terms))
    before, after = prod(self.shape[:first]), prod(self.shape[first + dims :])
    size = prod(self.shape[first : first + dims])
    if before > 1:
        starts = torch.arange(before, device=index.device)[:, None] * size
        index = (starts + index.long()).reshape(-1)
    _add(self.view(before * size, after), index, terms.reshape(index.numel(), after))
    return self


def refuse_bad_indices(like: torch.Tensor, size: int, index: torch.Tensor) -> None:
    """Raise for an index that is not in a dim of this size; on CUDA later, as ``hf.gather`` does."""
    plan = plan_of(
        GatherPlan, like.device, shape=index.shape, table=(size,), dtype=like.dtype, index_dtype=index.dtype,
        bad_index="raise",
    )  # fmt: skip
    table, out = like.new_empty(1).expand(size), like.new_empty(index.shape)
    Work(plan, GatherArgs(input=table, index=index, out=out), out).run()


def _add(table: torch.Tensor, index: torch.Tensor, terms: torch.Tensor) -> None:
    plan = plan_of(
        EmbeddingBackwardPlan, table.device, shape=index.shape, num_embeddings=len(table),
        embedding_dim=table.shape[1], dtype=table.dtype, index_dtype=index.dtype,
    )  # fmt: skip
    args = EmbeddingBackwardArgs(dout=terms, indices=index, dweight=table, accumulate=True)
    Work(plan, args, table).run()
