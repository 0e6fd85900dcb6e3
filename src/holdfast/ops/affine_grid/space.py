"""Random problems of affine_grid and its gradient, for the fuzzer."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.draw import Draw, Results
from holdfast.core.dtypes import FLOATS
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine_grid import torch_op
from holdfast.ops.affine_grid.cases import Problem

FREE = ("values",)


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    axes = draw.kind((2, 3))
    batch, *size = draw.shape(1 + axes, 1 + axes)
    aligned, dtype = draw.kind((False, True)), draw.kind([record.torch for record in FLOATS.values()])
    values = draw.one_of(("spread", "special", "exponents", "any bits"), [4, 1, 2, 1])
    accumulate = plan.direction == "backward" and draw.chance(4)
    return Problem(draw.label, tuple(size), batch, aligned, dtype, values, accumulate=accumulate)


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    size = (desc.batch, 1, *desc.output_size)
    if plan.direction == "forward":
        return {"grid": functions.affine_grid(args.theta, size, desc.align_corners)}
    if args.accumulate:
        return None
    theta = torch.zeros(desc.shape, dtype=desc.dtype, device=args.dgrid.device, requires_grad=True)
    functions.affine_grid(theta, size, desc.align_corners).backward(args.dgrid)
    assert theta.grad is not None
    return {"dtheta": theta.grad}
