"""Example calls of embedding."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.embedding.torch_op import embedding

TABLE = torch.linspace(-2, 3, 21).reshape(7, 3)
INDICES = torch.tensor([[1, 2, 3], [4, 1, 1]])

CALLS = {
    "embedding": Call(
        embedding,
        {"input": INDICES, "weight": TABLE, "padding_idx": 1, "max_norm": None, "norm_type": 2.0}
        | {"scale_grad_by_freq": False, "sparse": False, "bad_index": "raise"},
        by=("weight",),
    ),
}
