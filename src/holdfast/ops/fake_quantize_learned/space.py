"""Random problems of the gradients of a learned scale and zero point."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.space import draw_problem
from holdfast.ops.fake_quantize import torch_op
from holdfast.ops.fake_quantize.cases import Problem
from holdfast.ops.fake_quantize.plan import SteKind

#: The scale and the zero point are not free: the descriptor has their dtypes.
FREE = ("values",)


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    more: dict[str, Any] = {"ste": draw.kind(tuple(SteKind))}
    more["factor"] = draw.one_of([1.0, 0.3, -2.0, 0.0, 1e-3])
    more["accumulate"] = draw.chance(4)
    return draw_problem(draw, kind_of_problem=Problem, floating=False, floating_zero_points=True, **more)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    if args.accumulate or not isinstance(args.scale, torch.Tensor):
        return None
    learned = {"dx": args.x.detach().requires_grad_(), "dscale": args.scale.detach().requires_grad_()}
    zero_point = args.zero_point
    if desc.zero_point_dtype is not None:
        learned["dzero_point"] = zero_point = zero_point.detach().requires_grad_()
    names = ("dtype", "q_min", "q_max", "granularity", "ste", "grad_factor")
    options = {name: getattr(desc, name) for name in names}
    functions.fake_quantize(learned["dx"], learned["dscale"], zero_point, **options).backward(args.dy)
    return {name: tensor.grad for name, tensor in learned.items() if tensor.grad is not None}
