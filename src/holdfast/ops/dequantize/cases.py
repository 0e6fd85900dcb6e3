"""Cases of dequantize and its backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.plan import Plan
from holdfast.ops.affine.cases import (
    GROUPS_OF_32,
    Problem,
    code_values,
    make_scale,
    make_zero_point,
    problems,
    real_values,
)
from holdfast.ops.dequantize.plan import (
    DequantizeArgs,
    DequantizeBackwardArgs,
    DequantizeBackwardDescriptor,
    DequantizeDescriptor,
    DequantizePerGroupPlan,
)
from holdfast.ops.packing.torch_op import pack


def cases(plan: type[Plan[Any, Any]]) -> list[Case]:
    """All cases of ``plan``."""
    forward = plan.direction == "forward"
    found = problems(plan, reads_codes=forward)
    if plan is DequantizePerGroupPlan:
        found += GROUPS_OF_32
    return [case(plan, p) for p in found if forward or p.zero_point in ("tensor", "none")]


def case(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    """The case of ``plan`` for ``problem``."""
    return (_forward if plan.direction == "forward" else _backward)(plan, problem)


def _described(plan: type[Plan[Any, Any]], problem: Problem, **more: Any) -> Any:
    kind: Any = plan.Descriptor
    return kind(
        shape=problem.shape,
        input_dtype=problem.codes,
        output_dtype=problem.real,
        **problem.fields,
        **more,
    )


def _forward(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    descriptor: DequantizeDescriptor = _described(plan, problem, packed=problem.packed)
    return Case(problem.name, descriptor, partial(_forward_args, problem))


def _forward_args(problem: Problem) -> DequantizeArgs:
    of_input, of_output = problem.layouts
    q = code_values(problem, f"q/{problem.name}")
    return DequantizeArgs(
        q=laid_out(pack(q, problem.codes) if problem.packed else q, of_input),
        scale=make_scale(problem),
        zero_point=make_zero_point(problem),
        y=poisoned_output(problem.shape, problem.real, of_output),
    )


def _backward(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    descriptor: DequantizeBackwardDescriptor = _described(plan, problem)
    return Case(problem.name, descriptor, partial(_backward_args, descriptor.gradient_of_codes, problem))


def _backward_args(gradient: torch.dtype, problem: Problem) -> DequantizeBackwardArgs:
    of_input, of_output = problem.layouts
    dq = poisoned_output(problem.shape, gradient, of_output)
    if problem.accumulate:
        dq.copy_(real_values(problem, f"dq/{problem.name}").to(gradient))
    return DequantizeBackwardArgs(
        dy=laid_out(real_values(problem, f"dy/{problem.name}"), of_input),
        scale=make_scale(problem),
        dq=dq,
        accumulate=problem.accumulate,
    )
