"""Random problems of dynamic_fake_quantize and its backward."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw
from holdfast.core.plan import Plan
from holdfast.ops.choose_scale.space import draw_rule
from holdfast.ops.dynamic_fake_quantize.cases import Problem, case
from holdfast.ops.dynamic_fake_quantize.torch_op import dynamic_fake_quantize
from holdfast.ops.fake_quantize.plan import SteKind

__all__ = ["FREE", "case", "draw", "public"]

FREE = ("values", "chosen")


def draw(plan: type[Plan[Any, Any]], draw: Draw) -> Problem:
    more: dict[str, Any] = {}
    if plan.direction == "backward":
        more = {"ste": draw.kind(tuple(SteKind)), "accumulate": draw.chance(4), "chosen": not draw.chance(3)}
    return Problem(draw.label, **draw_rule(draw), **more)


def public(
    plan: type[Plan[Any, Any]], problem: Problem, desc: Any, args: Any
) -> dict[str, torch.Tensor] | None:
    rule = {name: getattr(desc, name) for name in ("dtype", "q_min", "q_max", "granularity", "symmetric")}
    rule["narrow"] = problem.narrow
    if plan.direction == "forward":
        found = dynamic_fake_quantize(args.x, return_scale=True, **rule)
        return dict(zip(("y", "scale", "zero_point"), found, strict=False))
    if args.accumulate or not problem.chosen:
        return None
    x = args.x.detach().requires_grad_()
    dynamic_fake_quantize(x, ste=desc.ste, **rule).backward(args.dy)
    return {"dx": x.grad}
