"""Random problems of embedding_bag and its gradients, for the fuzzer."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw, Results, form_of
from holdfast.core.plan import AnyPlan
from holdfast.ops.embedding.space import as_dense
from holdfast.ops.embedding_bag import torch_op
from holdfast.ops.embedding_bag.cases import Problem
from holdfast.ops.embedding_bag.plan import MODES
from holdfast.ops.segment_sum.indexed import INDEX_DTYPES
from holdfast.ops.segment_sum.space import draw_spread, draw_table

FREE = ("values", "spread")


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    by_offsets, mode = draw.kind((True, False)), draw.kind(MODES)
    shape = draw.shape(1, 1) if by_offsets else draw.shape(2, 2)
    fields = draw_table(draw, shape) | {"mode": mode}
    fields["spread"] = draw_spread(draw, fields["rows"])
    if by_offsets:
        fields |= {"last": draw.kind((False, True)), "offsets_dtype": draw.kind(INDEX_DTYPES)}
        fields["bags"] = _draw_bags(draw, shape[0], fields["last"])
    if mode == "sum":
        fields["weighted"] = draw.kind((False, True))
    if fields["rows"] and draw.kind((True, False)):
        fields["padding"] = draw.between(0, fields["rows"] - 1)
    if plan.direction == "forward":
        fields["bad_index"] = draw.kind(("raise", "skip"))
    else:
        fields |= {"frequency": mode != "max" and draw.kind((False, True)), "accumulate": draw.chance(4)}
        if fields.get("weighted"):
            fields["gradients"] = draw.kind(((True, True), (True, False), (False, True)))
    return Problem(draw.label, shape, **fields)


def _draw_bags(draw: Draw, count: int, last: bool) -> tuple[int, ...]:
    """Lengths of bags. Their sum is ``count``; with the last offset given it may be less.

    Rarely it is more, which is an error.
    """
    bags: list[int] = []
    left = count
    for _ in range(draw.size(40)):
        bags.append(draw.size(left) if left and not draw.chance(4) else 0)
        left -= bags[-1]
    if not last and bags:
        bags[-1] += left  # without the last offset, the last bag extends to the end
    if draw.chance(25):
        bags.extend([left + 1, 0])
    return tuple(bags)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    how = {name: getattr(desc, name) for name in ("mode", "include_last_offset", "padding_idx")}
    weights = args.per_sample_weights
    if plan.direction == "forward":
        if desc.embedding_dim == 0 and desc.bad_index == "raise":
            return None  # the function checks the indices, a plan that writes nothing does not
        how |= {"per_sample_weights": weights, "bad_index": desc.bad_index}
        return {"out": functions.embedding_bag(args.indices, args.weight, args.offsets, **how)}
    if args.accumulate or desc.empty or (desc.per_sample_weights and weights is None):
        return None  # a plan that writes nothing does not check offsets, but the function's forward does
    table = args.weight
    if table is None:
        table = torch.zeros(
            desc.num_embeddings, desc.embedding_dim, dtype=desc.dtype, device=args.dout.device
        )
    wanted = {}
    if desc.dweight:
        wanted["dweight"] = table = table.detach().requires_grad_()
    if desc.dper_sample_weights:
        wanted["dper_sample_weights"] = weights = weights.detach().requires_grad_()
    how |= {"per_sample_weights": weights, "scale_grad_by_freq": desc.scale_grad_by_freq, "bad_index": "skip"}
    how["sparse"] = desc.mode != "max" and form_of(problem.name, 3) == 0
    functions.embedding_bag(args.indices, table, args.offsets, **how).backward(args.dout)
    return {name: as_dense(tensor.grad) for name, tensor in wanted.items()}
