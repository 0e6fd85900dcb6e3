"""Random problems of scatter and gather, for the fuzzer."""

from __future__ import annotations

import math
from typing import Any

import torch

from holdfast.core.descriptor import MAX_RANK
from holdfast.core.draw import Draw, Results, form_of
from holdfast.core.plan import AnyPlan
from holdfast.ops.scatter import torch_op
from holdfast.ops.scatter.cases import Problem
from holdfast.ops.scatter.plan import BASES, REDUCTIONS
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


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    index, way = args.index, form_of(problem.name, 4)
    of_rows = desc.width is not None and len(desc.shape) == 1
    elements = index if desc.width is None else index[..., None].expand(*index.shape, desc.width)
    if elements.dim() > MAX_RANK:
        return None
    if plan.op == "gather":
        return None if problem.spread == "bad" else {"out": _read(desc, args, elements, functions, way)}
    if desc.base == "zeros":
        if of_rows and (way % 2 or desc.reduce == "mean"):
            ascends = way > 1 and problem.spread == "sorted"
            given = {"reduce": desc.reduce, "sorted": ascends}
            return {"out": functions.segment_reduce(args.src, index, desc.table[0], **given)}
        if desc.reduce == "mean":
            return None
        return {"out": _gradient_of_gather(desc, elements, args.src, functions)}
    if desc.reduce == "sum" and desc.base == "added":
        if of_rows and way < 2 and desc.alpha == 1.0:
            return {"out": _put(args.input, index, args.src, functions, split=way)}
        if of_rows:
            return {"out": _add(args.input, index, args.src, desc.alpha, functions, transposed=way == 2)}
        if desc.alpha != 1.0:
            return None
        return {"out": functions.scatter_add(args.input, desc.dim, elements, args.src)}
    own = desc.base == "added"
    reduced = functions.scatter_reduce(
        args.input, desc.dim, elements, args.src, desc.reduce, include_self=own
    )
    return {"out": reduced}


def _read(desc: Any, args: Any, elements: torch.Tensor, functions: Any, way: int) -> torch.Tensor:
    """``gather``, or for rows ``index_select``, along the first or the last axis."""
    if desc.width is None or len(desc.shape) > 1 or way < 2:
        return functions.gather(args.input, desc.dim, elements)  # type: ignore[no-any-return]
    if way == 2:
        return functions.index_select(args.input, 0, args.index)  # type: ignore[no-any-return]
    return functions.index_select(args.input.mT, -1, args.index).mT  # type: ignore[no-any-return]


def _put(input: torch.Tensor, index: torch.Tensor, src: torch.Tensor, functions: Any, split: int) -> Any:
    """``index_put`` with one index, or with two if the number of rows is even."""
    rows = len(input)
    if not split or rows % 2 or not rows:
        return functions.index_put(input, (index,), src)
    pairs = input.unflatten(0, (rows // 2, 2))
    return functions.index_put(pairs, (index // 2, index % 2 - 2), src).flatten(0, 1)


def _add(
    input: torch.Tensor,
    index: torch.Tensor,
    src: torch.Tensor,
    alpha: float,
    functions: Any,
    *,
    transposed: bool,
) -> Any:
    """``index_add`` along the first or the last axis."""
    if not transposed:
        return functions.index_add(input, 0, index, src, alpha=alpha)
    return functions.index_add(input.mT, 1, index, src.mT, alpha=alpha).mT


def _gradient_of_gather(desc: Any, index: torch.Tensor, src: torch.Tensor, functions: Any) -> torch.Tensor:
    shape, dtype = desc.expected("out")
    table = torch.zeros(shape, dtype=dtype, device=src.device, requires_grad=True)
    functions.gather(table, desc.dim, index).backward(src.detach())
    assert table.grad is not None
    return table.grad
