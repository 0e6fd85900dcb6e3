"""Random problems of fake_quantize and its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.case import Case
from holdfast.core.draw import Draw
from holdfast.core.plan import Plan
from holdfast.ops.affine.cases import Problem as AffineProblem
from holdfast.ops.affine.space import FREE, draw_problem
from holdfast.ops.fake_quantize.cases import backward_case, forward_case
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize.torch_op import fake_quantize

__all__ = ["FREE", "Problem", "case", "draw", "public"]


@dataclass(frozen=True)
class Problem(AffineProblem):
    """A problem with an estimator."""

    ste: SteKind = SteKind.IN_RANGE


def draw(plan: type[Plan[Any, Any]], draw: Draw) -> Problem:
    backward = plan.direction == "backward"
    more: dict[str, Any] = {"accumulate": backward and draw.chance(4)}
    if backward:
        more["ste"] = draw.kind(tuple(SteKind))
    return draw_problem(draw, kind_of_problem=Problem, floating_zero_points=True, **more)


def case(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    return forward_case(problem) if plan.direction == "forward" else backward_case(problem, problem.ste)


def public(
    plan: type[Plan[Any, Any]], problem: Problem, desc: Any, args: Any
) -> dict[str, torch.Tensor] | None:
    options = {name: getattr(desc, name) for name in ("dtype", "q_min", "q_max", "granularity")}
    if plan.direction == "forward":
        return {"y": fake_quantize(args.x, args.scale, args.zero_point, **options)}
    if args.accumulate:
        return None
    x = args.x.detach().requires_grad_()
    fake_quantize(x, args.scale, args.zero_point, ste=desc.ste, **options).backward(args.dy)
    return {"dx": x.grad}
