"""Random problems of lsq_init."""

from __future__ import annotations

from typing import Any

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.cases import Problem
from holdfast.ops.affine.space import draw_granular, draw_real
from holdfast.ops.lsq_init.torch_op import lsq_init

FREE = ("values",)


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    shape, granularity = draw_granular(draw)
    return Problem(
        draw.label, granularity, shape, real=draw_real(draw), limits=(-1, draw.one_of([1, 3, 7, 127, 65536])),
        values=draw.one_of(("spread", "special", "exponents", "any bits"), [4, 1, 2, 1]),
    )  # fmt: skip


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any) -> Results:
    return {"scale": lsq_init(args.x, q_min=-1, q_max=desc.q_max, granularity=desc.granularity)}
