"""Random problems of dynamic_fake_quantize and its backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from holdfast.core.bits import canonical
from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.choose_scale.space import draw_rule
from holdfast.ops.dynamic_fake_quantize import torch_op
from holdfast.ops.dynamic_fake_quantize.cases import Problem
from holdfast.ops.fake_quantize.plan import SteKind

FREE = ("values", "chosen")


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    problem = Problem(draw.label, **draw_rule(draw))
    if plan.direction == "forward":
        return problem
    # Which codes the scale leaves out is not known to a backward.
    problem = replace(problem, narrow=None, ste=draw.kind(tuple(SteKind)))
    return replace(problem, accumulate=draw.chance(4), chosen=not draw.chance(3))


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    rule = {name: getattr(desc, name) for name in ("dtype", "q_min", "q_max", "granularity", "symmetric")}
    rule["narrow"] = problem.narrow
    if plan.direction == "forward":
        found = functions.dynamic_fake_quantize(args.x, return_scale=True, **rule)
        return dict(zip(("y", "scale", "zero_point"), found, strict=False))
    x = args.x.detach().requires_grad_()
    y, *chosen = functions.dynamic_fake_quantize(x, ste=desc.ste, return_scale=True, **rule)
    given = (args.scale,) if desc.symmetric else (args.scale, args.zero_point)
    # A layout that repeats elements of x can change its scales.
    if args.accumulate or not all(map(torch.equal, map(canonical, chosen), map(canonical, given))):
        return None
    y.backward(args.dy)
    return {"dx": x.grad}
