"""Example calls of the functions of scatter."""

from __future__ import annotations

import torch

from holdfast.core.calls import Call
from holdfast.ops.scatter.torch_op import (
    gather,
    index_add,
    index_put,
    index_select,
    scatter_add,
    scatter_reduce,
    segment_reduce,
)

TABLE = torch.linspace(-2, 3, 12).reshape(4, 3)
TERMS = torch.linspace(-1, 2, 15).reshape(5, 3)
INDEX = torch.tensor([[0, 3, 1], [1, 1, 1], [3, 0, 2], [0, 0, 1], [2, 1, 0]])
ROWS = torch.tensor([1, 3, 1, 0, 1])

CALLS = {
    "scatter_add": Call(
        scatter_add, {"input": TABLE, "dim": 0, "index": INDEX, "src": TERMS}, by=("input", "src")
    ),
    "scatter_reduce": Call(
        scatter_reduce,
        {"input": TABLE, "dim": 0, "index": INDEX, "src": TERMS, "reduce": "mean", "include_self": False},
        by=("input", "src"),
    ),
    "index_add": Call(
        index_add,
        {"input": TABLE, "dim": 0, "index": ROWS, "source": TERMS, "alpha": 0.5},
        by=("input", "source"),
    ),
    "index_put": Call(
        index_put,
        {"input": TABLE, "indices": (ROWS, None), "values": TERMS, "accumulate": True},
        by=("input", "values"),
    ),
    "segment_reduce": Call(
        segment_reduce,
        {"data": TERMS, "segments": ROWS, "num_segments": 4, "reduce": "mean", "sorted": False},
        by=("data",),
    ),
    "gather": Call(gather, {"input": TABLE, "dim": 0, "index": INDEX}, by=("input",)),
    "index_select": Call(index_select, {"input": TABLE, "dim": 0, "index": ROWS}, by=("input",)),
}
