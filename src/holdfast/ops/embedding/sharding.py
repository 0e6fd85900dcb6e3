"""Sharding rules of embedding: indices split, columns split, and rows of the table split.

With split rows every rank looks up its own rows. A row of another rank reads as -0.0, which changes no value
when the terms are added: the sum has the bits of a lookup in the whole table, in any order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.core.errors import Unsupported
from holdfast.core.sharding import SUM, Option, Rule, Shards, Whole


def _forward(whole: Whole) -> Iterator[Option]:
    indices = whole["input"].dim()
    for dim in range(indices):
        yield Option({"input": dim}, (dim,))
    yield Option({"weight": 1}, (indices,))
    yield Option({"weight": 0}, (SUM,))


def _lookup(operator: Callable[..., Any], local: dict[str, Any], shards: Shards) -> Any:
    if 0 not in shards.inputs["weight"]:
        return operator(**local)
    indices, rows = local["input"], shards.whole["weight"].shape[0]
    begin, end = shards.range_of(shards.inputs["weight"], 0, rows)
    here = (indices >= begin) & (indices < end)
    elsewhere = (indices >= 0) & (indices < rows) & ~here
    # Any row stands in for one of another rank. An index of no rank stays as it is, out of range.
    local["input"] = torch.where(here, indices - begin, torch.where(elsewhere, 0, indices))
    if begin == end:
        local["weight"] = local["weight"].new_zeros(1, local["weight"].shape[1])
    return operator(**local).masked_fill_(elsewhere.unsqueeze(-1), -0.0)


def _backward(whole: Whole) -> Iterator[Option]:
    indices = whole["input"].dim()
    yield Option({"dout": indices}, (1,))
    yield Option({}, (0,))
    if not whole["scale_grad_by_freq"]:  # it divides by the number of terms on all ranks
        for dim in range(indices):
            yield Option({"dout": dim, "input": dim}, (SUM,))


def _gradient(operator: Callable[..., Any], local: dict[str, Any], shards: Shards) -> Any:
    if 0 in shards.outputs[0]:
        begin, end = shards.range_of(shards.outputs[0], 0, local["num_embeddings"])
        indices, padding = local["input"], local["padding_idx"]
        local |= {
            "input": torch.where((indices >= begin) & (indices < end), indices - begin, -1),
            "num_embeddings": end - begin,
            "padding_idx": padding - begin if begin <= padding < end else -1,
        }
    return operator(**local)


def refuse_sparse(whole: Whole) -> Iterator[Option]:
    """The rule of sparse gradients: raise."""
    raise Unsupported("the gradient of a table that is a DTensor cannot be sparse; leave sparse out.")


RULES = {
    "embedding": Rule(_forward, _lookup),
    "embedding_backward": Rule(_backward, _gradient),
    "embedding_touched_rows_backward": Rule(refuse_sparse),
}
