"""Random problems of quantize and its backward."""

from __future__ import annotations

from typing import Any

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.cases import Problem
from holdfast.ops.affine.space import FREE, draw_problem, granularity_of
from holdfast.ops.quantize.torch_op import quantize

__all__ = ["FREE", "draw", "public"]


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    backward = plan.direction == "backward"
    accumulate = backward and draw.chance(4)
    return draw_problem(draw, granularity_of(plan), packs=not backward, accumulate=accumulate)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any) -> Results:
    options = {name: getattr(desc, name) for name in ("granularity", "q_min", "q_max")}
    options["dtype"] = desc.output_dtype
    if plan.direction == "forward":
        return {"q": quantize(args.x, args.scale, args.zero_point, packed=desc.packed, **options)}
    if args.accumulate or not desc.codes.carried:  # only codes stored as floats have a gradient
        return None
    x = args.x.detach().requires_grad_()
    quantize(x, args.scale, args.zero_point, **options).backward(args.dy)
    return {"dx": x.grad}
