"""``torch.nn.Embedding`` on top of ``holdfast.embedding``."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.ops.embedding.torch_op import embedding, refuse_max_norm


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` with the lookup and the gradient of ``holdfast.embedding``.

    It takes the same arguments and has the same state_dict. ``bad_index`` is an argument of
    ``holdfast.embedding``. ``max_norm`` is not supported.

    >>> import torch, holdfast as hf
    >>> table = hf.nn.Embedding(4, 2, padding_idx=0)
    >>> table.load_state_dict(torch.nn.Embedding(4, 2, padding_idx=0).state_dict())
    <All keys matched successfully>
    >>> table(torch.tensor([[1, 3, 0]])).shape
    torch.Size([1, 3, 2])
    """

    bad_index = "raise"

    def __init__(self, *args: Any, bad_index: str = "raise", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_max_norm(self.max_norm)
        self.bad_index = bad_index

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq,
            self.sparse, bad_index=self.bad_index,
        )  # fmt: skip

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.bad_index == "raise" else f"{shown}, bad_index={self.bad_index!r}"
