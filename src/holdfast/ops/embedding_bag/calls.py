"""Example calls of embedding_bag."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.embedding.calls import INDICES, TABLE
from holdfast.ops.embedding_bag.torch_op import embedding_bag

WEIGHTS = torch.tensor([[0.5, 2.0, -1.0], [3.0, 0.25, 1.0]])

CALLS = {
    "embedding_bag": Call(
        embedding_bag,
        {"input": INDICES.reshape(-1), "weight": TABLE, "offsets": torch.tensor([0, 2, 6])}
        | {"per_sample_weights": WEIGHTS.reshape(-1), "mode": "sum", "include_last_offset": True}
        | {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
        | {"padding_idx": 1, "bad_index": "raise"},
        by=("weight", "per_sample_weights"),
    ),
}
