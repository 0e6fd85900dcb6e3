"""Cases of dequantize and its backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from holdfast.core.case import Case
from holdfast.core.plan import AnyPlan, Args
from holdfast.ops.affine.cases import GROUPS_OF_32, ODD_ROWS, Problem, code_values, make_args, problems
from holdfast.ops.dequantize.plan import DequantizePerChannelPlan, DequantizePerGroupPlan
from holdfast.ops.packing.torch_op import pack


def cases(plan: AnyPlan) -> list[Case]:
    forward = plan.direction == "forward"
    found = problems(plan, reads_codes=forward)
    if plan is DequantizePerGroupPlan:
        found += GROUPS_OF_32
    elif plan is DequantizePerChannelPlan:
        found += ODD_ROWS
    return [case(plan, p) for p in found if forward or p.zero_point in ("tensor", "none")]


def case(plan: AnyPlan, problem: Problem) -> Case:
    fields = {"input_dtype": problem.codes, "output_dtype": problem.real, **problem.fields}
    forward = plan.direction == "forward"
    if forward:
        fields["packed"] = problem.packed
    desc = plan.Descriptor(shape=problem.shape, **fields)
    make = _forward_args if forward else make_args
    return Case(problem.name, desc, partial(make, plan.Args, desc, problem))


def _forward_args(args: type[Args], desc: Any, problem: Problem) -> Args:
    q = code_values(problem, f"q/{problem.name}")
    return make_args(args, desc, problem, q=pack(q, problem.codes) if problem.packed else q)
