"""Random problems of dynamic_quantize."""

from __future__ import annotations

from typing import Any

from holdfast.core.draw import Draw, Results
from holdfast.core.plan import AnyPlan
from holdfast.ops.choose_scale.space import draw_rule, rule
from holdfast.ops.dynamic_quantize.cases import Problem
from holdfast.ops.dynamic_quantize.torch_op import dynamic_quantize

FREE = ("values",)


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    return Problem(draw.label, **draw_rule(draw, packs=True))


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any) -> Results:
    found = dynamic_quantize(args.x, packed=desc.packed, **rule(desc))
    return dict(zip(("q", "scale", "zero_point"), found, strict=False))
