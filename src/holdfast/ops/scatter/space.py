"""Random problems of scatter and gather, for the fuzzer."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.scatter.cases import Problem
from holdfast.ops.scatter.plan import BASES, REDUCTIONS
from holdfast.ops.scatter.torch_op import (
    gather,
    index_add,
    index_put,
    index_select,
    scatter_add,
    scatter_reduce,
    segment_reduce,
)
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
    index, second = args.index, Random(problem.name).randrange(2) == 1
    of_rows = desc.width is not None and len(desc.shape) == 1
    elements = index if desc.width is None else index[..., None].expand(*index.shape, desc.width)
    if plan.op == "gather":
        if problem.spread == "bad":
            return None
        selects = of_rows and second
        return {
            "out": index_select(args.input, 0, index) if selects else gather(args.input, desc.dim, elements)
        }
    if desc.base == "zeros":
        if of_rows and (second or desc.reduce == "mean"):
            return {"out": segment_reduce(args.src, index, desc.table[0], reduce=desc.reduce)}
        return None if desc.reduce == "mean" else {"out": _gradient_of_gather(desc, elements, args.src)}
    if desc.reduce == "sum" and desc.base == "added":
        if of_rows and second and desc.alpha == 1.0:
            return {"out": index_put(args.input, (index,), args.src)}
        if of_rows:
            return {"out": index_add(args.input, 0, index, args.src, alpha=desc.alpha)}
        return {"out": scatter_add(args.input, desc.dim, elements, args.src)} if desc.alpha == 1.0 else None
    own = desc.base == "added"
    return {"out": scatter_reduce(args.input, desc.dim, elements, args.src, desc.reduce, include_self=own)}


def _gradient_of_gather(desc: Any, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    shape, dtype = desc.expected("out")
    table = torch.zeros(shape, dtype=dtype, device=src.device, requires_grad=True)
    gather(table, desc.dim, index).backward(src.detach())
    assert table.grad is not None
    return table.grad
