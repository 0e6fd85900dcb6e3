"""``torch.nn.EmbeddingBag`` on top of ``holdfast.embedding_bag``."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.ops.embedding.torch_op import refuse_max_norm
from holdfast.ops.embedding_bag.torch_op import embedding_bag


class EmbeddingBag(torch.nn.EmbeddingBag):
    """``torch.nn.EmbeddingBag`` with the results and gradients of ``holdfast.embedding_bag``.

    It takes the same arguments and has the same state_dict. ``bad_index`` is an argument of
    ``holdfast.embedding_bag``. ``max_norm`` is not supported.

    >>> import torch, holdfast as hf
    >>> bag = hf.nn.EmbeddingBag(10, 3, mode="sum")
    >>> bag(torch.tensor([[1, 2], [3, 3]])).shape
    torch.Size([2, 3])
    """

    bad_index = "raise"

    def __init__(self, *args: Any, bad_index: str = "raise", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_max_norm(self.max_norm)
        self.bad_index = bad_index

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return embedding_bag(
            input, self.weight, offsets, scale_grad_by_freq=self.scale_grad_by_freq, mode=self.mode,
            sparse=self.sparse, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=self.padding_idx,
            bad_index=self.bad_index,
        )  # fmt: skip

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.bad_index == "raise" else f"{shown}, bad_index={self.bad_index!r}"
