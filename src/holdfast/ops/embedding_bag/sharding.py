"""Sharding rules of embedding_bag: columns split, and bags of one length split."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.sharding import SUM, Option, Place, Rule, Whole
from holdfast.ops.embedding.sharding import refuse_sparse


def _bags(whole: Whole) -> bool:
    """Whether each row of the indices is a bag."""
    indices, weights = whole["input"], whole["per_sample_weights"]
    return indices.dim() == 2 and (weights is None or weights.shape == indices.shape)


def _forward(whole: Whole) -> Iterator[Option]:
    yield Option({"weight": 1}, (1,))
    if _bags(whole):
        yield Option({"input": 0, "per_sample_weights": 0}, (0,))


def _backward(whole: Whole) -> Iterator[Option]:
    table, weights = whole["of_table"], whole["of_weights"]

    def outputs(of_table: Place, of_weights: Place) -> tuple[Place, Place]:
        return of_table if table else None, of_weights if weights else None

    yield Option({"dout": 1, "weight": 1}, outputs(1, SUM))
    if _bags(whole) and not whole["scale_grad_by_freq"]:
        yield Option({"dout": 0, "input": 0, "per_sample_weights": 0}, outputs(SUM, 0))


RULES = {
    "embedding_bag": Rule(_forward),
    "embedding_bag_backward": Rule(_backward),
    "embedding_bag_touched_rows_backward": Rule(refuse_sparse),
}
