"""Random problems of embedding for ``holdfast bench --drawn``."""

from __future__ import annotations

from holdfast.core.random_sizes import DrawCase, RandomSizes
from holdfast.ops.embedding.models import EmbeddingModel


def drawn_table(sizes: RandomSizes, most_columns: int = 4096) -> tuple[int, int, int]:
    """Rows and columns of a table, and a number of indices. The table or the output is the larger one."""
    columns = sizes.size(1, min(most_columns, max(sizes.elements // 8, 1)))
    larger = max(sizes.elements // columns, 1)
    smaller = sizes.size(1, larger)
    return (larger, columns, smaller) if sizes.chance(2) else (smaller, columns, larger)


def _draw(sizes: RandomSizes) -> EmbeddingModel:
    spread = sizes.one_of(("uniform", "zipf"))
    return EmbeddingModel("embedding", "", sizes.real, *drawn_table(sizes), spread)


DRAWS: dict[str, DrawCase] = {"embedding": _draw}
