"""Random problems of observe_range and choose_scale."""

from __future__ import annotations

from typing import Any

from holdfast.core.draw import Draw, Results
from holdfast.core.formats import format_of
from holdfast.core.plan import AnyPlan
from holdfast.ops.affine.space import draw_codes, draw_granular, draw_limits, draw_real
from holdfast.ops.choose_scale import torch_op
from holdfast.ops.choose_scale.cases import Problem

FREE = ("values",)


def draw(plan: AnyPlan, draw: Draw) -> Problem:
    return Problem(draw.label, **draw_rule(draw))


def draw_rule(draw: Draw, *, packs: bool = False) -> dict[str, Any]:
    """Fields of a problem with scales computed from the data."""
    real = draw_real(draw)
    codes, packed = draw_codes(draw, real, packs=packs)
    shape, granularity = draw_granular(draw, multiple=4 if packed else 1)
    fields = {
        "granularity": granularity, "shape": shape, "real": real, "codes": codes,
        "limits": draw_limits(draw, codes),
        "symmetric": draw.kind((True, False)) or not format_of(codes, "codes").zero_point,
        "narrow": draw.one_of((None, True, False)),
        "values": draw.one_of(("spread", "special", "mixed", "exponents"), [3, 1, 2, 2]),
    }  # fmt: skip
    return fields | ({"packed": packed} if packs else {})


def rule(desc: Any) -> dict[str, Any]:
    """The keyword arguments of ``choose_scale`` for a descriptor."""
    named = {name: getattr(desc, name) for name in ("q_min", "q_max", "granularity", "symmetric", "narrow")}
    return {"dtype": desc.output_dtype, **named}


def public(plan: AnyPlan, problem: Problem, desc: Any, args: Any, functions: Any = torch_op) -> Results:
    if plan.op == "observe_range":
        found = functions.observe_range(args.x, granularity=desc.granularity)
        return dict(zip(("low", "high"), found, strict=True))
    found = functions.choose_scale(args.x, **rule(desc))
    return {"scale": found} if desc.symmetric else dict(zip(("scale", "zero_point"), found, strict=True))
