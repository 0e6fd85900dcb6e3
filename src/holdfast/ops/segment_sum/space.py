"""Random problems of segment_sum for the fuzzer, and indices that embedding and embedding_bag use too."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw, Results
from holdfast.core.dtypes import FLOATS
from holdfast.core.plan import AnyPlan
from holdfast.ops.segment_sum.cases import Problem
from holdfast.ops.segment_sum.indexed import INDEX_DTYPES

FREE = ("values", "indices")
_REALS = [record.torch for record in FLOATS.values()]
_VALUES = ("spread", "special", "zeros", "exponents", "any bits")


def draw_spread(draw: Draw, rows: int) -> str:
    """Distribution of the indices over the rows: mostly skewed, sometimes with indices out of range."""
    return draw.one_of(("uniform", "zipf", "equal", "sorted", "bad"), [2, 3, 2, 1, 2]) if rows else "bad"


def draw_table(draw: Draw, shape: tuple[int, ...]) -> dict[str, Any]:
    """Sizes and dtypes of a table for indices of this shape."""
    columns = draw.size(max(draw.budget // max(torch.Size(shape).numel(), 1), 1))
    rows = draw.size(max(draw.budget // max(columns, 1), 1))
    return {
        "rows": rows, "columns": columns, "dtype": draw.kind(_REALS), "index_dtype": draw.kind(INDEX_DTYPES),
        "values": draw.one_of(_VALUES, [5, 1, 1, 2, 1]),
    }  # fmt: skip


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    shape = draw.shape()
    fields = draw_table(draw, shape)
    rows, columns = fields.pop("rows"), fields.pop("columns")
    spread = draw_spread(draw, rows)
    return Problem(draw.label, shape, rows, columns, spread, accumulate=draw.chance(4), **fields)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any) -> Results:
    return None  # public only through embedding and embedding_bag
