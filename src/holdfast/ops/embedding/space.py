"""Random problems of embedding and its gradient, for the fuzzer."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core import private
from holdfast.core.draw import Draw, Results, form_of
from holdfast.core.errors import HoldfastError
from holdfast.core.plan import AnyPlan
from holdfast.ops.embedding import torch_op
from holdfast.ops.embedding.cases import Problem
from holdfast.ops.segment_sum.space import draw_spread, draw_table

FREE = ("values", "spread")


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    shape = draw.shape()
    fields = draw_table(draw, shape)
    fields["spread"] = draw_spread(draw, fields["rows"])
    if plan.direction == "forward":
        fields["bad_index"] = draw.kind(("raise", "skip"))
    else:
        if fields["rows"] and draw.kind((True, False)):
            fields["padding"] = draw.between(0, fields["rows"] - 1)
        fields |= {"frequency": draw.kind((False, True)), "accumulate": draw.chance(4)}
    return Problem(draw.label, shape, **fields)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    if plan.direction == "forward":
        if desc.embedding_dim == 0 and desc.bad_index == "raise":
            return None  # the function checks the indices, a plan that writes nothing does not
        return {"out": functions.embedding(args.indices, args.weight, bad_index=desc.bad_index)}
    if args.accumulate:
        return None
    weight = torch.zeros(
        desc.num_embeddings, desc.embedding_dim, dtype=desc.dtype, device=args.dout.device, requires_grad=True
    )
    how = {"padding_idx": desc.padding_idx, "scale_grad_by_freq": desc.scale_grad_by_freq}
    how["sparse"] = form_of(problem.name, 3) == 0
    functions.embedding(args.indices, weight, bad_index="skip", **how).backward(args.dout)
    assert weight.grad is not None
    return {"dweight": as_dense(weight.grad)}


def as_dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of a table. A sparse one must have each row once, in ascending order."""
    if not gradient.is_sparse:
        return gradient
    (rows,), values = private.sparse_parts(gradient)
    dense = torch.zeros_like(gradient, layout=torch.strided)
    if bool((rows[1:] <= rows[:-1]).any()):
        raise HoldfastError(f"the rows of a sparse gradient are not ascending: {rows.tolist()[:100]}")
    dense[rows] = values
    return dense
