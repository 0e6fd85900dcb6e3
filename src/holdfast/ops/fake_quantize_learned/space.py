"""Random problems of the gradients of a learned scale and zero point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.case import Case
from holdfast.core.draw import Draw
from holdfast.core.plan import Plan
from holdfast.ops.affine.cases import Problem as AffineProblem
from holdfast.ops.affine.space import draw_problem
from holdfast.ops.fake_quantize.plan import SteKind
from holdfast.ops.fake_quantize.torch_op import fake_quantize
from holdfast.ops.fake_quantize_learned import cases

#: The scale and the zero point are not free: the descriptor has their dtypes.
FREE = ("values",)


@dataclass(frozen=True)
class Problem(AffineProblem):
    """A problem with an estimator and the factor of the gradients of scale and zero point."""

    ste: SteKind = SteKind.IN_RANGE
    factor: float = 1.0


def draw(plan: type[Plan[Any, Any]], draw: Draw) -> Problem:
    more: dict[str, Any] = {
        "ste": draw.kind(tuple(SteKind)),
        "factor": draw.one_of([1.0, 0.3, -2.0, 0.0, 1e-3]),
    }
    more["accumulate"] = draw.chance(4)
    return draw_problem(draw, kind_of_problem=Problem, floating=False, floating_zero_points=True, **more)


def case(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    return cases.case(cases.Learned(problem, problem.ste, problem.factor))


def public(
    plan: type[Plan[Any, Any]], problem: Problem, desc: Any, args: Any
) -> dict[str, torch.Tensor] | None:
    if args.accumulate or not isinstance(args.scale, torch.Tensor):
        return None
    learned = {"dx": args.x.detach().requires_grad_(), "dscale": args.scale.detach().requires_grad_()}
    zero_point = args.zero_point
    if desc.zero_point_dtype is not None:
        learned["dzero_point"] = zero_point = zero_point.detach().requires_grad_()
    options = {
        name: getattr(desc, name) for name in ("dtype", "q_min", "q_max", "granularity", "ste", "grad_factor")
    }
    fake_quantize(learned["dx"], learned["dscale"], zero_point, **options).backward(args.dy)
    return {name: tensor.grad for name, tensor in learned.items() if tensor.grad is not None}
