"""Random problems of dequantize and its backward."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.cases import Problem
from holdfast.ops.affine.space import FREE, draw_problem, granularity_of
from holdfast.ops.dequantize.torch_op import dequantize

__all__ = ["FREE", "draw", "public"]


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    if plan.direction == "backward":
        return draw_problem(draw, granularity_of(plan), accumulate=draw.chance(4))
    return draw_problem(draw, granularity_of(plan), packs=True)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any) -> Results:
    options = {"dtype": desc.output_dtype, "granularity": desc.granularity}
    if plan.direction == "forward":
        length = desc.shape[-1] if desc.packed else None
        options |= {"code_dtype": desc.input_dtype, "packed": desc.packed, "length": length}
        return {"y": dequantize(args.q, args.scale, args.zero_point, **options)}
    if args.accumulate or not desc.codes.carried:  # only codes stored as floats have a gradient
        return None
    q = torch.zeros(desc.shape, dtype=desc.input_dtype, device=args.dy.device, requires_grad=True)
    dequantize(q, args.scale, **options).backward(args.dy)
    assert q.grad is not None
    return {"dq": q.grad}
