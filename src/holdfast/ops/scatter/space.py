"""Random problems of scatter and gather, for the fuzzer."""

from __future__ import annotations

import math
from typing import Any

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.scatter.cases import Problem
from holdfast.ops.scatter.plan import BASES, REDUCTIONS
from holdfast.ops.scatter.torch_op import gather, index_add, scatter_add, scatter_reduce
from holdfast.ops.segment_sum.space import draw_spread, draw_table

FREE = ("values", "spread")


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    shape = draw.shape(1, 8)
    dim = draw.between(0, len(shape) - 1)
    fields = draw_table(draw, shape)
    rows, columns = fields.pop("rows"), fields.pop("columns")
    larger = plan.op == "scatter" and draw.chance(4)
    table = [length + larger * draw.between(0, 2) for length in shape]
    # The table may be large if the index is empty.
    table[dim] = 1
    table[dim] = max(min(rows, draw.budget // max(math.prod(table), 1)), 1)
    columns = min(columns, max(draw.budget // max(math.prod(table), 1), 1))
    if plan.op == "gather":
        return Problem(
            draw.label, shape, tuple(table), dim, columns if draw.kind((True, False)) else None,
            draw_spread(draw, table[dim]), bad_index="skip", **fields,
        )  # fmt: skip
    base, reduce = draw.kind(BASES), draw.kind(REDUCTIONS, [3, 1])
    alpha = 1.0
    if (base, reduce) == ("added", "sum") and draw.kind((False, True)):
        alpha = draw.one_of((-1.0, 0.1, 3.0, 0.0, 1e-30))
    spread = draw.one_of(("uniform", "zipf", "equal", "sorted"), [2, 3, 2, 1])
    return Problem(
        draw.label, shape, tuple(table), dim, columns if draw.kind((True, False)) else None, spread,
        base=base, reduce=reduce, alpha=alpha, **fields,
    )  # fmt: skip


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any) -> Results:
    if plan.op == "gather":
        return (
            None
            if desc.width is not None or problem.spread == "bad"
            else {"out": gather(args.input, desc.dim, args.index)}
        )
    if desc.base == "zeros":
        return None
    if desc.width is not None and len(desc.shape) > 1:
        return None
    index = args.index
    if desc.width is not None and desc.reduce == "sum" and desc.base == "added":
        return {"out": index_add(args.input, 0, index, args.src, alpha=desc.alpha)}
    if desc.alpha != 1.0:
        return None
    if desc.width is not None:
        index = index[:, None].expand(args.src.shape)
    if desc.reduce == "sum" and desc.base == "added":
        return {"out": scatter_add(args.input, desc.dim, index, args.src)}
    own = desc.base == "added"
    return {"out": scatter_reduce(args.input, desc.dim, index, args.src, desc.reduce, include_self=own)}
