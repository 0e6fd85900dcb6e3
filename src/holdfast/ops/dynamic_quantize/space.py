"""Random problems of dynamic_quantize."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.case import Case
from holdfast.core.draw import Draw
from holdfast.core.plan import Plan
from holdfast.ops.choose_scale.space import draw_rule, rule
from holdfast.ops.dynamic_quantize import cases
from holdfast.ops.dynamic_quantize.cases import Problem
from holdfast.ops.dynamic_quantize.torch_op import dynamic_quantize

FREE = ("values",)


def draw(plan: type[Plan[Any, Any]], draw: Draw) -> Problem:
    return Problem(draw.label, **draw_rule(draw, packs=True))


def case(plan: type[Plan[Any, Any]], problem: Problem) -> Case:
    return cases.case(problem)


def public(
    plan: type[Plan[Any, Any]], problem: Problem, desc: Any, args: Any
) -> dict[str, torch.Tensor] | None:
    found = dynamic_quantize(args.x, packed=desc.packed, **rule(desc))
    return dict(zip(("q", "scale", "zero_point"), found, strict=False))
