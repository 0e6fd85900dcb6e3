"""Random problems of fake_quantize and its backward."""

from __future__ import annotations

from typing import Any

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.space import FREE, draw_problem
from holdfast.ops.fake_quantize import torch_op
from holdfast.ops.fake_quantize.cases import Problem
from holdfast.ops.fake_quantize.plan import SteKind

__all__ = ["FREE", "draw", "public"]


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    backward = plan.direction == "backward"
    more: dict[str, Any] = {"accumulate": backward and draw.chance(4)}
    if backward:
        more["ste"] = draw.kind(tuple(SteKind))
    return draw_problem(draw, kind_of_problem=Problem, floating_zero_points=True, **more)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    options = {name: getattr(desc, name) for name in ("dtype", "q_min", "q_max", "granularity")}
    if plan.direction == "forward":
        return {"y": functions.fake_quantize(args.x, args.scale, args.zero_point, **options)}
    if args.accumulate:
        return None
    x = args.x.detach().requires_grad_()
    functions.fake_quantize(x, args.scale, args.zero_point, ste=desc.ste, **options).backward(args.dy)
    return {"dx": x.grad}
