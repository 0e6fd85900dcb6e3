"""Random problems of embedding_bag for ``holdfast bench --drawn``."""

from __future__ import annotations

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.ops.embedding.drawn import drawn_table
from holdfast.ops.embedding_bag.models import BagModel


def _draw(sizes: RandomSizes) -> BagModel:
    rows, columns, count = drawn_table(sizes, most_columns=1024)
    length = sizes.size(1, min(count, 128))
    mode, by_offsets = sizes.one_of(("sum", "mean", "max")), sizes.chance(2)
    return BagModel(
        "embedding_bag", "", sizes.real, rows, columns, max(count // length, 1), length, mode,
        by_offsets, weighted=mode == "sum" and sizes.chance(2),
    )  # fmt: skip


DRAWS: dict[str, DrawCase] = {"embedding_bag": _draw}
