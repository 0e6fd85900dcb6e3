"""Cases of quantize and its backward."""

from __future__ import annotations

from functools import partial

import torch

from holdfast.core.case import Case
from holdfast.core.formats import INT4
from holdfast.core.granularity import PerChannel, PerTensor
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.cases import (
    EVERY_SIZE,
    GROUPS_OF_32,
    ODD_ROWS,
    Problem,
    accumulating,
    make_args,
    problems,
)
from holdfast.ops.quantize.plan import (
    QuantizePerChannelBackwardPlan,
    QuantizePerChannelPlan,
    QuantizePerGroupPlan,
    QuantizePerTensorPlan,
)

#: For ``quantize_pairs``: the rows are three loops, two of them short.
_PAIRS_IN_LOOPS = Problem(
    "bfloat16 pairs, leading axes transposed", PerChannel(-1), (2, 3, 4, 6), real=torch.bfloat16,
    codes=INT4.torch, packed=True, layouts=("leading transposed", "contiguous"),
)  # fmt: skip
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
#: Quotients near ties, too large to be estimated, in whole blocks of elements with one scale.
_FAR_TIES = Problem(
    "two ties, zero point 20000", PerTensor(), (3, 128), values="two ties", scale="host 0.013",
    zero_point="host 20000",
)  # fmt: skip
_DY_APART = Problem(
    "dy in another layout", PerChannel(1), (2, 6, 5, 7), layouts=("channels last", "contiguous"),
    upstream="transposed",
)  # fmt: skip


def cases(plan: AnyPlan) -> list[Case]:
    found = problems(plan)
    if plan is QuantizePerTensorPlan:
        found.append(_FAR_TIES)
    elif plan is QuantizePerChannelPlan:
        found += [_PAIRS_IN_LOOPS, _WHOLE_TILE, *ODD_ROWS]
    elif plan is QuantizePerGroupPlan:
        found += GROUPS_OF_32
    elif plan is QuantizePerChannelBackwardPlan:
        found += [*_SCALES_BY_COLUMN, _DY_APART, _WHOLE_TILE, *ODD_ROWS, *accumulating(ODD_ROWS)]
    return [case(plan, problem) for problem in found]


def case(plan: AnyPlan, problem: Problem) -> Case:
    q_min, q_max = problem.limits or (None, None)
    fields = problem.fields | {"shape": problem.shape, "q_min": q_min, "q_max": q_max}
    fields |= {"input_dtype": problem.real, "output_dtype": problem.codes}
    if plan.direction == "forward":
        fields["packed"] = problem.packed
    desc = plan.Descriptor(**fields)
    return Case(problem.name, desc, partial(make_args, plan.Args, desc, problem))
