"""Cases of quantize and its backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from holdfast.core.case import Case, laid_out, poisoned_output
from holdfast.core.formats import INT4
from holdfast.core.granularity import PerChannel
from holdfast.core.plan import Plan
from holdfast.ops.affine.cases import (
    EVERY_SIZE,
    GROUPS_OF_32,
    Problem,
    make_scale,
    make_zero_point,
    problems,
    real_values,
)
from holdfast.ops.quantize.plan import (
    QuantizeArgs,
    QuantizeBackwardArgs,
    QuantizeBackwardDescriptor,
    QuantizeDescriptor,
    QuantizePerChannelBackwardPlan,
    QuantizePerChannelPlan,
    QuantizePerGroupPlan,
)

#: For ``quantize_pairs``: the rows are three loops, two of them short.
_PAIRS_IN_LOOPS = Problem(
    "bfloat16 pairs, leading axes transposed",
    PerChannel(-1),
    (2, 3, 4, 6),
    real=torch.bfloat16,
    codes=INT4.torch,
    packed=True,
    layouts=("leading transposed", "contiguous"),
)
#: One scale per column: the backward computes the range of x from each scale.
_SCALES_BY_COLUMN = [
    Problem(
        "last axis, unusual scales", PerChannel(-1), (41, 13), real=torch.bfloat16, values="special",
        scale="unusual mixed",
    ),
    Problem(
        "last axis, zero points far out", PerChannel(-1), (41, 13), values="ties", scale="dyadic",
        zero_point="far mixed",
    ),
    Problem("last axis, scales of every size", PerChannel(-1), (41, 19), **EVERY_SIZE),
]  # fmt: skip
#: More than one tile, with a scale and a zero point of the widest type for each element.
_WHOLE_TILE = Problem("a whole tile in float64", PerChannel(-1), (300, 37), real=torch.float64)
_DY_APART = Problem(
    "dy in another layout",
    PerChannel(1),
    (2, 6, 5, 7),
    layouts=("channels last", "contiguous"),
    upstream="transposed",
)


def cases(plan: type[Plan[Any, Any]]) -> list[Case]:
    """All cases of ``plan``."""
    found = problems(plan)
    if plan is QuantizePerChannelPlan:
        found += [_PAIRS_IN_LOOPS, _WHOLE_TILE]
    elif plan is QuantizePerGroupPlan:
        found += GROUPS_OF_32
    elif plan is QuantizePerChannelBackwardPlan:
        found += [*_SCALES_BY_COLUMN, _DY_APART, _WHOLE_TILE]
    return [case(plan, problem) for problem in found]


def case(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    """The case of ``plan`` for ``problem``."""
    return (_forward if plan.direction == "forward" else _backward)(plan, problem)


def _described(plan: type[Plan[Any, Any]], problem: Problem, **more: Any) -> Any:
    q_min, q_max = problem.limits or (None, None)
    kind: Any = plan.Descriptor
    return kind(
        shape=problem.shape,
        input_dtype=problem.real,
        output_dtype=problem.codes,
        q_min=q_min,
        q_max=q_max,
        **problem.fields,
        **more,
    )


def _forward(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    descriptor: QuantizeDescriptor = _described(plan, problem, packed=problem.packed)
    return Case(problem.name, descriptor, partial(_forward_args, descriptor, problem))


def _forward_args(descriptor: QuantizeDescriptor, problem: Problem) -> QuantizeArgs:
    of_input, of_output = problem.layouts
    return QuantizeArgs(
        x=laid_out(real_values(problem, f"x/{problem.name}"), of_input),
        scale=make_scale(problem),
        zero_point=make_zero_point(problem),
        q=poisoned_output(descriptor.code_shape, descriptor.code_storage, of_output),
    )


def _backward(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    descriptor: QuantizeBackwardDescriptor = _described(plan, problem)
    return Case(problem.name, descriptor, partial(_backward_args, descriptor, problem))


def _backward_args(descriptor: QuantizeBackwardDescriptor, problem: Problem) -> QuantizeBackwardArgs:
    of_input, of_output = problem.layouts
    dx = poisoned_output(problem.shape, problem.real, of_output)
    if problem.accumulate:
        dx.copy_(real_values(problem, f"dx/{problem.name}"))
    dy = real_values(problem, f"dy/{problem.name}")
    return QuantizeBackwardArgs(
        dy=laid_out(dy.to(descriptor.gradient_of_codes), problem.upstream or of_input),
        x=laid_out(real_values(problem, f"x/{problem.name}"), of_input),
        scale=make_scale(problem),
        zero_point=make_zero_point(problem),
        dx=dx,
        accumulate=problem.accumulate,
    )
